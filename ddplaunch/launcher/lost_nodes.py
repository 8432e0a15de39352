"""The loss of a node: how it is noticed, and what follows, for all processes. The launcher's decisions are here.

Runs in the launcher, in the main thread. In the tables, HOST and SPARE are names of hosts, HOST:PORT is the endpoint,
REASON says how the launcher has noticed the loss, and KEY is a key of ``--rdzv-conf``.

A host loses power, and workers run:

==========  ============================  ==========================  ===========================  ===================
            one launcher leads all nodes                              each node has a launcher
----------  --------------------------------------------------------  ------------------------------------------------
its node    does not serve                serves the rendezvous       does not serve               serves
==========  ============================  ==========================  ===========================  ===================
noticed by  the launcher: no ``Pong``     the same                    the serving member: no       each other member:
                                                                      heartbeat                    no store
after       5 s                           5 s                         5 s                          7 s
next        once all participants have    the same, on another        at once if MAX nodes are     none
attempt     joined, a spare included      rendezvous                  there; else 30 s after MIN
                                                                      are
a restart?  no, unless a worker has       no, unless some node had    no, unless a worker has      -
            failed by itself              received the verdict on a   failed by itself
                                          failure before the loss
user sees   "HOST has not answered for    the same, but the last is   "HOST (node 1) is lost;      "the rendezvous at
            5 s; the job can go on        "a new rendezvous has       starting the workers         HOST:PORT is lost"
            without it", "SPARE replaces  begun; starting the         again"
            HOST", "HOST (node 1) is      workers again"
            lost; starting the workers
            again"
==========  ============================  ==========================  ===========================  ===================

What follows if workers run. ``tests/process/test_loss_cases.py`` walks this table with real processes: it starts each
run on so many hosts, ends one node at once, and looks at the number of nodes of the next attempt, the exit code and the
page. The last column names the tests in which a real host is lost like that.

======  ========  =====  ========  ========================  ====  ===================================  ================
start   --nnodes  hosts  lost      next attempt              code  failure page                         tests/ssh/test_*
======  ========  =====  ========  ========================  ====  ===================================  ================
one     2         3      other     2, with the spare         0     no page                              job
one     2         3      serves    2, with the spare         0     no page                              cut_off
one     1         2      the only  1, the spare              0     no page
one     2:3       3      other     2                         0     no page                              cut_off
one     2:3       3      serves    2                         0     no page                              job
one     3:4       3      other     none: below MIN           84    REASON; no further attempt
one     2         2      other     none                      84    REASON; no further attempt           job
one     2         2      serves    none                      84    REASON; no further attempt
single  1         1      the only  none                      84    REASON
each    1:2       2      other     1                         0     no page                              self_organised
each    1:2       3      other     2, with the waiting node  0     no page
each    2         3      other     2, with the waiting node  0     no page
each    2         2      other     none                      84    HOST (node 1) is lost                self_organised
each    2:3       2      other     none: below MIN           83    lost: HOST; after N s only these
each    1:2       2      serves    none                      84    the rendezvous at HOST:PORT is lost  self_organised
each    2         2      serves    none                      84    the rendezvous at HOST:PORT is lost
======  ========  =====  ========  ========================  ====  ===================================  ================

start: "one" launcher leads all nodes; a "single" host has no spare, and so no rendezvous; "each" node has a launcher.
hosts: those of ``--hosts``, or that have started ddplaunch; with more than MAX there are spares, or nodes that wait.
Where each node has a launcher, MIN:MAX is with c10d; with static, MAX nodes are needed. lost: the node that serves the
rendezvous, another, or the only one. failure page: how it begins; where each node has a launcher, all that are left end
with this code and this page. No case is a restart.

In some cases it is otherwise:

=====  ========================  ======  ==============================================================================
start  when                      lost    what is otherwise
=====  ========================  ======  ==============================================================================
one    before any worker runs    any     if the run ends, there is an error and no page
one    between two attempts      any     no worker is stopped, and no node gets a verdict
each   while workers run         serves  each node decides alone. One whose worker has failed by itself has the code
                                         and the page of that. One whose processes cannot be killed has 86
each   between two attempts      other   the code is 83 in place of 84 (B below). A job of a fixed size, too, first
                                         waits for ``join_timeout_s``, 600 s
each   between two attempts      serves  the code is 83 in place of 84 (C below)
=====  ========================  ======  ==============================================================================

Who decides a row, and so where it is changed: if one launcher leads, ``LostNodes._continue_or_fail`` here and
``Participants.replace_or_shrink``. If each node has one, ``Coordinator._why_too_few`` says whether the run can go on,
``Coordinator.has_enough`` and ``_is_complete`` when the next attempt begins; 83 is
``RendezvousClient.too_few_error``. If the node that served is lost, ``MultiNodeRendezvous.finish_round``. The code 84
is made of the result in ``launcher/outcome.py``; ``failure_page.page`` shows it.

Where one launcher leads, a lost node never comes back; docs/architecture.md says what that would need.

Where one launcher leads, the end of the run waits for the sweep of the host, up to 20 s after the loss, and then
says "left: unknown on HOST", also if the job has succeeded without it. If the launcher's own machine is lost,
nobody says anything: the other agents get no ping for 5 s, and stop their workers.

The times, if the user sets none, with one launcher that leads all nodes, and where each node has a launcher. "-": there
is no such wait.

=====  =====  ==================================  ===============================  ====================================
one    each   who waits for what                  then                             set by
=====  =====  ==================================  ===============================  ====================================
1 s    -      the launcher                        sends each agent on another      ``pings.INTERVAL_S``
                                                  machine the next ``Ping``
1 s    1 s    each member                         sends its next heartbeat         ``member.HEARTBEAT_S``
5 s    -      the launcher for a ``Pong``         the node is lost                 ``TimeoutConfig.lost_after_s``: KEY
                                                                                   keep_alive_interval times KEY
                                                                                   keep_alive_max_attempt
5 s    -      an agent for a ``Ping``             it stops its workers             the same
                                                  (``LauncherLost``)
8 s    5 s    the serving member for a heartbeat  ``_on_silent``: the round ends   ``RendezvousConfig.silent_after_s``:
                                                                                   the same; with one launcher also
                                                                                   ``setup.HEARTBEAT_MARGIN_S``
10 s   7 s    another member for the store        the rendezvous is lost           ``silent_after_s`` and 2 heartbeats
10 s   7 s    the serving node, after the last    it ends without them             ``silent_after_s`` and 2 s
              verdict, for the others to leave
20 s   20 s   the launcher for the sweep          it gives up the sweep            ``nodes.SWEEP_S``
              of a host
30 s   30 s   an agent for its workers to end     it kills them                    ``--shutdown-timeout``
              after SIGTERM
30 s   -      the launcher for the first          the node is lost                 ``lost_after_s`` and
              ``Pong`` of an agent                                                 ``setup.SLOW_START_S``, 25 s
-      30 s   the serving member for MAX nodes,   it forms the round               KEY last_call_timeout
              when MIN have joined
68 s   65 s   an agent for the verdict on a       the run ends on this node        ``silent_after_s``,
              round that has failed or was                                         ``--shutdown-timeout`` and
              stopped, from a rendezvous that                                      ``multi_node._VERDICT_S``, 30 s
              answers
600 s  600 s  an agent that has joined for a      the run ends with 83             KEY join_timeout; without a limit
              round                                                                before the first attempt if one
                                                                                   launcher leads
=====  =====  ==================================  ===============================  ====================================

**One launcher leads all nodes.**

1.  ``Pings`` calls ``on_unresponsive``. If only the agent dies, ``ChannelClosed`` comes at once. A node whose records
    cannot be handled is lost, too (``count_as_lost``).
2.  ``on_lost`` starts a sweep of the host: another agent gets ``SweepNode`` and answers with ``AgentEnded``. The node
    is SWEEPING until the channel of that agent closes, for at most 20 s, and then LOST.
3.  A spare takes its position, or the world shrinks. If fewer than MIN nodes are left, also after a spare that cannot
    be used, the run ends: ``Shutdown.fail`` sends ``StopWorkers``, before any node hears of the loss by step 4.
4.  The lost node did not serve the rendezvous. The launcher sends ``AssignNodes`` to the agent of the node that does,
    for the ``Coordinator``. That sends ``StopRound`` to the agents of the round. They stop their workers, send
    ``WorkersEnded``, and get a ``RoundVerdict``. If an attempt follows, they send ``NodeReady``, and once all
    participants have, the coordinator forms the next round: ``RoundFormed``. If a worker had failed by itself, and not
    because it lost its peers, the verdict is that on a failure: the attempt counts as a restart, or none follows.
5.  The lost node served the rendezvous. Once a spare is connected, if there is one, the first participant (the
    spare itself, if it replaces node 0) gets ``JoinRendezvous``. It stops its workers, and then opens an endpoint
    (``EndpointOpen``); only then do the others get ``JoinRendezvous``, and stop theirs. A member that gets no answer
    from the store makes its agent stop them earlier.
    A failure in this round counts only if some node had received the verdict before the loss; a node whose processes
    cannot be killed ends the run. The agents join the new rendezvous by ``NodeReady``. Its coordinator knows the
    number of restarts from ``JoinRendezvous`` and ``NodeReady``.
6.  Each agent sends ``AttemptEnded``, which ``Attempts`` merges, then ``AttemptStarted``. After step 5 the reason is
    that of the node with the lowest index: perhaps "the rendezvous at HOST:PORT is lost: ..."; the others' is "a new
    rendezvous has begun".

The nodes notice a loss, too, but the launcher mostly acts first, 5 s after the loss. They act if the node still answers
the launcher, or if the launcher is late. After 8 s without a heartbeat the coordinator stops the round by itself, and
``NodeSilent`` tells the launcher, which begins a new rendezvous as in step 5, unless that node no longer takes part.

A member that gets no answer from the rendezvous store makes its agent stop its workers and send ``NeedsRendezvous``: at
once if the connection is closed, else after 10 s, since a call of the store does not return if the host has no power.
A new rendezvous begins. If one node alone loses the next two as well, only the launcher reaches it: it is lost
(``participants._MAX_LOST_BY_ONE``). If the fifth in a row is lost before a round is formed
(``participants._MAX_TRIES``), the run ends with exit code 83.

**Each node has a launcher.** No launcher notices the loss of another node, and none starts a spare.

A.  The lost node did not serve the rendezvous. The coordinator stops the round on all nodes and gives the verdict, as
    in step 4 above. Nodes that wait at the endpoint for a free place (``NoFreePlace``) are the spares of the next one.
B.  Without a waiting node, an elastic job goes on with the nodes that are left. If these are fewer than MIN, they wait
    for another one, for ``join_timeout_s``; the page then names the lost nodes. A job of a fixed size ends on all
    nodes, "no further attempt: 1 node is left, and 2 are needed"; between two attempts it waits like an elastic one.
C.  It served the rendezvous. The others notice it at once if its connection closes. While workers run, each node ends
    with the result of ``verdicts.of_lost_rendezvous``; between two attempts with the error of
    ``RendezvousClient.unreachable_error``, since the nodes cannot meet again.

**A node fails before it has joined** the others: it tells them itself (``agent/rendezvous/cannot_join.py``).
One that is killed cannot. If it should have served, and no other had reached its endpoint, it looks like one that has
not started yet: the others wait for ``RendezvousConfig.search_timeout_s``. Once the endpoint has answered, they wait
for 10 s after the process there has gone (``connect._SERVER_GONE_S``).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_LOST, LaunchError, Level
from ddplaunch.protocol import first_failure
from ddplaunch.protocol.launcher_agent import AgentFailed, NeedsRendezvous, NodeSilent, ReportOfNode
from ddplaunch.protocol.wire import ProtocolError
from ddplaunch.text import quote
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import ChannelClosed

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.launcher.attempts import Attempts
    from ddplaunch.launcher.nodes import Node
    from ddplaunch.launcher.participants import Participants
    from ddplaunch.launcher.shutdown import Shutdown
    from ddplaunch.protocol.results import AttemptResult

_MAX_REASON = 300
_HINT = "This is a bug in ddplaunch, or the node is not sound; please report it with the output of -v."
_NO_SPARE_HINT = "With one more host as a spare, or with --nnodes MIN:MAX, a job can go on without a lost node."


class LostNodes:
    """Decides what the loss of a node means for one run."""

    def __init__(
        self,
        config: LaunchConfig,
        participants: Participants,
        attempts: Attempts,
        shutdown: Shutdown,
        note: Callable[..., None],
        show: Callable[[str, int], None],
        show_attempts: Callable[[Iterable[AttemptResult]], None],
    ) -> None:
        """``note``: as ``Watches.note``. ``show_attempts`` shows those that are complete now."""
        self._config, self._lost_after_s = config, config.timeouts.lost_after_s
        self._participants, self._attempts, self._shutdown = participants, attempts, shutdown
        self._note, self._show, self._show_attempts = note, show, show_attempts
        self._has_ignored_report = False

    @property
    def run_is_ending(self) -> bool:
        """Whether no further attempt or node is started: the run is shut down, or its outcome is known."""
        return self._shutdown.in_progress or self._attempts.outcome_is_known

    # How a loss is noticed.

    def on_unresponsive(self, node: Node) -> None:
        """The machine is frozen or disconnected. Called by the pings."""
        node.handle.kill()
        if not node.state.is_ending:
            self.on_lost(node, f"{node.host} has not answered for {self._lost_after_s:g} s")

    def count_as_lost(self, node: Node, reason: str, hint: str = "") -> None:
        """Kill the agent of ``node``, which does not do what it must: it is lost, unless it has come to its end."""
        node.handle.kill()
        if not (node.state.is_final or node.state.is_lost):
            self.on_lost(node, reason, hint)

    def on_bad_record(self, node: Node, event: object, error: Exception) -> None:
        """A record of ``node`` is invalid, or an unexpected ``error`` of the launcher has its cause in it: give it up.

        One bad node must not end the run of the others. Agents on this machine are part of this program: there, an
        unexpected error is a bug, with which the run ends in order and with its report. A report of another node that
        such an agent passes on is only ignored, and shown with ``-v``; the first one with an unexpected error always.
        """
        is_invalid = isinstance(error, ProtocolError)
        what = "is invalid" if is_invalid else f"cannot be handled: {type(error).__name__}"
        record = event.report if isinstance(event, ReportOfNode) else event
        told = f"its {type(record).__name__} {what}: {quote(str(error), _MAX_REASON)}"
        if isinstance(event, ReportOfNode):
            is_quiet = is_invalid or self._has_ignored_report
            self._has_ignored_report = self._has_ignored_report or not is_invalid
            text = f"a report of node {event.node_index} is ignored: {told}"
            self._show(text, Level.VERBOSE if is_quiet else Level.NORMAL)
        elif is_invalid or not self._config.is_local:
            node.is_ignored = True
            hint = _HINT if self._config.is_local or not is_invalid else ""
            self.count_as_lost(node, f"the agent on {node.host} was given up: {told}", hint)
        else:
            self._end_run(node, event, told)

    def _end_run(self, node: Node, event: object, told: str) -> None:
        self._shutdown.on_bug(f"on {node.host}: {told}")
        if isinstance(event, ChannelClosed):
            self.on_lost(node, f"the agent on {node.host} has ended")

    def on_channel_closed(self, node: Node, returncode: int | None) -> None:
        """The channel of an agent that has not reported its end has closed; ``returncode`` is None if unknown.

        One of 0 is that of the command which carried the channel.
        """
        if not returncode:
            self.on_lost(node, f"the connection to {node.host} has ended")
        else:
            killed = first_failure.KILLED_IN_DRY_RUN if self._config.dry_run else first_failure.KILLED_HINT
            hint = killed if returncode == -signal.SIGKILL else ""
            self.on_lost(node, f"the agent on {node.host} {first_failure.ended(returncode)}", hint)

    def on_host_failure(self, node: Node, failure: HostFailure) -> None:
        """No agent could be started on the host. If the run ends anyway, its outcome does not depend on this.

        Raises:
            LaunchError: too few other hosts can be used.
        """
        if not self.run_is_ending:
            self._participants.exclude(node, failure)
            return
        self._participants.nodes.end_unused(node)
        if node.index in self._participants.indices:
            self._participants.remove(node)

    def on_agent_failed(self, node: Node, event: AgentFailed) -> None:
        """The agent cannot run its node, and ends in order: no sweep is needed."""
        is_needed = node.index in self._participants.indices and not self._attempts.outcome_is_known
        if self._config.one_launcher_leads and not is_needed:  # It has left, or is a spare that came too late.
            self._show(event.message, Level.NORMAL)
        elif self._participants.can_do_without(node) and not self.run_is_ending:
            self._participants.exclude(node, HostFailure(node.host, "agent", event.message, event.hint))
            self._show_attempts(self._attempts.remove_node(node.index))
        else:
            self._shutdown.fail(LaunchError(event.message, event.hint, event.exit_code))

    # What follows.

    def on_lost(self, node: Node, reason: str, hint: str = "") -> None:
        """Kill the node's remaining processes. Then a spare replaces it, or the world shrinks, or the run fails."""
        if not node.state.is_lost:  # Else an earlier call has ended with an error.
            self._participants.nodes.sweep(node)
            node.loss = "" if self.run_is_ending else reason
            self._note("node_lost", reason, node=node.index)
        if node.index in self._participants.indices:
            try:
                self._continue_or_fail(node, reason, hint)
            except LaunchError as error:
                self._shutdown.fail(error)
        self._show_attempts(self._attempts.remove_node(node.index))

    def _continue_or_fail(self, node: Node, reason: str, hint: str) -> None:
        if not self.run_is_ending and self._participants.can_do_without(node):
            self._show(f"{reason}; the job can go on without it", Level.ALWAYS)
            self._participants.replace_or_shrink(node)
            return
        if self._shutdown.has_killed:  # Shutdown.run_due killed the agent, and has shown a message.
            self._show(reason, Level.VERBOSE)
        elif self._config.one_launcher_leads and (self._shutdown.others_stop or self._attempts.outcome_is_known):
            self._show(reason, Level.ALWAYS)  # The outcome does not depend on this node.
        else:  # The order to stop goes first: a node that only knew of the loss could begin an attempt with too few.
            self._shutdown.fail(self._error_of_loss(node, reason, hint))
        self._participants.remove(node)

    def _error_of_loss(self, node: Node, reason: str, hint: str) -> LaunchError:
        if self.run_is_ending or not self._config.one_launcher_leads:
            return LaunchError(reason, hint, NODE_LOST)
        from ddplaunch.rounds.verdicts import why_too_few_nodes

        too_few = why_too_few_nodes(*self._participants.remaining_and_needed([node]))
        return LaunchError(f"{reason}; {too_few}", hint or _NO_SPARE_HINT, NODE_LOST)

    def on_needs_rendezvous(self, node: Node, event: NeedsRendezvous) -> None:
        """``node`` has lost the rendezvous: the nodes start another one, without ``node`` if it alone loses them all.

        Raises:
            LaunchError: too many rendezvous have failed one after the other.
        """
        self._on_rendezvous_lost(node, event.token, event.reason)

    def on_node_silent(self, server: Node, event: NodeSilent) -> None:
        """As ``on_needs_rendezvous``, for the silent node. Only the node that serves the rendezvous may say it."""
        if self._participants.server_index == server.index and event.node_index in self._participants.indices:
            silent = self._participants.nodes.all[event.node_index]
            self._on_rendezvous_lost(silent, event.token, f"it sent no heartbeat for {event.silent_s:g} s")

    def _on_rendezvous_lost(self, node: Node, token: str, reason: str) -> None:
        participants = self._participants
        if self.run_is_ending or not participants.is_current(token):
            return
        if participants.is_cut_off(node) and participants.can_do_without(node):
            self.count_as_lost(node, f"{node.host} cannot join the others ({reason})")
        else:
            participants.begin_new_rendezvous(node, reason)
