"""Types of fields of records whose values ``wire`` checks when it decodes a record.

Used in annotations only. Another process may be broken or hostile: what it sends must not steer the reader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Limit:
    """A condition on a value, in ``Annotated``; ``wire`` refuses a record with a value that is not accepted.

    Attributes:
        description: what the value must be, as ``a number from 0 to 9``.
    """

    description: str
    accepts: Callable[[Any], bool]


OneLine = Annotated[str, Limit("one line of printable text", str.isprintable)]
"""A name, address or sentence that is shown: it cannot steer the terminal or forge a line."""
