"""The report.json of an earlier run, as the ``RunResult`` that its launcher has written.

Used by all that show earlier runs. Whatever the file holds, nothing is raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.protocol import wire
from ddplaunch.protocol.results import RunResult
from ddplaunch.system.files import run_json

if TYPE_CHECKING:
    from pathlib import Path


def read(folder: Path) -> RunResult | None:
    """The report in ``folder``, as far as it can be read; None if there is none."""
    return wire.salvage(RunResult, run_json.read(folder / run_json.REPORT))
