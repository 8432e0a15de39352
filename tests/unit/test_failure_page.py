"""The failure page says who, when, how, why and where to look; report.json and the reply file say the same."""

from __future__ import annotations

import json
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.errors import INTERNAL, NODE_LOST, LaunchError
from ddplaunch.features.hangs.wording import stuck_ranks
from ddplaunch.features.run_events.launcher import worker_events
from ddplaunch.launcher.display import failure_page, report_files
from ddplaunch.protocol import wire
from ddplaunch.protocol.results import AttemptResult, WorkerError, WorkerExit
from ddplaunch.protocol.run_result import RunResult
from ddplaunch.system.files import kept_files
from tests.support import golden

NOON = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))


def ended(rank: int, returncode: int = 0, **fields: Any) -> WorkerExit:
    defaults: dict[str, Any] = {
        "rank": rank,
        "local_rank": rank % 8,
        "host": f"node{rank // 8}",
        "pid": 1000 + rank,
        "returncode": returncode,
        "stopped": False,
        "time_s": NOON + 0.25,
        "duration_s": 61.04,
        "log_file": f"/runs/r1/attempt_0/{rank % 8}/stderr.log",
    }
    return WorkerExit(**{**defaults, **fields})


def stopped(rank: int) -> WorkerExit:
    return ended(rank, -signal.SIGTERM, stopped=True, time_s=NOON + 1)


def failed(*exits: WorkerExit, first: WorkerExit | None = None, reason: str = "", **fields: Any) -> RunResult:
    attempt = AttemptResult(0, "failed", exits, 61.5, reason=reason)
    defaults: dict[str, Any] = {
        "run_id": "r1",
        "exit_code": 1,
        "outcome": "failed",
        "duration_s": 62.0,
        "attempts": (attempt,),
        "first_failure": first or (exits[0] if exits else None),
        "run_dir": "/runs/r1",
    }
    return RunResult(**{**defaults, **fields})


def page(*exits: WorkerExit, **fields: Any) -> str:
    return failure_page.page(failed(*exits, **fields))


RAISED = WorkerError(
    "ValueError: no", 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\nValueError: no\n', NOON
)
PEER_LOST = WorkerError("RuntimeError: Connection reset by peer", "", NOON)


def lost_peer(rank: int, **fields: Any) -> WorkerExit:
    error = WorkerError(f"RuntimeError: closed by [10.0.0.1]:{7000 + rank}", "", 0)
    return ended(rank, 1, time_s=NOON + rank, error=error, **fields)


def raised_at(traceback: str) -> str:
    error = WorkerError("KeyError: 'lr'\nmore", f"Traceback (most recent call last):\n{traceback}", NOON)
    return page(ended(0, 1, error=error))


def raised_with(message: str) -> str:
    traceback = f'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n{message}'
    return page(ended(0, 1, error=WorkerError(message, traceback, NOON)))


INNER = """Traceback (most recent call last):
  File "/v/site-packages/torch/utils/data/_utils/worker.py", line 374, in _worker_loop
  File "/a/data.py", line 6, in __getitem__
KeyError: 5

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/a/data.py", line 7, in __getitem__
ValueError: bad sample 5
and more
"""
IN_DATA_LOADER = f"ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal {INNER}"
IN_SPAWNED = f"ProcessRaisedException: \n\n-- Process 1 terminated with the following error:\n{INNER}"

CRASH = """Fatal Python error: Segmentation fault
Thread 0x00007f0 (most recent call first):
  File "/a/other.py", line 8 in wait
Current thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/a/train.py", line 3 in inner
  File "/a/train.py", line 6 in <module>
Thread 0x00007f2 (most recent call first):
  File "/a/third.py", line 9 in wait"""


def attempts(*codes: int, error: WorkerError | None = None) -> tuple[AttemptResult, ...]:
    """The rank that failed is the code, less one."""
    return tuple(
        AttemptResult(number, "failed", (ended(code - 1, code, error=error),), 5.0, attempt_follows=number < 2)
        for number, code in enumerate(codes)
    )


def hung(hosts: int = 1, run_dir: str | None = "/runs/r1") -> RunResult:
    """Two ranks that stood at one line."""
    folders = ["/runs/r1" if hosts == 1 else f"/runs/r1/node{rank}" for rank in range(2)]
    exits = tuple(
        replace(stopped(rank), whereabouts="train.py:4 in f", log_file=f"{folders[rank]}/attempt_0/{rank}/stderr.log")
        for rank in range(2)
    )
    attempt = AttemptResult(0, "failed", exits, 61.5, reason="the job hangs", hung=True)
    return failed(attempts=(attempt,), run_dir=run_dir)


def hang_page(result: RunResult, *, is_remote: bool = False) -> str:
    lines = stuck_ranks(result.attempts[-1], result.run_dir, is_remote=is_remote)
    return failure_page.page(result, lines, is_remote=is_remote)


def collectives(*waits: str) -> RunResult:
    exits = (ended(0, 1, error=WorkerError("RuntimeError: Timed out", "", NOON)),)
    attempt = AttemptResult(0, "failed", exits, 61.5, collectives=waits)
    return replace(failed(*exits), attempts=(attempt,))


EARLY_AND_HUNG = AttemptResult(0, "failed", (stopped(0), ended(1, 0)), 61.5, reason="the job hangs", hung=True)
PAGES = {
    "a lost node": failure_page.page(
        replace(collectives("ranks 0-1 waited in all_reduce #3"), first_failure=None),
        error=LaunchError("the agent on node1 was killed by SIGKILL", "Look for who kills.", NODE_LOST),
        is_remote=True,
    ),
    "waits in a collective": failure_page.page(
        collectives("rank 2 never joined all_reduce #6", "ranks 0-1 waited\nthere")
    ),
    "a hang, and a rank that ended early": failure_page.page(failed(attempts=(EARLY_AND_HUNG,))),
    "many ranks": page(
        *[ended(rank, 1 + rank, time_s=NOON + rank) for rank in range(100)], stopped(200), stopped(201), stopped(205)
    ),
    "ranks that failed alike": page(
        ended(0, 1, error=RAISED), ended(1, 1, error=RAISED, time_s=NOON + 1), *map(lost_peer, range(2, 8))
    ),
    "equal attempts": failure_page.page(failed(ended(0, 3), attempts=attempts(1, 1, 3))),
    "attempts with errors": failure_page.page(failed(ended(2, 1), attempts=attempts(1, 2, 3, error=RAISED))),
    "the last line of the user's": raised_at(
        '  File "/a/train.py", line 4, in main\n  File "/v/site-packages/torch/x.py", line 9, in f'
    ),
    "the line of the last of several exceptions": raised_at(
        '  File "old.py", line 1, in f\nKeyError\n\nTraceback (most recent call last):\n File "new.py", line 2, in g'
    ),
    "a syntax error": raised_at('  File "/a/train.py", line 3\n    def\nSyntaxError: invalid'),
    "no traceback": raised_at("not a traceback"),
    "an exception of a DataLoader's process": raised_with(IN_DATA_LOADER),
    "an exception of a spawned process": raised_with(IN_SPAWNED),
    "an exception of another process without its end": raised_with("E: Caught E in pin memory thread.\nOriginal Tr"),
    "a crash with its stack": page(ended(0, -11, tail=tuple(CRASH.splitlines()))),
    "a hang on one host": hang_page(hung()),
    "a hang on two hosts": hang_page(hung(2)),
    "a hang on other machines": hang_page(hung(2), is_remote=True),
    "a hang without files": hang_page(hung(run_dir=None)),
}


def test_the_pages() -> None:
    """torchrun: multiprocessing_api_test 12, 13; errors_api_test 3."""
    golden.check("failure_page", PAGES)


ERRORS = {"raised": RAISED, "peer lost": PEER_LOST}


def exit_of(text: str) -> WorkerExit:
    """``3 1 error='raised', after_s=2``: rank, exit code, and fields; an error is one of ``ERRORS``, or this text."""
    rank, code, *rest = text.split(" ", 2)
    if code == "stopped":
        return stopped(int(rank))
    fields = golden.keywords("".join(rest))
    if said := fields.pop("error", None):
        fields["error"] = ERRORS.get(said) or WorkerError(said, "", NOON)
    if "after_s" in fields:
        fields["time_s"] = NOON + fields.pop("after_s")
    return ended(int(rank), int(code), **fields)


def test_the_pages_of_few_exits() -> None:
    """A question is a sentence, exits, and fields of the result or arguments of ``page``; ``first`` is a rank."""

    def told(case: str) -> str:
        parts = case.split(" / ")[1:]
        exits = [exit_of(part) for part in parts if part[0].isdigit()]
        given = golden.keywords(" ".join(part for part in parts if not part[0].isdigit()))
        options = {name: given.pop(name) for name in ("is_remote", "has_report", "is_dry_run") if name in given}
        first = [each for each in exits if each.rank == given.get("first")]
        return failure_page.page(failed(*exits, **given | ({"first": first[0]} if first else {})), **options)

    golden.check_pages("failure_pages", told)


@pytest.mark.parametrize(
    ("exit_code", "workers_ran", "is_page"),
    [(None, True, True), (NODE_LOST, True, True), (NODE_LOST, False, False), (INTERNAL, True, False)],
    ids=["a worker", "a lost node", "a node that never came", "a bug"],
)
def test_which_failures_are_shown_as_a_page(exit_code: int | None, workers_ran: bool, is_page: bool) -> None:
    error = LaunchError("no", "", exit_code) if exit_code else None
    assert failure_page.has_page(failed(attempts=()), error, workers_ran) is is_page


def test_absolute_and_relative_paths_of_logs_have_no_folder_in_common() -> None:
    exits = (stopped(0), replace(stopped(1), log_file="runs/r1/attempt_0/1/stderr.log"))
    text = failure_page.page(replace(failed(*exits, reason="the job hangs"), first_failure=None))
    assert "the job hangs" in text
    assert "logs:" not in text


EVIL = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202ereversed\ud800\nall is well"


def test_no_field_of_the_page_steers_the_terminal_or_begins_a_line() -> None:
    error = WorkerError(EVIL, "", NOON)
    first = ended(0, 1, log_file=EVIL, whereabouts=EVIL, error=error, tail=(EVIL,))
    text = page(first, ended(1, 1, error=replace(error, traceback=EVIL)), reason=EVIL, run_dir=EVIL)
    assert set(filter(lambda c: not c.isprintable(), text)) == {"\n"}
    assert r"\x1b]0;owned\x07\x1b[2J\r" in text
    assert [line for line in text.splitlines() if line.startswith("all is well")] == []
    text = page(replace(first, error=replace(error, traceback=f"Traceback\n{EVIL}\tafter a tab")))
    assert set(filter(lambda c: not c.isprintable(), text)) == {"\n", "\t"}


def test_a_huge_traceback_and_huge_lines_leave_a_page_that_can_be_read() -> None:
    stack = "\n".join(["first", *("x" * 100_000 for _ in range(1000)), "last"])
    text = page(ended(0, 1, error=WorkerError("m" * 1_000_000, stack, NOON)), ended(1, 1, tail=("y" * 100_000,)))
    assert len(text) < 100_000
    assert "  | first\n" in text
    assert "  | last\n" in text
    assert "... 942 lines, see the log" in text
    assert "... 99000 more characters" in text


@pytest.mark.parametrize("time_s", [0.0, -1.0, 1e20, float("inf"), float("nan")])
def test_a_nonsense_time_does_no_harm(time_s: float) -> None:
    assert "\nat " in page(ended(0, 1, time_s=time_s))


# Of several launchers.


def test_one_launcher_of_a_job_shows_the_page_and_the_others_a_line() -> None:
    own, other = ended(1, 7), ended(8, 7)
    assert not failure_page.is_shown_elsewhere(failed(own, stopped(0)))
    elsewhere = failed(stopped(8), stopped(9), first=own)
    assert failure_page.is_shown_elsewhere(elsewhere)
    line = "rank 1 on node0 failed: exit code 7; the launcher on node0 shows the failure page"
    line += "; report of this node in /runs/r1"
    assert failure_page.summary(elsewhere) == line
    attempt = AttemptResult(0, "failed", (stopped(8),), 1.0, decision="not restarted: 3 of 3 restarts used")
    used_up = failed(first=own, attempts=(attempt,))
    line = line.replace("exit code 7; ", "exit code 7; not restarted: 3 of 3 restarts used; ")
    assert failure_page.summary(used_up) == line
    without = {"reason": "nothing moved for 60 s", "first_failure": None}
    assert not failure_page.is_shown_elsewhere(failed(stopped(0), **without))
    hung = failed(other, **without, run_dir=None)
    assert failure_page.is_shown_elsewhere(hung)
    assert failure_page.summary(hung) == "nothing moved for 60 s"
    assert not failure_page.is_shown_elsewhere(failed(attempts=()))


def test_after_the_loss_of_a_node_each_launcher_shows_the_page_since_that_of_rank_0_may_be_gone() -> None:
    lost = failed(stopped(8), reason="node0 is lost", first_failure=None, exit_code=NODE_LOST)
    assert not failure_page.is_shown_elsewhere(lost)


# Hints.


def hint(said: str) -> str:
    """By the exception and by the last lines."""
    by_exception = page(ended(0, 1, error=WorkerError(said, "Traceback", NOON)))
    by_last_lines = page(ended(0, 1, tail=("noise", f"[rank0]: {said}".splitlines()[0], "[W1122] a warning")))
    found = [re.findall(r"^hint: +(.*)", text, re.MULTILINE) for text in (by_exception, by_last_lines)]
    assert found[0] == found[1]
    return "; ".join(found[0])


def test_hints_for_what_is_known() -> None:
    golden.check_answers("hints", hint)


def test_words_beside_the_exception_bring_no_hint() -> None:
    said = "KeyError: 'a'"
    traceback = f'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    nccl["No module named"]\n{said}'
    error = WorkerError(said, traceback, NOON)
    assert "hint:" not in page(ended(0, 1, error=error, tail=tuple(traceback.splitlines())))
    assert "hint:" not in page(ended(0, 1, tail=tuple(traceback.splitlines())))


def test_hints_are_found_in_time_whatever_the_message() -> None:
    """CPU time, which a busy machine does not change: 0.2 s, and 50 s for a search of the whole message."""
    before_s = time.thread_time()
    page(ended(0, 1, error=WorkerError("DataLoader worker " * 40_000, "", NOON)))
    assert time.thread_time() - before_s < 5


# Files.


def test_report_json_holds_the_whole_result(tmp_path: Path) -> None:
    result = failed(ended(0, 1, error=RAISED, tail=("a\x00\udcff",)), stopped(1), signal=None, unkillable_pids=(7,))
    report_files.write_report(result, tmp_path)
    report_files.write_page("the page \udcff", tmp_path)
    body = json.loads((tmp_path / "report.json").read_text())
    assert next(iter(body)) == "schema"
    assert body.pop("schema") == report_files.SCHEMA
    assert wire._build(RunResult, body) == result
    assert (tmp_path / "report.txt").read_text() == "the page \\udcff\n"


def test_stacks_and_failures_of_other_machines_are_written_here(tmp_path: Path) -> None:
    hung = replace(stopped(1), stacks="Thread 0x0 (most recent call first):\n")
    report_files.write_failures(failed(ended(0, 7, tail=("bye",)), hung, stopped(2)), tmp_path)
    files = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.*")}
    assert files == {"failed/rank_0/last_lines.log": "bye\n", "failed/rank_1/stacks.txt": hung.stacks}


def test_a_report_that_cannot_be_written_is_passed_over_and_leaves_no_half(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    report_files.write_report(failed(ended(0, 1)), gone)
    report_files.write_page("page", gone)
    assert kept_files.is_noted(gone / "report.json")
    told = f"not written, or only in part, in {gone}: report.json, report.txt: No such file or directory"
    assert kept_files.not_written(gone) == told
    assert kept_files.not_written(gone) == ""
    assert list(tmp_path.iterdir()) == []


def test_the_process_above_gets_the_first_failure_in_torchs_schema_with_its_exit_code(tmp_path: Path) -> None:
    """torchrun: errors_api_test 8, 9."""
    path = tmp_path / "error.json"
    path.write_text("what an earlier process left, longer than the reply " * 100)
    report_files.write_error_file(ended(3, 7, error=RAISED), str(path))
    message = json.loads(path.read_text())["message"]
    assert message == {
        "message": "ValueError: no",
        "errorCode": 7,
        "extraInfo": {"py_callstack": RAISED.traceback, "timestamp": str(int(NOON))},
    }


def test_there_is_no_reply_without_an_exception_or_without_a_place_for_it(tmp_path: Path) -> None:
    """torchrun: errors_api_test 7."""
    path = tmp_path / "error.json"
    report_files.write_error_file(ended(3, 7), str(path))
    report_files.write_error_file(None, str(path))
    report_files.write_error_file(ended(3, 7, error=RAISED), "")
    report_files.write_error_file(ended(3, 7, error=RAISED), str(tmp_path / "no" / "folder"))
    assert list(tmp_path.iterdir()) == []


# Events.


def test_events_have_torchelastics_fields() -> None:
    """torchrun: agent_api_test 10. Attempt 1 followed the loss of a node, which is no restart."""
    failure = ended(1, 7, error=RAISED, node_rank=3)
    attempt = AttemptResult(2, "failed", (ended(0), failure, stopped(2)), 5.0, restart_count=1)
    events = [json.loads(line) for line in worker_events("r1", "trainer", attempt)]
    for event in events:
        event["timestamp"] -= int(NOON * 1000)
    golden.check("torchelastic_events", {"an attempt, times since noon": json.dumps(events, indent=1)})


def test_a_large_report_has_a_line_for_each_worker_and_the_same_fields(tmp_path: Path) -> None:
    large = failed(*(ended(rank, 7, tail=('"exits": []',)) for rank in range(1025)))
    large = replace(large, attempts=2 * large.attempts)
    report_files.write_report(large, tmp_path)
    text = (tmp_path / "report.json").read_text()
    assert len(text.splitlines()) < 2200
    body = json.loads(text)
    assert body.pop("schema") == report_files.SCHEMA
    assert wire._build(RunResult, body) == large


def test_only_the_likeliest_causes_have_a_folder(tmp_path: Path) -> None:
    victims = (ended(rank, 1, error=WorkerError("Broken pipe", "", 0.0)) for rank in range(300))
    report_files.write_failures(failed(*victims, ended(300, 7), replace(stopped(301), stacks="here")), tmp_path)
    folders = {path.name for path in (tmp_path / "failed").iterdir()}
    assert len(folders) == 257
    assert {"rank_300", "rank_301", "rank_0"} < folders
    assert "rank_299" not in folders
