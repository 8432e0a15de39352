"""Processes use GPUs of four, wait for them, and are killed at random; each GPU has a file with its only user.

A list in a file has who waits, takes and is killed, in order. Some do not wait, and must not overtake those that do.
``sys.argv``: how many are killed. Runs in a pid namespace of its own.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from ddplaunch.features.free_gpus import choice, register
from ddplaunch.features.free_gpus.records import GpuUser
from ddplaunch.features.free_gpus.register import OwnFile

FOUND, PROCESSES = [choice.Candidate(name, name, "", "") for name in "abcd"], 8
MARKS, LIST = Path(register.folder() + ".marks"), register.folder() + ".list"


def note(what: str, pid: int) -> None:
    with open(LIST, "a") as file:
        file.write(f"{what} {pid}\n")


class Process:
    """Takes GPUs once, at once or after a wait."""

    def __init__(self) -> None:
        self.own: OwnFile | None = None
        self.entry = GpuUser(pid=os.getpid(), run_id="r", since_s=0.0, processes=(register.started(os.getpid()),))

    def taken(self, count: int, *, waits: bool) -> list[str]:
        """The GPUs that it has from now on; none if there are too few."""
        with register.locked(20.0) as opened:
            others = register.users(opened, self.own.name if self.own else "")
            ticket = self.entry.ticket or register.next_ticket(others)
            seen = choice.view(FOUND, others, ticket if waits else 0)
            gpus = tuple(each.key for each in seen.free[:count]) if len(seen.free) >= count else ()
            wants = tuple(each.key for each in FOUND)
            changed = {"gpus": gpus} if gpus else {"ticket": ticket, "needs": count, "wants": wants}
            entry = GpuUser(pid=os.getpid(), run_id="r", since_s=0.0, processes=self.entry.processes, **changed)
            if self.own and gpus:
                self.own.write(entry)
            elif not self.own and (gpus or waits):
                self.own = OwnFile(opened, entry)
                note("wait", os.getpid())
            if gpus:
                note("take", os.getpid())
            self.entry = entry if self.own else self.entry
        return list(gpus)

    def use(self, rest: random.Random) -> None:
        """Take GPUs and give them back. Ends with 3 if one has another living user."""
        count, waits = rest.randint(1, 3), rest.random() < 0.7
        while not (gpus := self.taken(count, waits=waits)) and waits:
            time.sleep(0.001)
        for gpu in gpus:
            mark = MARKS / gpu
            before = mark.read_text() if mark.exists() else ""
            if before and int(before) != os.getpid() and is_alive(int(before)):
                os._exit(3)
            mark.write_text(str(os.getpid()))
        time.sleep(rest.random() * 0.005)
        for gpu in gpus:
            (MARKS / gpu).unlink()
        if self.own:
            self.own.remove()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def start() -> int:
    pid = os.fork()
    if not pid:
        try:
            rest = random.Random(os.getpid())
            while True:
                Process().use(rest)
        finally:
            os._exit(4)
    return pid


def check_order() -> int:
    """Each takes before all living ones that began to wait later. Returns how many have taken GPUs."""
    waiting: list[int] = []
    killed: set[int] = set()
    count = 0
    for line in Path(LIST).read_text().splitlines():
        what, pid = line.split()[0], int(line.split()[1])
        if what == "wait":
            waiting.append(pid)
        elif what == "kill":
            killed.add(pid)
        else:
            ahead = [each for each in waiting[: waiting.index(pid)] if each not in killed]
            assert not ahead, f"{pid} has overtaken {ahead}"
            waiting.remove(pid)
            count += 1
    return count


def kill(pid: int) -> None:
    note("kill", pid)
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != -signal.SIGKILL:
        sys.exit(f"a process ended with {code}")


def main() -> None:
    MARKS.mkdir()
    wanted, killed, rest = int(sys.argv[1]), 0, random.Random(1)
    living = [start() for _ in range(PROCESSES)]
    while killed < wanted:
        time.sleep(rest.random() * 0.04)
        kill(living.pop(rest.randrange(len(living))))
        killed += 1
        living.append(start())
    for pid in living:
        kill(pid)
    taken = check_order()
    assert Process().taken(len(FOUND), waits=False), "a GPU is lost"
    assert len(os.listdir(register.folder())) == 1
    print(f"{killed} killed, {taken} times GPUs were taken")


main()
