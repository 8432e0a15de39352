"""Waits until it is this node's turn to get free GPUs: ``--wait-for-gpus``. Runs in the agent, before it has workers.

The run has a file in the register, as those that use GPUs have, with a ticket: it gets GPUs before all that came later
and want some of the same. The kernel tells when such a file changes; every ``_LOOK_S`` the agent looks for what it does
not tell, as the end of other programs. The driver is asked before each look. Only the time limit needs a clock, the
monotonic one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError
from ddplaunch.features.free_gpus import changes, choice, register
from ddplaunch.features.free_gpus.records import GpuWaitEnded, WaitsForGpus
from ddplaunch.features.free_gpus.register import OwnFile
from ddplaunch.features.gpus.reader import GpuReader
from ddplaunch.features.gpus.records import GpusRead
from ddplaunch.text import duration, plural

if TYPE_CHECKING:
    from ddplaunch.agent.parts import NodeServices
    from ddplaunch.features.free_gpus.choice import Candidate, View, Wanted
    from ddplaunch.features.free_gpus.records import GpuUser
    from ddplaunch.protocol.specs import AgentSpec

_LOOK_S, _PAUSE_S = 2.0, 0.05
_LOCK_S = 1.0
"""Meanwhile the agent answers no ping."""

_SHOWN_S = 5.0
"""A line follows another one after this time at the earliest."""

_MAX_TEXT = 900


def chosen(spec: AgentSpec, node: NodeServices, limit_s: float) -> tuple[AgentSpec, OwnFile | None]:
    """``spec`` with GPUs that this node has from now on; unchanged, with None, if the run is being stopped.

    Raises:
        LaunchError: it has got none within ``limit_s``, or can never have them.
    """
    wait = _Wait(spec, node, limit_s)
    try:
        wait.run()
    finally:
        wait.end()
    return (choice.with_gpus(spec, wait.taken), wait.own) if wait.taken else (spec, None)


class _Wait:
    """Of one node, in the main thread of its agent, which handles events meanwhile.

    Attributes:
        own: the node's file in the register; None before it has one.
        taken: the GPUs that it has got.
    """

    def __init__(self, spec: AgentSpec, node: NodeServices, limit_s: float) -> None:
        self.own: OwnFile | None = None
        self.taken: Sequence[Candidate] = ()
        self._entry = choice.this_run(spec, ())
        self._spec, self._node, self._limit_s = spec, node, limit_s
        self._began = time.monotonic()
        self._reader: GpuReader | None = None
        self._read: GpusRead | None = None
        self._has_changed = self._has_shown = False
        self._error = choice.unknown(spec, "the driver has not answered")
        self._shown: object = None
        self._shown_at = 0.0

    def run(self) -> None:
        """Returns when ``taken`` has GPUs, or when the run is being stopped. Raises as ``chosen``."""
        choice.visible(self._spec, os.environ)
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_reader)
            self._look()
            if not self._is_over():
                stack.enter_context(changes.of_folder(register.folder(), lambda: self._node.post(self._on_change)))
            while not self._is_over():
                self._sleep(_PAUSE_S, self._node.is_stopping)
                self._sleep(_LOOK_S, lambda: self._has_changed or self._node.is_stopping())
                self._look()
        if not self.taken and not self._node.is_stopping():
            raise self._error

    def end(self) -> None:
        """Leave the register without GPUs, and tell the launcher how long it was."""
        if self.own and not self.taken:
            self.own.remove()
        if self._has_shown:
            self._node.outbox.send(GpuWaitEnded(time.monotonic() - self._began, ",".join(g.name for g in self.taken)))
            if gpus := self._node.begun.get("gpus"):
                gpus.ask("health")  # The first answer came before there were parts to take it.

    def _is_over(self) -> bool:
        return bool(self.taken) or self._node.is_stopping() or time.monotonic() >= self._began + self._limit_s

    def _sleep(self, limit_s: float, is_done: Callable[[], bool]) -> None:
        self._node.wait(is_done, min(time.monotonic() + limit_s, self._began + self._limit_s))

    def _on_change(self) -> None:
        self._has_changed = True

    def _on_answer(self, answer: object) -> None:
        if isinstance(answer, GpusRead):
            self._read = answer

    # One look.

    def _look(self) -> None:
        """Take GPUs, or a place behind the others; and tell the user, if something has changed."""
        self._has_changed = False
        read = self._asked()
        if read is None or self._node.is_stopping():
            return
        try:
            found, wanted = choice.choice_of(self._spec, read)
            with register.locked(_LOCK_S) as opened:
                others = register.users(opened, self.own.name if self.own else "")
                self._take(opened, found, wanted, others)
        except TimeoutError as error:
            self._tell_problem(choice.unusable(self._spec, error))
        except OSError as error:
            raise choice.unusable(self._spec, error) from None
        except LaunchError as error:
            if not self.own:
                raise
            self._tell_problem(error)

    def _asked(self) -> GpusRead | None:
        """What the driver says now; None if the wait is over first. A reader that has failed is replaced later."""
        if not self._reader:
            self._reader = GpuReader.start(lambda answer: self._node.post(functools.partial(self._on_answer, answer)))
        self._read = None if self._reader else GpusRead()
        if self._reader:
            self._reader.ask("health")
        self._node.wait(lambda: self._read is not None or self._is_over(), self._began + self._limit_s)
        if self._read and self._read.missing:
            self._close_reader()
        return self._read

    def _close_reader(self) -> None:
        if self._reader:
            self._reader.close()
        self._reader = None

    def _take(self, opened: int, found: Sequence[Candidate], wanted: Wanted, others: Sequence[GpuUser]) -> None:
        ticket = self._entry.ticket or register.next_ticket(others)
        seen = choice.view(found, others, ticket)
        taken = wanted.of(seen.free)
        entry = choice.this_run(self._spec, [each.key for each in taken])
        if not taken:
            wants = tuple(each.key for each in found)
            entry = replace(self._entry, ticket=ticket, needs=wanted.least, wants=wants)
        if not self.own:
            self.own = OwnFile(opened, entry)
        elif taken:
            self.own.write(entry)
        self._entry, self.taken = entry, taken
        if not taken:
            waited = f"; it has waited for {duration(self._limit_s)}"
            self._error = choice.too_few(self._spec, seen, wanted, waited)
            self._tell_place(seen, wanted)

    # What the user sees.

    def _tell_place(self, seen: View, wanted: Wanted) -> None:
        place = len(seen.ahead) + 1
        users = seen.users
        state = [(gpu.name, bool(gpu.in_use), *(user.pid for user in users if gpu.is_of(user))) for gpu in seen.found]
        lines = "; ".join(seen.lines()) or "the last ones are being freed"
        at = f"place {place} of {len(seen.waiting) + 1}"
        text = f"waiting for {plural(wanted.least, 'GPU')} of {self._spec.host}: {at}; {lines}"
        self._tell(text, place, (place, state))

    def _tell_problem(self, error: LaunchError) -> None:
        self._error = error
        self._tell(f"waiting for GPUs of {self._spec.host}: {error.message}", 0, error.message)

    def _tell(self, text: str, place: int, state: object) -> None:
        now = time.monotonic()
        if state != self._shown and (not self._has_shown or now >= self._shown_at + _SHOWN_S):
            self._shown, self._shown_at, self._has_shown = state, now, True
            self._node.outbox.send(WaitsForGpus(text[:_MAX_TEXT], place))
