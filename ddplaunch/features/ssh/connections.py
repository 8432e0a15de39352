"""Connects to many hosts at a time, with shared connections to jump hosts, keys and known hosts.

Runs in the launcher, in a pool of threads. Limits simultaneous logins and attempts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddplaunch.config import RemoteConfig
from ddplaunch.features.remote.io_thread import IoThread
from ddplaunch.features.ssh import session, sockets
from ddplaunch.features.ssh.config import ConfigError, ConnectFailed, HostConfig, resolve
from ddplaunch.features.ssh.keys import KeyRing, OncePerKey
from ddplaunch.features.ssh.known_hosts import KnownHosts
from ddplaunch.protocol import first_failure
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    import socket

    import paramiko

    from ddplaunch.cluster.hosts import Host

_MIN_LIMIT = 4
_MAX_JUMPS = 8
_PROXY_TRIES = 3
_PROXY_END_S = 1.0
_MIN_WAIT_S, _MAX_WAIT_S = 0.2, 5.0


_MAX_LOGINS = 20
"""Logins at the same time: an encrypted handshake is CPU time of the launcher, and sshd refuses too many."""

MAX_STARTS = 100
"""Hosts on which agents are started at the same time. Each takes two threads: of the pool, and paramiko's. It is more
than logins, since a host may be slow to load Python, and a --remote-setup may take long."""


class LoginLimiter:
    """Limits simultaneous logins: halved when a server is overloaded, raised slowly while logins succeed."""

    def __init__(self, max_limit: int) -> None:
        self._max_limit = self._limit = float(max(1, max_limit))
        self._active = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._active < int(self._limit))
            self._active += 1

    def __exit__(self, _type: type[BaseException] | None, error: BaseException | None, _tb: object) -> None:
        with self._changed:
            self._active -= 1
            if isinstance(error, ConnectFailed) and error.is_overload:
                self._limit = max(min(_MIN_LIMIT, self._max_limit), self._limit / 2)
            elif error is None:
                self._limit = min(self._max_limit, self._limit + 0.5)
            self._changed.notify_all()


class Connections:
    """Connects to the hosts of one run, in a pool of threads. Any thread.

    A refused login is not repeated: sshd from OpenSSH 9.8 on bans machines with failed logins (PerSourcePenalties).
    """

    def __init__(self, settings: RemoteConfig) -> None:
        """Raises OSError or RuntimeError: no room for a descriptor or a thread."""
        self.settings = settings
        self.io = IoThread("connections of agents")
        self._pool_lock = threading.Lock()
        self._pool_size = 0
        self._waiting: deque[Callable[[], object]] = deque()
        self._jump_settings = RemoteConfig(config=settings.config, accept_new=settings.accept_new)
        self._limiter = LoginLimiter(_MAX_LOGINS)
        self._keys = KeyRing()
        self._known: OncePerKey[KnownHosts] = OncePerKey()
        self._jump_configs: OncePerKey[HostConfig] = OncePerKey()
        self._jumps: OncePerKey[paramiko.Transport] = OncePerKey(is_good=lambda transport: transport.is_active())
        self._proxies: list[subprocess.Popen[bytes]] = []
        self._jump_transports: list[paramiko.Transport] = []
        self._closed = threading.Event()

    def in_pool(self, work: Callable[[], object]) -> None:
        """Call ``work``, which must not raise, in one of ``MAX_STARTS`` threads, which end when there is no more work.

        Raises:
            RuntimeError: no room for the first thread.
        """
        with self._pool_lock:
            self._waiting.append(work)
            if self._pool_size < MAX_STARTS:
                try:
                    in_thread("login", self._run_pool)
                    self._pool_size += 1
                except RuntimeError:
                    if not self._pool_size:
                        raise

    def _run_pool(self) -> None:
        while True:
            with self._pool_lock:
                if not self._waiting:
                    self._pool_size -= 1
                    return
                work = self._waiting.popleft()
            work()

    def connect(self, host: Host) -> paramiko.Transport:
        """A logged-in connection to ``host``, which the caller closes. Blocks while too many logins are in progress.

        Raises:
            ConnectFailed: after ``ConnectFailed.max_attempts`` attempts.
        """
        config = _resolved(host, self.settings)
        chain = self._chain(config, 0)
        return self._retry(config, chain, self._limiter)

    def close(self) -> None:
        """Close the connections to jump hosts, hence all connections through them, and stop further attempts."""
        self._closed.set()
        for transport in self._jump_transports:
            session.close_now(transport)
        for process in self._proxies:
            process.kill()
            process.wait()
        self.io.close()

    def _retry(
        self, config: HostConfig, chain: tuple[HostConfig, ...], limiter: LoginLimiter | None = None
    ) -> paramiko.Transport:
        wait_s = _MIN_WAIT_S
        for attempt in itertools.count(1):
            try:
                with limiter or contextlib.nullcontext():
                    return self._try(config, chain)
            except ConnectFailed as error:
                if attempt >= error.max_attempts or self._closed.is_set():
                    raise
            self._closed.wait(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(_MAX_WAIT_S, 2 * wait_s)
        raise AssertionError("count() does not end")

    def _try(self, config: HostConfig, chain: tuple[HostConfig, ...]) -> paramiko.Transport:
        if self._closed.is_set():
            raise ConnectFailed("start", "cancelled")
        known = self._known_hosts(config)
        jump = self._jump_transport(chain) if chain else None
        deadline = time.monotonic() + self.settings.connect_timeout_s
        stream: socket.socket | paramiko.Channel
        if jump:
            stream = sockets.open_through(jump, chain[-1].name, config, deadline)
        elif config.proxy_command:
            return self._try_proxy(config, known, deadline)
        else:
            stream = sockets.open_tcp(config, deadline)
        return session.connect(self.io, stream, config, known, self._keys, deadline)

    def _try_proxy(self, config: HostConfig, known: KnownHosts, deadline: float) -> paramiko.Transport:
        stream, process = sockets.open_proxy(config)
        self._proxies.append(process)
        try:
            return session.connect(self.io, stream, config, known, self._keys, deadline)
        except ConnectFailed as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if error.is_overload and process.wait(_PROXY_END_S):
                    ended = first_failure.ended(process.returncode)
                    raise ConnectFailed("jump", f"its ProxyCommand {ended}", max_attempts=_PROXY_TRIES) from None
            raise

    def _known_hosts(self, config: HostConfig) -> KnownHosts:
        files = (config.known_hosts, config.revoked_host_keys)
        try:
            return self._known.get(files, lambda: KnownHosts(*files))
        except OSError as error:
            raise ConnectFailed("host key", f"{error.filename} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConnectFailed("host key", str(error), "Convert it to a text file of public keys.") from None

    def _chain(self, config: HostConfig, depth: int) -> tuple[HostConfig, ...]:
        """The jump hosts in the order of the connections; the first one's own jump hosts come before it."""
        if depth > _MAX_JUMPS:
            raise ConnectFailed("configuration", "its ProxyJump goes in a circle")
        chain: tuple[HostConfig, ...] = ()
        for number, host in enumerate(config.jumps):
            jump = self._jump_configs.get(host, functools.partial(_resolved, host, self._jump_settings))
            if jump.hostname == config.hostname and jump.port == config.port:
                return ()  # `Host *` with a ProxyJump applies to the jump host too.
            chain += (*(self._chain(jump, depth + 1) if number == 0 else ()), jump)
        return chain

    def _jump_transport(self, chain: tuple[HostConfig, ...]) -> paramiko.Transport:
        """The shared connection to the last jump host of the chain."""
        try:
            return self._jumps.get(chain, lambda: self._connect_jump_transport(chain))
        except ConnectFailed as error:
            message = error.message if error.cause == "jump" else f"jump host {chain[-1].name}: {error.message}"
            raise ConnectFailed("jump", message, error.hint) from None

    def _connect_jump_transport(self, chain: tuple[HostConfig, ...]) -> paramiko.Transport:
        transport = self._retry(chain[-1], chain[:-1])
        self._jump_transports.append(transport)
        return transport


def _resolved(host: Host, settings: RemoteConfig) -> HostConfig:
    try:
        return resolve(host, settings)
    except ConfigError as error:
        raise ConnectFailed("configuration", str(error), f"`ssh -G {host.name}` must work.") from None
