"""--ps RUN_ID of real runs: into a pipe, on a terminal, after the end."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.process.test_samples import WORK
from tests.support.detached import JOB
from tests.support.processes import wait_until
from tests.support.runs import Running, run, start
from tests.support.terminal import CTRL_C, Terminal

RANK = r"0 +\S+ +running +0s ago +\d+ % +\S+ MB"


def job(seconds: str, end: str = "") -> Running:
    options = ("--rdzv-id", JOB, "--nproc-per-node", "2")
    return start(*options, "--no-python", sys.executable, "-S", "-c", f"{WORK}\n{end}", seconds)


@pytest.mark.slow
def test_a_live_run_has_a_line_for_each_rank_and_an_ended_one_says_how_it_ended() -> None:
    running = job("60")
    running.wait_for("line")
    text = wait_until(ps_with_values)
    title, head, *ranks = text.splitlines()
    assert re.fullmatch(rf"{JOB}: running for \d+s, attempt 0, 2 ranks on 1 node; as of \d+s ago", title)
    assert head.startswith("rank  node")
    assert [line.split()[0] for line in ranks] == ["0", "1"]
    running.signal(signal.SIGTERM)
    running.finish()
    done = run("--ps", JOB)
    assert done.returncode == 0
    assert re.match(rf"{JOB}: ended after \d+s: exit 143\n", done.out), done.out


def ps_with_values() -> str:
    out = run("--ps", JOB).out
    return out if re.search(RANK, out) else ""


@pytest.mark.slow
def test_on_a_terminal_the_table_follows_the_run_until_it_ends() -> None:
    running = job("6", "sys.exit(3)")
    running.wait_for("line")
    terminal = Terminal()
    viewer = terminal.start("--ps", JOB)
    viewer.wait_for(RANK)
    viewer.wait_for(rf"{JOB}: ended after \d+s: exit 3")
    viewer.wait_for("rank [01] on .*: exit code 3")
    assert viewer.finish().returncode == 0
    assert running.finish().returncode == 3
    assert sum("last line" in line for line in viewer.lines) > 1


def test_ctrl_c_leaves_the_table_and_not_the_run() -> None:
    running = job("60")
    running.wait_for("line")
    terminal = Terminal()
    viewer = terminal.start("--ps", JOB)
    viewer.wait_for(f"{JOB}: running for")
    terminal.type(CTRL_C)
    assert viewer.finish().returncode == 0
    assert running.process.poll() is None
    running.signal(signal.SIGTERM)
    running.finish()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for words, text in (
        (("--ps", "none"), "--ps none: no run of yours with this id"),
        (("--ps", "none", "--hosts", "a"), "--ps reads files of this machine, and --hosts names others"),
        (("--hosts", "a", "--ps", "none"), "--ps reads files of this machine, and --hosts names others"),
    ):
        done = run(*words, env={"XDG_STATE_HOME": str(tmp_path)})
        assert done.returncode == 2
        assert text in done.err
