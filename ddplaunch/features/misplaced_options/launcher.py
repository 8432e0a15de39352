"""On the failure page: the options of ddplaunch that the script did not know. Runs in the launcher, main thread."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddplaunch.features.misplaced_options import misplaced, sentence, text_of
from ddplaunch.launcher.watches import RunServices, Watch

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.protocol.results import WorkerExit
    from ddplaunch.protocol.run_result import RunResult

_REFUSED = re.compile(r"unrecogni[sz]ed|no such option|unknown|unexpected|not used", re.IGNORECASE)
"""How parsers of arguments refuse an option: argparse, click, absl, HfArgumentParser."""


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The watch, if the script has arguments that may be options of ddplaunch."""
    return (MisplacedOptions(run.config),) if misplaced(run.config.script_args, abbreviated=True) else ()


class MisplacedOptions(Watch):
    """Says on the failure page which options of ddplaunch the script has got, if it does not know them."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config

    def page_lines(self, result: RunResult) -> Sequence[str]:
        """One line, or none."""
        arguments, first = self._config.script_args, result.first_failure
        refused = [name for name in misplaced(arguments, abbreviated=True) if first and _refuses(first, name)]
        names = refused or _not_in(text_of(self._config), misplaced(arguments))
        return [f"options:  {sentence(names)}"] if names else []


def _refuses(first: WorkerExit, name: str) -> bool:
    lines = (first.error.message.splitlines() if first.error else []) + [*first.tail]
    return any(name in line and _REFUSED.search(line) for line in lines)


def _not_in(text: str, names: Sequence[str]) -> list[str]:
    if not text:
        return []
    return [name for name in names if not re.search(name.strip("-").replace("_", "-").replace("-", "[-_]"), text)]
