"""A machine with four GPUs of a fake driver, a register of its own, and a script that runs on them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.fake_nvml import healthy, say
from tests.support.runs import Finished, Running, start

SCRIPT = """
import os, pathlib, sys, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("runs on", os.environ.get("CUDA_VISIBLE_DEVICES"), "attempt", attempt, flush=True)
while "WAIT" in os.environ and not pathlib.Path(os.environ["WAIT"]).exists():
    time.sleep(0.01)
sys.exit("FAIL" in os.environ and attempt == "0")
"""


class Machine:
    """Its driver, its register, and a script that goes on until ``end``."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder, self.locks = folder, folder / "locks"
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        self.environ = {
            "LD_LIBRARY_PATH": str(library),
            "FAKE_NVML": str(folder / "says"),
            "DDPLAUNCH_LOCK_DIR": str(self.locks),
        }
        self.says()

    def says(self, *also: str) -> None:
        lines = [line for index in range(4) for line in healthy(index)]
        say(self.folder / "says", *also, "gpus 4", "driver 570.1", *lines)

    def start(self, *options: str, waits: bool = False, **environ: str) -> Running:
        wait = {"WAIT": str(self.folder / "end")} if waits else {}
        return start(*options, self.script, env={**self.environ, **wait, **environ})

    def run(self, *options: str, **environ: str) -> Finished:
        return self.start(*options, **environ).finish()

    def end(self, *jobs: Running) -> list[Finished]:
        (self.folder / "end").touch()
        return [job.finish() for job in jobs]


def gpus_of(finished: Finished) -> list[str]:
    return re.findall(r"runs on (\S+) attempt", finished.out)
