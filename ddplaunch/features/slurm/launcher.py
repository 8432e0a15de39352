"""Nodes that SLURM drains, or whose maintenance is about to begin, leave after the present attempt.

Runs in the launcher, in the main thread. SLURM is asked by ``scontrol`` in a thread, once a minute while workers run: a
restart never waits for it, and uses the last answer. Where each node has a launcher, each asks about its own node, and
large jobs ask less often: all of them together up to ``_MAX_RATE`` times a second.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import fold, matching
from ddplaunch.errors import Level
from ddplaunch.features.slurm import requeue, scontrol
from ddplaunch.launcher.watches import RunEnd, RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted, NodeDeparts, RunIdAgreed
from ddplaunch.text import quote
from ddplaunch.threads import post_from_thread

if TYPE_CHECKING:
    from ddplaunch.launcher.nodes import Node
    from ddplaunch.protocol.run_result import RunResult

INTERVAL_S = 60.0
_LIMIT_S = 2.0
_MAX_RATE = 5.0
_MAX_REASON = 500


class NodeWatch(Watch):
    """Asks SLURM about the nodes of the run, and tells the coordinator which ones leave after the attempt."""

    def __init__(self, run: RunServices) -> None:
        self._config = config = run.config
        asks = config.slurm_job and config.has_peers and not config.dry_run
        self._is_on = bool(asks and shutil.which("scontrol"))
        count, own = (_number(f"SLURM_{name}") if config.each_node_has_launcher else 0 for name in ("NTASKS", "PROCID"))
        self._period_s, self._first_s = max(INTERVAL_S, count / _MAX_RATE), own / _MAX_RATE
        self._nodes, self._participants = run.nodes, run.participants
        self._post, self._show = run.post, run.messages.show
        self._ask_at = NEVER
        self._is_asking = False
        self._told: set[int] = set()
        self._running: set[int] = set()
        self._leaving: Mapping[str, str] = {}
        """SLURM's last answer."""

    def on_event(self, index: int, event: object) -> None:
        """SLURM is asked from the first attempt on; by the launcher of one node, which may be a spare, before."""
        if isinstance(event, AttemptStarted):
            self._running.add(index)
            if matching(self._leaving, [self._nodes.all[index].host]):
                self._tell()
        elif isinstance(event, AttemptEnded):
            self._running.discard(index)
        begins = AttemptStarted | RunIdAgreed if self._config.each_node_has_launcher else AttemptStarted
        if self._is_on and self._ask_at == NEVER and isinstance(event, begins):
            self._ask_at = time.monotonic() + self._first_s

    def run_due(self, now: float) -> float:
        """Ask SLURM if it is time. Returns when it is time again."""
        if now >= self._ask_at:
            self._ask_at = now + self._period_s
            if not self._is_asking:
                self._ask()
        return self._ask_at

    def _ask(self) -> None:
        names = [host for host in self._hosts if not set(host) & set(":@[]")]
        self._is_asking = True
        post_from_thread(
            "scontrol", lambda: partial(self.on_answer, _leaving(names)), self._post, partial(self.on_answer, None)
        )

    def on_answer(self, leaving: Mapping[str, str] | None) -> None:
        """SLURM has answered which nodes it takes out of service, and why. Without an answer the last one is used."""
        self._is_asking = False
        if leaving is not None:
            self._leaving = leaving
            self._tell()

    def _tell(self) -> None:
        leaving = self._leaving
        if self._config.each_node_has_launcher:
            self._on_own("; ".join(leaving[name] for name in matching(leaving, self._hosts).values()))
            return
        found = matching(leaving, self._nodes.hosts)
        self._participants.pass_over({host: leaving[name] for host, name in found.items()})
        participants = [self._nodes.all[index] for index in self._participants.indices]
        known = matching(leaving, [node.host for node in participants])
        reasons = [(node, leaving[known[node.host]]) for node in participants if node.host in known]
        # No round is formed with a node that departs until the end of its attempt decides about it. For one that is
        # between two attempts that end has passed: it is told when the next one starts.
        reasons = [(node, reason) for node, reason in reasons if node.index in self._running | self._told]
        departing = self._announce(reasons)  # Also that there are other spares now.
        for node, reason in reasons:
            if node.index not in self._told:
                effect = "it leaves after this attempt" if node.index in departing else "no other node can replace it"
                self._show(f"{node.host}: {reason}; {effect}", Level.NORMAL)
        self._told = {node.index for node, _ in reasons}

    @property
    def _hosts(self) -> Sequence[str]:
        """The nodes about which this launcher asks, spares included."""
        if self._config.each_node_has_launcher:
            return (os.environ.get("SLURMD_NODENAME", self._nodes.hosts[0]),)
        return self._nodes.hosts

    def _on_own(self, reason: str) -> None:
        """Tell this node's agent, which tells the coordinator when it joins the next round."""
        if bool(reason) == bool(self._told):
            return
        self._told = {0} if reason else set()
        host = self._nodes.all[0].host
        effect = f"{reason}; it leaves after this attempt if the others suffice" if reason else "SLURM uses it again"
        self._show(f"{host}: {effect}", Level.NORMAL)
        self._nodes.send(NodeDeparts(quote(reason, _MAX_REASON)))

    def _announce(self, reasons: Sequence[tuple[Node, str]]) -> Mapping[int, str]:
        """Tell the coordinator which of these nodes depart: as many as the run can do without. Returns them."""
        if not self._config.one_launcher_leads:
            return {}
        # Whoever was told that it leaves does, in whichever order the nodes of an attempt have started.
        chosen = sorted(reasons, key=lambda each: each[0].index not in self._participants.departing)
        free = chosen[: self._participants.dispensable_count]
        departing = {node.index: reason for node, reason in free if node.index in self._running}
        self._participants.set_departing(departing)
        return departing


class Requeue(Watch):
    """Requeues the SLURM job of a run."""

    def __init__(self, run: RunServices) -> None:
        self._job, self._shutdown, self._show = run.config.slurm_job, run.shutdown, run.messages.show

    def after_stop(self, signum: int) -> str:
        """Whether it is a signal of ``--requeue-on``, or the run is stopped so that it goes on later."""
        is_time_up = self._shutdown.continues and not self._shutdown.signals  # Later signals may be the user's.
        asks = bool(is_time_up and self._job and self._job.requeue_on)
        return "the job is requeued afterwards" if asks or requeue.is_asked_for(self._job, [signum]) else ""

    def add_to_result(self, result: RunResult) -> RunResult:
        """Add the job, and whether SLURM starts it again."""
        return requeue.with_job(result, self._job, self._shutdown.signals, continues=self._shutdown.continues)

    def on_run_ended(self, end: RunEnd) -> None:
        """Requeue the job if the run is to continue."""
        requeue.requeue(end.result, self._show)


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0


def _leaving(names: Sequence[str]) -> Mapping[str, str] | None:
    """In a thread of its own: ask for the nodes and the reservations; at most ``_LIMIT_S`` in all, or None."""
    began = time.monotonic()
    # Names that SLURM does not know make the exit code 1 on some versions; what it prints of others is still good.
    code, nodes = scontrol.run(_LIMIT_S, "show", "node", fold(names), "--oneliner", seconds=True)
    left_s = _LIMIT_S - (time.monotonic() - began)
    if code or left_s <= 0.0:
        return None
    code, reservations = scontrol.run(left_s, "show", "reservation", "--oneliner", seconds=True)
    own = os.environ.get("SLURM_JOB_RESERVATION", "")
    return scontrol.leaving(nodes, "" if code else reservations, time.time(), own)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The parts of a run in the launcher."""
    return NodeWatch(run), Requeue(run)
