"""A file system that fails: ``dying_files.c``, built once per test process, and how a run is started on it."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.runs import PROGRAMS, Finished, run

SOURCE = Path(__file__).with_name("dying_files.c")
JOB = PROGRAMS / "end_on_a_dead_disk.py"

_NAMES = {
    r"warm-\S+\.sock": "warm-*.sock",
    r"probe-\d+": "probe-*",
    r"\.\d+\.[0-9a-f]{8}\.part": ".*.part",
    r"/\.[0-9a-f]{12}": "/.*",
}
"""What differs from run to run in the names of files, and a pattern for it."""


@functools.cache
def _library() -> Path:
    library = Path(tempfile.mkdtemp(), "dying_files.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-o", library, SOURCE, "-ldl"], check=True)
    return library


@dataclass
class DyingFiles:
    """The state folder of runs whose file system fails."""

    folder: Path

    def run(self, *arguments: str, **settings: str | int) -> Finished:
        """Run ``JOB`` with two workers; options, then ends as for exit_with.py.

        ``settings`` are the variables of dying_files.c, without their prefix and in lower case.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        options = [argument for argument in arguments if argument.startswith("-")]
        ends = [argument for argument in arguments if not argument.startswith("-")]
        variables = {f"DYING_{name.upper()}": str(value) for name, value in settings.items()}
        env = {
            "XDG_STATE_HOME": f"{self.folder}/state",
            "LD_PRELOAD": str(_library()),
            "DYING_FOLDER": f"{self.folder}/state",
            "DDPLAUNCH_PAGE": "on",
        }
        fixed = ("--nproc-per-node=2", "--rdzv-id=r1")
        return run(*fixed, *options, JOB, self.folder / "dead", *ends, env={**env, **variables})

    def operations(self, *arguments: str) -> list[str]:
        """Each operation below the folder in such a run, as a pattern for ``only``."""
        self.run(*arguments, log=str(self.folder / "log"))
        return self.logged()

    def logged(self) -> list[str]:
        """The operations that were tried in runs with the setting ``log``, also those that failed."""
        lines = set((self.folder / "log").read_text().splitlines())
        for name, pattern in _NAMES.items():
            lines = {re.sub(name, pattern, line) for line in lines}
        return sorted(lines)
