"""What the kernel counts for a process and its descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ddplaunch.features.hangs import process_activity
from ddplaunch.features.hangs.process_activity import ProcessActivity
from ddplaunch.features.hangs.rank_state import STARVED_SHARE
from ddplaunch.system import procfs
from tests.support.processes import wait_until

SENT_BYTES = 300_000

BUSY_CHILD = """
import os, sys
if os.fork():
    print(os.wait(), flush=True)
else:
    sys.stdin.readline()
    data = os.urandom(1 << 20)
    with open("/dev/null", "wb", 0) as sink:
        for _ in range(20): sink.write(data)
    end = os.times().user + 0.2
    while os.times().user < end: pass
    print("done", flush=True)
    sys.stdin.read()
"""


def read(pid: int) -> ProcessActivity:
    return process_activity.read(pid, process_activity.tcp_connections())


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", BUSY_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as found:
        yield found
        found.kill()


def test_a_childs_work_counts(process: subprocess.Popen[bytes]) -> None:
    before = read(process.pid)
    assert process.stdin
    assert process.stdout
    process.stdin.write(b"begin\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"done\n"
    after = read(process.pid)
    (child,) = process_activity.descendants(process.pid)
    assert after.cpu_since(before) >= 0.15
    assert after.io_since(before) >= 20 << 20
    assert after.busiest_child(before) == child
    wait_until(lambda: process_activity.waits_for_input(child))
    idle = read(process.pid)
    assert idle.busiest_child(read(process.pid)) is None
    os.kill(child, signal.SIGKILL)
    process.wait(10)


def test_why_the_kernel_does_not_run_a_process(process: subprocess.Popen[bytes]) -> None:
    assert procfs.blocked_state(process.pid) == ""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert procfs.blocked_state(process.pid) == "suspended by a signal"


def test_a_process_that_is_gone_has_done_nothing() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait(10)
    assert read(gone.pid).cpu_s == {gone.pid: 0.0}
    assert procfs.blocked_state(gone.pid) == ""
    assert not process_activity.waits_for_input(gone.pid)


def test_the_cpu_time_of_a_thread_is_found_by_its_name() -> None:
    is_done, ended = threading.Event(), threading.Event()

    def work() -> None:
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "wb", 0) as comm:
            comm.write(b"some-thread")
        while time.thread_time() < 0.05:
            pass
        is_done.set()
        ended.wait(10)

    threading.Thread(target=work).start()
    assert is_done.wait(10)
    assert 0.04 < process_activity.thread_cpu_s(os.getpid(), b"some-thread") < 0.5
    assert process_activity.thread_cpu_s(os.getpid(), b"no-thread") == 0.0
    ended.set()


LOOP = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(flush=True)\nwhile True: pass"
IDLE_LOOP = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n" + LOOP


def test_a_process_that_others_leave_no_cpu_waits_for_one() -> None:
    """It looks still: it uses less CPU time than a rank that waits for others."""
    with contextlib.ExitStack() as stack:
        loops = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE))
            for text in (IDLE_LOOP, LOOP, LOOP)
        ]
        for loop in loops:
            stack.callback(loop.kill)
            assert loop.stdout
            assert loop.stdout.readline() == b"\n"
        pid, before = loops[0].pid, read(loops[0].pid)

        def has_waited() -> bool:
            nonlocal before
            now = read(pid)
            if now.at <= before.at + 1.0:
                return False
            is_starved = now.waited_since(before) > STARVED_SHARE * (now.at - before.at)
            before = now  # A wait that follows some CPU time counts only when it ends, which may take a minute.
            return is_starved

        wait_until(has_waited, 60)


def test_a_wait_for_a_cpu_counts_before_it_has_ended() -> None:
    """The kernel adds a wait when it is over."""
    before = ProcessActivity(7, 100.0, {7: 3.0}, {7: 0}, 1.5, is_ready=True)
    assert replace(before, at=104.0).waited_since(before) == 4.0
    assert replace(before, at=104.0, cpu_s={7: 3.01}).waited_since(before) == 0.0
    assert replace(before, at=104.0, is_ready=False, run_queue_wait_s=2.0).waited_since(before) == 0.5


def test_what_is_received_counts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        with connection:
            before = read(os.getpid())
            left = SENT_BYTES
            client.sendall(bytes(SENT_BYTES))
            while left:
                left -= len(connection.recv(left))
            assert read(os.getpid()).io_since(before) >= SENT_BYTES
            inode = os.fstat(connection.fileno()).st_ino
            assert process_activity.connections_of(os.getpid(), process_activity.tcp_connections())[inode] == (
                SENT_BYTES,
                "",
            )


def test_a_process_that_is_gone_has_no_connection() -> None:
    assert process_activity.connections_of(1 << 22, {1: (1, "")}) == {}
