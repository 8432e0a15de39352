"""Agents that connect to the launcher once they were started over SSH: their logins end."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ddplaunch.features.remote.relay import EXITED, RECORDS
from ddplaunch.features.ssh import connections
from ddplaunch.features.ssh import handle as handle_module
from ddplaunch.features.ssh.handle import SshTransport
from ddplaunch.protocol.launcher_agent import Notice, SweepNode
from ddplaunch.threads import in_thread
from ddplaunch.transport.handle import ChannelClosed, NodeFacts
from tests.support.connecting import connecting, listener_of
from tests.support.nodes import NodeOptions
from tests.support.processes import wait_until
from tests.support.ssh_jobs import job, pid_on

pytestmark = pytest.mark.ssh

MOST_THREADS = 64


def logins(lab: Any) -> int:
    """Processes of logins."""
    return sum(len(node.sshd_pids()) - 1 for node in lab.nodes)


def test_the_logins_end_and_records_go_both_ways(make_lab) -> None:
    lab = make_lab(2)
    with connecting(lab, connects=True) as them:
        them.start(env={"ECHO_ERRORS": "first second"})
        connected, failures = them.settle()
        assert (len(connected), failures, them.not_connected) == (2, [], [])
        wait_until(lambda: logins(lab) == 0)
        for handle in them.handles.values():
            for number in range(50):
                handle.send(SweepNode(str(number) * 20_000, ()))
            handle.end_input()
        assert len(them.wait_for(ChannelClosed, 2)) == 2
        for name, handle in them.handles.items():
            lengths = [int(text.split()[0]) for text in them.texts(name) if "bytes" in text]
            assert [nbytes - nbytes % 20_000 for nbytes in lengths] == [20_000] * 10 + [40_000] * 40
            assert [text for text in them.texts(name) if text.startswith(name)] == [f"{name}: first", f"{name}: second"]
            assert handle.close() == 7
        wait_until(lambda: lab.leftovers() == {})


def test_the_secret_is_in_no_environment_and_no_command_line(make_lab) -> None:
    lab = make_lab(1)
    with connecting(lab, connects=True) as them:
        them.start()
        them.settle()
        assert them.listener
        secret = them.listener._server.secret.encode()
        for pid in lab["node1"].pids():
            for name in ("environ", "cmdline"):
                assert secret not in Path(f"/proc/{pid}/{name}").read_bytes()


@pytest.mark.parametrize("victim", ["ddplaunch relay", "DDPLAUNCH_START"])
def test_agent_and_relay_end_with_each_other(make_lab, victim: str) -> None:
    lab = make_lab(2)
    with connecting(lab, connects=True) as them:
        them.start()
        them.settle()
        os.kill(pid_on(lab["node1"], victim), signal.SIGKILL)
        them.wait_for(ChannelClosed)
        wait_until(lambda: not lab["node1"].pids())
        them.handles["node2"].send(SweepNode("still there", ()))
        them.wait_for(Notice, 2, host="node2")
        assert them.handles["node1"].close() is None


def test_a_node_that_cannot_reach_the_launcher_stays_connected_over_ssh(make_lab) -> None:
    lab = make_lab(1)
    with connecting(lab) as them:
        them.listener = listener_of(them.connections, local_addr="127.0.0.1")  # On the node, that is the node itself.
        port = them.listener._server.port
        them.start()
        connected, _ = them.settle()
        assert len(connected) == 1
        why = f"node1: it cannot connect to the launcher at 127.0.0.1:{port} (Connection refused)"
        assert them.not_connected == [why]
        assert logins(lab) > 0
        them.handles["node1"].send(SweepNode("x", ()))
        them.wait_for(Notice, 2)
        assert them.handles["node1"].close() == 7


def test_another_program_that_answers_is_not_the_launcher(make_lab) -> None:
    """Its certificate is another one: the node says nothing to it."""
    lab = make_lab(1)
    with connecting(lab, connects=True) as them:
        assert them.listener
        other = listener_of(them.connections)
        them.listener._given["port"] = other._server.port
        them.start()
        them.settle()
        (why,) = them.not_connected
        assert "certificate verify failed" in why
        other.close()


SESSION = "0::/user.slice/user-0.slice/session-3.scope\n"
SERVICE = "0::/system.slice/system-ssh.slice/ssh@7-10.0.0.1:22-10.0.0.2:5.service\n"


@pytest.mark.parametrize(
    ("group", "answer", "why"),
    [
        (SESSION, "b true", "KillUserProcesses=yes"),
        (SESSION, "b false", ""),
        (SESSION, "", ""),
        (SERVICE, "", "a service of its own"),
    ],
)
def test_a_login_that_systemd_would_end_with_all_its_processes_stays(
    make_lab, tmp_path: Path, group: str, answer: str, why: str
) -> None:
    """busctl and the control group of the login are of this test: there is no systemd here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "busctl").write_text(f"#!/bin/sh\necho {answer}\n")
    (folder / "busctl").chmod(stat.S_IRWXU)
    (tmp_path / "sitecustomize.py").write_text(
        f"import ddplaunch.features.remote.relay as relay\nrelay.CGROUP = {str(tmp_path / 'cgroup')!r}\n"
    )
    (tmp_path / "cgroup").write_text(group)
    lab = make_lab(1, node1=NodeOptions(home={".bashrc": f"PATH={folder}:$PATH"}))
    with connecting(lab, connects=True) as them:
        root = Path(__file__).parents[2]
        them.start(env={"PYTHONPATH": f"{root}:{tmp_path}"})
        connected, _ = them.settle()
        assert len(connected) == 1
        assert len(them.not_connected) == bool(why)
        assert all(why in told for told in them.not_connected)


def test_the_launcher_of_many_hosts_has_few_threads_and_goes_on_without_one_of_them(make_lab, tmp_path: Path) -> None:
    lab = make_lab(20)
    end = tmp_path / "end"
    wait = f"until [ -e {end} ]; do sleep 0.1; done; echo over"
    options = ("--nnodes", "15:20", "--nproc-per-node", "1", "--no-python")
    running = job(lab, *options, "sh", "-c", f"echo began; {wait}")
    launcher, most = psutil.Process(running.pid), 0

    def all_began() -> bool:
        nonlocal most
        most = max(most, launcher.num_threads())
        return len(running.lines) == 20

    wait_until(all_began, 60)
    assert most <= MOST_THREADS
    wait_until(lambda: logins(lab) == 0)
    assert launcher.num_threads() < 24
    os.kill(pid_on(lab["node5"], "ddplaunch relay"), signal.SIGKILL)
    running.wait_for("began", 20 + 15)  # On a busy machine others may be lost, too.
    end.touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err
    assert 15 <= finished.out.count("over") <= 19
    assert "node5" in finished.err
    assert lab.leftovers() == {}


@pytest.mark.parametrize(
    ("reasons", "hints"),
    [
        (["a: it cannot connect to the launcher at b:1 (timed out)", "c: it cannot connect to the launcher at b:1"], 1),
        (["a: systemd ends there what a login has started", "c: it cannot connect to the launcher at b:1"], 0),
    ],
)
def test_the_first_node_that_stays_on_ssh_is_told_with_a_hint_only_if_that_would_help(
    reasons: list[str], hints: int
) -> None:
    posted: list[Any] = []
    listener = SimpleNamespace(has_told=False, some_cannot_connect=False)
    for reason in reasons:
        SshTransport._on_not_connected(posted.append, listener, reason)
    (notice,) = posted
    assert notice.text.startswith(reasons[0])
    assert notice.text.count("--local-addr") == hints
    assert listener.some_cannot_connect


def test_behind_a_jump_host_nodes_stay_connected_over_ssh_and_that_is_told_once(make_lab) -> None:
    """They see the address of the jump host, where nobody listens."""
    lab = make_lab(18)
    jumps = "Host *\n  ProxyJump node1\n"
    lab.ssh_config.write_text(f"{lab.config_of(lab['node1'])}{jumps}{lab.ssh_config.read_text()}")
    names = ",".join(node.name for node in lab.nodes[1:])
    finished = job(lab, "--nproc-per-node", "1", "--no-python", "sh", "-c", "echo began", hosts=names).finish()
    assert finished.returncode == 0, finished.err
    assert finished.out.count("began") == 17
    assert finished.err.count(f"cannot connect to the launcher at {lab['node1'].address}") == 1


def site(folder: Path, text: str) -> dict[str, str]:
    """Variables with which a node's Python runs ``text`` first."""
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": f"{Path(__file__).parents[2]}:{folder}"}


def test_a_node_whose_python_has_no_ssl_stays_connected_over_ssh(make_lab, tmp_path: Path) -> None:
    lab = make_lab(1)
    with connecting(lab, connects=True) as them:
        them.start(env=site(tmp_path, "import sys; sys.modules['_ssl'] = None"))
        connected, failures = them.settle()
        assert (len(connected), failures) == (1, [])
        (why,) = them.not_connected
        assert "_ssl" in why


def test_a_launcher_that_answers_too_late_serves_the_agent_over_ssh(
    make_lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been stopped or busy for some seconds: the node has given up the connection that now arrives."""
    lab = make_lab(1)
    with connecting(lab, connects=True) as them:
        assert them.listener
        server = them.listener._server
        let_in = server._on_hello

        def let_in_late(stranger: Any, hello: str) -> None:
            if hello.startswith(RECORDS):
                wait_until(lambda: them.not_connected)
            let_in(stranger, hello)

        monkeypatch.setattr(server, "_on_hello", let_in_late)
        them.start(env=site(tmp_path, "import ddplaunch.features.remote.relay as relay; relay._TRY_S = 0.5"))
        connected, _ = them.settle()
        handle = them.handles["node1"]
        for number in range(50):
            handle.send(SweepNode(str(number), ()))
        them.wait_for(Notice, 51)
        assert handle.close() == 7
        them.wait_for(ChannelClosed)
        assert len(connected) == len(them.of(NodeFacts)) == len(them.of(ChannelClosed)) == 1


def test_an_agent_that_fails_before_its_facts_is_told_of_at_once(make_lab, tmp_path: Path) -> None:
    """It has connected, and its login has ended already."""
    lab = make_lab(1)
    exits = "import ddplaunch.version as v, os, json; dumps = json.dumps\n"
    exits += (
        "json.dumps = lambda body: dumps(body) if 'has_connected' in body else os.write(2, b'Oh!\\n') and os._exit(3)"
    )
    with connecting(lab, connects=True) as them:
        them.start(env=site(tmp_path, exits))
        _, (failure,) = them.settle()
        assert "Oh!" in failure.message


def test_only_an_exit_code_is_read_as_one(make_lab, capfd: pytest.CaptureFixture[str]) -> None:
    lab = make_lab(1)
    with connecting(lab, connects=True) as them:
        them.start()
        them.settle()
        handle = them.handles["node1"]
        for code in ("x", "", "-9", "9" * 5000, "\u0661"):
            handle._io.call(lambda code=code: handle._on_error_line(EXITED + code))
        assert handle.close() == 7
    assert "Traceback" not in capfd.readouterr().err


def test_without_room_for_a_thread_a_node_that_stays_connected_over_ssh_fails(
    make_lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_no_thread(name: str, work: Any) -> None:
        if name.startswith("from"):
            raise RuntimeError("can't start new thread")
        in_thread(name, work)

    monkeypatch.setattr(handle_module, "in_thread", in_no_thread)
    lab = make_lab(1)
    with connecting(lab) as them:
        them.start()
        connected, (failure,) = them.settle()
        assert (len(connected), "no room for a thread" in failure.message) == (0, True)


def test_once_a_node_cannot_connect_the_next_ones_do_not_try(make_lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try would take 3 s where a firewall drops what they send, and 100 hosts are started at a time."""
    monkeypatch.setattr(connections, "MAX_STARTS", 1)
    lab = make_lab(3)
    with connecting(lab) as them:
        them.listener = listener_of(them.connections, local_addr="127.0.0.1")
        them.start()
        connected, _ = them.settle()
        assert len(connected) == 3
        assert ["Connection refused" in why for why in them.not_connected] == [True, False, False]
        assert them.not_connected[2].endswith("other nodes cannot connect to the launcher")
