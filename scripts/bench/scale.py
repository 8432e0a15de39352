"""What the launcher's process uses for up to 10,000 nodes of 8 ranks: the real ``Run``, simulated agents over TCP.

Of each phase of a job: CPU seconds, memory, threads, descriptors, the longest time between two pings of a node, which
are to come every second, and for how long the main thread looked for neither events nor signals. Below each phase the
exponent of the growth from the second smallest size to the largest: 1 is in proportion to the number of nodes.

Pings are sent in their own phases only, or with ``BENCH_PINGS=1`` in all: other load makes phases longer, and pings
would be most of their CPU time.

The agents are in another process (``agents.py``), and their CPU time does not count. One thread reads, one
decodes, and one writes, for all of them. ``BENCH_NODES`` chooses other sizes. Each size runs in a separate process.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import platform
import queue
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents import WORKERS, Agents, Launcher, host_name
from common import size
from page import made

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig, OutputConfig, WorkerConfig
from ddplaunch.features.remote import remote_start
from ddplaunch.launcher import launch, pings, run, setup
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import Ping, Pong
from ddplaunch.system import signals
from ddplaunch.timeouts import TimeoutConfig
from ddplaunch.transport.handle import (
    _LARGE_BYTES,
    AgentHandle,
    ChannelClosed,
    FromNode,
    NodeFacts,
    late_types,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.sharedctypes import Synchronized

    from ddplaunch.protocol.launcher_agent import Output

SIZES = size("BENCH_NODES", (64, 256, 1024, 4000, 10_000), (2, 8))
LOST_AFTER_S = 300.0
"""Other load of the machine must end no job."""

ALWAYS_PINGS = os.environ.get("BENCH_PINGS", "") not in ("", "0")
JOBS = ("fails", "is stopped")
SMALL_CPU_S, SMALL_MB = 0.01, 20.0
"""Figures below these are not compared: the exponent would be one of the clock or of the interpreter."""


class Channels:
    """The transport to the simulated agents, and the two threads that serve all of them."""

    is_remote = True

    def __init__(self, count: int, listener: socket.socket, handled: Synchronized[int]) -> None:
        self.node_names = tuple(map(host_name, range(count)))
        self.handles: list[Handle] = []
        self.outgoing: queue.SimpleQueue[tuple[Handle, object]] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[Handle] = queue.SimpleQueue()
        self._listener, self._handled = listener, handled
        self._selector = selectors.EpollSelector()

    def begin(self, post: Callable[[object], None], output: Callable[[Output, bytes], None]) -> None:
        self._post, self._output = post, output
        for target in (self._write, self._read, self._decode):
            threading.Thread(target=_or_exit, args=(target,), daemon=True).start()

    def start(self, index: int) -> Handle:
        channel, _ = self._listener.accept()
        handle = Handle(index, channel, self, self._post, self._show)
        self.handles.append(handle)
        self._selector.register(channel, selectors.EVENT_READ, handle)
        return handle

    def _show(self, header: Output, data: bytes) -> None:
        self._output(header, data)
        self._handled.value += 1

    def start_together(self) -> None: ...

    def close(self) -> None: ...

    def _write(self) -> None:
        while True:
            handle, record = self.outgoing.get()
            with contextlib.suppress(OSError):
                handle.write(record)

    def _read(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if not key.data.read():
                    self._selector.unregister(key.fileobj)
                self._arrived.put(key.data)

    def _decode(self) -> None:
        while True:
            self._arrived.get().deliver()


def _or_exit(work: Callable[[], None]) -> None:
    """Nobody waits for these threads: an error must end the benchmark."""
    try:
        work()
    finally:
        traceback.print_exc()
        os._exit(1)


class Handle(AgentHandle):
    """The handle of a simulated agent; keeps when its pings were sent."""

    def __init__(
        self,
        index: int,
        channel: socket.socket,
        channels: Channels,
        post: Callable[[object], None],
        output: Callable[[Output, bytes], None],
    ) -> None:
        super().__init__(f"on {host_name(index)}", lambda event: post(FromNode(index, event)), output)
        self._channel, self._channels, self.pinged_at = channel, channels, list[float]()
        self._unread, self._rest = deque[bytes](), bytearray()
        facts = {"pid": 1, "python": "3.11.0", "ddplaunch": "0.1", "torch": "2.13"}
        self._post(remote_start.read_facts(remote_start.FACTS_PREFIX + json.dumps(facts).encode()))

    def send(self, record: object) -> None:
        self._channels.outgoing.put((self, record))

    def write(self, record: object) -> None:
        if record is None:
            self._channel.shutdown(socket.SHUT_WR)
            return
        self._channel.sendall(wire.encode(record))
        if isinstance(record, Ping):
            self.pinged_at.append(time.monotonic())

    def read(self) -> bool:
        """Take what has arrived, which is an answer. Returns whether more may come."""
        data = self._channel.recv(1 << 18)
        self._unread.append(data)
        self.heard_at = math.inf if len(data) > _LARGE_BYTES else time.monotonic()
        return bool(data)

    def deliver(self) -> None:
        """Deliver the records of which all has arrived."""
        while self._unread:
            data = self._unread.popleft()
            if not data:
                self._post(ChannelClosed())
            self._rest += data
            if b"\n" in data:
                while (end := self._rest.find(b"\n") + 1) and self._deliver_one(end):
                    pass

    def _deliver_one(self, end: int) -> bool:
        """Deliver the record whose line is the first ``end`` bytes, if all of it has come."""
        with self._decoding(end):
            record = wire.decode(bytes(self._rest[:end]), self.accepted, late_types)
        whole = end + (record.nbytes if isinstance(record, wire.Chunk) else 0)
        if len(self._rest) < whole:
            return False
        self._deliver(record, bytes(self._rest[end:whole]))
        del self._rest[:whole]
        return True

    def wake(self) -> None: ...

    def kill(self) -> None: ...

    def end_input(self) -> None:
        self.send(None)

    def close(self, timeout_s: float = 5.0) -> int:
        self._channel.close()
        return 0


class WatchedMailbox(Mailbox[object]):
    """Counts the records that have been handled, and keeps when the main thread looked for events or signals."""

    def __init__(self, handled: Synchronized[int]) -> None:
        super().__init__()
        self.busy: list[tuple[float, float]] = []
        self._left_at = time.monotonic()
        self._handled, self._is_handling = handled, False

    def get(self, deadline: float = math.inf) -> object:
        self._look()
        self._handled.value += self._is_handling
        event = super().get(deadline)
        is_record = isinstance(event, FromNode) and not isinstance(event.event, Pong | NodeFacts | ChannelClosed)
        self._is_handling = is_record and deadline > 0  # 0: the launcher only looks, while it starts nodes.
        self._left_at = time.monotonic()
        return event

    def take(self, is_wanted: Callable[[object], bool]) -> list[object]:
        self._look()
        return super().take(is_wanted)

    def _look(self) -> None:
        now = time.monotonic()
        self.busy.append((self._left_at, now))
        self._left_at = now


@contextlib.contextmanager
def job(count: int, name: str, folder: Path, handled: Synchronized[int], phases: list[Any]) -> Iterator[socket.socket]:
    """The socket to which ``count`` agents connect; they have ended, and ``phases`` is filled, after the block."""
    context = multiprocessing.get_context("fork")
    is_pinging, beat = context.Value("q", int(ALWAYS_PINGS), lock=False), pings.Pings.beat
    pings.Pings.beat = lambda self: beat(self) if is_pinging.value else None  # type: ignore[method-assign]
    (results, told), launcher = context.Pipe(duplex=False), Launcher(os.getpid(), handled, is_pinging)
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:

        def serve() -> None:
            port = listener.getsockname()[1]
            listener.close()
            agents = Agents(count, port, folder, launcher)
            agents.run(is_stopped=name == "is stopped")
            told.send([asdict(phase) for phase in agents.phases])

        process = context.Process(target=serve)
        process.start()
        told.close()
        try:
            yield listener
            handled.value = -1  # The end.
            phases += results.recv()
        finally:
            process.terminate()
            process.join()


def measure(count: int, name: str) -> list[dict[str, Any]]:
    """The phases of a job of ``count`` nodes."""
    handled, phases = multiprocessing.get_context("fork").Value("q", 0, lock=False), list[Any]()
    with tempfile.TemporaryDirectory() as base, open(os.devnull, "w") as null:
        folder = Path(base)
        with job(count, name, folder, handled, phases) as listener:  # type: ignore[arg-type]
            mailbox = WatchedMailbox(handled)  # type: ignore[arg-type]
            channels = Channels(count, listener, handled)  # type: ignore[arg-type]

            def transport_for(_config: object, _tag: str, output: Any, post: Any, *_: object) -> Channels:
                channels.begin(post, output)
                return channels

            setup.transport_for = transport_for  # type: ignore[assignment]
            hosts = tuple(map(Host, channels.node_names))
            workers, output = WorkerConfig(nproc_per_node=WORKERS), OutputConfig(log_dir=base, page=False)
            config = LaunchConfig(
                script="train.py", hosts=hosts, min_nodes=count, max_nodes=count, workers=workers, output=output,
                max_restarts=1, timeouts=TimeoutConfig(lost_after_s=LOST_AFTER_S),
            )  # fmt: skip
            with (
                launch.without_full_collections(),
                signals.post_signals(config.signals, mailbox.post, ends_process=True),
                contextlib.closing(setup.open_console(config, folder, null.fileno())) as console,
            ):
                result = run.Run(config, "scale", "scale", None, mailbox, folder, console).run()
        assert len(result.attempts) == (2 if name == "fails" else 1), result.outcome
        with_pings(phases, channels.handles, mailbox.busy)
        if name == "fails":
            cpu_s = memory_mb = math.inf
            with contextlib.suppress(subprocess.CalledProcessError):  # The process ends itself after a minute.
                _, cpu_s, memory_mb = made(folder)
            phases.append({"name": "run.html, by a process of its own", "cpu_s": cpu_s, "peak_mb": memory_mb})
    return phases


def with_pings(phases: list[dict[str, Any]], handles: list[Handle], busy: list[tuple[float, float]]) -> None:
    """Add the longest times of each phase without a ping, and for which the main thread was busy."""
    ends = [*(phase["began_at"] for phase in phases[1:]), time.monotonic()]
    gaps = [gap for handle in handles for gap in zip(handle.pinged_at, handle.pinged_at[1:], strict=False)]
    for phase, end in zip(phases, ends, strict=True):
        for name, times in (*((("gap_s", gaps),) if ALWAYS_PINGS else ()), ("busy_s", busy)):
            within = (until - since for since, until in times if until > phase["began_at"] and since < end)
            phase[name] = max(within, default=0.0)


# The result table.


def measured(count: int, name: str) -> list[dict[str, Any]]:
    """As ``measure``, in a separate process."""
    done = subprocess.run((sys.executable, __file__, str(count), name), stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode:
        sys.exit(f"{count} nodes, {name}: {done.returncode}\n{done.stderr.decode()[-3000:]}")
    phases: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return phases


def exponent(values: list[tuple[int, float]], least: float) -> str:
    """Of the growth between the first and the last size with a value of at least ``least``."""
    large = [(count, value) for count, value in values if value >= least]
    if len(large) < 2:
        return "-"
    (few, small), (many, big) = large[0], large[-1]
    return f"{math.log(big / small) / math.log(many / few):.2f}"


def print_row(name: str, phases: dict[int, dict[str, Any]]) -> None:
    for count, phase in phases.items():
        figures = [f"{phase['cpu_s']:.3f} s", f"{phase['peak_mb']:.0f} MB"]
        figures += [f"{phase[key]:,}" if key in phase else "" for key in ("threads", "descriptors")]
        figures += [f"{phase[key]:.2f} s" if key in phase else "" for key in ("wall_s", "gap_s", "busy_s")]
        print(f"| {name} | {count:,} | {' | '.join(figures)} |")
    grown = [exponent([(count, phase[key]) for count, phase in phases.items()], least)
             for key, least in (("cpu_s", SMALL_CPU_S), ("peak_mb", SMALL_MB))]  # fmt: skip
    print(f"| | exponent | {' | '.join(grown)} | | | | | |", flush=True)


def main() -> None:
    if len(sys.argv) == 3:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with contextlib.redirect_stdout(sys.stderr):
            phases = measure(int(sys.argv[1]), sys.argv[2])
        print(json.dumps(phases))
        return
    print(f"{os.cpu_count()} cores, {platform.machine()}, {time.strftime('%Y-%m-%d')}; {WORKERS} workers a node\n")
    heads = ("phase", "nodes", "CPU", "memory at most", "threads", "descriptors", "took", "no ping for", "busy for")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name in JOBS:
        by_size = {count: measured(count, name) for count in SIZES}
        for number, phase in enumerate(by_size[SIZES[0]]):
            if name == JOBS[0] or phase["name"].startswith("Ctrl-C"):
                print_row(phase["name"], {count: phases[number] for count, phases in by_size.items()})


if __name__ == "__main__":
    main()
