"""The end of a run before its time: the user's signals, failures, silent agents; and the orders that follow."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from ddplaunch.launcher.signals import PASSED_ON, Signalled
from ddplaunch.records import AgentFailed, PassSignal, StopWorkers

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.errors import LaunchError
    from ddplaunch.launcher.collected import Collected
    from ddplaunch.launcher.handles import Node
    from ddplaunch.launcher.injector import Injector
    from ddplaunch.launcher.nodes import Nodes
    from ddplaunch.launcher.telling import Telling
    from ddplaunch.mailbox import Mailbox

_SECOND_GRACE_S = 2.0
AGENT_OVERTIME_S = 20.0
"""What an agent may need beyond the grace; only one with processes in uninterruptible sleep needs more."""


class Stopping:
    """Whether a run is to end, and why. Main thread only.

    Attributes:
        signals: those that asked for the end, in order.
        failed: trouble that ended the run; None if only workers' ends do.
        deadline: when agents that have not ended are killed, by ``time.monotonic()``.
        has_killed: they were.
        follows: a node has left by itself.
    """

    def __init__(
        self, config: LaunchConfig, nodes: Nodes, injector: Injector, collected: Collected, telling: Telling
    ) -> None:
        self.signals: list[int] = []
        self.failed: AgentFailed | None = None
        self.deadline = float("inf")
        self.has_killed = False
        self.follows = False
        self._config = config
        self._nodes = nodes
        self._injector = injector
        self._collected = collected
        self._telling = telling

    @property
    def is_on(self) -> bool:
        """The run shall not go on."""
        return bool(self.signals or self.failed or self.follows)

    def signalled(self, signum: int, node: Node | None = None) -> None:
        """A second signal shortens the grace, a third ends it; others than those that stop are passed on.

        Those that a job is requeued on count once: SLURM sends them to the batch script, to every step, or to both.
        ``node``: not this process got it, but its agent, which stops by itself where the signal is one to end by.
        """
        name, job = signal.Signals(signum).name, self._config.job
        requeues = job is not None and name in job.requeue_on
        if not requeues and (node or name not in self._config.signals):
            if name in PASSED_ON:
                (node.handle if node else self._nodes).send(PassSignal(signum))
            return
        if requeues and signum in self.signals:
            return
        if self._collected.interrupted(signum):
            return
        self.signals.append(signum)
        grace_s = (self._config.shutdown_timeout_s, _SECOND_GRACE_S, 0.0)[min(len(self.signals), 3) - 1]
        grace_s = min(grace_s, self._config.shutdown_timeout_s)
        self._stop(signum, grace_s)
        later = ", then the job is to be requeued" if requeues else ""
        self._telling.say(f"{name}: stopping the workers, SIGKILL in {grace_s:g} s{later}", 0)

    def fail(self, failure: AgentFailed) -> None:
        """What cannot be gone on with ends the run; the first one counts."""
        if self.failed:  # All nodes may fail alike, and each has been told to stop already.
            return
        self.failed = failure
        if self._config.is_led or self._config.dry_run:
            self._stop(signal.SIGTERM, self._config.shutdown_timeout_s)

    def fail_by(self, error: LaunchError) -> None:
        """Likewise."""
        self.fail(AgentFailed(error.message, error.hint, error.exit_code))

    def follow(self) -> None:
        """A node has left, so the run is over: the others know, or could not hear it and must not wait for it."""
        self.follows = True
        self._stop(signal.SIGTERM, self._config.shutdown_timeout_s)

    def _stop(self, signum: int, grace_s: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + grace_s + AGENT_OVERTIME_S)
        self._nodes.abandon()
        self._injector.release()
        if len(self.signals) > 1 or not self._config.hosts:  # Over SSH it takes a session of its own for each.
            for node in self._nodes.running:
                node.handle.wake()
        self._nodes.send(StopWorkers(signum, grace_s))

    def give_up_silent(self, now: float) -> None:
        """Kill the agents whose time is over."""
        if now >= self.deadline:
            self.deadline, self.has_killed = float("inf"), True
            for node in (node for node in self._nodes.running if not node.sends_logs):
                self._telling.say(f"the agent on {node.host} does not answer and is killed", -1)
                node.handle.kill()

    def has_more_signals(self, mailbox: Mailbox[object], count: int) -> bool:
        """At the end: more than ``count`` have come by now."""
        while (event := mailbox.get(0.0)) is not None:
            if isinstance(event, Signalled):
                self.signals.append(event.signum)
        return len(self.signals) > count
