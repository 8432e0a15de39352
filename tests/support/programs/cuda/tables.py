"""The two tables of docs/dry-run.md: what is simulated and how, and what is not and the effect."""

import re
from pathlib import Path

_PAGE = (Path(__file__).parents[4] / "docs" / "dry-run.md").read_text()


def _rows(title):
    section = _PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| (.*) \| (.*) \|$", section, re.MULTILINE)[1:]


SUPPORTED = {what.strip("`"): how for what, how in _rows("What is simulated")}
UNSUPPORTED = {
    name.strip("`"): effect for names, effect in _rows("What is not simulated") for name in names.split(", ")
}
