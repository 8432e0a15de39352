"""What a worker has recorded of its end is read in every form that torch has given it; kills for memory are counted.

Wherever the kernel tells of them, and nowhere is an error.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.agent.workers.exit_details import (
    OomCounters,
    error_in,
    killed_for_memory,
    last_lines,
    lost_peer_in,
    main_log,
    read_error_file,
    shorten,
)
from ddplaunch.protocol import wire
from ddplaunch.protocol.agent_entry import PACKAGE_ROOT
from ddplaunch.protocol.first_failure import raised_at
from ddplaunch.protocol.results import WorkerError, WorkerExit
from tests.support import golden

NATIVE = f"""Fatal Python error: Segmentation fault

Current thread 0x00007f3f2a25bb80 (most recent call first):
  File "/home/train.py", line 4 in <module>
  File "<string>", line 1 in <module>
  File "{PACKAGE_ROOT}/ddplaunch/features/functions/worker.py", line 70 in __call__
  File "<string>", line 3 in <module>

Extension modules: numpy._core, torch._C (total: 2)
"""


def test_the_last_lines_of_a_native_crash_are_without_our_frames_and_the_extension_modules():
    """The script may have executed a string itself."""
    assert last_lines({"stderr": NATIVE.encode()}, is_needed=True) == (
        "Fatal Python error: Segmentation fault",
        "Current thread 0x00007f3f2a25bb80 (most recent call first):",
        '  File "/home/train.py", line 4 in <module>',
        '  File "<string>", line 1 in <module>',
    )


def test_the_log_to_open_is_the_one_that_has_text():
    """A question is the ends of a worker's streams."""

    def told(question: str) -> str:
        tails = golden.keywords(question)
        return f"{main_log(Path('/logs'), tails)}, last lines: {last_lines(tails, is_needed=True)}"

    golden.check_answers("main_logs", told)


def test_without_logs_there_is_none_to_open():
    assert main_log(None, {"stderr": b"x"}) is None
    assert main_log(Path("/logs"), {}) is None
    assert last_lines({}, is_needed=True) == ()


@pytest.mark.parametrize("time", [10, "10"])
def test_both_forms_are_read_whatever_their_time_is(time: object, tmp_path: Path):
    """torchrun: errors_api_test 2."""
    details = {"py_callstack": "Traceback: here", "timestamp": time}
    assert read(tmp_path, {"message": "no luck", "timestamp": time}) == ("no luck", "")
    assert read(tmp_path, {"message": {"message": "no", "extraInfo": details}}) == ("no", "Traceback: here")
    assert read(tmp_path, {"message": {"message": "no", "errorCode": 7, "extraInfo": details}})[0] == "no"


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_the_exception_is_found_in_the_last_lines(prefix: str):
    frames = ["Traceback (most recent call last):", '  File "/train.py", line 4, in <module>', "    main()"]
    message = ["ValueError: no", "and more"]
    found = error_in(["a line", *frames, "KeyError: 1", *[f"{prefix}{line}" for line in (*frames, *message)]])
    assert found
    assert found.message == "ValueError: no\nand more"
    assert found.traceback == "\n".join((*frames, *message))


@pytest.mark.parametrize("lines", [[], ["bye"], ["Traceback (most recent call last):", "  cut"]])
def test_last_lines_without_a_whole_traceback_name_no_exception(lines: list[str]):
    assert error_in(lines) is None


REMOTE = """NCCL error: remote process exited or there was a network error, NCCL version 2.20.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer gpu1<45074>"""
SLOW = """[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST, NumelIn=112, \
NumelOut=112, Timeout(ms)=1800000) ran for 1800011 milliseconds before timing out."""
CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
STACK = """Exception raised from checkForNCCLErrorsInternal at ProcessGroupNCCL.cpp:1723 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x14790e6d6897 in libc10.so)
frame #1: c10d::ProcessGroupNCCL::checkForNCCLErrorsInternal(std::shared_ptr<c10d::NCCLComm>&) + 0x220 (0x1478add786a0)
"""
LOGGED = """[rank1]:[E ProcessGroupNCCL.cpp:583] To avoid data inconsistency, we are taking the entire process down.
[rank1]:[E ProcessGroupNCCL.cpp:1414] [PG 0 Rank 1] Process group watchdog thread terminated with exception: """
DIES = "\nFatal Python error: Aborted\n\nThread 0x00007f (most recent call first):\n  <no Python frame>\n"


def thrown(what: str, kind: str = "c10::DistBackendError") -> str:
    return f"terminate called after throwing an instance of '{kind}'\n  what():  {what}"


BY_WATCHDOG = "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{LOGGED}{REMOTE}\n{STACK}\n{thrown(f'{BY_WATCHDOG}{REMOTE}')}\n{STACK}{DIES}", REMOTE),
        (f"{LOGGED}{REMOTE}\n{STACK}\nterminate called recursively{DIES}", REMOTE),
        (f"{thrown(f'[Rank 1] NCCL watchdog thread terminated with exception: {REMOTE}')}{DIES}", REMOTE),
        (f"{thrown(REMOTE, 'std::runtime_error')}\n", REMOTE),
        (f"{thrown(f'{BY_WATCHDOG}{SLOW}')}\n{STACK}{DIES}", SLOW),
        (f"{thrown(CLOSED, 'gloo::IoException')}{DIES}", CLOSED),
        (f"{thrown(CLOSED, 'gloo::IoException')}\n[rank1]:[E x.cpp:1] more{DIES}", CLOSED),
        (f"{thrown(REMOTE)}\n{thrown('std::bad_alloc')}{DIES}", None),
        (f"{LOGGED}CUDA error: an illegal memory access was encountered\n{STACK}{DIES}", None),
        (f"{thrown(f'{BY_WATCHDOG}CUDA error: device-side assert triggered')}\n{STACK}{DIES}", None),
        (f"{thrown('std::bad_alloc', 'std::bad_alloc')}{DIES}", None),
        (f"python: ops.cpp:12: void f(): Assertion `n > 0' failed.{DIES}", None),
        (f"free(): invalid pointer{DIES}", None),
        (DIES, None),
        ("", None),
    ],
)
def test_of_an_abort_in_cpp_the_exception_is_found_if_a_peer_is_lost(text: str, message: str | None) -> None:
    found = lost_peer_in({"stdout": b"", "stderr": text.encode()})
    assert (found and found.message) == message


def test_an_error_file_of_another_kind_is_told_and_blocks_nobody(tmp_path: Path):
    os.mkfifo(tmp_path / "error.json")
    found = read_error_file(tmp_path / "error.json")
    assert found
    assert found.message == "(its error file is not a regular file)"


@pytest.mark.parametrize("mtime", [-1e9, 4e12])
def test_a_file_with_an_impossible_time_can_be_told(mtime: float, tmp_path: Path):
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": "no"}))
    os.utime(path, (mtime, mtime))
    error = read_error_file(path)
    assert error
    assert 0.0 <= error.time_s <= time.time()
    assert wire.from_json(WorkerError, wire.to_json(error)) == error


def read(folder: Path, body: dict[str, Any]) -> tuple[str, str]:
    path = folder / "error.json"
    path.write_text(json.dumps(body))
    found = read_error_file(path)
    assert found is not None
    return found.message, found.traceback


# Kills for memory.


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_kills_are_counted_wherever_the_kernel_tells_them(tmp_path: Path) -> None:
    """A question is files with their lines."""

    def counted(question: str) -> OomCounters:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for file in question.split("; "):
            path, _, lines = file.partition(" = ")
            write(root, path, "".join(f"{line}\n" for line in lines.split(" / ")))
        return OomCounters.read(str(root))

    golden.check_answers("oom_counters", counted)
    assert OomCounters.read(str(tmp_path / "missing")) == OomCounters(machine=0, cgroup=0)


def test_what_cannot_be_read_or_understood_counts_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "proc/vmstat").mkdir(parents=True)
    write(tmp_path, "proc/self/cgroup", "nonsense\n0::/a\n")
    (tmp_path / "sys/fs/cgroup/a").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/a/memory.events").write_bytes(b"oom_kill \xff\noom_kill\n")
    assert OomCounters.read(str(tmp_path)) == OomCounters()


def test_memory_is_blamed_for_certain_only_when_our_own_counter_rose() -> None:
    """A question is the counters of the machine and of our cgroup after the end of a worker; they were 5 and 2."""

    def blame(question: str) -> str:
        return killed_for_memory(OomCounters(machine=5, cgroup=2), OomCounters(*map(int, question.split())))

    golden.check_answers("killed_for_memory", blame)


def _failed(rank: int, message: str, text: str) -> WorkerExit:
    traceback = f'Traceback (most recent call last):\n  File "/home/train.py", line 4, in step\n    {text}\n{message}'
    error = WorkerError(f"{message}: {text}", traceback, 0.0)
    return WorkerExit(rank, rank, "gpu1", 100 + rank, 1, False, 0.0, 1.0, error=error, tail=200 * (text[:100],))


def test_the_nodes_of_a_large_job_send_less_of_errors_and_last_lines() -> None:
    exits = (*(_failed(rank, "Broken pipe", 1000 * "x") for rank in (0, 1, 2)), _failed(3, "KeyError", "lr"))
    assert shorten(exits, 8) == exits
    victim, *others, cause = shorten(exits, 4000)
    assert cause == exits[3]
    assert victim.tail == exits[0].tail[-20:]  # As much as fits, of the next one.
    for each in others:
        assert each.error
        assert len(each.error.message) == 200
        assert raised_at(each.error.traceback) == "train.py:4"  # The failure page still tells that they are alike.
        assert not each.tail
