"""Whatever comes over a channel between two of our processes: who reads it says so, ends, and stays small."""

from __future__ import annotations

import io
import json
import os
import queue
import resource
import socket
import struct
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddplaunch import features
from ddplaunch.config import LaunchConfig, WorkerConfig
from ddplaunch.launcher import setup
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import (
    FROM_AGENT,
    AgentEnded,
    AgentFailed,
    AgentReady,
    AttemptEnded,
    AttemptStarted,
    Notice,
    Output,
    Ping,
    Pong,
    StopWorkers,
)
from ddplaunch.protocol.rendezvous import FROM_MEMBER, RendezvousLost
from ddplaunch.protocol.results import AttemptResult
from ddplaunch.protocol.specs import AgentSpec
from ddplaunch.transport import agent_process, local
from ddplaunch.transport.handle import ChannelClosed
from tests.support.processes import pids_with
from tests.support.runs import PROGRAMS, ROOT, run, start

NODE_LOST = 84
MEMORY_BYTES = 400 << 20
"""More than a process of ours needs, less than what a long line could be made into."""

LONG_LINE_BYTES = 100_000_000
STOP = json.loads(wire.encode(StopWorkers(15, 1.0)))
HOSTILE = {
    "another protocol": b"GET / HTTP/1.0\r\n\r\n",
    "deep nesting": b'{"record":' * 200_000 + b"\n",
    "a wrong type": json.dumps({**STOP, "signum": [15]}).encode() + b"\n",
}
"""One of each kind: all that a line can have is refused in tests/unit/test_wire.py."""

CUT_OFF = wire.encode(Ping(5.0))[:-4]


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))


def spec() -> AgentSpec:
    """Of a job that goes on for long."""
    config = LaunchConfig(
        script="sleep", script_args=("1000",), entry="program", workers=WorkerConfig(nproc_per_node=1)
    )
    return setup.agent_spec(config, "a-run", 0, "here", node_dir=None)


# An agent's stdin.


def tell_agent(data: bytes) -> tuple[list[Any], subprocess.CompletedProcess[bytes]]:
    """Start an agent, tell it this and no more. Returns what it says, and how it ended."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        agent_process.COMMAND,
        input=data,
        capture_output=True,
        timeout=60,
        env=env,
        preexec_fn=limit_memory,
        check=False,
    )
    stream = io.BytesIO(done.stdout)
    said = []
    while received := wire.read_record(stream, (*FROM_AGENT, *features.records("FROM_AGENT"))):
        said.append(received[0])
    return said, done


def assert_agent_says_so(data: bytes) -> None:
    (failure, ended), done = tell_agent(data)
    assert isinstance(failure, AgentFailed)
    assert failure.message.startswith("this node received an invalid record: ")
    assert len(failure.message) < 400
    assert failure.message.isprintable()
    assert ended == AgentEnded()
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("garbage", [*HOSTILE.values(), CUT_OFF], ids=[*HOSTILE, "cut off"])
def test_an_agent_that_gets_no_order_says_so(garbage: bytes) -> None:
    assert_agent_says_so(garbage)


def test_a_line_without_end_is_not_kept() -> None:
    assert_agent_says_so(b"x" * LONG_LINE_BYTES)


ORDER = json.loads(wire.encode(spec()))
WRONG = st.sampled_from([None, True, -1, 1.5, "text", [], {}, [[]], {"record": "AgentSpec"}, 10**30])


@settings(max_examples=8)
@given(st.sampled_from(sorted(ORDER)), WRONG)
def test_an_agent_whose_order_has_a_wrong_field_does_not_start(name: str, value: Any) -> None:
    body = {**ORDER, name: value}
    try:
        wire.decode(json.dumps(body).encode(), (AgentSpec,))
    except wire.ProtocolError:
        assert_agent_says_so(json.dumps(body).encode() + b"\n")


@pytest.mark.parametrize("garbage", [b"\xff\x00\n", CUT_OFF], ids=["garbage", "cut off"])
def test_an_agent_that_does_not_understand_its_launcher_any_more_ends_its_workers(garbage: bytes) -> None:
    said, done = tell_agent(wire.encode(spec()) + garbage)
    notices = [record.text for record in said if isinstance(record, Notice)]
    complaint = "the launcher sent an invalid record, so the agent stops its workers: "
    # A launcher that was killed has cut off what it said, and hears no complaint.
    assert any(complaint in text for text in notices) == (garbage != CUT_OFF)
    assert AgentEnded() not in said
    assert (done.returncode, done.stderr) == (0, b"")


# What a launcher reads.


def heard_from(data: bytes, tmp_path: Path) -> list[Any]:
    """What a handle posts whose agent says this."""
    (tmp_path / "said").write_bytes(data)
    posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with mock.patch.object(agent_process, "COMMAND", ("cat", str(tmp_path / "said"))):
        handle = local.LocalHandle(
            agent_process.start(os.environ), posted.put, lambda header, data: posted.put((header, data))
        )
    heard = [posted.get(timeout=60)]
    while not isinstance(heard[-1], ChannelClosed):
        heard.append(posted.get(timeout=60))
    handle.close()
    return heard


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wire")


LYING = {
    "less than it is": wire.encode(Output("here", 0, 0, "stdout", 3)) + b"a longer line\n",
    "more than allowed": wire.encode(Output("here", 0, 0, "stdout", 1 << 40)),
    "less than nothing": wire.encode(Output("here", 0, 0, "stdout", -1)),
}


@pytest.mark.parametrize("garbage", [*HOSTILE.values(), *LYING.values()], ids=[*HOSTILE, *LYING])
def test_a_launcher_gives_up_an_agent_that_it_does_not_understand(garbage: bytes, folder: Path) -> None:
    pong, *output, notice, _ = heard_from(wire.encode(Pong()) + garbage, folder)
    assert pong == Pong()
    assert [header.nbytes for header, _ in output] in ([], [3])
    assert "sent an invalid record and was given up: " in notice.text
    assert len(notice.text) < 400
    assert notice.text.isprintable()


@pytest.mark.parametrize(
    "garbage", [CUT_OFF, wire.encode(Output("here", 0, 0, "stdout", 1000)) + b"short\n"], ids=["record", "output"]
)
def test_a_launcher_takes_what_is_cut_off_for_the_end(garbage: bytes, folder: Path) -> None:
    assert heard_from(wire.encode(Pong()) + garbage, folder) == [Pong(), ChannelClosed()]


@settings(max_examples=25)
@given(damage=st.binary(min_size=1, max_size=40), place=st.integers(0, 80))
def test_a_launcher_survives_any_damage_to_what_an_agent_says(damage: bytes, place: int, folder: Path) -> None:
    whole = wire.encode(Output("here", 0, 0, "stdout", 6)) + b"hello\n" + wire.encode(Notice("x"))
    damaged = whole[:place] + damage + whole[place + len(damage) :]
    assert heard_from(damaged, folder)[-1] == ChannelClosed()


IN_PLACE_OF_AN_AGENT = """
import os, sys
if any("agent.main" in word for word in sys.orig_argv):
    os.execvp("sh", ["sh", "-c", os.environ["IN_PLACE"]])
"""


@pytest.mark.parametrize(
    "words", ["echo hello", f"head -c {LONG_LINE_BYTES} /dev/zero | tr '\\0' x"], ids=["a word", "a line without end"]
)
def test_a_run_whose_agent_talks_nonsense_ends_and_says_so(tmp_path: Path, words: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(IN_PLACE_OF_AN_AGENT)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "IN_PLACE": words}
    finished = run("--no-python", "true", env=env, preexec_fn=limit_memory)
    assert finished.returncode == NODE_LOST, finished.err
    assert "sent an invalid record and was given up: " in finished.err
    assert finished.err.count("ddplaunch: error: ") == 1
    assert "Traceback" not in finished.err


def test_an_agent_that_restarts_more_often_than_it_may_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(IN_PLACE_OF_AN_AGENT)
    records = [wire.encode(AgentReady(1))]
    for attempt in range(200):
        follows = {"attempt_follows": True, "restart_follows": True, "decision": f"restart {attempt + 1} of 2"}
        result = AttemptResult(attempt, "failed", (), 1.0, restart_count=attempt, **follows)
        records += [wire.encode(AttemptStarted(attempt, 1, (11,), 0, 1, 0)), wire.encode(AttemptEnded(result))]
    (tmp_path / "said").write_bytes(b"".join(records))
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "IN_PLACE": f"cat {tmp_path / 'said'}; exec cat >/dev/null"}
    finished = run("--max-restarts", "2", "--no-python", "true", env=env)
    assert finished.returncode == NODE_LOST, finished.err
    assert "reports more than 2 restarts" in finished.err
    assert len(finished.report["attempts"]) <= 3
    assert finished.err.count("restart 2 of 2") == 1
    assert "restart 3" not in finished.err


# The channel of a rendezvous process.


@pytest.mark.parametrize("name", ["another protocol", "a wrong type"])
def test_a_member_of_the_rendezvous_that_gets_no_order_says_so(name: str) -> None:
    ours, theirs = socket.socketpair()
    code = f"from ddplaunch.rendezvous.member import serve; serve({theirs.fileno()}, -1)"
    with ours, theirs:
        member = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, cwd=ROOT
        )
        theirs.close()
        ours.sendall(HOSTILE[name])
        ours.shutdown(socket.SHUT_WR)
        with ours.makefile("rb") as stream:
            received = wire.read_record(stream, FROM_MEMBER)
    assert received
    assert isinstance(received[0], RendezvousLost)
    assert member.communicate(timeout=60)[1] == b""
    assert member.returncode == 0


# The ports that listen while a job runs.


def listening_ports(pids: list[int]) -> list[int]:
    """Of these processes."""
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for pid in pids for fd in os.listdir(f"/proc/{pid}/fd")]
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in own})


@pytest.mark.torch
def test_strangers_at_its_ports_do_not_touch_a_job(tmp_path: Path) -> None:
    running = start("--dry-run", "--nnodes", "2", "--nproc-per-node", "1", PROGRAMS / "rounds.py", tmp_path / "end")
    running.wait_for("rank . of 2 in round 0", 2)
    pids = pids_with(f"DDPLAUNCH_TEST_MARK={os.environ['DDPLAUNCH_TEST_MARK']}")
    ports = listening_ports(pids)
    assert len(ports) >= 2, "the rendezvous and the workers' store"
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(512)
    oversized = bytes([0]) + struct.pack("<Q", 1 << 60) + b"key"
    with ExitStack() as stack:
        for port in ports:
            for words in (b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), hello, oversized, b"\x00", *[b""] * 50):
                stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
                stranger.sendall(words)
        with pytest.raises(TimeoutError):
            running.wait_for("lost|restart|Traceback|again", 1, 1)
        (tmp_path / "end").touch()
        finished = running.finish()
    assert finished.returncode == 0, finished.err
    assert len(finished.report["attempts"]) == 1
