"""Processes take GPUs of four from the register, and are killed at random; each GPU has a file with its only user.

``sys.argv``: how many are killed. Runs in a pid namespace of its own.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from ddplaunch.features.free_gpus import register
from ddplaunch.features.free_gpus.register import GpuUser, OwnFile

GPUS, HOLDERS = "abcd", 8
MARKS = Path(register.folder() + ".marks")


def take(count: int) -> tuple[OwnFile, list[str]] | None:
    with register.locked(20.0) as opened:
        held = {gpu for user in register.users(opened) for gpu in user.gpus}
        free = [gpu for gpu in GPUS if gpu not in held][:count]
        if len(free) < count:
            return None
        pid = os.getpid()
        run = GpuUser(pid=pid, run_id="r", since_s=0.0, gpus=tuple(free), processes=(register.started(pid),))
        return OwnFile(opened, run), free


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def hold() -> None:
    """Take and give back until killed. Ends with 3 if a GPU has another living user."""
    rest = random.Random(os.getpid())
    while True:
        if not (taken := take(rest.randint(1, 2))):
            time.sleep(0.001)
            continue
        own, gpus = taken
        for gpu in gpus:
            mark = MARKS / gpu
            before = mark.read_text() if mark.exists() else ""
            if before and int(before) != os.getpid() and is_alive(int(before)):
                os._exit(3)
            mark.write_text(str(os.getpid()))
        time.sleep(rest.random() * 0.01)
        for gpu in gpus:
            (MARKS / gpu).unlink()
        own.remove()


def start() -> int:
    pid = os.fork()
    if not pid:
        try:
            hold()
        finally:
            os._exit(4)
    return pid


def main() -> None:
    MARKS.mkdir()
    wanted, killed, rest = int(sys.argv[1]), 0, random.Random(1)
    holders = [start() for _ in range(HOLDERS)]
    while killed < wanted:
        time.sleep(rest.random() * 0.02)
        victim = holders.pop(rest.randrange(len(holders)))
        os.kill(victim, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1])
        if code != -signal.SIGKILL:
            sys.exit(f"a holder ended with {code}")
        killed += 1
        holders.append(start())
    for pid in holders:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert take(len(GPUS)), "a GPU is lost"
    assert len(os.listdir(register.folder())) == 1
    print(f"{killed} killed")


main()
