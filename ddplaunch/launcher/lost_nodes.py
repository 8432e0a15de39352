"""The loss of a node: how it is noticed, and what follows. Every decision of the launcher about it is here.

Runs in the launcher, in the main thread. A host loses power, in a run whose launcher has started all nodes:

1.  Nothing closes the connection. ``Pings`` sends ``Ping`` every 1 s (``pings.INTERVAL_S``), and calls
    ``on_unresponsive`` when a node has not answered with ``Pong`` for ``TimeoutConfig.lost_after_s``, 5 s; an agent
    that has just been started has ``setup.SLOW_START_S``, 25 s, more. If only the agent dies, ``ChannelClosed`` comes
    at once. A node whose records cannot be handled is lost, too (``GivenUp``).
2.  ``on_lost`` starts a sweep of the host: another agent gets ``SweepRun`` and answers with ``AgentEnded``. The node is
    SWEEPING until then, for at most ``nodes.SWEEP_S``, 20 s, and then LOST. Only the end of the run waits for it.
3.  If too few nodes are left, spares included, the run ends with exit code 84: ``Shutdown.fail`` sends ``StopWorkers``.
    Otherwise the user sees "HOST has not answered for 5 s; the job goes on", and "SPARE replaces HOST" if a spare
    takes its position. Without a spare the world shrinks.
4.  The lost node did not serve the rendezvous. The launcher sends ``AssignNodes`` to the agent of the node that
    serves it, whose member hands it to the ``Coordinator``. That sends ``StopRound`` to the agents of the round. They
    stop their workers (SIGTERM, SIGKILL after ``shutdown_timeout_s``), send ``WorkersEnded``, get a ``RoundVerdict``
    after which an attempt follows, and send ``NodeJoined``. When all participants have joined, a spare with its
    ``JoinRendezvous`` included, the coordinator forms the next round: ``RoundFormed``.
5.  The lost node served the rendezvous. Once a spare is connected, if there is one, the first participant gets
    ``JoinRendezvous`` and opens an endpoint (``EndpointOpen``); then the others get ``JoinRendezvous``, too. This ends
    the round for an agent: it stops its workers, gets no verdict, and joins the new rendezvous by ``NodeJoined``. The
    new coordinator knows the number of restarts from both records. After 5 rendezvous in a row without a round
    (``rendezvous_manager._MAX_TRIES``), the run ends with exit code 83.
6.  Each agent sends ``AttemptEnded``. ``Attempts`` merges those of the nodes that are left. The user sees
    "HOST (node 1) is lost; starting the workers again", or "the rendezvous has moved; ..."; ``AttemptStarted`` follows.
    This counts as a restart only if a worker failed by itself before, and not because it lost its peers.

A node that is only cut off gets no ``Ping`` for 5 s: its agent stops its workers (``LauncherLost``).

The member of the node that serves the rendezvous notices the loss, too: each member sends a heartbeat every 1 s
(``member.HEARTBEAT_S``), and this one has missed it for the same 5 s. The coordinator stops the round by itself.
``NodeSilent`` tells the launcher, which moves the rendezvous as in step 5, because the node may still answer
pings. If the pings notice the loss first, this record names a node that takes part no longer, and has no effect.

A member that the rendezvous store does not answer any more makes its agent send ``NeedsRendezvous``. A call to a
store on a host without power does not return: then it does so after 7 s.

Where each node has its own launcher, only the heartbeats show a loss. The coordinator stops the round and forms the
next one as in step 4. If the node that serves the rendezvous is lost, the run ends on all nodes.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_LOST, LaunchError, Level
from ddplaunch.launcher.nodes import NodeState
from ddplaunch.protocol import first_failure
from ddplaunch.transport.failures import HostFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddplaunch.launcher.attempts import Attempts
    from ddplaunch.launcher.nodes import Node
    from ddplaunch.launcher.participants import Participants
    from ddplaunch.launcher.run_files.run_events import RunEvents
    from ddplaunch.launcher.shutdown import Shutdown
    from ddplaunch.protocol.launcher_agent import AgentFailed
    from ddplaunch.protocol.results import AttemptResult, NeedsRendezvous, NodeSilent


class LostNodes:
    """Decides what the loss of a node means for one run."""

    def __init__(
        self,
        lost_after_s: float,
        participants: Participants,
        attempts: Attempts,
        shutdown: Shutdown,
        events: RunEvents,
        show: Callable[[str, int], None],
        report: Callable[[Iterable[AttemptResult]], None],
    ) -> None:
        """``report`` shows attempts that are complete now."""
        self._lost_after_s = lost_after_s
        self._participants, self._attempts, self._shutdown = participants, attempts, shutdown
        self._events, self._show, self._report = events, show, report

    @property
    def run_is_ending(self) -> bool:
        """Whether no further attempt or node is started: the run is shut down, or its outcome is known."""
        return self._shutdown.in_progress or self._attempts.outcome_is_known

    # How a loss is noticed.

    def on_unresponsive(self, node: Node) -> None:
        """The machine is frozen or disconnected. Called by the pings."""
        node.handle.kill()
        if node.state is not NodeState.SENDING_LOGS:  # Else all records for the outcome have arrived.
            self.on_lost(node, f"{node.host} has not answered for {self._lost_after_s:g} s")

    def give_up(self, node: Node, reason: str, hint: str = "") -> None:
        """Kill the agent of a node that does not do what it must; the node is lost, unless it has come to its end."""
        node.handle.kill()
        if not (node.state.is_final or node.state.is_lost):
            self.on_lost(node, reason, hint)

    def on_channel_closed(self, node: Node, returncode: int | None) -> None:
        """The channel of an agent that has not reported its end has closed; ``returncode`` is None if unknown."""
        if returncode is None:
            self.on_lost(node, f"the connection to {node.host} has ended")
        else:
            hint = first_failure.KILLED_HINT if returncode == -signal.SIGKILL else ""
            self.on_lost(node, f"the agent on {node.host} {first_failure.ended(returncode)}", hint)

    def on_agent_failed(self, node: Node, event: AgentFailed) -> None:
        """The agent cannot run its node, and ends in order: no sweep is needed."""
        is_needed = node.index in self._participants.indices and not self._attempts.outcome_is_known
        if self._participants.rendezvous and not is_needed:  # It has left, or it is a spare that connected too late.
            self._show(event.message, Level.NORMAL)
        elif self._participants.can_continue_without(node) and not self.run_is_ending:
            self._participants.exclude(node, HostFailure(node.host, "agent", event.message, event.hint))
            self._report(self._attempts.remove_node(node.index))
        else:
            self._shutdown.fail(LaunchError(event.message, event.hint, event.exit_code))

    # What follows.

    def on_lost(self, node: Node, reason: str, hint: str = "") -> None:
        """Kill the node's remaining processes. Then a spare replaces it, or the world shrinks, or the run fails."""
        self._participants.nodes.sweep(node)
        node.loss = "" if self.run_is_ending else reason
        self._events.of_node("node_lost", node.index, reason)
        if node.index in self._participants.indices:
            try:
                self._continue_or_fail(node, reason, hint)
            except LaunchError as error:
                self._shutdown.fail(error)
        self._report(self._attempts.remove_node(node.index))

    def _continue_or_fail(self, node: Node, reason: str, hint: str) -> None:
        if not self.run_is_ending and self._participants.can_continue_without(node):
            self._show(f"{reason}; the job goes on", Level.ALWAYS)
            self._participants.continue_without(node)
            return
        self._participants.remove(node)
        if self._shutdown.has_killed:  # Shutdown.run_due killed the agent, and has shown a message.
            self._show(reason, Level.VERBOSE)
        elif self._participants.rendezvous and (self._shutdown.node_ended or self._attempts.outcome_is_known):
            self._show(reason, Level.ALWAYS)  # The outcome does not depend on this node.
        else:
            raise LaunchError(reason, hint, NODE_LOST)

    def on_needs_rendezvous(self, node: Node, event: NeedsRendezvous) -> None:
        """``node`` has lost the rendezvous: the nodes start another one.

        Raises:
            LaunchError: too many rendezvous have failed one after the other.
        """
        if not self.run_is_ending:
            self._participants.move_rendezvous(node.index, event.token, event.reason)

    def on_node_silent(self, server: Node, event: NodeSilent) -> None:
        """As ``on_needs_rendezvous``, for the silent node. Only the node that serves the rendezvous may say it."""
        rendezvous = self._participants.rendezvous
        if rendezvous and rendezvous.server == server.index and not self.run_is_ending:
            reason = f"it sent no heartbeat for {event.silent_s:g} s"
            self._participants.move_rendezvous(event.node_index, event.token, reason)
