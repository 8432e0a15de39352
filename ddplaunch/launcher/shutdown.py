"""The shutdown of a run: on a user's signal, on an error, or when a node has ended. Kills agents that do not end.

Runs in the launcher, in the main thread. It decides when and how fast the agents stop their workers, not the outcome.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddplaunch.errors import INTERNAL, LaunchError, Level
from ddplaunch.launcher.nodes import Node, Nodes, NodeState
from ddplaunch.mailbox import NEVER, Mailbox
from ddplaunch.protocol.launcher_agent import PassSignal, StopWorkers
from ddplaunch.system.signals import PASSED_TO_WORKERS, SignalReceived, StopRequests, suspend

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.launcher.display.messages import UserMessages

_SECOND_GRACE_S = 5.0
_QUIT_GRACE_S = 0.5
_VIEWERS_MOMENT_S = 3.0
_BUG_HINT = "Please report it with the lines above and the output of `ddplaunch --version`."
AGENT_OVERTIME_S = 20.0
"""Seconds that an agent may take beyond the grace period; uninterruptible sleep of a worker can take longer."""


class Shutdown:
    """Whether and why the run is being shut down.

    Attributes:
        signals: the signals that stopped the run, in order; of one moment only the first.
        outcome_known_at: when a node has reported that no attempt follows, as ``time.monotonic()``.
        requests: how often the user has asked to stop, also while watches hold nodes and after the run.
        error: the reason of a failure other than a worker's; of several errors the first.
        continues: a watch has stopped the run, so that it goes on later (``stop_to_continue``).
        others_stop: the run is over, since the agent of a node has ended, or by a bug: the other nodes are stopped.
        has_killed: agents that did not end in time have been killed.
    """

    def __init__(
        self,
        config: LaunchConfig,
        nodes: Nodes,
        messages: UserMessages,
        stops_rest: Callable[[int], bool],
        what_follows: Callable[[int], str],
    ) -> None:
        """``stops_rest`` is ``Watches.on_stop``, ``what_follows`` is ``Watches.after_stop``."""
        self.signals: list[int] = []
        self.outcome_known_at = self._signalled_at = NEVER
        self.error: LaunchError | None = None
        self.continues = self.others_stop = False
        self.has_killed = False
        self.requests = StopRequests()
        self._kill_at = NEVER
        self._config = config
        self._nodes = nodes
        self._messages = messages
        self._stops_rest = stops_rest
        self._what_follows = what_follows

    @property
    def in_progress(self) -> bool:
        """Whether the run is being shut down."""
        return bool(self.signals or self.error or self.others_stop)

    @property
    def came_late(self) -> bool:
        """Whether the first of ``signals`` was received when the outcome was known already.

        ``srun --kill-on-bad-exit`` sends SIGTERM to the other launchers of a run as soon as one has exited.
        """
        return bool(self.signals) and self._signalled_at > self.outcome_known_at

    def on_signal(self, event: SignalReceived, node: Node | None = None) -> None:
        """Stop the run, or pass a signal that does not stop it to the workers.

        The second request to stop sends SIGTERM and shortens the grace period, the third ends it. A signal after which
        something follows counts once: a scheduler sends it to the batch script, to every step, or to both.
        ``node`` is the node whose agent received the signal instead of this process; that agent stops its workers
        without an order.
        """
        signum = event.signum
        follows = self._what_follows(signum)
        if not self._stops(signum) or (node and not follows):
            if signal.Signals(signum).name in PASSED_TO_WORKERS:
                (node.handle if node else self._nodes).send(PassSignal(signum))
        elif not (follows and (self.continues or signum in self.signals)) and self.requests.is_new(event.received_at):
            self._on_request(signum, follows and f"; {follows}", event.received_at)

    def _stops(self, signum: int) -> bool:
        return signal.Signals(signum).name in self._config.signals

    def on_stop_request(self) -> None:
        """Another process of the user stops the run: as SIGTERM, also where that does not stop it.

        Each of two viewers may have asked its user before the run was stopped: their moment is longer.
        """
        if self.requests.is_new(time.monotonic(), _VIEWERS_MOMENT_S):
            self._on_request(signal.SIGTERM, "", time.monotonic())

    def stop_to_continue(self, signum: int, grace_s: float, why: str) -> None:
        """A watch stops the run, which is to go on later: as a user's first signal, but with this grace period.

        No effect on a run that is being stopped, or whose outcome is known. ``why`` begins the message. Until the end,
        signals after which something follows are part of this stop: a scheduler may send them now, too.
        """
        if not self.in_progress and self.outcome_known_at == NEVER:
            self.continues, now = True, time.monotonic()
            follows = self._what_follows(signum)
            self.requests.is_new(now)
            self._on_request(signum, follows and f"; {follows}", now, grace_s, why)

    def _on_request(
        self, signum: int, remark: str, received_at: float, grace_s: float | None = None, why: str = ""
    ) -> None:
        """``grace_s``: for a first request; None: as the user has set it. ``why``: who asks, if not a signal."""
        if self._stops_rest(signum):
            return
        self._note_signal(signum, received_at)
        count = min(self.requests.count, 3)
        usual_s = self._config.timeouts.shutdown_timeout_s
        graces_s = [usual_s if grace_s is None else grace_s, min(_SECOND_GRACE_S, usual_s), 0.0]
        self._stop_workers(signum if count == 1 else signal.SIGTERM, graces_s[count - 1])
        name = signal.Signals(signum).name
        by = f" by {name}" if why else " by SIGTERM" if count == 2 and signum != signal.SIGTERM else ""
        kills = [f"SIGKILL in {each_s:g} s" if each_s else "SIGKILL at once" for each_s in graces_s]
        again = f"; a {'second' if count == 1 else 'third'} signal: {kills[count]}" if count < 3 else ""
        text = f"{why or name}: stopping the workers{by}, {kills[count - 1]}{again}{remark}"
        self._messages.show(text, Level.NORMAL, "signal")

    def on_quit(self, who: str) -> None:
        """The user has quit the debugger of rank ``who``: as Ctrl-C, but quickly."""
        now = time.monotonic()
        self.requests.is_new(now)
        self._note_signal(signal.SIGINT, now)
        grace_s = min(_QUIT_GRACE_S, self._config.timeouts.shutdown_timeout_s)
        self._stop_workers(signal.SIGTERM, grace_s)
        self._messages.show(f"the debugger of {who} was quit: stopping the workers by SIGTERM", Level.NORMAL)

    def _note_signal(self, signum: int, received_at: float) -> None:
        self.signals.append(signum)
        self._signalled_at = min(self._signalled_at, received_at)

    def fail(self, error: LaunchError) -> None:
        """Stop the run because of ``error``. Further errors are ignored: all nodes may fail for one reason."""
        if not self.error:
            self.error = error
            # Else the error is that of the only agent, which ends by itself or is lost: nobody is left to stop.
            if self._config.one_launcher_leads or self._config.dry_run:
                self._stop_workers(signal.SIGTERM, self._config.timeouts.shutdown_timeout_s)

    def on_bug(self, told: str) -> None:
        """Call it while an unexpected exception is handled: it ends the run in order, and with its report."""
        import traceback

        self.fail(LaunchError(f"a bug in ddplaunch: {told}\n{traceback.format_exc()}", _BUG_HINT, INTERNAL))
        if not self.others_stop:
            self.stop_others()

    def stop_others(self) -> None:
        """The run is over, since a node has ended, or by a bug: stop the other nodes."""
        self.others_stop = True
        self._stop_workers(signal.SIGTERM, self._config.timeouts.shutdown_timeout_s)

    def _stop_workers(self, signum: int, grace_s: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s + AGENT_OVERTIME_S)
        self._nodes.stop_connecting()
        # To wake the agents on other hosts takes a session for each of them over SSH.
        if self.requests.count > 1 or not self._config.hosts:
            for node in self._nodes.connected:
                node.handle.wake()
        self._nodes.send(StopWorkers(signum, grace_s))

    def run_due(self, now: float) -> float:
        """Kill the agents that have not ended in time. Returns when to call again."""
        if now >= self._kill_at:
            self._kill_at, self.has_killed = NEVER, True
            for node in self._nodes.connected:
                if node.state is not NodeState.HELD or self._has_bug:  # What holds it may be what has failed.
                    self._messages.show(f"the agent on {node.host} does not respond and is killed", Level.ALWAYS)
                    node.handle.kill()
        return self._kill_at

    @property
    def _has_bug(self) -> bool:
        return self.error is not None and self.error.exit_code == INTERNAL

    def collect_signals(self, mailbox: Mailbox[object]) -> int:
        """At the end of the run: count what has arrived meanwhile. Returns how often the run was asked to stop."""
        while (event := mailbox.get(0.0)) is not None:
            if isinstance(event, SignalReceived) and event.signum == signal.SIGTSTP:
                suspend()
            elif isinstance(event, SignalReceived) and self._stops(event.signum):
                self.requests.is_new(event.received_at)
        return self.requests.count
