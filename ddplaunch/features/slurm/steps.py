"""Steps: runs srun for agents that wait for their start: as few steps as possible, at most 8 that start at a time.

Runs in the launcher, in the IoThread of ``srun``, but for ``start`` and ``close``. srun forwards its stdin only when
the step runs on all nodes, so no agent connects before: a step that SLURM refuses, because of one node, has started
none, and is tried again without that node.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.errors import UsageError
from ddplaunch.features.remote.caller import ON_NODE
from ddplaunch.features.remote.io_thread import READ_BYTES, IoThread, Lines
from ddplaunch.features.remote.start_limit import StartLimit
from ddplaunch.features.slurm import scontrol
from ddplaunch.features.slurm.reader import parse_node_list
from ddplaunch.system.limits import NO_ROOM_HINT
from ddplaunch.threads import post_from_thread
from ddplaunch.transport.failures import HostFailure

if TYPE_CHECKING:
    from ddplaunch.features.remote.call_back import CallBackHandle
    from ddplaunch.features.remote.remote_start import RemoteStart
    from ddplaunch.transport.handle import Purpose

MAX_STARTING = 8

_LABELLED = re.compile(r" *(\d+): ?(.*)")
_REFUSED = re.compile(r"srun: error: Task launch for \S+ failed on node (\S+): (.*)")
_KEPT_LINES = 20
_END_S, _KILLED_S = 1.0, 3.0
_LOOK_S = 0.05
_JOB_S = 5.0

Waiting = tuple[str, "CallBackHandle", "Purpose"]
"""SLURM's name of the node, the handle of its agent, and what that is started for."""


class Steps:
    """All steps of one launcher."""

    def __init__(
        self,
        io: IoThread,
        command: Callable[[Sequence[str]], Sequence[str]],
        stdin: Callable[[Sequence[RemoteStart]], bytes],
        env: Mapping[str, str],
    ) -> None:
        """``command`` starts a step on nodes with these names, in the environment ``env``, with the ``stdin``."""
        self._io, self._command, self._stdin, self._env = io, command, stdin, env
        self._waiting: list[Waiting] = []
        self._running: list[_Step] = []
        self._is_closing, self._all_over = False, threading.Event()

    # The main thread.

    def start(self, agents: Sequence[Waiting]) -> None:
        """Start these agents, by one step if they have one purpose; does not wait."""
        self._io.call(partial(self._add, agents))

    def close(self) -> None:
        """Start nothing more, and wait for the end of the steps: for a second, then they are killed."""
        self._io.call(self._begin_end)
        for limit_s, end in ((_END_S, subprocess.Popen.terminate), (_KILLED_S, subprocess.Popen.kill)):
            if self._all_over.wait(limit_s):
                return
            self._io.call(partial(self._signal, end))
        self._all_over.wait(_END_S)

    # The thread.

    def _begin_end(self) -> None:
        self._is_closing = True
        self._waiting.clear()
        self._look()

    def _signal(self, end: Callable[[subprocess.Popen[bytes]], None]) -> None:
        for step in self._running:
            end(step.srun)

    def _add(self, agents: Sequence[Waiting]) -> None:
        self._waiting += [] if self._is_closing else agents
        self._look()

    def _look(self) -> None:
        """Begin the steps for which there is room."""
        while self._waiting and sum(bool(step.starting) for step in self._running) < MAX_STARTING:
            common = _common(self._waiting[0])
            alike = [each for each in self._waiting if _common(each) == common]
            self._waiting = [each for each in self._waiting if _common(each) != common]
            if members := {name: handle for name, handle, _ in alike if not handle.is_over}:
                self._begin(members, common[0])
        if self._is_closing and not self._running:
            self._all_over.set()

    def _begin(self, members: dict[str, CallBackHandle], purpose: Purpose) -> None:
        stdin = self._stdin([handle.start for handle in members.values()])
        try:
            srun = _srun(self._command(list(members)), self._env, stdin)
        except OSError as error:
            for handle in members.values():
                failure = HostFailure(handle.host, "start", f"srun cannot be started: {error.strerror}", NO_ROOM_HINT)
                handle.on_failed(failure)
            return
        step = _Step(members, purpose, srun)
        for name, handle in members.items():
            handle.on_change = partial(self._on_change, step, name)
        self._running.append(step)
        assert srun.stdout
        self._io.watch(srun.stdout, selectors.EVENT_READ, partial(self._on_output, step))
        for handle in members.values():
            handle.limit = StartLimit(handle.start.timeout_s)
        self._look_at_limits(step)

    def _look_at_limits(self, step: _Step) -> None:
        if (due := step.end_late(time.monotonic())) < math.inf:
            self._io.at(due, partial(self._look_at_limits, step))

    def _on_change(self, step: _Step, name: str) -> None:
        step.on_change(name)
        if not step.starting:
            self._look()

    def _on_output(self, step: _Step) -> None:
        assert step.srun.stdout
        data = os.read(step.srun.stdout.fileno(), READ_BYTES)
        if data:
            step.lines.add(data)
            return
        self._io.forget(step.srun.stdout)
        step.srun.stdout.close()
        self._wait_for(step)

    def _wait_for(self, step: _Step) -> None:
        if step.srun.poll() is None:
            self._io.at(time.monotonic() + _LOOK_S, partial(self._wait_for, step))
            return
        self._running.remove(step)
        if len(step.starting) > 1 and not step.refused and not self._is_closing:
            otherwise: tuple[str, ...] = ()
            post_from_thread("scontrol", _nodes_of_job, partial(self._on_nodes_of_job, step), otherwise)
        else:
            self._without_refused(step)

    def _on_nodes_of_job(self, step: _Step, names: Sequence[str]) -> None:
        """In another thread: SLURM has answered which nodes the job has; none: it has not."""
        gone = set(step.starting) - set(names) if names else ()
        step.refused = dict.fromkeys(gone, "SLURM has taken it out of the job")
        self._io.call(partial(self._without_refused, step))

    def _without_refused(self, step: _Step) -> None:
        """The step has ended: nodes that were refused fail, and the others are started again; else all fail."""
        starting = dict(step.starting)
        refused = step.refused.keys() & starting.keys()
        for name in refused or starting:
            why = [step.refused[name]] if refused else step.words
            starting[name].on_failed(starting[name].not_started("srun", why))
        if refused and not self._is_closing:
            self._waiting += [(name, each, step.purpose) for name, each in starting.items() if name not in refused]
        self._look()


def _common(waiting: Waiting) -> tuple[Purpose, str]:
    """What agents that one step starts have in common: their purpose, and their interpreter."""
    _, handle, purpose = waiting
    return purpose, handle.start.python


class _Step:
    """One srun, and the agents that it starts.

    Attributes:
        starting: the handles of agents that are neither connected nor over, by SLURM's names of the nodes.
        refused: nodes that SLURM could not use, each with the reason.
        words: what srun itself has said.
    """

    def __init__(self, members: dict[str, CallBackHandle], purpose: Purpose, srun: subprocess.Popen[bytes]) -> None:
        self.purpose, self.srun = purpose, srun
        self.starting = dict(members)
        self.refused: dict[str, str] = {}
        self.words: list[str] = []
        self.lines = Lines(self._on_line)
        self._members, self._needed, self._must_end = members, dict(members), False
        self._by_label: dict[str, CallBackHandle] = {}

    def end_late(self, now: float) -> float:
        """Agents that have had their time to start fail. Returns when to call again; infinity: all have started."""
        for handle in [each for each in self.starting.values() if each.limit.due <= now]:
            handle.on_failed(handle.not_started("srun", self.words, handle.start.timeout_s))
        return min((handle.limit.due for handle in self.starting.values()), default=math.inf)

    def on_change(self, name: str) -> None:
        """An agent is connected or over. If none is needed any more and not all end by themselves, end the step."""
        handle = self._members[name]
        self.starting.pop(name, None)
        if handle.is_over:
            self._needed.pop(name, None)
            self._must_end = self._must_end or handle.was_ended or not handle.is_connected
        if self._must_end and not self._needed:
            self.srun.terminate()

    def _on_line(self, line: str) -> None:
        labelled = _LABELLED.fullmatch(line)
        if not labelled:
            self._on_own_line(line)
        elif found := ON_NODE.fullmatch(labelled[2]):
            if found[1] in self._members:
                self._by_label[labelled[1]] = self._members[found[1]]
        elif handle := self._by_label.get(labelled[1]):
            handle.on_printed(labelled[2])

    def _on_own_line(self, line: str) -> None:
        if found := _REFUSED.fullmatch(line):
            self.refused[found[1]] = found[2]
        self.words = [*self.words, line][-_KEPT_LINES:]
        if not self.starting and self._needed:
            next(iter(self._needed.values())).on_said(line)


def _srun(command: Sequence[str], env: Mapping[str, str], text: bytes) -> subprocess.Popen[bytes]:
    """Start srun, with ``text`` as stdin: a file in memory, since it is read much later than srun starts."""
    fd = os.memfd_create("stdin of srun")
    with open(fd, "wb+") as stdin:
        stdin.write(text)
        stdin.seek(0)
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=stdin, stdout=pipe, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def _nodes_of_job() -> tuple[str, ...]:
    """The nodes that the job has now: SLURM takes one that is down from a job with ``--no-kill``. Empty: not known."""
    code, told = scontrol.run(_JOB_S, "show", "job", "--oneliner", os.environ.get("SLURM_JOB_ID", ""))
    with contextlib.suppress(UsageError):
        return () if code else parse_node_list(scontrol.field(told, "NodeList"))
    return ()
