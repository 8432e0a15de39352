"""The failure page says who, when, how, why and where to look; report.json and the reply file say the same."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ddplaunch.launcher.display import event_log, failure_page, report_files
from ddplaunch.protocol import wire
from ddplaunch.protocol.results import NEVER_RESTARTED, AttemptResult, RunResult, WorkerError, WorkerExit
from ddplaunch.system.files import kept_files

if TYPE_CHECKING:
    from pathlib import Path

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


def test_where_ranks_waited_when_a_collective_failed() -> None:
    exits = (ended(0, 1, error=WorkerError("RuntimeError: Timed out", "", NOON)),)
    waits = ("rank 2 never joined all_reduce #6", "ranks 0-1 waited\nthere")
    attempt = AttemptResult(0, "failed", exits, 61.5, collectives=waits)
    lines = failure_page.page(replace(failed(*exits), attempts=(attempt,))).splitlines()
    assert lines[3:5] == ["waiting:  rank 2 never joined all_reduce #6", "          ranks 0-1 waited\\nthere"]


def test_no_field_of_the_page_steers_the_terminal_or_begins_a_line() -> None:
    evil = "\x1b]0;owned\x07\nall is well"
    exit_ = ended(0, 1, log_file=evil, whereabouts=evil, error=WorkerError(evil, "", NOON), tail=(evil,))
    text = page(exit_, ended(1, 1, error=WorkerError(evil, evil, NOON)), reason=evil, run_dir=evil)
    assert "\x1b" not in text
    assert r"\x1b]0;owned\x07\nall is well" in text
    assert [line for line in text.splitlines() if line.startswith("all is well")] == []


RAISED = WorkerError(
    "ValueError: no", 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\nValueError: no\n', NOON
)


# The page.


def test_an_exception_is_shown_with_its_traceback() -> None:
    text = page(ended(11, 1, error=RAISED), stopped(8), stopped(9), stopped(10))
    assert text.splitlines() == [
        "========================== ddplaunch: the job failed ===========================",
        "rank 11 on node1 failed: ValueError: no (a.py:3)",
        "at 12:00:00.250: exit code 1; it ran for 61.0 s (local_rank 3, pid 1011)",
        "",
        "  | Traceback (most recent call last):",
        '  |   File "a.py", line 3, in <module>',
        "  | ValueError: no",
        "",
        "stopped:  ranks 8-10 (by ddplaunch, because of the failure)",
        "log:      /runs/r1/attempt_0/3/stderr.log",
        "report:   /runs/r1/report.json",
        "left:     nothing; every process of this run has ended",
        "=" * 80,
    ]


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (7, "exit code 7"),
        (-11, "SIGSEGV"),
        (-6, "SIGABRT"),
        (-9, "SIGKILL"),
        (-40, "signal 40"),
        (255, "exit code 255"),
    ],
)
def test_an_end_without_an_exception_shows_how_and_the_last_lines(returncode: int, words: str) -> None:
    """torchrun: multiprocessing_api_test 12, 13; errors_api_test 3."""
    text = page(ended(0, returncode, tail=("Fatal Python error: Segmentation fault", "", "Thread 0x0")))
    assert f": {words}; it ran for 61.0 s (local_rank 0, pid 1000)\n" in text
    assert f"rank 0 on node0 failed: {words}\n" in text
    assert "its last lines:\n  | Fatal Python error: Segmentation fault\n  | \n  | Thread 0x0\n" in text


def test_a_worker_without_output_is_shown_as_such() -> None:
    assert "none of its output was logged." in page(ended(0, 7))


def test_a_message_without_a_traceback_is_shown_with_the_last_lines() -> None:
    text = page(ended(0, 1, error=WorkerError("terminate called\nwhat(): x", "", NOON), tail=("bye",)))
    assert "  | terminate called\n  | what(): x\n\nits last lines:\n  | bye\n" in text


def test_a_kill_for_memory_is_named_as_such() -> None:
    text = page(ended(0, -9, out_of_memory="yes"))
    assert "SIGKILL, killed by the kernel for memory (out of memory)" in text
    assert "hint:     Use less memory per worker" in text


def test_a_kill_that_may_have_been_for_memory_is_not_said_to_have_been() -> None:
    text = page(ended(0, -9, out_of_memory="perhaps"))
    assert "SIGKILL, perhaps by the kernel for memory" in text
    assert "hint:     If the kernel sent the signal, `dmesg`" in text


def test_those_that_failed_later_and_those_that_were_stopped_are_told_apart() -> None:
    first = ended(3, 1, error=RAISED)
    later = ended(1, 7, time_s=NOON + 2, error=WorkerError("\nRuntimeError: lost\nmore", "", NOON + 2))
    text = page(stopped(0), later, stopped(2), first, first=first)
    assert "then:     rank 1 on node0 failed: RuntimeError: lost\n" in text
    assert "stopped:  ranks 0, 2 (by ddplaunch" in text


PEER_LOST = WorkerError("RuntimeError: Connection reset by peer", "", NOON)


def test_a_rank_that_ended_early_with_0_is_the_probable_cause_of_a_lost_peer() -> None:
    lost, early = ended(0, 1, error=PEER_LOST), ended(1, 0, time_s=NOON + 0.247)
    assert page(lost, early).splitlines()[1:4] == [
        "rank 0 on node0 failed: RuntimeError: Connection reset by peer",
        "at 12:00:00.250: exit code 1; it ran for 61.0 s (local_rank 0, pid 1000)",
        "before: rank 1 on node0 ended with exit code 0, 3 ms earlier, while others went on: the probable cause",
    ]
    assert "hint:     All ranks must make the same collective calls" in page(lost, early)
    elsewhere = ended(11, 0, time_s=NOON - 100)
    assert "before: rank 11 on node1 ended with exit code 0, while others went on" in page(lost, elsewhere)
    assert "before: rank 1 on node0 (and ranks 2-3) ended" in page(lost, early, ended(2), ended(3))
    assert "before: " not in page(ended(0, 1, error=RAISED), early)
    assert "before: " not in page(lost, stopped(1), ended(2, 0, stopped=True))


def test_a_rank_that_ended_early_is_named_when_the_others_hang() -> None:
    attempt = AttemptResult(0, "failed", (stopped(0), ended(1, 0)), 61.5, reason="the job hangs", hung=True)
    text = failure_page.page(failed(attempts=(attempt,)))
    assert "\nthe job hangs\nbefore: rank 1 on node0 ended with exit code 0, while others went on" in text


def test_many_ranks_are_folded() -> None:
    exits = [ended(rank, 1 + rank, time_s=NOON + rank) for rank in range(100)]
    text = page(*exits, stopped(200), stopped(201), stopped(205))
    assert text.count("then:") == 9
    assert "then:     91 more ranks: ranks 9-99" in text
    assert "stopped:  ranks 200-201, 205 (by" in text


def test_ranks_that_failed_alike_are_told_in_one_line() -> None:
    lost = [
        ended(
            rank, 1, time_s=NOON + rank, error=WorkerError(f"RuntimeError: closed by [10.0.0.1]:{7000 + rank}", "", 0)
        )
        for rank in range(2, 8)
    ]
    text = page(ended(0, 1, error=RAISED), ended(1, 1, error=RAISED, time_s=NOON + 1), *lost)
    assert (
        "then:     rank 1 failed in the same way\n"
        "then:     rank 2 on node0 failed: RuntimeError: closed by [10.0.0.1]:7002; ranks 3-7: the same\n" in text
    )
    text = page(ended(0, 1), ended(1, 7), ended(2, 9))
    assert "then:     rank 1 on node0 failed: exit code 7\nthen:     rank 2 on node0 failed: exit code 9\n" in text


def test_equal_attempts_are_told_in_one_line() -> None:
    codes = (1, 1, 3)
    attempts = tuple(AttemptResult(number, "failed", (ended(0, code),), 5.0) for number, code in enumerate(codes))
    text = failure_page.page(failed(ended(0, 3), attempts=attempts))
    assert "attempts 0-1: rank 0 on node0 failed: exit code 1\nattempt 2: rank 0 on node0 failed: exit code 3" in text


def test_earlier_attempts_are_told_in_a_line_each() -> None:
    attempts = tuple(
        AttemptResult(number, "failed", (ended(number, 1, error=RAISED),), 5.0, attempt_follows=number < 2)
        for number in range(3)
    )
    text = failure_page.page(failed(ended(2, 1), attempts=attempts))
    assert "attempt 0: rank 0 on node0 failed: ValueError: no (a.py:3)\nattempt 1: rank 1" in text


def test_an_attempt_without_a_culprit_tells_its_trouble() -> None:
    text = page(reason="the workers' store on node0 was killed by SIGKILL")
    assert " failed: " not in text
    assert "\nthe workers' store on node0 was killed by SIGKILL\n" in text
    assert failure_page.page(failed(attempts=(), run_dir=None)).count("\n") == 2


@pytest.mark.parametrize(
    ("decision", "is_shown"),
    [("not restarted: 3 of 3 restarts used", True), (NEVER_RESTARTED, False), ("", False)],
)
def test_the_page_says_why_no_restart_follows_if_there_could_have_been_one(decision: str, is_shown: bool) -> None:
    exits = (ended(0, 7),)
    text = failure_page.page(failed(*exits, attempts=(AttemptResult(0, "failed", exits, 1.0, decision=decision),)))
    assert (f"\n\n{decision}\n\n" in text) == is_shown
    assert ("restart" in text) == is_shown


def test_without_files_no_file_is_named() -> None:
    text = page(ended(0, 7, log_file=None), run_dir=None)
    assert "log:" not in text
    assert "report:" not in text


def test_what_could_not_be_ended_is_named() -> None:
    assert "left:     pids 7, 8 could not be killed" in page(ended(0, 7), unkillable_pids=(7, 8))


def test_a_host_that_could_not_be_asked_what_is_left_is_named() -> None:
    text = page(ended(0, 7), unreachable_hosts=("gpu1", "gpu2"))
    assert "left:     unknown on gpu[1-2], which could not be reached; check again with --ps" in text


def test_the_log_of_another_machine_is_named_with_its_host() -> None:
    result = failed(ended(3, 1, error=RAISED))
    assert "log:      node0:/runs/r1/attempt_0/3/stderr.log" in failure_page.page(result, is_remote=True)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_our_own_stop_signal_is_never_the_cause(signum: int) -> None:
    late = ended(1, -signum, error=WorkerError("RuntimeError: Read error", "", NOON), ended_by_stop=True)
    assert "then:     rank 1 on node0 failed: RuntimeError: Read error\n" in page(ended(0, 1, error=RAISED), late)
    text = page(late, ended(0, 1, error=RAISED))
    assert "rank 1 on node0 failed: RuntimeError: Read error\n" in text
    assert f"stopped by ddplaunch ({signal.Signals(signum).name}) after its exception" in text
    assert "SIGKILL came from outside" not in text


@pytest.mark.parametrize(
    ("traceback", "where"),
    [
        ('  File "/a/train.py", line 4, in main\n  File "/v/site-packages/torch/x.py", line 9, in f', " (train.py:4)"),
        (
            '  File "/a/old.py", line 1, in f\nKeyError\n\nTraceback (most recent call last):\n'
            '  File "/a/new.py", line 2, in g',
            " (new.py:2)",
        ),
        ('  File "/a/train.py", line 3\n    def\nSyntaxError: invalid', ""),
        ("not a traceback", ""),
    ],
)
def test_the_headline_names_the_line_of_the_script(traceback: str, where: str) -> None:
    error = WorkerError("KeyError: 'lr'\nmore", f"Traceback (most recent call last):\n{traceback}", NOON)
    assert failure_page.failure_line(ended(1, 1, error=error)) == f"rank 1 on node0 failed: KeyError: 'lr'{where}"


def test_no_worker_can_steer_the_users_terminal_through_the_page() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202ereversed\ud800"
    error = WorkerError(f"E: {evil}", "", NOON)
    text = page(ended(0, 1, error=error, tail=(evil,)), ended(1, 1, error=error))
    assert set(filter(lambda c: not c.isprintable(), text)) == {"\n"}
    assert r"\x1b]0;owned\x07" in text
    text = page(ended(0, 1, error=replace(error, traceback=f"Traceback\n{evil}\tafter a tab")))
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


def test_the_time_is_cut_not_rounded_up_into_the_next_second() -> None:
    assert "at 12:00:00.999:" in page(ended(0, 1, time_s=NOON + 0.9996))


@pytest.mark.parametrize(
    ("hosts", "is_remote", "files"),
    [
        (1, False, "/runs/r1/attempt_0/*/stacks.txt"),
        (2, False, "/runs/r1/*/attempt_0/*/stacks.txt"),
        (2, True, "/runs/r1/failed/rank_*/stacks.txt"),
    ],
)
def test_the_stacks_of_a_job_that_hangs_are_named_with_their_path(hosts: int, is_remote: bool, files: str) -> None:
    host = ["/runs/r1" if hosts == 1 else f"/runs/r1/node{rank}" for rank in range(2)]
    exits = tuple(
        replace(stopped(rank), whereabouts="train.py:4 in f", log_file=f"{host[rank]}/attempt_0/{rank}/stderr.log")
        for rank in range(2)
    )
    result = failed(attempts=(AttemptResult(0, "failed", exits, 61.5, reason="the job hangs", hung=True),))
    text = failure_page.page(result, is_remote=is_remote)
    assert f"\nWhere the ranks were; full stacks in {files}:\n  ranks 0-1: train.py:4 in f\n" in text
    without = failed(attempts=result.attempts, run_dir=None)
    assert "\nWhere the ranks were:\n" in failure_page.page(without, is_remote=is_remote)


# Of several launchers.


def test_one_launcher_of_a_job_shows_the_page_and_the_others_a_line() -> None:
    own, other = ended(1, 7), ended(8, 7)
    assert not failure_page.is_shown_elsewhere(failed(own, stopped(0)))
    elsewhere = failed(stopped(8), stopped(9), first=own)
    assert failure_page.is_shown_elsewhere(elsewhere)
    line = "rank 1 on node0 failed: exit code 7; the launcher on node0 shows the failure page"
    line += "; report of this node in /runs/r1"
    assert failure_page.summary(elsewhere) == line
    without = {"reason": "node2 is lost", "first_failure": None}
    assert not failure_page.is_shown_elsewhere(failed(stopped(0), **without))
    lost = failed(other, **without, run_dir=None)
    assert failure_page.is_shown_elsewhere(lost)
    assert failure_page.summary(lost) == "node2 is lost"
    assert not failure_page.is_shown_elsewhere(failed(attempts=()))


# Hints.


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "batch size"),
        ("DistNetworkError: port: 29500, code: -98, name: EADDRINUSE", "--master-port"),
        (
            "DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (h, 12355).",
            "mp.spawn",
        ),
        ("ModuleNotFoundError: No module named 'datasets'", "not installed"),
        ("ModuleNotFoundError: No module named 'cuda.x'; 'cuda' is not a package", "a file cuda.py lies beside"),
        ("AttributeError: module 'random' has no attribute 'seed'", "a file random.py lies beside"),
        ("AttributeError: partially initialized module 'tools' has no attribute 'f'", "a file tools.py lies beside"),
        ("RuntimeError: Distributed package doesn't have NCCL built in", "gloo"),
        ("RuntimeError: No CUDA GPUs are available", "--dry-run"),
        ("MemoryError", "less memory"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you",
            "less memory",
        ),
        ("OSError: [Errno 12] Cannot allocate memory", "less memory"),
        ("SyntaxError: invalid syntax (run.sh, line 2)", "--no-python"),
        ("torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 0 terminated", "mp.spawn"),
        ("train.py: error: unrecognized arguments: --max-restarts 3", "before the script"),
        ("Error: No such option: --max-restarts", "before the script"),
        ("train.py: error: the following arguments are required: --local-rank/--local_rank", "Put --pass-local-rank"),
        ("CUDA error: invalid device ordinal", "--nproc-per-node"),
        ("error: unrecognized arguments: --local-rank=0", "--pass-local-rank"),
        ("train.py: error: unrecognized arguments: --local_rank=0", "--pass-local-rank"),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp", "NCCL_DEBUG=INFO"),
        ("AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'", "--dry-run"),
        ("AssertionError: Torch not compiled with CUDA enabled", "--dry-run"),
        ("RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error", "/dev/shm"),
        ("OSError: [Errno 24] Too many open files", "ulimit -n"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
    ],
)
def test_one_hint_for_what_is_known(said: str, hint: str) -> None:
    by_exception = page(ended(0, 1, error=WorkerError(said, "Traceback", NOON)))
    by_last_lines = page(ended(0, 1, tail=("noise", f"[rank0]: {said}".splitlines()[0], "[W1122] a warning")))
    for text in (by_exception, by_last_lines):
        assert text.count("hint:") == 1
        assert hint in text[text.index("hint:") :]


@pytest.mark.parametrize(
    "said",
    [
        "KeyError: 'cpu'",
        "KeyError: 'nccl'",
        "SyntaxError: invalid syntax (train.py, line 2)",
        "SyntaxError: invalid syntax (<string>, line 2)",
        "AttributeError: module 'mine' has no attribute 'x'",
        "KeyError: Caught KeyError in DataLoader worker process 0.\nTraceback:\n backend='nccl'\nKeyError: 'a'",
    ],
)
def test_words_beside_the_exception_bring_no_hint(said: str) -> None:
    traceback = f'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    nccl["No module named"]\n{said}'
    error = WorkerError(said, traceback, NOON)
    assert "hint:" not in page(ended(0, 1, error=error, tail=tuple(traceback.splitlines())))
    assert "hint:" not in page(ended(0, 1, tail=tuple(traceback.splitlines())))


def test_a_dry_run_has_no_hint_for_real_gpus() -> None:
    result = failed(ended(0, 1, error=WorkerError("DistBackendError: NCCL error", "Traceback", NOON)))
    assert "hint:" in failure_page.page(result)
    assert "hint:" not in failure_page.page(result, is_dry_run=True)


def test_a_kill_from_outside_has_a_hint_and_a_plain_failure_has_none() -> None:
    assert "hint:     SIGKILL came from outside" in page(ended(0, -9))
    assert "hint:" not in page(ended(0, 7, tail=("it did not work",)))


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


def test_the_page_says_if_its_report_could_not_be_written() -> None:
    text = failure_page.page(failed(ended(0, 1)), has_report=False)
    assert "report:   could not be written to /runs/r1/report.json" in text


def test_a_success_has_a_report_and_no_page(tmp_path: Path) -> None:
    result = RunResult("r1", 0, "succeeded", 2.0, (AttemptResult(0, "succeeded", (ended(0),), 1.0),))
    report_files.write_report(result, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["exit_code"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


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
    """torchrun: agent_api_test 10."""
    failure = ended(1, 7, error=RAISED, node_rank=3)
    attempt = AttemptResult(2, "failed", (ended(0), failure, stopped(2)), 5.0, restart_count=1)
    lines = [json.loads(line) for line in event_log.worker_events("r1", "trainer", attempt)]
    assert [line["name"] for line in lines] == [
        "torchelastic.worker.status.SUCCEEDED",
        "torchelastic.worker.status.FAILED",
        "torchelastic.worker.status.TERMINATED",
    ]
    assert {line["source"] for line in lines} == {"WORKER"}
    assert lines[1]["timestamp"] == int((NOON + 0.25) * 1000)
    metadata = lines[1]["metadata"]
    assert metadata["global_rank"] == 1
    assert metadata["group_rank"] == 3
    assert metadata["agent_restarts"] == 1, "attempt 1 followed the loss of a node, which is no restart"
    assert metadata["role"] == "trainer"
    assert metadata["raw_error"] == "ValueError: no"
    assert json.loads(metadata["metadata"])["exit_code"] == [7]


# What the script has asked for.


def test_what_the_script_has_asked_for_is_the_failure() -> None:
    first = ended(3, 93, give_up="no\x1bdata", error=RAISED)
    text = page(first, stopped(2))
    assert "\nrank 3 on node0 gave up: no\\x1bdata\n" in text
    assert "exit code 93; it ran for" in text
    assert RAISED.traceback.splitlines()[-1] in text, "where it was is shown all the same"
    assert failure_page.failure_line(ended(9, 88, avoid_node="wrong sums")) == (
        "rank 9 on node1 asked to avoid its node: wrong sums"
    )
