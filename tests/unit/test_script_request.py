"""What a script writes to its request file is understood, bounded, and cannot steer what shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ddplaunch
from ddplaunch.agent.workers.exit_details import read_request_file
from ddplaunch.agent.workers.worker import Worker
from ddplaunch.protocol import script_request
from ddplaunch.protocol.script_request import read
from tests.support import golden


def test_a_line_says_what_is_asked_for() -> None:
    golden.check_answers("script_requests", lambda text: read(text.partition(" ")[2], int(text.partition(" ")[0])))


def test_a_reason_is_one_line_of_printable_text_and_bounded() -> None:
    evil = "\x1b]0;owned\x07 a\tb\u2028c" + "x" * 10_000
    (line,) = script_request.line("give_up", f"{evil}\nnext").splitlines()
    assert line.isprintable()
    found = read(f"give_up: {evil}\n{evil}", 1)
    assert found.give_up.isprintable()
    assert found.unknown.isprintable()
    assert len(found.give_up) < script_request.MAX_REASON_CHARS + 50
    assert r"\x1b]0;owned\x07 a b c" in found.give_up


def test_a_file_of_another_kind_is_told_of_and_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "request.txt"
    assert read_request_file(path) == ""
    path.symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        read_request_file(path)
    path.unlink()
    os.mkfifo(path)
    assert read_request_file(path) == f"({path} is not a regular file)"
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert len(read_request_file(path)) == script_request.MAX_BYTES


@pytest.mark.parametrize("has_folder", [True, False])
def test_the_file_is_in_the_folder_of_the_worker_or_in_memory(has_folder: bool, tmp_path: Path) -> None:
    worker = Worker(3, 1, tmp_path if has_folder else None)
    path = worker.open_request_file()
    assert path.startswith(str(tmp_path) if has_folder else "/proc/")
    for redirection in (">", ">>"):
        subprocess.run(["sh", "-c", f'echo "give_up: no {redirection}" {redirection} "$0"', path], check=True)
    assert worker.take_request() == "give_up: no >\ngive_up: no >>\n"
    assert worker.request_fd is None


def test_without_a_request_there_is_none(tmp_path: Path) -> None:
    for folder in (tmp_path, None):
        worker = Worker(3, 1, folder)
        worker.open_request_file()
        assert worker.take_request() == ""
    assert Worker(3, 1, None).take_request() == "", "its start has failed before the file was made"


# The functions, without a launcher.


def ends(code: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    folder = Path(ddplaunch.__file__).parent.parent
    command = [sys.executable, "-c", f"import ddplaunch, sys, threading\n{code}"]
    environ = {name: value for name, value in os.environ.items() if name != script_request.VARIABLE}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**environ, **(env or {})})


@pytest.mark.parametrize(
    ("name", "code", "said"), [("give_up", 93, "gave up"), ("avoid_this_node", 88, "asked to avoid this node")]
)
def test_a_script_that_ddplaunch_has_not_started_ends_in_the_same_way(name: str, code: int, said: str) -> None:
    done = ends(f"import atexit; atexit.register(print, 'bye')\nddplaunch.{name}('no data')")
    assert (done.returncode, done.stdout, done.stderr) == (
        code,
        "bye\n",
        f"ddplaunch: {said}: no data\n",
    )


def test_in_another_thread_the_process_ends_at_once_with_what_it_has_printed() -> None:
    done = ends(
        "import time, atexit; atexit.register(print, 'bye'); print('hello')\n"
        "threading.Thread(target=ddplaunch.give_up, args=('no data',)).start()\n"
        "time.sleep(60)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (93, "hello\n", "ddplaunch: gave up: no data\n")


def test_closed_streams_and_a_file_that_cannot_be_written_change_nothing(tmp_path: Path) -> None:
    env = {script_request.VARIABLE: str(tmp_path / "missing" / "request.txt")}
    assert "No such file or directory" in ends("ddplaunch.give_up('no data')", env).stderr
    for stream in ("sys.stderr = None", "sys.stderr.close()"):
        assert ends(f"{stream}; ddplaunch.give_up('no data')", env).returncode == 93


def test_the_functions_load_nothing_heavy() -> None:
    done = ends("ddplaunch.give_up; ddplaunch.avoid_this_node; print(*sys.modules)")
    loaded = {name for name in done.stdout.split() if name.startswith("ddplaunch")}
    golden.check("modules_of_requests", {"ddplaunch": "\n".join(sorted(loaded))})
    assert not {"torch", "numpy", "click", "psutil", "json"} & set(done.stdout.split())
