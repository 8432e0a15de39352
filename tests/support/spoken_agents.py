"""Agents on other machines of which nothing runs: what they say is written down, and goes through the real decoder."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import threading
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from ddplaunch import features
from ddplaunch.config import LaunchConfig
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import (
    AgentEnded,
    AgentReady,
    AttemptEnded,
    AttemptStarted,
    EndpointOpen,
    JoinRendezvous,
    Ping,
    Pong,
    StopWorkers,
    SweepNode,
)
from ddplaunch.protocol.results import AttemptResult, WorkerExit
from ddplaunch.protocol.specs import AgentSpec
from ddplaunch.transport.handle import (
    AgentHandle,
    ChannelClosed,
    NodeFacts,
    Post,
    Purpose,
    Transport,
    WriteOutput,
)

Answer = Callable[["SpokenHandle", object], None]
"""What an agent does when it gets a record."""


class SpokenHandle(AgentHandle):
    """An agent that says what ``answer`` makes of the records that it gets.

    The main thread calls all methods, and that of the pings ``send``: one record is answered after the other.
    """

    def __init__(self, name: str, post: Post, output: WriteOutput, answer: Answer) -> None:
        super().__init__(f"on {name}", post, output)
        self.heard: list[object] = []
        self.is_closed = False
        self._answer, self._answering = answer, threading.RLock()

    def say(self, *records: object) -> None:
        """As ``hear``, for records that can be sent."""
        self.hear(b"".join(map(wire.encode, records)))

    def hear(self, said: bytes) -> None:
        """The launcher reads this from the agent."""
        if not (self.is_closed or self._deliver_records(io.BytesIO(said))):
            self.end()

    def end(self) -> None:
        """The channel closes."""
        if not self.is_closed:
            self.is_closed = True
            self._post(ChannelClosed())

    def send(self, record: object) -> None:
        with self._answering:
            self.heard.append(record)
            if not self.is_closed:
                self._answer(self, record)

    def end_input(self) -> None:
        self.end()

    def wake(self) -> None: ...

    def kill(self) -> None:
        self.end()

    def close(self, timeout_s: float = 5.0) -> int | None:
        self.end()
        return None


class SpokenTransport(Transport):
    """The nodes ``hosts``; ``answers`` are those of their agents."""

    def __init__(
        self,
        config: LaunchConfig,
        hosts: tuple[str, ...],
        output: WriteOutput,
        post: Post,
        answers: Sequence[Answer],
    ) -> None:
        super().__init__(config, hosts, "tag", output, post)
        self._answers = answers

    @staticmethod
    def command(config: LaunchConfig, index: int) -> tuple[str, ...]:
        return ()

    def _start_agent(self, index: int, post: Post, output: WriteOutput, purpose: Purpose) -> SpokenHandle:
        answer = sweeping if purpose == "sweep" else self._answers[index]
        handle = SpokenHandle(self.node_names[index], post, output, answer)
        if purpose == "run":
            post(NodeFacts(torch="2.13"))
        return handle


def sweeping(agent: SpokenHandle, record: object) -> None:
    """An agent that finds no process of a lost node."""
    if isinstance(record, SweepNode):
        agent.say(AgentEnded())
        agent.end()


def honest(index: int, host: str, others: Sequence[int], may_end: Callable[[], bool]) -> Answer:
    """Node ``index`` of a world of one worker per node: it succeeds in attempt 0 once it ``may_end``."""
    here = WorkerExit(index, 0, host, 11, 0, stopped=False, time_s=1.0, duration_s=1.0)

    def answer(agent: SpokenHandle, record: object) -> None:
        match record:
            case AgentSpec():
                agent.say(AgentReady(1))
            case JoinRendezvous(rendezvous=config):
                if config.is_server:
                    agent.say(EndpointOpen(config.token, ("10.0.0.1",), 1234))
                world_size = len(others) + 1
                agent.say(AttemptStarted(0, world_size, (11,), index, world_size, index))
            case Ping(time_s=time_s):
                agent.say(Pong(time_s, time_s))
            case StopWorkers():
                agent.say(AttemptEnded(AttemptResult(0, "stopped", (), 1.0)), AgentEnded())
                agent.end()
        if may_end() and not agent.is_closed:
            agent.say(AttemptEnded(AttemptResult(0, "succeeded", (here,), 1.0)), AgentEnded())
            agent.end()

    return answer


# Records at random.

NUMBERS: dict[type, tuple[Any, ...]] = {
    int: (0, 1, 2, 3, 7, 15, 255, 1000, 1 << 22, 1 << 24, 1 << 60, (1 << 63) - 1),
    float: (0.0, 1.0, 0.25, 60.0, 1.8e9, -3.5, 1e12, 1e18),
}
TEXTS = (
    "",
    "node0",
    "w.cpu",
    "node1",
    "here",
    "out\nof\tline",
    "x" * 300,
    "GPU-1",
    "tag#1",
    "0",
    "1,2,-",
    "{}",
    "/etc",
    "é",
)
BAD: tuple[Any, ...] = (
    *(None, True, -1, 5, 1 << 31, 1 << 62, 10**30, 1e308, -1e308, float("nan"), float("inf")),
    *("", "/tmp/evil", "../../evil", "..", "x" * 5000, "\x1b]0;evil\x07", "node0", "node1", [], {}, [[]], {"a": 1}),
)
"""What JSON may have in place of a value."""


class Mutator:
    """Makes JSON of record types: values within their limits, and some that no agent would send."""

    def __init__(self, seed: int, share: float) -> None:
        """``share`` of all values are bad ones."""
        self.random = random.Random(seed)
        self._share = share

    def line(self, kind: type) -> bytes:
        """A record of this type, with the bytes that follow it."""
        body = {"record": kind.__name__, **self._fields(kind)}
        data = b"x" * body["nbytes"] if isinstance(body.get("nbytes"), int) and 0 <= body["nbytes"] < 1 << 16 else b""
        return json.dumps(body).encode() + b"\n" + (data if issubclass(kind, wire.Chunk) else b"")

    def _fields(self, kind: type) -> dict[str, Any]:
        hints = typing.get_type_hints(kind, include_extras=True)
        return {field.name: self._value(hints[field.name]) for field in dataclasses.fields(kind)}

    def _value(self, kind: Any) -> Any:
        if self.random.random() < self._share:
            return self.random.choice(BAD)
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return self._fields(kind)
        if isinstance(kind, type) and issubclass(kind, wire.Nested):
            chosen = self.random.choice([each for each in features.records(kind.direction) if issubclass(each, kind)])
            return {"record": chosen.__name__, **self._fields(chosen)}
        if origin is dict:
            return {key: self._value(args[1]) for key in (self._value(args[0]) for _ in range(2)) if type(key) is str}
        if origin in (typing.Union, types.UnionType):
            return self._value(self.random.choice(args))
        if origin is typing.Annotated:
            return self._within(args[0], args[1:])
        if origin is typing.Literal:
            return self.random.choice(args)
        if origin is tuple and args[-1] is not Ellipsis:
            return [self._value(arg) for arg in args]
        if origin in (tuple, frozenset):
            return [self._value(args[0]) for _ in range(self.random.randrange(3))]
        if kind in NUMBERS:
            return self.random.choice(NUMBERS[kind])
        return {bool: self.random.random() < 0.5, str: self.random.choice(TEXTS)}.get(kind)

    def _within(self, kind: Any, limits: Sequence[Any]) -> Any:
        known = {**NUMBERS, str: TEXTS}.get(kind)
        if known is None:
            return self._value(kind)
        fitting = [value for value in known if all(limit.accepts(value) for limit in limits)]
        return self.random.choice(fitting or known)
