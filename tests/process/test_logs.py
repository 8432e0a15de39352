"""--logs: the log files of ranks, those of one attempt, followed, or where they are."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path

import pytest

from ddplaunch.features.runs import run_json
from tests.support.detached import JOB, folder_of, job, started
from tests.support.processes import wait_until
from tests.support.runs import run, start

USAGE, NODE_NOT_READY = 2, 82

SPEAK = 'echo "out $RANK $TORCHELASTIC_RESTART_COUNT"; echo "err $RANK" >&2; test "$TORCHELASTIC_RESTART_COUNT" = 1'
"""Prints a line to each stream; fails in the first attempt."""


def test_the_files_of_ranks_and_attempts_are_printed() -> None:
    arguments = ("--rdzv-id", JOB, "--nproc-per-node", "2", "--max-restarts", "1")
    assert run(*arguments, "--no-python", "sh", "-c", SPEAK).returncode == 0
    host = json.loads((folder_of(JOB) / "run.json").read_text())["host"].split(".")[0]
    every = run("--logs", JOB)
    assert (every.returncode, every.err) == (0, "")
    assert every.out == "\n".join(
        f"==> rank {rank} on {host}, {stream} <==\n{line}\n"
        for rank in (0, 1)
        for stream, line in (("stdout", f"out {rank} 1"), ("stderr", f"err {rank}"))
    )
    for stream, lines in (("--stdout", "out 0 1\n"), ("--stderr", "err 0\n")):
        assert run("--logs", JOB, "--ranks", "0", stream).out == lines
    assert run("--logs", JOB, "--stdout", "--stderr").out == every.out
    first = run("--logs", JOB, "--attempt", "0", "-f").out
    assert re.search(r"^out \d 0$", first, re.MULTILINE)
    assert not re.search(r"^out \d 1$", first, re.MULTILINE)
    for more, text in (
        (("--ranks", "1-3"), "--ranks: no ranks 2-3 in attempt 1, which has ranks 0-1"),
        (("--attempt", "7"), "--attempt 7: the workers have started in attempt 0-1 only"),
        (("--ranks", "x"), "must be ranks like 0,4-7"),
    ):
        refused = run("--logs", JOB, *more)
        assert refused.returncode == USAGE
        assert text in refused.err
    (folder_of(JOB) / "attempt_1" / "0" / "stderr.log").unlink()
    assert run("--logs", JOB, "--ranks", "0").out == "out 0 1\n", "a single file has no title"


def test_lines_that_follow_are_printed_until_the_end(go: Path) -> None:
    run_id = started(go, "--nproc-per-node", "2")
    following = start("--logs", run_id, "--ranks", "1", "-f")
    following.wait_for("begins")
    go.touch()
    finished = following.finish()
    assert finished.returncode == 0
    assert "ends" in finished.out or not json.loads((folder_of(run_id) / "report.json").read_text())["signal"]


def test_a_restart_is_followed(tmp_path: Path) -> None:
    program = f'echo "attempt $TORCHELASTIC_RESTART_COUNT"; while [ ! -e {tmp_path}/$TORCHELASTIC_RESTART_COUNT ]; '
    program += 'do sleep 0.05; done; test "$TORCHELASTIC_RESTART_COUNT" = 1'
    running = start("--rdzv-id", JOB, "--max-restarts", "1", "--no-python", "sh", "-c", program)
    running.wait_for("attempt 0")
    following = start("--logs", JOB, "-f")
    following.wait_for("attempt 0")
    (tmp_path / "0").touch()
    following.wait_for("attempt 1", 2)
    (tmp_path / "1").touch()
    assert running.finish().returncode == following.finish().returncode == 0


def test_simulated_nodes_have_a_folder_each() -> None:
    options = ("--rdzv-id", JOB, "--dry-run", "--nnodes", "2", "--nproc-per-node", "2")
    program = ("--no-python", "sh", "-c", "echo rank $RANK local $LOCAL_RANK")
    ended = run(*options, *program)
    if ended.returncode:  # A dry run refuses programs.
        script = folder_of("").parent / "x.py"
        script.write_text("import os\nprint('rank', os.environ['RANK'], 'local', os.environ['LOCAL_RANK'])\n")
        assert run("--rdzv-id", "job8", *options[2:], script).returncode == 0
    run_id = "job8" if ended.returncode else JOB
    assert run("--logs", run_id, "--ranks", "3").out.splitlines()[1] == "rank 3 local 1"


def test_files_that_are_on_other_machines_are_named(go: Path) -> None:
    go.touch()
    run("--rdzv-id", JOB, *job(go))
    folder = folder_of(JOB)
    (folder / "failed" / "rank_2").mkdir(parents=True)
    (folder / "failed" / "rank_2" / "last_lines.log").write_text("the end\n")
    (folder / "gpu8").mkdir()
    (folder / "attempt_0").rename(folder / "gpu8" / "attempt_0")
    event = {"t": 1, "event": "attempt_started", "attempt": 0, "workers": 2, "first_rank": 1, "host": "gpu9"}
    more = ({}, {"host": "../x"}, {"workers": "2"}, {"first_rank": 0, "host": "gpu8", "workers": 1})
    lines = [json.dumps({**event, **each}) for each in more]
    (folder / run_json.EVENTS).write_text("\n".join((*lines, '{"event": "attempt_started", cut')))
    some = run("--logs", JOB, "--ranks", "0-2")
    assert some.returncode == NODE_NOT_READY
    assert "begins\n" in some.out
    assert "the end\n" in some.out
    assert some.err.splitlines() == [
        "ddplaunch: gpu9, ranks 1-2: its log files are not on this machine, and where they are is not known; here are "
        "the last lines of rank 2",
        f"ddplaunch: error: --logs {JOB}: not all log files could be read",
    ]
    none = run("--logs", JOB, "--ranks", "1")
    assert none.returncode == NODE_NOT_READY
    assert "gpu9, rank 1: its log files are not on this machine" in none.err


def test_what_is_no_file_that_can_be_read_is_named_and_the_others_are_printed() -> None:
    assert run("--rdzv-id", JOB, "--no-python", "sh", "-c", "echo out; echo err >&2").returncode == 0
    path = folder_of(JOB) / "attempt_0" / "0" / "stdout.log"
    host = json.loads((folder_of(JOB) / "run.json").read_text())["host"].split(".")[0]
    for make, reason in (
        (os.mkfifo, "is not a regular file"),
        (os.mkdir, "is not a regular file"),
        (partial(os.symlink, "missing"), "No such file or directory"),
    ):
        path.unlink() if not path.is_dir() else path.rmdir()
        make(path)
        some = run("--logs", JOB)
        assert (some.returncode, some.out) == (NODE_NOT_READY, "err\n"), reason
        assert some.err.splitlines() == [
            f"ddplaunch: {host}, rank 0: {path}: {reason}",
            f"ddplaunch: error: --logs {JOB}: not all log files could be read",
        ]


def test_without_an_attempt_there_is_nothing_to_print() -> None:
    assert run("--rdzv-id", JOB, "--no-python", "missing-program").returncode == NODE_NOT_READY
    wait_until((folder_of(JOB) / "run.json").exists)
    none = run("--logs", JOB)
    assert none.returncode == NODE_NOT_READY
    assert "no worker has started" in none.err


@pytest.mark.parametrize("option", [("--ranks", "1"), ("--attempt", "0"), ("-f",), ("--stdout",), ("--stderr",)])
def test_options_of_logs_need_it(option: tuple[str, ...]) -> None:
    refused = run(*option, "x.py")
    assert refused.returncode == USAGE
    assert "needs --logs" in refused.err
