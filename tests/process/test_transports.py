"""A transport is a class and a row: runs, queries and the plan then know it."""

from __future__ import annotations

import os
import queue
import sys
from pathlib import Path
from unittest import mock

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig, RemoteConfig
from ddplaunch.features.remote.command_handle import CommandTransport
from ddplaunch.protocol.launcher_agent import Pong, SweepNode
from ddplaunch.transport import agent_process
from ddplaunch.transport.handle import ChannelClosed, FromNode, NodeFacts, discard_output
from ddplaunch.transport.local import LocalHandle
from tests.support import runs
from tests.support.processes import is_alive, wait_until

PROGRAM = Path(runs.__file__).parent / "programs" / "shell_transport.py"


def test_a_class_and_a_row_are_a_transport(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os; print(*map(os.environ.get, ('WAY', 'RANK', 'WORLD_SIZE')))\n")
    done = runs.python(PROGRAM, script, tmp_path / "logs")
    assert done.returncode == 0, done.err
    assert "on 2 nodes, started through a shell" in done.out
    assert "on each node  through a shell: " in done.out
    assert "[one:0] shell 0 2" in done.out
    assert "[two:1] shell 1 2" in done.out


class SilentTransport(CommandTransport):
    """Its command never reaches the host."""

    @staticmethod
    def carrier(_config: LaunchConfig, _host: Host) -> tuple[str, ...]:
        return "sh", "-c", "echo no answer yet >&2; exec sleep 1000"


def test_a_command_that_does_not_start_the_agent_is_given_up() -> None:
    posted: queue.SimpleQueue[object] = queue.SimpleQueue()
    config = LaunchConfig(script="x.py", hosts=(Host("one"),), remote=RemoteConfig(start_timeout_s=0.5))
    handle = SilentTransport(config, ("one",), "tag", discard_output, posted.put).start(0, "query")
    try:
        posted_by = posted.get(timeout=60)
    finally:
        handle.close()
    assert isinstance(posted_by, FromNode)
    assert "sh did not start the agent within 0.5 s: no answer yet" in str(posted_by.event)


class TalkativeTransport(CommandTransport):
    """Its command prints many words, and ends without an agent."""

    @staticmethod
    def carrier(_config: LaunchConfig, _host: Host) -> tuple[str, ...]:
        return "sh", "-c", "for i in 0 1 2 3 4 5 6 7 8 9; do echo " + "unreachable " * 10 + ">&2; done"


def test_of_a_long_output_of_the_command_whole_words_are_shown() -> None:
    posted: queue.SimpleQueue[object] = queue.SimpleQueue()
    config = LaunchConfig(script="x.py", hosts=(Host("one"),))
    handle = TalkativeTransport(config, ("one",), "tag", discard_output, posted.put).start(0, "query")
    try:
        posted_by = posted.get(timeout=60)
    finally:
        handle.close()
    assert isinstance(posted_by, FromNode)
    printed = posted_by.event.message.partition("did not start the agent: ")[2]
    assert {word.rstrip(";") for word in printed.split()} == {"...", "unreachable"}


def started(command: str, posted: queue.SimpleQueue[object]) -> LocalHandle:
    """The handle of an agent that is ``command``, for a shell."""
    with mock.patch.object(agent_process, "COMMAND", ("sh", "-c", f"exec {command}")):
        return LocalHandle(agent_process.start(os.environ), posted.put, discard_output)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_agent_that_does_not_read_delays_no_other_one_and_nothing_of_it_is_left() -> None:
    before, heard, nothing = open_files(), queue.SimpleQueue[object](), queue.SimpleQueue[object]()
    deaf, echo = started("sleep 1000", nothing), started("cat", heard)
    try:
        for _ in range(200):  # Far more than the pipe holds.
            deaf.send(SweepNode("x" * 100_000, ()))
        pings = [Pong(float(number)) for number in range(100)]
        for ping in pings:
            echo.send(ping)
        assert [heard.get(timeout=60) for _ in pings] == pings
        assert nothing.empty()
    finally:
        deaf.kill()
        codes = [handle.close() for handle in (deaf, echo)]
    assert codes == [-9, 0]
    assert [nothing.get(timeout=60), heard.get(timeout=60)] == [ChannelClosed(), ChannelClosed()]
    assert not any(is_alive(handle._process.pid) for handle in (deaf, echo))
    del deaf, echo  # ``Popen`` closes what is left of its pipes.
    wait_until(lambda: open_files() == before)


def test_what_was_sent_before_the_end_arrives_in_its_order() -> None:
    heard = queue.SimpleQueue[object]()
    echo = started("cat", heard)
    sent = [Pong(float(number)) for number in range(5000)]  # More than the pipes hold.
    for record in sent:
        echo.send(record)
    assert echo.close(60.0) == 0
    assert [heard.get(timeout=60) for _ in sent] == sent
    assert heard.get(timeout=60) == ChannelClosed()


RELAY = """
import os, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
def relay():
    while data := os.read(0, 65536):
        child.stdin.write(data)
        child.stdin.flush()
    child.stdin.close()
threading.Thread(target=relay, daemon=True).start()
sys.exit(child.wait())
"""


class RelayTransport(CommandTransport):
    """Its command passes on stdin, and no signal, like one that executes something on another machine."""

    @staticmethod
    def carrier(_config: LaunchConfig, _host: Host) -> tuple[str, ...]:
        return sys.executable, "-c", RELAY


def test_an_agent_whose_command_gets_sigterm_ends_at_the_end_of_its_stdin() -> None:
    posted: queue.SimpleQueue[object] = queue.SimpleQueue()
    config = LaunchConfig(script="x.py", hosts=(Host("one"),))
    handle = RelayTransport(config, ("one",), "tag", discard_output, posted.put).start(0, "query")
    try:
        connected = posted.get(timeout=60)
        assert isinstance(connected, FromNode)
        assert isinstance(connected.event, NodeFacts)
        pid = connected.event.pid
        assert is_alive(pid)
        handle.kill()
        wait_until(lambda: not is_alive(pid), 60)
    finally:
        handle.close()
