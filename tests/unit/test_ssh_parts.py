"""The parts of connecting that need no server: configuration, sharing, slowing down."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import paramiko
import pytest

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import RemoteConfig
from ddplaunch.features.remote.io_thread import IoThread
from ddplaunch.features.ssh import config, keys, sockets
from ddplaunch.features.ssh.config import ConfigError, ConnectFailed, parse_jumps, resolve, selected_algorithms
from ddplaunch.features.ssh.connections import LoginLimiter
from ddplaunch.features.ssh.keys import KeyRing, OncePerKey
from ddplaunch.features.ssh.known_hosts import KnownHosts
from ddplaunch.features.ssh.session import connect
from tests.support import golden
from tests.support.processes import wait_until


@pytest.fixture(params=["ssh", "paramiko"])
def reader(request, monkeypatch):
    """Both ways to read the files must agree."""
    if request.param == "paramiko":
        monkeypatch.setattr(config.shutil, "which", lambda _: None)
    elif not config.shutil.which("ssh"):
        pytest.skip("no ssh")


CONFIG = (Path(__file__).parent / "data" / "ssh_config").read_text()


@pytest.mark.usefixtures("reader")
def test_the_files_are_read_as_ssh_reads_them(tmp_path):
    path = tmp_path / "config"
    path.write_text(CONFIG)
    config = resolve(Host("gpu1"), RemoteConfig(config=str(path)))
    assert (config.name, config.hostname, config.user, config.port) == ("gpu1", "gpu1.cluster", "worker", 2200)
    assert config.identity_files == (os.path.expanduser("~/keys/worker"),)
    assert config.jumps == (Host("fd00::1", "me", 2222), Host("second"))
    assert config.known_hosts == (Path("/k/one"), Path("/k/two"))
    assert (config.host_key_alias, config.accept_new) == ("cluster", True)
    assert (config.ssh_agent_socket, config.identities_only) == ("", True)
    assert dict(config.algorithms)["Ciphers"] == "aes256-ctr,aes128-ctr"
    assert dict(config.algorithms)["KexAlgorithms"] == "ecdh-sha2-nistp256"
    config = resolve(Host("proxied"), RemoteConfig(config=str(path)))
    assert config.proxy_command == "nc proxied 22 % someone"
    assert (config.identity_files, config.accept_new) == ((), False)


def test_algorithms_are_chosen_and_jumps_are_read_as_ssh_does():
    def told(question):
        keyword, _, text = question.partition(" ")
        if keyword == "Ciphers":
            return " ".join(selected_algorithms(text, ("a1", "a2", "b1", "b2")))
        try:
            return " ".join(map(str, parse_jumps(text)))
        except ConfigError as error:
            return f"refused: {error}"

    golden.check_answers("ssh_values", told)


@pytest.mark.usefixtures("reader")
def test_what_is_given_with_the_host_or_as_an_option_comes_first(tmp_path):
    path = tmp_path / "config"
    path.write_text(CONFIG.replace("%r", "mine"))
    given = str(path)
    settings = RemoteConfig(config=str(path), user="option", port=7, identity=given, accept_new=True)
    config = resolve(Host("gpu1", "host", 2020), settings)
    assert (config.user, config.port) == ("host", 2020)
    assert config.identity_files == (given, os.path.expanduser("~/keys/mine"))
    config = resolve(Host("other"), settings)
    assert (config.user, config.port, config.accept_new) == ("option", 7, True)


@pytest.mark.usefixtures("reader")
def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="config"):
        resolve(Host("gpu1"), RemoteConfig(config=str(tmp_path / "config")))
    with pytest.raises(ConfigError, match="--ssh-identity"):
        resolve(Host("gpu1"), RemoteConfig(identity=str(tmp_path / "key")))


def test_the_gate_lets_in_fewer_when_servers_hang_up_and_more_again_when_all_is_well():
    gate = LoginLimiter(8)

    def count(expected: int) -> int:
        """How many of twelve are inside, once as many are as ``expected``."""
        inside, release = [], threading.Event()

        def enter() -> None:
            with gate:
                inside.append(1)
                release.wait()

        threads = [threading.Thread(target=enter, daemon=True) for _ in range(12)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(inside) >= expected)
        seen = len(inside)
        release.set()
        for thread in threads:
            thread.join()
        return seen

    for _ in range(5):
        with pytest.raises(ConnectFailed), gate:
            raise ConnectFailed("TCP", "hung up", is_overload=True)
    assert count(4) <= 5
    for _ in range(20):
        with gate:
            pass
    assert count(8) == 8


def test_a_port_that_is_none_is_told_without_ssh_too(tmp_path, monkeypatch):
    monkeypatch.setattr(config.shutil, "which", lambda _: None)
    path = tmp_path / "config"
    path.write_text("Host gpu1\n  Port abc\n")
    with pytest.raises(ConfigError, match="Port abc: not a port"):
        resolve(Host("gpu1"), RemoteConfig(config=str(path)))


class HeldKey:
    """A key in an ssh-agent."""

    comment = "me"

    def __init__(self, key: paramiko.PKey) -> None:
        self._key = key

    def get_base64(self) -> str:
        return self._key.get_base64()


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="no ssh-keygen")
def test_a_certificate_is_tried_although_the_ssh_agent_holds_its_key(tmp_path):
    key = tmp_path / "key"
    for path in (key, tmp_path / "authority"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    sign = ["ssh-keygen", "-q", "-s", tmp_path / "authority", "-I", "me", "-n", "me", f"{key}.pub"]
    subprocess.run(sign, check=True)
    path = tmp_path / "config"
    path.write_text(f"Host gpu1\n  IdentityFile {key}\n  IdentitiesOnly yes\n")
    held = HeldKey(paramiko.PKey.from_path(key))
    found = keys._candidates(resolve(Host("gpu1"), RemoteConfig(config=str(path))), keys.KeyRing(), [held], [])
    assert [label for label, _ in found] == ["me (ssh-agent)", f"{key}-cert.pub"]


class Tunnel:
    """A channel of a jump host's connection that has just been closed."""

    closed = False

    def settimeout(self, _timeout_s: float) -> None:
        pass

    def send(self, _data: bytes) -> int:
        return 0

    def recv(self, _nbytes: int) -> bytes:
        return b""

    def close(self) -> None:
        self.closed = True
        raise EOFError


def test_a_connection_ends_in_silence_when_that_to_its_jump_host_has(monkeypatch):
    errors, tunnel = [], Tunnel()
    monkeypatch.setattr(threading, "excepthook", errors.append)
    jump = SimpleNamespace(open_channel=lambda *_, **__: tunnel)
    transport = paramiko.Transport(sockets.open_through(jump, "jump", resolve(Host("a"), RemoteConfig()), 0.0))
    transport.start_client(event=threading.Event())
    transport.join(10)
    assert tunnel.closed
    assert not errors


def test_a_connection_is_closed_for_the_peer_at_once_and_its_descriptor_when_nobody_waits_for_it_any_more(tmp_path):
    """Or that thread could wait for 30 s for the file that has got the number, and would keep it open for so long."""
    waits, go_on = threading.Event(), threading.Event()

    class Held(socket.socket):
        """A thread that reads from it is interrupted before it waits in the kernel."""

        def recv(self, *arguments):
            waits.set()
            go_on.wait(60)
            return super().recv(*arguments)

    io = IoThread("deadlines")
    ours, theirs = socket.socketpair()
    theirs.settimeout(60)
    held = Held(fileno=ours.detach())
    settings = resolve(Host("node1"), RemoteConfig(config=os.devnull))
    with theirs:
        with pytest.raises(ConnectFailed, match="its sshd does not"):
            connect(io, held, settings, KnownHosts([]), KeyRing(), time.monotonic() + 0.2)
        assert waits.is_set()
        assert theirs.makefile("rb").read().startswith(b"SSH-2.0-"), "and then the end"
    assert held.fileno() >= 0
    go_on.set()
    wait_until(lambda: held.fileno() == -1)
    io.close()


def test_a_shared_value_is_made_once_and_so_is_its_failure():
    made: list[int] = []
    shared: OncePerKey[int] = OncePerKey(is_good=lambda value: value > 1)

    def make() -> int:
        made.append(1)
        return len(made)

    assert shared.get("a", make) == 1
    assert shared.get("a", make) == 2  # 1 was not good any more.
    assert shared.get("a", make) == 2

    def fail() -> int:
        made.append(1)
        raise ConnectFailed("TCP", "no")

    before = len(made)
    for _ in range(3):
        with pytest.raises(ConnectFailed):
            shared.get("b", fail)
    assert len(made) == before + 1
