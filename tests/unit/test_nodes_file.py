"""nodes.json: many processes change it at once, and no content, lock or disk stops any of them for long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddplaunch.features.health import nodes_file
from tests.support.processes import wait_until
from tests.support.runs import environment

ADD = """
import sys
from pathlib import Path
from ddplaunch.features.health import nodes_file
for number in range(5):
    nodes_file.change(Path(sys.argv[1]), lambda entries: [*entries, f"{sys.argv[2]}.{number}"])
"""
HOLD = """
import sys
from pathlib import Path
from ddplaunch.features.health import nodes_file

def new(entries):
    print("holds", flush=True)
    sys.stdin.readline()
    return [*entries, "late"]

nodes_file.change(Path(sys.argv[1]), new)
"""


def python(code: str, *arguments: object, **popen: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment(), text=True, **popen)  # type: ignore[call-overload,no-any-return]


def holding(path: Path) -> subprocess.Popen[str]:
    """A process that holds the lock."""
    holder = python(HOLD, path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout
    assert holder.stdout.readline() == "holds\n"
    return holder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "ddplaunch" / nodes_file.FILE


def test_what_several_processes_add_at_once_is_all_there(path: Path) -> None:
    processes = [python(ADD, path, number) for number in range(8)]
    assert [process.wait(60) for process in processes] == [0] * 8
    entries = nodes_file.read(path)
    assert sorted(entries) == sorted(f"{process}.{number}" for process in range(8) for number in range(5))
    assert {file.name for file in path.parent.iterdir()} == {"nodes.json", ".nodes.lock"}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_stopped_process_that_holds_the_lock_delays_others_by_less_than_a_second_and_loses_nothing(
    path: Path,
) -> None:
    holder = holding(path)
    holder.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    nodes_file.change(path, lambda entries: [*entries, "soon"])
    assert time.monotonic() - began < 1.0
    assert nodes_file.read(path) == ["soon"]
    holder.send_signal(signal.SIGCONT)
    holder.communicate("\n\n", timeout=30)  # It notices that it has lost the lock, and starts again.
    assert nodes_file.read(path) == ["soon", "late"]


def test_a_killed_process_leaves_no_lock(path: Path) -> None:
    holder = holding(path)
    holder.kill()
    holder.communicate()
    began = time.monotonic()
    nodes_file.change(path, lambda entries: [*entries, "x"])
    assert time.monotonic() - began < nodes_file.LOCK_S


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 100, b"{", b"[]", b"7", b'{"schema": 1}', b'{"schema": 2, "nodes": []}', b"[" * 100_000, b"\xff\xfe"],
)
def test_a_damaged_file_is_set_aside(path: Path, content: bytes) -> None:
    _write(path, content)
    with pytest.raises(nodes_file.Damaged):
        nodes_file.read(path)
    nodes_file.change(path, lambda entries: [*entries, 1])
    assert json.loads(path.read_text()) == {"schema": 1, "nodes": [1]}
    assert path.with_name("nodes.json.damaged").read_bytes() == content


def test_what_is_no_file_is_not_waited_for(path: Path) -> None:
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.raises(nodes_file.Damaged):
        nodes_file.read(path)


def test_nothing_is_written_for_no_change(path: Path) -> None:
    nodes_file.change(path, lambda entries: entries)
    assert not path.exists()
    assert nodes_file.read(path) == []


def test_a_folder_that_takes_no_file_is_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        nodes_file.change(tmp_path / "file" / "nodes.json", lambda entries: [*entries, 1])


def test_processes_that_never_give_the_lock_back_are_not_waited_for_forever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_file, "_GIVE_UP_S", 0.1)
    monkeypatch.setattr(nodes_file, "_try_lock", lambda fd: False)
    with pytest.raises(TimeoutError):
        nodes_file.change(path, lambda entries: [1])


def test_a_waiting_process_gets_the_lock_as_soon_as_it_is_free(path: Path) -> None:
    holder = holding(path)
    other = python(ADD, path, "other")
    holder.communicate("\n\n", timeout=30)
    assert other.wait(30) == 0
    wait_until(lambda: len(nodes_file.read(path)) == 6, 5)
