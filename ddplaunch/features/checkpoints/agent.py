"""Looks for the newest whole checkpoint, names it to the workers, and sets one aside that ends attempts.

Runs in the agent, main thread; a thread looks, one at a time: a file system that does not answer delays an attempt by
some seconds, and nothing else. All nodes look before the first round and after each; while workers run, only the node
with rank 0. The checkpoint of an attempt is the one that its round names, so that all nodes have the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.environment import CHECKPOINT
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.threads import post_from_thread

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.features.checkpoints.search import Found, Search
    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.results import AttemptResult, Round, WorkerExit

PLACEHOLDER = "{checkpoint}"

PERIOD_S = 15.0
_FIRST_S, _LAST_S = 20.0, 5.0
"""For so long a node waits for a look before the first attempt, and after each."""

_SLOW = "the file system of --checkpoint has not answered for"


class CheckpointPart(Part):
    """Of one node."""

    def __init__(self, node: NodeServices) -> None:
        super().__init__(node)
        pattern, self._sets_aside = json.loads(node.spec.texts.get("checkpoints", '["", false]'))
        self._pattern = os.path.abspath(os.path.expanduser(pattern)) if pattern else ""
        self._search: Search | None = None
        self._found: Found | None = None
        self._is_known = self._is_looking = self._looks_again = self._is_late = self._has_set_aside = False
        self._told = ""
        self._round: Round | None = None
        self._started_s = 0.0
        self._look_at = NEVER
        if pattern:
            from ddplaunch.features.checkpoints.search import Search  # Every agent has this part.

            self._search = Search(self._pattern)
            self._look(all_ended=True)  # No worker of this run writes yet.

    # Looking.

    def _look(self, *, all_ended: bool) -> None:
        self._looks_again = self._is_looking and all_ended  # The look may have begun before the last checkpoint.
        if (search := self._search) and not self._is_looking:
            self._is_looking = True
            look = lambda: partial(self._on_found, search.newest(all_ended=all_ended))  # noqa: E731
            post_from_thread("checkpoint", look, self._node.post, self._on_looked)

    def _on_found(self, found: Found | None) -> None:
        self._is_known, self._found = True, found
        self._on_looked()

    def _on_looked(self) -> None:
        self._is_looking, self._is_late, self._look_at = False, False, time.monotonic() + PERIOD_S
        if self._looks_again:
            self._look(all_ended=True)

    def _await_look(self, limit_s: float) -> None:
        """Until the thread has looked; not for longer, once for each look, and not if the run is being stopped."""
        is_over = lambda: not self._is_looking or self._node.is_stopping()  # noqa: E731
        is_due = self._is_looking and not self._is_late
        if is_due and not self._node.wait(is_over, time.monotonic() + limit_s):
            self._is_late = True
            text = f"{self._node.spec.host}: {_SLOW} {limit_s:.0f} s"
            self._node.outbox.send(Notice(f"{text}; it is not known what the newest checkpoint is", 0))

    def run_due(self, now: float) -> float:
        """While workers run: look again, on the node with rank 0, and tell of another checkpoint."""
        if self._round is None or self._round.node_rank:
            return NEVER
        if self._is_known and self._found and self._found.text != self._told:
            self._told = self._found.text
            self._node.report(self._seen(self._round, self._found))
        if now >= self._look_at:
            self._look_at = NEVER
            self._look(all_ended=False)
        return self._look_at

    def saved(self) -> str | None:
        """As ``Part.saved``."""
        if self._search is None:
            return None
        self._await_look(_LAST_S if self._is_known else _FIRST_S)
        if self._is_late or not self._is_known:  # An attempt that has saved must not count as one that has not.
            return None
        return self._found.text if self._found else ""

    # An attempt.

    def on_attempt(self, group: WorkerGroup, round_: Round) -> None:
        """Its checkpoint is that of the round."""
        super().on_attempt(group, round_)
        if self._search:
            self._round, self._started_s, self._look_at = round_, time.time(), time.monotonic() + PERIOD_S
            self._looks_again = False  # Workers write.
            if round_.node_rank == 0:
                self._told = ""  # The report of an earlier attempt may have been dropped.

    @property
    def _path(self) -> str:
        """The checkpoint of the attempt; empty if there is none."""
        text = self._round.saved if self._round else ""
        return (text or "").partition(":")[2]

    def default_environ(self) -> Mapping[str, str]:
        """The checkpoint, also if there is none: a script need not tell the cases apart."""
        return {CHECKPOINT: self._path} if self._search else {}

    def script_args(self, args: tuple[str, ...]) -> tuple[str, ...]:
        """With the checkpoint in place of {checkpoint}; without one, an empty text."""
        return tuple(each.replace(PLACEHOLDER, self._path) for each in args) if self._search else args

    def on_attempt_ended(self, exits: tuple[WorkerExit, ...]) -> tuple[WorkerExit, ...]:
        """What the workers have saved at their end counts: look at once."""
        self._look(all_ended=True)
        return exits

    def evidence(self, exits: tuple[WorkerExit, ...]) -> tuple[Report, ...]:
        """The node with rank 0: what there is to go on from, and what is lost."""
        if self._search is None or self._round is None or self._round.node_rank:
            return ()
        self._await_look(_LAST_S)
        ran_s = max(0.0, time.time() - self._started_s)
        since_s = time.time() - self._found.saved_ns / 1e9 if self._found else ran_s
        seen = self._seen(self._round, self._found, lost_s=round(min(ran_s, max(0.0, since_s)), 3))
        self._round = None
        return (seen,) if self._is_known and not self._is_late else ()

    def _seen(self, round_: Round, found: Found | None, lost_s: float = -1.0) -> Report:
        from ddplaunch.features.checkpoints.records import CheckpointSeen

        path, saved_ns, step = found or ("", 0, 0)
        return CheckpointSeen(round_.attempt, self._node.spec.host, path, round(saved_ns / 1e9, 3), step, lost_s)

    def before_next_attempt(self, result: AttemptResult) -> None:
        """Set the checkpoint aside if attempts that begin from it fail, once until there is a newer one."""
        is_first = self._group is not None and any(worker.rank == 0 for worker in self._group.workers)
        self._has_set_aside = self._has_set_aside and result.saved_is_suspect
        may = self._sets_aside and not self._has_set_aside and not self._is_looking
        if not (may and result.saved_is_suspect and is_first and self._found):
            return
        self._has_set_aside, path, self._is_looking = True, self._found.path, True
        post_from_thread("checkpoint", partial(self._set_aside, path), self._node.post, self._on_looked)
        self._await_look(_LAST_S)

    def _set_aside(self, path: str) -> Callable[[], None]:
        """In a thread: rename, and look again. Returns what follows in the main thread."""
        from ddplaunch.features.checkpoints.records import name_of
        from ddplaunch.features.checkpoints.search import set_aside

        text = f"the checkpoint {name_of(path, 0)} cannot be set aside"
        with contextlib.suppress(FileNotFoundError):
            try:
                text = f"{name_of(path, 0)} is set aside as {set_aside(self._pattern, path)}; it may be sound after all"
            except OSError as error:
                text = f"{text}: {error}"
        found = self._search.newest(all_ended=True) if self._search else None

        def act() -> None:
            self._node.outbox.send(Notice(text, -1))
            self._on_found(found)

        return act


part = CheckpointPart
