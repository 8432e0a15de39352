"""However a connection ends, nothing of ours keeps running on the other side, and this side does not wait for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from ddplaunch.protocol.launcher_agent import Notice, SweepNode
from ddplaunch.transport.failures import HostFailure
from tests.support.connecting import ChannelClosed, connecting
from tests.support.nodes import LAB_ADDRESS, NodeOptions
from tests.support.processes import state, wait_until
from tests.support.runs import PROGRAMS, ROOT, environment

pytestmark = pytest.mark.ssh
both_ways = pytest.mark.parametrize("connects", [False, True], ids=["over SSH", "connected"])


def _agents(lab):
    return [pid for node in lab.nodes for pid, line in node.pids().items() if "DDPLAUNCH_START" in line]


def _start_holding(lab, *names, connects=False):
    command = [sys.executable, PROGRAMS / "hold_hosts.py", lab.ssh_config, "connects" if connects else "stays", *names]
    return lab.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())


def _hold(lab, connects):
    program = _start_holding(lab, *(node.name for node in lab.nodes), connects=connects)
    assert program.stdout.readline() == b"connected\n"
    assert len(_agents(lab)) == len(lab.nodes)
    return program


@both_ways
def test_the_remote_process_ends_when_the_handle_is_closed(make_lab, connects):
    lab = make_lab(2)
    with connecting(lab, connects=connects) as them:
        them.start()
        them.settle()
        assert len(_agents(lab)) == 2
        assert [handle.close() for handle in them.handles.values()] == [7, 7]
    assert _agents(lab) == []


@both_ways
def test_the_remote_process_ends_when_the_launcher_is_killed(make_lab, connects):
    lab = make_lab(2)
    with _hold(lab, connects) as program:
        program.send_signal(signal.SIGKILL)
    wait_until(lambda: not _agents(lab))


def test_the_launcher_can_exit_while_servers_say_nothing(make_lab):
    lab = make_lab(1)
    with lab.inside(), socket.create_server((LAB_ADDRESS, 0)) as mute:
        text = lab.config_of(lab["node1"], "mute", mute.getsockname()[1])
        lab.ssh_config.write_text(text.replace(lab["node1"].address, LAB_ADDRESS))
        with _start_holding(lab, "mute") as program:
            connection, _ = mute.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                assert connection.recv(4) == b"SSH-"
                started_s = time.monotonic()
                program.communicate(b"end\n", timeout=20)
                assert time.monotonic() - started_s < 5


@both_ways
def test_the_launcher_can_exit_with_connections_open(make_lab, connects):
    lab = make_lab(2)
    with _hold(lab, connects) as program:
        started_s = time.monotonic()
        program.communicate(b"end\n", timeout=20)
        assert program.returncode == 0
        assert time.monotonic() - started_s < 10
    wait_until(lambda: not _agents(lab))


@both_ways
def test_an_agent_that_is_stopped_can_be_woken_and_killed(make_lab, connects):
    lab = make_lab(1)
    with connecting(lab, connects=connects) as them:
        them.start()
        them.wait_for(Notice)
        (pid,) = _agents(lab)
        handle = them.handles["node1"]
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state(pid) == "T")
        handle.send(SweepNode("x", ()))
        handle.wake()
        them.wait_for(Notice, 2)
        os.kill(pid, signal.SIGSTOP)
        handle.kill()
        them.wait_for(ChannelClosed)
        wait_until(lambda: not _agents(lab))
        assert handle.close() is None


@both_ways
def test_a_process_that_is_not_the_agent_is_not_killed(make_lab, connects, tmp_path):
    # An agent in a container reports a pid that outside belongs to another process.
    (tmp_path / "sitecustomize.py").write_text("import os; os.getpid = lambda: int(os.environ['REPORTED_PID'])")
    lab, pipe = make_lab(1), subprocess.PIPE
    on_node = ["nsenter", "--target", str(lab["node1"].init_pid), "--all", "sh", "-c", "echo $$; exec cat"]
    with connecting(lab, connects=connects) as them, subprocess.Popen(on_node, stdin=pipe, stdout=pipe) as foreign:
        pid = int(foreign.stdout.readline())
        them.start(env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "REPORTED_PID": str(pid)})
        (connected,), _ = them.settle()
        assert connected.pid == pid
        them.handles["node1"].kill()
        them.wait_for(ChannelClosed)
        wait_until(lambda: not _agents(lab))
        foreign.communicate()
        assert foreign.returncode == 0, "it has ended by itself, at the end of its stdin"


@both_ways
def test_kill_and_close_do_not_wait_for_a_node_that_is_cut_off(make_lab, connects):
    lab = make_lab(2)
    with connecting(lab, connects=connects) as them:
        them.start()
        them.settle()
        for node in lab.nodes:
            node.unplug()
        started_s = time.monotonic()
        them.handles["node1"].kill()
        them.wait_for(ChannelClosed, host="node1")
        assert them.handles["node2"].close(0.5) is None
        them.wait_for(ChannelClosed, host="node2")
        assert time.monotonic() - started_s < 15
    for node in lab.nodes:
        node.crash()


@both_ways
def test_sending_to_an_agent_that_does_not_read_never_blocks(make_lab, connects):
    lab = make_lab(1)
    with connecting(lab, connects=connects) as them:
        them.start()
        them.wait_for(Notice)
        (pid,) = _agents(lab)
        os.kill(pid, signal.SIGSTOP)
        started_s = time.monotonic()
        for _ in range(100):
            them.handles["node1"].send(SweepNode("x" * 100_000, ()))
        assert time.monotonic() - started_s < 2
        os.kill(pid, signal.SIGCONT)
        them.wait_for(Notice, 101)


@both_ways
def test_a_node_that_crashes_is_lost_at_once(make_lab, connects):
    lab = make_lab(2)
    with connecting(lab, connects=connects) as them:
        them.start()
        them.settle()
        lab["node1"].crash()
        them.wait_for(ChannelClosed, timeout_s=10)
        them.handles["node2"].send(SweepNode("still there", ()))
        them.wait_for(Notice, 2, host="node2")


@pytest.mark.parametrize("stage", ["waiting for a name", "logging in", "starting"])
def test_closing_while_a_host_is_being_connected_does_not_wait(make_lab, stage):
    slow = NodeOptions(home={".bashrc": "read -t 60 < <(sleep 60)"} if stage == "starting" else {})
    lab = make_lab(1, node1=slow)
    if stage == "logging in":
        os.kill(lab["node1"].init_pid, signal.SIGSTOP)
    if stage == "waiting for a name":
        lab["node1"].unplug()
    with connecting(lab) as them:
        them.start()
        if stage == "starting":
            wait_until(lambda: lab["node1"].pids())
        started_s = time.monotonic()
        them.handles["node1"].close()
        them.connections.close()
        assert time.monotonic() - started_s < 3
        if stage != "starting":
            assert them.of(HostFailure) == []
    lab["node1"].crash()


def test_jump_hosts_end_with_the_run(make_lab):
    lab = make_lab(2)
    lab.ssh_config.write_text(f"Host node2\n  ProxyJump node1\n{lab.ssh_config.read_text()}")
    with connecting(lab) as them:
        them.start("node2")
        them.settle()
        lab["node1"].crash()
        them.wait_for(ChannelClosed)
    wait_until(lambda: not _agents(lab))
