"""--stacks, from another shell: what the workers of a live run do, or that there is nothing to ask."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from ddplaunch.protocol.control import SOCKET
from ddplaunch.protocol.environment import RUN_ID
from ddplaunch.system import procfs
from tests.support.processes import wait_until
from tests.support.runs import PROGRAMS, Finished, Running, environment, meeting, run, start

HANG = PROGRAMS / "hang.py"
USAGE, NODE_NOT_READY = 2, 82


def begin(run_id: str, *arguments: str | Path, workers: int = 2) -> Running:
    """A run whose workers have printed ``ready``."""
    running = start("--rdzv-id", run_id, "--nproc-per-node", str(workers), "--shutdown-timeout", "1", *arguments)
    running.wait_for("ready", workers)
    return running


def end(running: Running) -> Finished:
    running.signal(signal.SIGTERM)
    finished = running.finish()
    assert finished.returncode == 128 + signal.SIGTERM, finished.err
    return finished


def page_of(run_id: str) -> tuple[list[str], Path]:
    """The lines of the page, and the path of stacks.txt."""
    finished = run("--stacks", run_id)
    assert finished.returncode == 0, finished.err
    assert finished.err == ""
    *lines, last = finished.out.splitlines()
    assert last.startswith("all stacks: /"), finished.out
    return lines, Path(last.removeprefix("all stacks: "))


@pytest.mark.torch
def test_the_rank_that_others_wait_for_is_named_though_nothing_is_reported(tmp_path: Path, run_id: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "def load():\n"
        "    time.sleep(1000)\n"
        "def step():\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "step()\n"
        "print('ready', flush=True)\n"
        "load() if dist.get_rank() == 1 else step()\n"
    )
    running = begin(run_id, "--hang-report", "off", script, workers=3)
    lines, path = page_of(run_id)
    assert re.fullmatch(r"nothing moved in the last \d+\.\d s; no output for .*", lines[0])
    assert re.match(r"rank 1 never joined all_reduce #2 of default_pg \(1 float\)", lines[1])
    assert "rank 1: still, at train.py:4 in load" in lines
    assert any(line.startswith("ranks 0, 2: waiting, at train.py:6 in step") for line in lines)
    assert "in step\n" in path.read_text()
    finished = end(running)
    assert path.parent == finished.run_dir
    assert not (path.parent / SOCKET).exists()


def test_a_suspended_worker_stays_suspended(run_id: str) -> None:
    running = begin(run_id, HANG, "0=loop", "1=stopped")
    pids = [int(match[1]) for match in running.wait_for(r"ready \(pid: (\d+)", 2)]
    lines, _ = page_of(run_id)
    assert re.search(r"rank 1: blocked, .*suspended by a signal", "\n".join(lines))
    assert re.search(r"^rank 0: still, at hang.py:\d+ in loop$", "\n".join(lines), re.MULTILINE)
    assert sorted(procfs.stat(pid)[procfs.STATE] == b"T" for pid in pids) == [False, True]
    end(running)


def test_of_a_run_that_moves_it_is_said(run_id: str) -> None:
    running = begin(run_id, HANG, "*=talk:100")
    lines, _ = page_of(run_id)
    assert re.match(r"the job moves: ranks 0-1 wrote output, or called or finished a collective, in the last", lines[0])
    assert any(re.match(r"ranks? .*: moving, at hang.py:\d+ in talk", line) for line in lines)
    end(running)


def test_a_run_without_files_has_no_socket_and_an_unknown_one_no_launcher(run_id: str) -> None:
    running = begin(run_id, "--log-dir", "/dev/null", HANG, "*=loop")
    finished = run("--stacks", run_id)
    assert (finished.returncode, finished.out) == (NODE_NOT_READY, "")
    assert "it has no control socket, because it keeps no files (--log-dir /dev/null)" in finished.err
    finished = run("--stacks", f"{run_id}-none")
    assert finished.returncode == USAGE
    assert f"--stacks {run_id}-none: no run of yours has this id" in finished.err
    assert run_id in finished.err.partition("There are: ")[2]
    end(running)


def test_a_launcher_that_cannot_answer_is_not_waited_for_and_it_is_said_why(tmp_path: Path, run_id: str) -> None:
    running = begin(run_id, "--log-dir", tmp_path, HANG, "*=loop")
    shutil.rmtree(tmp_path / run_id)
    finished = run("--stacks", run_id)
    assert finished.returncode == NODE_NOT_READY, finished.out
    assert f"launcher {running.pid}: it has no control socket: its run folder was deleted" in finished.err
    running.signal(signal.SIGSTOP)
    wait_until(lambda: procfs.stat(running.pid)[procfs.STATE] == b"T")
    finished = run("--stacks", run_id)
    running.signal(signal.SIGCONT)
    assert finished.returncode == NODE_NOT_READY, finished.out
    assert f"launcher {running.pid}: it is suspended by a signal, as by Ctrl-Z" in finished.err
    end(running)


def test_of_a_run_whose_launcher_has_ended_nobody_can_be_asked(run_id: str) -> None:
    with subprocess.Popen(["sleep", "60"], env=environment({RUN_ID: f"{run_id}.0a1b2c"})) as left:
        finished = run("--stacks", run_id)
        left.kill()
    assert finished.returncode == USAGE, finished.out
    assert f"--stacks {run_id}: its launcher has ended" in finished.err


def test_launchers_that_meet_give_one_page_of_all_nodes(run_id: str) -> None:
    options = (*meeting(), "--nnodes", "2", "--rdzv-id", run_id, "--nproc-per-node", "1", "--shutdown-timeout", "1")
    nodes = [start(*options, HANG, "*=loop") for _ in range(2)]
    for node in nodes:
        node.wait_for("ready")
    lines, path = page_of(run_id)
    assert any(re.match(r"ranks 0-1: still, at hang.py:\d+ in loop$", line) for line in lines)
    assert sorted(re.findall(r"^rank (\d) on", path.read_text(), re.MULTILINE)) == ["0", "1"]
    nodes[0].signal(signal.SIGTERM)
    for node in nodes:
        node.finish()
