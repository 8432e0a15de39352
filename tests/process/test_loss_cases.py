"""The table of ``launcher/lost_nodes.py``, row by row: a node of a real run ends at once, and what must follow does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddplaunch.launcher import lost_nodes
from tests.support.processes import children, command_line, wait_until
from tests.support.runs import PROGRAMS, Finished, Running, meeting, start

ROUNDS = PROGRAMS / "rounds.py"
NAMES = ("a", "b", "c")


class Case(NamedTuple):
    start: str
    nnodes: str
    hosts: str
    lost: str
    next_attempt: str
    code: str
    page: str
    real_host: str

    @property
    def size(self) -> int:
        """Number of nodes of the first attempt; of one worker each."""
        return min(int(self.hosts), int(self.nnodes.split(":")[-1]))

    @property
    def lost_node(self) -> int:
        return 0 if self.lost in ("serves", "the only") else self.size - 1


def table() -> Iterator[Case]:
    """The rows of the table, by the width of its columns."""
    lines = iter(str(lost_nodes.__doc__).splitlines())
    ruler = next(before for before, line in pairwise(lines) if line.startswith("start   --nnodes"))
    columns = [match.span() for match in re.finditer("=+", ruler)]
    assert next(lines) == ruler
    for row in takewhile(ruler.__ne__, lines):
        yield Case(*(row[begin:end].strip() for begin, end in columns))


def cases(*starts: str) -> list[Any]:
    """Those that wait for other nodes are slow."""
    found = [case for case in table() if case.start in starts]
    return [pytest.param(case, id="-".join(case[:4]), marks=[pytest.mark.slow] * (case.code == "83")) for case in found]


def as_pattern(page: str) -> str:
    text = re.escape(page).replace("HOST", r"\S+").replace("PORT", r"\d+").replace(r"N\ s", r"\d+\ s")
    return text.replace("REASON", r"the agent on \S+ was killed by SIGKILL")


def agents(launcher: Running) -> list[int]:
    """The agents of a launcher, by the number of their node."""
    return sorted(pid for pid in children(launcher.pid) if "agent.main" in command_line(pid))


def check_end(finished: Finished, case: Case) -> None:
    assert finished.returncode == int(case.code), finished.err
    assert "restart 1" not in finished.err, "the loss of a node is no restart"
    if case.page == "no page":
        assert "the job failed" not in finished.err
    else:
        assert re.search(rf"the job failed =+\n{as_pattern(case.page)}", finished.err), finished.err


def goes_on(running: Running, case: Case, number: int) -> bool:
    """Whether another attempt follows; it has as many nodes as the table says."""
    if case.next_attempt.startswith("none"):
        return False
    running.wait_for(rf"rank \d of {case.next_attempt[0]} in round {number}")
    return True


def test_hosts_are_lost_in_the_tests_that_are_named() -> None:
    for case in table():
        path = Path(__file__).parent.parent / "ssh" / f"test_{case.real_host}.py"
        assert not case.real_host or path.is_file(), case


@pytest.mark.parametrize("case", cases("one", "single"))
def test_of_one_launcher(case: Case, tmp_path: Path) -> None:
    end = tmp_path / "end"
    hosts = ",".join(NAMES[: int(case.hosts)])
    options = ("--hosts", hosts, "--nnodes", case.nnodes, "--nproc-per-node", "1", "--max-restarts", "1")
    running = start("--dry-run", *options, ROUNDS, end)
    running.wait_for(rf"rank \d of {case.size} in round 0", case.size)
    os.kill(agents(running)[case.lost_node], signal.SIGKILL)
    if goes_on(running, case, 1):
        end.touch()
    finished = running.finish()
    check_end(finished, case)
    assert (" replaces " in finished.err) == ("spare" in case.next_attempt)


@pytest.mark.parametrize("case", cases("each"))
def test_of_a_launcher_for_each_node(case: Case, port: int, tmp_path: Path) -> None:
    end = tmp_path / "end"
    conf = "last_call_timeout=3,keep_alive_interval=0.5" + (",join_timeout=10" if case.code == "83" else "")
    options = (*meeting(port), "--rdzv-conf", conf, "--nnodes", case.nnodes, "--nproc-per-node", "1")
    nodes: list[Running] = []
    for _ in range(int(case.hosts)):
        nodes.append(start(*options, "--max-restarts", "1", ROUNDS, end))
        if len(nodes) == 1:
            nodes[0].wait_for("waiting at|are here")
        elif len(nodes) == case.size:
            found = [each.wait_for(rf"rank \d of {case.size} in round (\d+)")[0] for each in nodes]
    for each in nodes[case.size :]:
        each.wait_for("waits until a node is lost")
    lost = nodes.pop(case.lost_node)
    for pid in (*agents(lost), lost.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if all([goes_on(each, case, int(found[0][1]) + 1) for each in nodes]):
        end.touch()
    for each in nodes:
        check_end(each.finish(), case)
    wait_until(lambda: lost.process.poll() is not None)
