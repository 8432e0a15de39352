"""Which tests took longest: kept in a file with each run of many, so that a test that has become slow is found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

FILE = Path("build/slowest-tests.txt")
COUNT = 50
SLOW_S = 10.0


def report(reporter: pytest.TerminalReporter) -> None:
    """Write the slowest to ``FILE`` under the root folder; name those that lack the mark ``slow``."""
    reports = [report for kind in ("passed", "failed", "error") for report in reporter.stats.get(kind, [])]
    seconds: Counter[str] = Counter()
    for each in (*reports, *reporter.stats.get("", [])):
        seconds[each.nodeid] += getattr(each, "duration", 0.0)  # A file that cannot be imported has none.
    if len(seconds) >= COUNT:
        file = reporter.config.rootpath / FILE
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{s:7.2f} s  {name}\n" for name, s in seconds.most_common(COUNT)))
    unmarked = {each.nodeid for each in reports if seconds[each.nodeid] > SLOW_S and "slow" not in each.keywords}
    for name in sorted(unmarked):
        reporter.write_line(f"took {seconds[name]:.1f} s, and is not marked slow: {name}")
