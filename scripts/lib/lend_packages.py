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


def needed_by(name: str, extra: str, found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Adds to ``found`` the packages, each with its extras, that ``name`` needs, directly and through others."""
    for requirement in map(Requirement, metadata.requires(name) or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            for wanted in {(requirement.name, each) for each in ("", *requirement.extras)} - found:
                found.add(wanted)
                needed_by(*wanted, found)
    return found


def tops_of(name: str) -> set[Path]:
    """The top-level files and folders of an installed package, which others may share; programs are left out."""
    distribution = metadata.distribution(name)
    tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
    return {Path(distribution.locate_file(top)) for top in tops}


def main(venv: str) -> None:
    site = Path(sysconfig.get_path("purelib", vars={"base": venv}))
    packages = {name for name, _ in needed_by("ddplaunch", "", set())}
    for top in set().union(*map(tops_of, packages)):
        (site / top.name).symlink_to(top)


if __name__ == "__main__":
    main(sys.argv[1])
