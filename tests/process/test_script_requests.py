"""A script says that no restart may follow, or none on its node: in Python, or in any language by a file or a code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.runs import PROGRAMS, Finished, run

ASK = PROGRAMS / "ask.py"
TWO = ("--nproc-per-node", "2", "--max-restarts", "2")
NO_LOGS = ("--log-dir", "/dev/null")


def assert_gave_up(finished: Finished, reason: str = "the loss is nan") -> None:
    assert finished.returncode == 93, finished.err
    assert f"\nnot restarted: rank 1 on {host(finished)} gave up: {reason}\n" in finished.err
    assert re.search(rf"^rank 1 on \S+ gave up: {re.escape(reason)}$", finished.err, re.MULTILINE)
    assert "restart 1 of" not in finished.err


def host(finished: Finished) -> str:
    found = re.search(r"^rank 1 on (\S+)", finished.err, re.MULTILINE)
    assert found, finished.err
    return found[1]


@pytest.mark.parametrize(
    ("start_method", "how"),
    [*(("forkserver", how) for how in ("main", "thread", "caught", "forked")), ("spawn", "forked")],
)
def test_a_script_gives_up(how: str, start_method: str) -> None:
    finished = run("--start-method", start_method, *TWO, ASK, "give_up", "the loss is nan", how)
    assert_gave_up(finished)
    first = finished.report["first_failure"]
    assert (first["rank"], first["give_up"], first["avoid_node"]) == (1, "the loss is nan", "")
    assert first["returncode"] == (1 if how in ("caught", "forked") else 93)
    assert len(finished.report["attempts"]) == 1


@pytest.mark.torch
def test_a_script_gives_up_within_torchs_record() -> None:
    finished = run(*TWO, ASK, "give_up", "the loss is nan", "record")
    assert_gave_up(finished)
    assert finished.report["first_failure"]["error"] is None


@pytest.mark.parametrize("options", [NO_LOGS, ("--dry-run", "--nnodes", "2")], ids=["no folder", "dry run"])
def test_a_script_gives_up_also(options: tuple[str, ...]) -> None:
    assert_gave_up(run(*TWO, *options, ASK, "give_up", "the loss is nan"))


def test_a_script_asks_for_other_nodes_and_is_started_again() -> None:
    options = ("--dry-run", "--nnodes", "1:2", "--nproc-per-node", "2")
    finished = run(*options, ASK, "avoid_this_node", "wrong\nsums", "world:4")
    assert finished.returncode == 0, finished.err
    assert finished.out.count("goes on") == 2
    first, *_ = finished.report["attempts"]
    asked = [exit_ for exit_ in first["exits"] if exit_["avoid_node"]]
    assert [(exit_["rank"], exit_["avoid_node"], exit_["returncode"]) for exit_ in asked] == [(1, "wrong sums", 88)]
    assert re.search(r"rank 1 on \S+ asked to avoid its node: wrong sums", finished.err)


# Without Python.

SHELL = '[ $RANK = 1 ] || exec sleep 60; echo "$1: no data in $2" > "$DDPLAUNCH_REQUEST_FILE"; exit ${3-7}'


@pytest.mark.parametrize("options", [(), NO_LOGS], ids=["folder", "no folder"])
def test_a_shell_script_gives_up_by_a_line_in_a_file(options: tuple[str, ...]) -> None:
    finished = run(*TWO, *options, "--no-python", "sh", "-c", SHELL, "sh", "give_up", "/data")
    assert_gave_up(finished, "no data in /data")


def test_exit_code_93_alone_is_enough() -> None:
    finished = run(*TWO, "--no-python", "sh", "-c", "[ $RANK = 1 ] || exec sleep 60; exit 93")
    assert_gave_up(finished, "exit code 93")


def test_what_is_not_understood_is_told_of_and_changes_nothing() -> None:
    finished = run(*TWO[:2], "--no-python", "sh", "-c", SHELL, "sh", "giveup", "/data")
    assert finished.returncode == 7, finished.err
    assert re.search(
        r"ddplaunch: rank 1 on \S+ wrote giveup: no data in /data to its request file; "
        r"give_up: REASON or avoid_this_node: REASON is expected\n",
        finished.err,
    )


def test_who_succeeds_has_asked_for_nothing(tmp_path: Path) -> None:
    finished = run(*TWO, "--no-python", "sh", "-c", 'echo "give_up: x" > "$DDPLAUNCH_REQUEST_FILE"')
    assert finished.returncode == 0, finished.err
    assert {exit_["give_up"] for exit_ in finished.report["attempts"][0]["exits"]} == {""}
