"""What --snapshot adds to a start: a repository of many files that are copied, have not changed, or changed a little.

The job is a script that ends at once. torchrun has no snapshots: its time is that of the start alone. The first copy
goes to an empty folder each time.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
import time
from pathlib import Path

from common import DDPLAUNCH, TORCHRUN, alternate, check_hosts, print_table, seconds, size

FILES = size("BENCH_FILES", 1000, 10)
BYTES = 4096
_IDENTITY = {f"GIT_{who}_{what}": "bench" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
_SAME_MOMENT_S = 0.0 if FILES == 10 else 2.5
"""A file that was changed just now is read again at the next start: that is not measured."""


def make_repository(folder: Path) -> Path:
    """A repository with ``FILES`` files in folders of 50. Returns the script."""
    for number in range(FILES):
        path = folder / f"package_{number // 50}" / f"module_{number}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"NUMBER = {number}\n".ljust(BYTES, "#"))
    (folder / "train.py").write_text("")
    for command in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message=first")):
        subprocess.run(["git", "-C", folder, *command], env={**os.environ, **_IDENTITY}, check=True)
    return folder / "train.py"


def main() -> None:
    check_hosts()
    with tempfile.TemporaryDirectory() as name:
        script, numbers = make_repository(Path(name) / "project"), itertools.count()
        logs = ("--log-dir", f"{name}/logs")

        def changed() -> float:
            (script.parent / "package_0/module_0.py").write_text(f"NUMBER = {next(numbers)}")
            return seconds((*DDPLAUNCH, *logs, "--snapshot", str(script)))

        def first() -> float:
            return seconds((*DDPLAUNCH, "--log-dir", f"{name}/logs {next(numbers)}", "--snapshot", str(script)))

        time.sleep(_SAME_MOMENT_S)
        changed()
        base, *taken = alternate(
            lambda: seconds((*TORCHRUN, "--nproc-per-node", "1", str(script))),
            lambda: seconds((*DDPLAUNCH, *logs, str(script))),
            lambda: seconds((*DDPLAUNCH, *logs, "--snapshot", str(script))),
            changed,
            first,
        )
        without = taken[0]
        names = ("no snapshot", "snapshot, nothing has changed", "snapshot, one file has changed", "first snapshot")
        rows = [
            (f"{text}, {FILES} files", f"{base:.2f} s", f"{found:.2f} s", f"+{found - without:.2f} s")
            for text, found in zip(names, taken, strict=True)
        ]
        print_table("snapshot", rows)


if __name__ == "__main__":
    main()
