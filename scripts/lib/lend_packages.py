"""Lends a venv the packages that ddplaunch needs, as links to those of this interpreter: torch is large.

    .venv/bin/python scripts/lib/lend_packages.py VENV

Only what the metadata of ddplaunch and of its dependencies ask for: a dependency that nobody has declared is missing.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def needed_by(name: str, found: set[str]) -> set[str]:
    """Adds to ``found`` what ``name`` needs, directly and through others."""
    for requirement in map(Requirement, metadata.requires(name) or ()):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in found:
            found.add(requirement.name)
            needed_by(requirement.name, found)
    return found


def lend(name: str, site: Path) -> None:
    """Links the top-level files and folders of an installed package into ``site``; programs are left out."""
    distribution = metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        (site / top).symlink_to(distribution.locate_file(top))


def main(venv: str) -> None:
    site = Path(sysconfig.get_path("purelib", vars={"base": venv, "platbase": venv}))
    for name in sorted(needed_by("ddplaunch", set())):
        lend(name, site)


if __name__ == "__main__":
    main(sys.argv[1])
