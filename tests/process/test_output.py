"""What workers write is on the console and in their files: whole, in order, in time, on the right stream."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import struct
import subprocess
import sys
import termios
import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.support.processes import peak_mb, resident_kb, wait_until
from tests.support.runs import PROGRAMS, Finished, run, start
from tests.support.screen import Screen

WRITE, FLOOD, EXIT_WITH = PROGRAMS / "write.py", PROGRAMS / "flood.py", PROGRAMS / "exit_with.py"
TWO = ("--nproc-per-node", "2")
ALONE = ("--nproc-per-node", "1")
BARE = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}| "}
"""A prefix that does not hold this machine's name."""


def log(finished: Finished, rank: int, stream: str = "stdout", attempt: int = 0) -> bytes:
    return (finished.run_dir / f"attempt_{attempt}" / str(rank) / f"{stream}.log").read_bytes()


def of_rank(console: bytes, rank: int) -> bytes:
    """The lines of one rank, without their prefixes."""
    prefix = f"{rank}| ".encode()
    lines = console.splitlines(keepends=True)
    return b"".join(line.removeprefix(prefix) for line in lines if line.startswith(prefix))


# Bytes.


def test_every_byte_is_in_the_file_and_every_line_whole_on_the_console(start_method: str, tmp_path: Path) -> None:
    """2 MB lines, invalid UTF-8, NUL, CR LF, no final newline, an empty line; on both streams of two ranks."""
    actions = (r"out:first\n", "big:2000000", r"out:\xff\xfe\x00\n\n", r"err:caf\xe9\r\n", r"err:last", r"out:end")
    with open(tmp_path / "out", "wb") as out:
        finished = run("--start-method", start_method, "--nproc-per-node", "2", WRITE, *actions, stdout=out, env=BARE)
    assert finished.returncode == 0
    console = (tmp_path / "out").read_bytes()
    for rank in range(2):
        expected = b"first\n" + str(rank).encode() * 1_999_999 + b"\n\xff\xfe\x00\n\nend"
        assert log(finished, rank) == expected
        assert log(finished, rank, "stderr") == b"caf\xe9\r\nlast"
        assert of_rank(console, rank).removesuffix(b"\n") == expected
        assert f"{rank}| caf�" in finished.err
        assert f"{rank}| last" in finished.err


def test_a_lone_worker_has_no_prefix_and_a_file_and_what_c_code_and_programs_write_is_caught_too(
    tmp_path: Path,
) -> None:
    """torchrun: redirects_test 1."""
    script = tmp_path / "three.py"
    script.write_text(
        "import ctypes, subprocess, sys\nprint('by Python', flush=True)\n"
        "libc = ctypes.CDLL(None)\nlibc.puts(b'by C')\nlibc.fflush(None)\n"
        "subprocess.run(['echo', 'by a program'])\n"
        "sys.stdout.write('b\\r')\nsys.stderr.write('c')\n"
    )
    finished = run(*ALONE, script)
    assert finished.returncode == 0
    assert finished.out == "by Python\nby C\nby a program\nb\r\n"  # The last newline is the helper's.
    assert "\nc\n" in finished.err
    assert (log(finished, 0), log(finished, 0, "stderr")) == (b"by Python\nby C\nby a program\nb\r", b"c")


def test_no_line_of_many_ranks_is_lost_or_split_or_out_of_order(tmp_path: Path) -> None:
    """torchrun: tail_log_test 1; redirects_test 2."""
    workers, lines = 4, 50_000
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        options = ("--nproc-per-node", str(workers), "--log-dir", tmp_path / "logs")
        finished = run(*options, FLOOD, str(lines), "60", stdout=out, stderr=err, env=BARE)
    assert finished.returncode == 0
    numbers = re.compile(rb"(\d):(\d{8}) (x{40}|error)\n")
    for name, stream, count in (("out", "stdout", lines), ("err", "stderr", lines // 10)):
        console = (tmp_path / name).read_bytes()
        shown = 0
        for rank in range(workers):
            expected = [b"%d:%08d" % (rank, number) for number in range(0, lines, lines // count)]
            for text in (
                of_rank(console, rank),
                next((tmp_path / "logs").glob(f"*/*/{rank}/{stream}.log")).read_bytes(),
            ):
                found = [b"%b:%b" % (match[1], match[2]) for match in numbers.finditer(text)]
                assert found == expected
                assert text.count(b"\n") == count, "nothing but whole lines"
            shown += count
        ours = [line for line in console.splitlines() if not re.match(rb"\d\| ", line)]
        assert console.count(b"\n") == shown + len(ours)
        assert all(line.startswith(b"ddplaunch: ") for line in ours)


def test_both_streams_of_a_rank_keep_the_order_of_writing(start_method: str, tmp_path: Path) -> None:
    script = tmp_path / "alternate.py"
    lines = "for n in range(5000): print(n, file=(sys.stdout, sys.stderr)[n % 3 % 2])"
    script.write_text(f"import sys\n{lines}\nraise ValueError('last')\n")
    with open(tmp_path / "console", "wb") as console:
        options = ("--start-method", start_method, "--nproc-per-node", "2", "--log-dir", tmp_path / "logs")
        run(*options, script, stdout=console, stderr=console, env=BARE)
    (log_file,) = (tmp_path / "logs").glob("*/console.log")
    for text in ((tmp_path / "console").read_bytes(), log_file.read_bytes()):
        whole = []
        for rank in range(2):
            found = of_rank(text, rank).decode().splitlines()
            numbers = [int(line) for line in found if line.isdecimal()]
            assert numbers == list(range(5000))[: len(numbers)]
            if len(found) > len(numbers):
                assert found[5000].startswith("Traceback"), "a rank that fails has written all of its lines before"
                whole.append(rank)
        assert whole, "the rank that fails first is not stopped, and its traceback is not folded"


def test_lines_of_many_megabytes_do_not_fill_the_memory(tmp_path: Path) -> None:
    nbytes, go = 50_000_000, tmp_path / "go"
    logs = [tmp_path / "job" / "attempt_0" / str(rank) / "stdout.log" for rank in range(2)]
    with open(tmp_path / "out", "wb") as out:
        options = (*TWO, "--log-dir", tmp_path, "--rdzv-id", "job")
        running = start(*options, WRITE, f"big:{nbytes}", f"until:{go}", stdout=out, env=BARE)
        wait_until(lambda: all(log.exists() and log.stat().st_size == nbytes for log in logs), 60)
        for pid in (running.pid, running.agent_pid()):
            assert peak_mb(pid) < 200
        go.touch()
        finished = running.finish()
        assert finished.returncode == 0
    console = (tmp_path / "out").read_bytes()
    for rank in range(2):
        prefix = f"{rank}| ".encode()
        shown = console.count(str(rank).encode()) - console.count(prefix)
        # On a machine that is far too busy the console may fall behind; then that is said, and the file has all.
        assert shown == nbytes - 1 or "lines not shown" in finished.err or b"lines not shown" in console


def test_many_lines_leave_nothing_in_the_memory(tmp_path: Path) -> None:
    """From 20,000 lines to 220,000: 16 bytes kept of each would be 3 MB; all that can wait in queues is 1 MB."""
    more, end = tmp_path / "more", tmp_path / "end"
    with open(tmp_path / "out", "wb") as out:
        running = start(*ALONE, WRITE, "lines:20000", f"until:{more}", "lines:200000", f"until:{end}", stdout=out)
        pids, console = (running.pid, running.agent_pid()), tmp_path / "out"

        def used(count: int) -> list[int]:
            """Once so many lines are shown, or it is said that some are not: see above."""
            wait_until(lambda: (shown := console.read_bytes()).count(b"\n") >= count or b"not shown" in shown, 60)
            return [*map(resident_kb, pids)]

        early = used(20_000)
        more.touch()
        assert [now - before < 3_000 for now, before in zip(used(220_000), early, strict=True)] == [True, True]
        end.touch()
        assert running.finish().returncode == 0


# In time.


def test_prompts_appear_while_the_worker_goes_on_and_progress_bars_at_their_end(tmp_path: Path) -> None:
    """The worker waits, after its half line, until the half line was seen."""
    go = tmp_path / "go"
    actions = [r"0/out:ready? ", f"0/until:{go}", r"0/out:yes\n", r"0/out:\r 10%%", r"0/out:\r 20%%", r"0/out:\n"]
    path = tmp_path / "out"
    with open(path, "wb") as out:
        running = start("--nproc-per-node", "2", WRITE, *actions, f"1/until:{go}", stdout=out, env=BARE)
        wait_until(lambda: path.read_bytes() == b"0| ready? ", 60)
        go.touch()
        assert running.finish().returncode == 0
    assert path.read_bytes() == b"0| ready? yes\n0|  20%%\n"


# Which stream, whose lines.


@pytest.mark.parametrize(
    ("options", "out", "err"),
    [
        (("-r", "3", "-t", "2"), "", "0 1 2"),
        (("-r", "0:1,2:3"), "1", "0 1"),
        (("--ranks-filter", "0,1", "--local-ranks-filter", "1-2"), "1", "1"),
    ],
    ids=" ".join,
)
def test_masks_and_filters_choose_what_the_console_shows_and_files_have_it_all(
    options: tuple[str, ...], out: str, err: str
) -> None:
    """torchrun: multiprocessing_api_test 10; tail_log_test 3."""
    finished = run("--nproc-per-node", "3", *options, WRITE, r"out:O\n", r"err:E\n", env=BARE)
    assert finished.returncode == 0
    assert sorted(re.findall(r"^(\d)\| O$", finished.out, re.MULTILINE)) == out.split()
    assert sorted(re.findall(r"^(\d)\| E$", finished.err, re.MULTILINE)) == err.split()
    for rank in range(3):
        assert (log(finished, rank), log(finished, rank, "stderr")) == (b"O\n", b"E\n")


def test_local_ranks_of_two_digits_can_be_named(tmp_path: Path) -> None:
    finished = run("--nproc-per-node", "12", "-r", "10:1,11:3", WRITE, r"out:O\n", r"err:E\n", env=BARE)
    assert finished.returncode == 0
    assert sorted(map(int, re.findall(r"^(\d+)\| O$", finished.out, re.MULTILINE))) == list(range(10))
    assert sorted(map(int, re.findall(r"^(\d+)\| E$", finished.err, re.MULTILINE))) == list(range(11))
    assert log(finished, 11) == b"O\n"


def test_lines_with_a_needle_are_copied_to_the_filtered_files() -> None:
    """torchrun: multiprocessing_api_test 11."""
    options = ("--duplicate-stdout-filters", "loss,a,,b", "--duplicate-stderr-filters", "Error", "--role", "trainer")
    actions = (r"out:loss 1\nother\nx a,b y\n", r"err:Error: no\nwarning\n", "1/out:last loss")
    finished = run(*TWO, *options, WRITE, *actions, env=BARE)
    folder = finished.run_dir / "attempt_0"
    copied = sorted((folder / "filtered_stdout.log").read_text().splitlines())
    expected = [f"[trainer{rank}]:{line}" for rank in range(2) for line in ("loss 1", "x a,b y")]
    assert copied == sorted([*expected, "[trainer1]:last loss"])
    errors = sorted((folder / "filtered_stderr.log").read_text().splitlines())
    assert errors == ["[trainer0]:Error: no", "[trainer1]:Error: no"]


# Prefixes.


def test_torchruns_prefix_template_is_used_also_for_a_lone_worker() -> None:
    """torchrun: test_run 18; local_elastic_agent_test 9."""
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${local_rank} ${rank} ${other}>"}
    finished = run(*ALONE, "--role", "r", WRITE, r"out:a\n", env=template)
    assert finished.out == "<r 0 0 ${other}>a\n"


@pytest.mark.parametrize("options", [TWO, ALONE], ids=["two", "alone"])
def test_without_a_prefix_stdout_has_the_bytes_of_the_workers_and_nothing_else(
    options: tuple[str, ...], screen: Screen, tmp_path: Path
) -> None:
    """Redraws, colours of the script and half lines too; on a terminal stderr is as the workers have written it."""
    written = b'{"a": 1}\n10%\r20%\r\n\x1b[31mred\x1b[0m\x00\xff\nend'
    action = "out:" + written.decode("latin-1").encode("unicode_escape").decode()
    with open(tmp_path / "out", "wb") as out:
        running = screen.start(
            *options, "--line-prefix", "", "--ranks-filter", "0", WRITE, action, r"err:E\n", stdout=out
        )
        assert running.finish().returncode == 0
    assert (tmp_path / "out").read_bytes() == written
    screen.wait_for(b"\nE\n" if options == TWO else b"E\n")


def test_colour_is_for_terminals_that_want_it(screen: Screen) -> None:
    assert screen.start(*TWO, WRITE, r"out:O\n").finish().returncode == 0
    assert re.search(rb"\x1b\[\d+m\[[^]]+:1\] \x1b\[0mO\n", screen.shown)
    before = len(screen.shown)
    assert screen.start(*TWO, WRITE, r"out:O\n", env={"NO_COLOR": "1"}).finish().returncode == 0
    wait_until(lambda: screen.shown[before:].count(b"O\n") == 2)
    assert b"\x1b" not in screen.shown[before:]  # Into a pipe: the test of prefixes and streams below.


# The terminal itself.


def test_a_lone_worker_has_a_terminal_and_log_files(start_method: str, screen: Screen, tmp_path: Path) -> None:
    options = ("--start-method", start_method, "--nproc-per-node", "1", "--log-dir", tmp_path, "--rdzv-id", "job")
    running = screen.start(*options, WRITE, "tty:", r"err:E\n", "out:name? ", "ask:")
    screen.wait_for(f", logs in {tmp_path / 'job'}\n".encode())
    for shown in (b"terminals: [True, True, True]\n", b"E\n", b"name? "):
        screen.wait_for(shown)
    screen.type(b"Ada\n")
    screen.wait_for(b"got 'Ada\\n'")
    assert running.finish().returncode == 0
    logs = tmp_path / "job" / "attempt_0" / "0"
    assert (logs / "stdout.log").read_bytes() == b"terminals: [True, True, True]\nname? got 'Ada\\n'\n"
    assert (logs / "stderr.log").read_bytes() == b"E\n"
    kept = (tmp_path / "job" / "console.log").read_bytes()
    assert all(line in kept for line in (b"terminals: [True, True, True]\n", b"E\n", b"got 'Ada\\n'\n"))


def test_without_log_files_a_lone_worker_writes_to_the_terminal_itself(screen: Screen) -> None:
    name = os.ttyname(screen.streams["stdout"])
    program = ("--no-python", "sh", "-c", "readlink /proc/self/fd/1")
    assert screen.start("--nproc-per-node", "1", "--log-dir", "/dev/null", *program).finish().returncode == 0
    screen.wait_for(f"{name}\n".encode())


def test_a_lone_worker_sees_the_size_of_the_terminal_also_when_it_changes(screen: Screen, tmp_path: Path) -> None:
    def resize(rows: int, columns: int) -> None:
        fcntl.ioctl(screen.streams["stdout"], termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    resize(33, 77)
    program = "while stty size <&1; do sleep 0.1; [ -e {} ] && exit; done".format(tmp_path / "end")
    running = screen.start("--nproc-per-node", "1", "--no-python", "sh", "-c", program)
    screen.wait_for(b"33 77\n")
    resize(44, 99)
    screen.wait_for(b"44 99\n")
    (tmp_path / "end").touch()
    assert running.finish().returncode == 0


@pytest.mark.slow
def test_a_flood_of_a_lone_worker_is_whole_on_the_terminal_and_in_the_log(screen: Screen, tmp_path: Path) -> None:
    program = ("--no-python", "sh", "-c", "seq 200000")
    options = ("--nproc-per-node", "1", "--log-dir", tmp_path, "--rdzv-id", "job")
    assert screen.start(*options, *program).finish().returncode == 0
    whole = "".join(f"{number}\n" for number in range(1, 200_001)).encode()
    assert (tmp_path / "job/attempt_0/0/stdout.log").read_bytes() == whole
    screen.wait_for(b"succeeded after ")
    assert whole in screen.shown


def test_what_a_lone_worker_wrote_last_is_not_lost_on_a_stopped_terminal(screen: Screen, tmp_path: Path) -> None:
    logs, whole = tmp_path / "job/attempt_0/0", "".join(f"{number}\n" for number in range(1, 301)).encode()
    program = f"""
wait_for() {{ until [ -e {tmp_path}/$1 ]; do sleep 0.1; done; }}
echo begin; wait_for stopped; echo 0; wait_for rest; seq 300; echo last >&2"""
    options = ("--nproc-per-node", "1", "--log-dir", tmp_path, "--rdzv-id", "job", "--no-python", "sh", "-c", program)
    running = screen.start(*options)
    screen.wait_for(b"begin\n")
    screen.type(b"\x13")  # Ctrl-S
    (tmp_path / "stopped").touch()
    wait_until(lambda: (logs / "stdout.log").read_bytes() == b"begin\n0\n")
    (tmp_path / "rest").touch()
    wait_until(lambda: (logs / "stdout.log").read_bytes() == b"begin\n0\n" + whole)
    wait_until(lambda: (logs / "stderr.log").read_bytes() == b"last\n")
    screen.type(b"\x11")  # Ctrl-Q
    screen.wait_for(whole)
    screen.wait_for(b"last\n")
    assert running.finish().returncode == 0


def test_a_terminal_that_a_lone_worker_has_made_non_blocking_shows_all(screen: Screen) -> None:
    program = "import os; os.set_blocking(0, False); print('\\n'.join(map(str, range(100000))))"
    assert screen.start("--nproc-per-node", "1", "--no-python", sys.executable, "-c", program).finish().returncode == 0
    screen.wait_for(b"\n99999\n")
    assert "".join(f"{number}\n" for number in range(100_000)).encode() in screen.shown


def test_several_workers_share_the_terminal_by_lines(screen: Screen) -> None:
    running = screen.start(*TWO, WRITE, "tty:", "0/ask:", env={**BARE, "NO_COLOR": "1"})
    screen.wait_for(b"0| terminals: [True, False, False]\n")
    screen.wait_for(b"1| terminals: [True, False, False]\n")
    screen.type(b"Ada\n")
    screen.wait_for(b"0| got 'Ada\\n'")
    assert running.finish().returncode == 0


def test_a_stream_of_a_lone_worker_that_is_no_terminal_is_logged(screen: Screen, tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as out:
        options = (*ALONE, "--log-dir", tmp_path / "logs", "--rdzv-id", "job")
        running = screen.start(*options, WRITE, "tty:", r"err:to the terminal\n", stdout=out)
        assert running.finish().returncode == 0
    assert (tmp_path / "out").read_bytes() == b"terminals: [True, False, True]\n"
    assert (tmp_path / "logs/job/attempt_0/0/stdout.log").read_bytes() == b"terminals: [True, False, True]\n"
    screen.wait_for(b"to the terminal\n")


@pytest.mark.parametrize("option", ["--tee=3", "--redirects=3", "--local-ranks-filter=0"])
def test_who_asks_for_files_gets_them_on_a_terminal_too(screen: Screen, option: str, tmp_path: Path) -> None:
    options = (*ALONE, "--log-dir", tmp_path, "--rdzv-id", "job", option)
    assert screen.start(*options, WRITE, "tty:").finish().returncode == 0
    assert b"[True, False, False]" in (tmp_path / "job/attempt_0/0/stdout.log").read_bytes()
    shown = b"terminals: [True, False, False]\n" in screen.close()
    assert shown == (option != "--redirects=3")


# Log folders.


def test_a_run_prefixes_its_lines_keeps_its_streams_apart_and_has_a_private_folder_with_a_report(
    tmp_path: Path,
) -> None:
    actions = (r"out:a\nb\n", r"err:warning\n")
    finished = run(*TWO, WRITE, *actions, cwd=tmp_path)
    host = os.uname().nodename.split(".")[0]
    assert sorted(finished.out.splitlines()) == [f"[{host}:{rank}] {line}" for rank in range(2) for line in "ab"]
    errors = sorted(line for line in finished.err.splitlines() if not line.startswith("ddplaunch: "))
    assert errors == [f"[{host}:{rank}] warning" for rank in range(2)]
    folder = finished.run_dir
    assert folder.parent == tmp_path / "state" / "ddplaunch"
    first, *_, last = finished.err.splitlines()
    assert first == f"ddplaunch: 2 workers on {host}, logs in {folder}"
    assert re.fullmatch(rf"ddplaunch: succeeded after \d+(\.\d)? s; logs in {re.escape(str(folder))}", last)
    assert finished.err.count(str(folder)) == 2, "it is said at the start and at the end"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in (*folder.rglob("*.log"), *folder.glob("*.json")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    names = {".ddplaunch-run", "attempt_0", "console.log", "events.jsonl", "report.json", "run.json"}
    assert {path.name for path in folder.iterdir()} == names
    report, started = finished.report, json.loads((folder / "run.json").read_text())
    assert report["command"] == [sys.executable, "-m", "ddplaunch", *TWO, str(WRITE), *actions]
    assert [report[key] for key in ("command", "cwd", "start")] == [started[key] for key in ("command", "cwd", "start")]
    assert (report["cwd"], started["script"]) == (str(tmp_path), str(WRITE))
    moments = [datetime.fromisoformat(report[key]) for key in ("start", "end")]
    assert (moments[1] - moments[0]).total_seconds() == pytest.approx(report["duration_s"], abs=0.5)
    (where,) = report["hosts"]
    assert (where["workers"], where["cpus"]) == (2, len(os.sched_getaffinity(0)))
    assert report["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_failed_run_has_all_that_the_console_showed_and_tells_the_process_above_its_first_failure(
    tmp_path: Path,
) -> None:
    """torchrun: local_elastic_agent_test 10."""
    path = tmp_path / "above.json"
    finished = run(*TWO, EXIT_WITH, "1=raise:the cause", env={"TORCHELASTIC_ERROR_FILE": str(path)})
    assert finished.returncode == 1
    log = (finished.run_dir / "console.log").read_text()
    assert sorted(log.splitlines()) == sorted((finished.out + finished.err).splitlines())
    assert f"logs in {finished.run_dir}" in log
    assert "rank 1 on " in log
    message = json.loads(path.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("RuntimeError: the cause", 1)
    assert "in main" in message["extraInfo"]["py_callstack"]
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 300
    assert (finished.run_dir / "attempt_0" / "1" / "error.json").exists()


def test_an_error_that_the_command_prints_last_is_in_the_run_folder_too(tmp_path: Path) -> None:
    finished = run(*TWO, "--log-dir", "logs", "--rdzv-id", "job", "missing.py", cwd=tmp_path)
    assert finished.returncode == 82
    assert "error: missing.py: no such file" in finished.err
    assert (tmp_path / "logs/job/console.log").read_text() == finished.err


def test_a_given_folder_holds_a_folder_per_run_and_attempt(tmp_path: Path) -> None:
    options = (*TWO, "--log-dir", "logs", "--rdzv-id", "job", "--max-restarts", "1")
    runs = [run(*options, EXIT_WITH, "0=code:3,code:0", "1=code:0", cwd=tmp_path) for _ in range(2)]
    assert [finished.returncode for finished in runs] == [0, 0]
    assert [finished.run_dir for finished in runs] == [tmp_path / "logs" / "job", tmp_path / "logs" / "job.2"]
    for finished in runs:
        for attempt in range(2):
            assert log(finished, 0, attempt=attempt).startswith(b"ready")


def test_without_files_the_console_has_all_and_nothing_is_made(tmp_path: Path) -> None:
    """torchrun: errors_api_test 7."""
    finished = run(*TWO, "--log-dir", "/dev/null", WRITE, r"out:a\n", env=BARE, cwd=tmp_path)
    assert sorted(finished.out.splitlines()) == ["0| a", "1| a"]
    assert "no logs are kept" in finished.err
    assert not (tmp_path / "state").exists()


def test_a_file_as_log_folder_is_refused(tmp_path: Path) -> None:
    """torchrun: multiprocessing_api_test 3."""
    path = tmp_path / "file"
    path.touch()
    finished = run(*TWO, "--log-dir", path, WRITE, r"out:a\n")
    assert finished.returncode == 2
    assert str(path) in finished.err
    assert "Traceback" not in finished.err
    assert finished.out == ""


def test_a_log_folder_deleted_during_the_run_stops_neither_output_nor_a_restart(tmp_path: Path) -> None:
    """torchrun: tail_log_test 2."""
    go = tmp_path / "go"
    options = (*TWO, "--log-dir", tmp_path / "logs", "--rdzv-id", "job", "--max-restarts", "1")
    running = start(*options, EXIT_WITH, f"*=+{go}+text:after,code:0", env=BARE)
    running.wait_for("ready", 2)
    subprocess.run(["rm", "-r", str(tmp_path / "logs")], check=True)
    go.touch()
    finished = running.finish()
    assert finished.returncode == 0
    assert "| after" in finished.err, "the other rank may be stopped before"
    assert finished.out.count("| attempt 1 of 1") == 2
    assert "Traceback" not in finished.err


# The end.


def test_a_console_that_is_closed_early_does_not_end_the_job(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    running = start(*TWO, "--log-dir", tmp_path, "--rdzv-id", "job", FLOOD, "50000", "60", stdout=writer)
    os.close(writer)
    assert os.read(reader, 10)
    os.close(reader)  # As `| head -1` does.
    finished = running.finish()
    assert finished.returncode == 0
    assert finished.err.count(f"stdout is not read any more; the job goes on, logs in {tmp_path}/job\n") == 1
    for rank in range(2):
        assert (tmp_path / f"job/attempt_0/{rank}/stdout.log").read_bytes().count(b"\n") == 50_000


def test_what_a_worker_wrote_just_before_its_end_comes_before_the_page() -> None:
    finished = run("--nproc-per-node", "2", EXIT_WITH, "0=text:the reason", env=BARE)
    assert finished.returncode == 1
    assert finished.err.index("0| the reason") < finished.err.index("the job failed")
    assert re.search(r"failed: SystemExit: the reason \(exit_with.py:\d+\)\n", finished.err)


def test_a_background_process_that_holds_stdout_loses_no_line_and_delays_no_end(tmp_path: Path) -> None:
    script = tmp_path / "leaves.sh"
    script.write_text("#!/bin/sh\nsetsid sleep 3600 &\necho last words\n")
    script.chmod(0o755)
    started = time.monotonic()
    finished = run(*TWO, "--no-python", script, env=BARE)
    assert time.monotonic() - started < 30
    assert sorted(finished.out.splitlines()) == ["0| last words", "1| last words"]


def test_events_are_printed_as_json_lines_where_asked_for() -> None:
    """torchrun: test_run 9."""
    finished = run(*TWO, "--event-log-handler", "console", EXIT_WITH, "1=code:5")
    assert finished.returncode == 5
    lines = [json.loads(line) for line in finished.err.splitlines() if line.startswith("{")]
    states = {line["metadata"]["global_rank"]: line["metadata"]["state"] for line in lines}
    assert states == {0: "TERMINATED", 1: "FAILED"}


def test_closed_standard_streams_do_no_harm(tmp_path: Path, start_method: str) -> None:
    """What a shell's ``<&- >&- 2>&-`` leaves: three descriptors that the next files opened would take."""
    options = (*TWO, "--log-dir", tmp_path, "--rdzv-id", "job", "--start-method", start_method)
    under = ("sh", "-c", '"$@" <&- >&- 2>&-', "sh")
    finished = run(*options, WRITE, r"out:a\n", r"err:b\n", "ask:", under=under)
    assert finished.returncode == 0
    folder = tmp_path / "job" / "attempt_0" / "0"
    assert (folder / "stdout.log").read_bytes() == b"a\ngot ''\n"
    assert (folder / "stderr.log").read_bytes() == b"b\n"
    assert (tmp_path / "job" / ".ddplaunch-run").read_text() == f"{os.uname().nodename}\n"
