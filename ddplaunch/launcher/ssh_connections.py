"""Connections to many hosts at a time, and what they share: jump hosts, keys, the files of known hosts."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import resource
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from ddplaunch import verdict
from ddplaunch.errors import LaunchError
from ddplaunch.launcher import ssh_sockets, ssh_transport
from ddplaunch.launcher.failures import Unreachable
from ddplaunch.launcher.known_hosts import KnownHosts
from ddplaunch.launcher.shared import Shared
from ddplaunch.launcher.ssh_config import ConfigError, HostConfig, SshSettings, resolve
from ddplaunch.launcher.ssh_keys import KeyRing

if TYPE_CHECKING:
    import socket

    import paramiko

    from ddplaunch.hosts import Host

_MIN_WIDTH = 4
_MAX_JUMPS = 8
_PROXY_TRIES = 3
_PROXY_END_S = 1.0
_MIN_WAIT_S, _MAX_WAIT_S = 0.2, 5.0


class Gate:
    """How many logins go on at a time: fewer when servers hang up, slowly more again while all is well."""

    def __init__(self, width: int) -> None:
        self._width = self._limit = float(max(1, width))
        self._active = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._active < int(self._limit))
            self._active += 1

    def __exit__(self, _type: type[BaseException] | None, error: BaseException | None, _tb: object) -> None:
        with self._changed:
            self._active -= 1
            if isinstance(error, Unreachable) and error.is_dropped:
                self._limit = max(min(_MIN_WIDTH, self._width), self._limit / 2)
            elif error is None:
                self._limit = min(self._width, self._limit + 0.5)
            self._changed.notify_all()


class Connections:
    """Connects to hosts for one run. Any thread.

    A login that was refused is never tried again: newer sshds ban the whole machine for it.
    """

    def __init__(self, settings: SshSettings) -> None:
        self.settings = settings
        self._jump_settings = SshSettings(config=settings.config, accept_new=settings.accept_new)
        self._gate = Gate(settings.width)
        self._ring = KeyRing()
        self._known: Shared[KnownHosts] = Shared()
        self._jump_configs: Shared[HostConfig] = Shared()
        self._jumps: Shared[paramiko.Transport] = Shared(is_good=lambda transport: transport.is_active())
        self._proxies: list[subprocess.Popen[bytes]] = []
        self._jump_transports: list[paramiko.Transport] = []
        self._closed = threading.Event()

    def connect(self, host: Host) -> paramiko.Transport:
        """A connection to ``host`` that is logged in and belongs to the caller.

        Blocks while others are being connected to.

        Raises:
            Unreachable: after as many tries as may help.
        """
        with self._gate:
            config = _resolved(host, self.settings)
            chain = self._chain(config, 0)
        return self._try_often(config, chain, self._gate)

    def close(self) -> None:
        """End the connections to jump hosts, and with them all that go through. Also stops further tries."""
        self._closed.set()
        for transport in self._jump_transports:
            ssh_transport.drop(transport)
        for process in self._proxies:
            process.kill()
            process.wait()

    def _try_often(
        self, config: HostConfig, chain: tuple[HostConfig, ...], gate: Gate | None = None
    ) -> paramiko.Transport:
        wait_s = _MIN_WAIT_S
        for tries in itertools.count(1):
            try:
                with gate or contextlib.nullcontext():
                    return self._try(config, chain)
            except Unreachable as error:
                if tries >= error.tries or self._closed.is_set():
                    raise
            self._closed.wait(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(_MAX_WAIT_S, 2 * wait_s)
        raise AssertionError("count() does not end")

    def _try(self, config: HostConfig, chain: tuple[HostConfig, ...]) -> paramiko.Transport:
        if self._closed.is_set():
            raise Unreachable("start", "was not waited for")
        known = self._known_hosts(config)
        jump = self._jump(chain) if chain else None
        deadline = time.monotonic() + self.settings.connect_timeout_s
        stream: socket.socket | paramiko.Channel
        if jump:
            stream = ssh_sockets.open_through(jump, chain[-1].name, config, deadline)
        elif config.proxy_command:
            return self._try_proxy(config, known, deadline)
        else:
            stream = ssh_sockets.open_tcp(config, deadline)
        return ssh_transport.connect(stream, config, known, self._ring, deadline)

    def _try_proxy(self, config: HostConfig, known: KnownHosts, deadline: float) -> paramiko.Transport:
        stream, process = ssh_sockets.open_proxy(config)
        self._proxies.append(process)
        try:
            return ssh_transport.connect(stream, config, known, self._ring, deadline)
        except Unreachable as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if error.is_dropped and process.wait(_PROXY_END_S):
                    ended = verdict.describe(process.returncode)
                    raise Unreachable("jump", f"its ProxyCommand ended by {ended}", tries=_PROXY_TRIES) from None
            raise

    def _known_hosts(self, config: HostConfig) -> KnownHosts:
        files = (config.known_hosts, config.revoked_host_keys)
        try:
            return self._known.get(files, lambda: KnownHosts(*files))
        except OSError as error:
            raise Unreachable("host key", f"{error.filename} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise Unreachable("host key", str(error), "Give it as a text file of public keys.") from None

    def _chain(self, config: HostConfig, depth: int) -> tuple[HostConfig, ...]:
        """The jump hosts on the way, the first first. One that is itself reached through others adds these."""
        if depth > _MAX_JUMPS:
            raise Unreachable("configuration", "its ProxyJump goes in a circle")
        chain: tuple[HostConfig, ...] = ()
        for number, host in enumerate(config.jumps):
            jump = self._jump_configs.get(host, functools.partial(_resolved, host, self._jump_settings))
            if jump.hostname == config.hostname and jump.port == config.port:
                return ()  # `Host *` with a ProxyJump holds for the jump host too.
            chain += (*(self._chain(jump, depth + 1) if number == 0 else ()), jump)
        return chain

    def _jump(self, chain: tuple[HostConfig, ...]) -> paramiko.Transport:
        """The one connection to the last of the chain, which all share."""
        try:
            return self._jumps.get(chain, lambda: self._connect_jump(chain))
        except Unreachable as error:
            message = error.message if error.cause == "jump" else f"jump host {chain[-1].name}: {error.message}"
            raise Unreachable("jump", message, error.hint) from None

    def _connect_jump(self, chain: tuple[HostConfig, ...]) -> paramiko.Transport:
        transport = self._try_often(chain[-1], chain[:-1])
        self._jump_transports.append(transport)
        return transport


def make_room(hosts: int, width: int) -> None:
    """Let this process have enough files open for that many hosts at a time.

    Raises:
        LaunchError: it may not.
    """
    needed = hosts + 4 * width + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        hint = "Raise it with `ulimit -n`, or let the administrator raise it for you (limits.conf, LimitNOFILE)."
        raise LaunchError(f"{hosts} hosts need {needed} open files, and this machine allows {hard}", hint)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _resolved(host: Host, settings: SshSettings) -> HostConfig:
    try:
        return resolve(host, settings)
    except ConfigError as error:
        raise Unreachable("configuration", str(error), f"`ssh -G {host.name}` must work.") from None
