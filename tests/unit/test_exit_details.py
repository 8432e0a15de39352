"""What a worker has recorded of its end is read in every form that torch has given it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.agent.workers.exit_details import error_in, last_lines, main_log, read_error_file
from ddplaunch.protocol import wire
from ddplaunch.protocol.agent_entry import PACKAGE_ROOT
from ddplaunch.protocol.results import WorkerError

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


@pytest.mark.parametrize(
    ("tails", "name"),
    [
        ({"stdout": b"no data", "stderr": b""}, "stdout.log"),
        ({"stdout": b"no data", "stderr": b"\n"}, "stdout.log"),
        ({"stdout": b"x", "stderr": b"no data"}, "stderr.log"),
        ({"stdout": b"", "stderr": b""}, "stderr.log"),
        ({"stdout": b""}, "stdout.log"),
    ],
)
def test_the_log_to_open_is_the_one_that_has_text(tails: Any, name: str, tmp_path: Path):
    assert main_log(tmp_path, tails) == str(tmp_path / name)
    assert last_lines(tails, is_needed=True) == (("no data",) if "no data" in str(tails) else ())


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
