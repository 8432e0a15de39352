"""Entry point of the agent's process: control channel, signals, and the report of an error that ends the agent.

The first record on stdin selects the task: a node of a run (AgentSpec), a sweep, or a query, which other queries and a
run may follow. Must import only what every run needs, since the launcher waits for its start.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from ddplaunch import errors, features
from ddplaunch.agent import this_node
from ddplaunch.agent.agent import Agent
from ddplaunch.agent.launcher_channel import Inbox, Outbox
from ddplaunch.agent.parts import StoppedEarly
from ddplaunch.errors import LaunchError
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol import environment, wire
from ddplaunch.protocol.launcher_agent import AgentEnded, AgentFailed, Notice, SweepNode
from ddplaunch.protocol.specs import AgentSpec
from ddplaunch.system import cgroup, limits, linux, processes, procfs
from ddplaunch.system.signals import PASSED_TO_WORKERS, SENT_TO_RUNS, SignalReceived, StopRequests

if TYPE_CHECKING:
    import threading

    from ddplaunch.agent.workers.forkserver_client import Forked

_LAST_RECORD_S = 3.0
"""Time limit of the last write to a launcher that does not read."""


def main(warm: Forked | None = None) -> None:
    """Run the agent. Stdin and stdout are the control channel, stderr is the user's.

    ``warm``: pid and socket of a forkserver, if a keeper has forked it with this agent.
    """
    control_in, control_out = _take_control_channel()
    mailbox: Mailbox[object] = Mailbox()
    _post_signals(mailbox)
    try:
        outbox = Outbox(control_out)
    except RuntimeError as error:  # The limit of threads is reached.
        os.write(control_out, wire.encode(_describe(error, "this node")) + wire.encode(AgentEnded()))
        return
    after_end: list[Callable[[], None]] = []
    unkillable = _execute(os.fdopen(control_in, "rb"), outbox, mailbox, after_end, warm)
    if unkillable is not None:
        outbox.send(AgentEnded(unkillable))
        for act in after_end:
            act()
    outbox.drain(_LAST_RECORD_S)
    gc.freeze()  # Else the end of the interpreter searches all objects for garbage, twice.


def _take_control_channel() -> tuple[int, int]:
    """Move the channel to other descriptors: children inherit /dev/null as stdin and stderr as stdout."""
    control_in, control_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return control_in, control_out


def _post_signals(mailbox: Mailbox[object]) -> None:
    requests = StopRequests()

    def post(number: int, _frame: object) -> None:
        event, is_passed = SignalReceived(number), signal.Signals(number).name in PASSED_TO_WORKERS
        # The second one that SLURM sends would end the transfer of the logs of workers that have ended at once.
        if is_passed or requests.is_new(event.received_at):
            mailbox.post(event)

    for signum in SENT_TO_RUNS:
        if signal.getsignal(signum) != signal.SIG_IGN:  # Under nohup, SIGHUP stays ignored.
            signal.signal(signum, post)
    # If SIGCHLD is ignored, the kernel reaps the children and their exit codes are lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _execute(
    stream: BinaryIO, outbox: Outbox, mailbox: Mailbox[object], after_end: list[Callable[[], None]], warm: Forked | None
) -> tuple[int, ...] | None:
    """Execute the launcher's first record. ``after_end`` gets what must follow AgentEnded.

    Returns:
        The pids that SIGKILL has not ended, for AgentEnded. None if that must not follow, so that a launcher that still
        runs counts this node as lost: the launcher is lost, or a bug keeps the pids from being known.
    """
    agent: Agent | None = None
    spec: AgentSpec | None = None
    host = "this node"
    try:
        order = _serve_until_run(stream, outbox)
        if not isinstance(order, AgentSpec):
            return order
        host = order.host
        linux.become_subreaper()
        inbox = Inbox(stream, mailbox, outbox.send)
        spec = this_node.prepare(order)
        after_end.append(lambda: _after_end(spec, outbox, mailbox, inbox.is_closed))
        agent = Agent(spec, outbox, mailbox, warm)
        unkillable = agent.run()
        if inbox.is_closed.is_set():
            return None
        agent.on_run_ended()
        return unkillable
    except StoppedEarly as stopped:
        if str(stopped):
            outbox.send(Notice(str(stopped), -1))
        return None if inbox.is_closed.is_set() else ()
    except Exception as error:
        failed = _describe(error, host)
    if spec is None or not spec.rendezvous or (agent and agent.rendezvous.has_joined):
        outbox.send(failed)
        return _close(agent, failed)
    from ddplaunch.agent.rendezvous import cannot_join

    left = _close(agent, failed)
    cannot_join.tell(spec, failed, mailbox, outbox.send)
    outbox.send(failed)  # Last: the launcher answers with an order to stop.
    return left


def _close(agent: Agent | None, failed: AgentFailed) -> tuple[int, ...] | None:
    """Returns the pids that SIGKILL has not ended; None if a bug keeps them from being known: the launcher sweeps."""
    for is_bug in (failed.exit_code == errors.INTERNAL, False):
        with contextlib.suppress(Exception):
            return agent.close(is_bug=is_bug) if agent else ()
    return None


def _after_end(spec: AgentSpec, outbox: Outbox, mailbox: Mailbox[object], launcher_lost: threading.Event) -> None:
    for module, text in features.modules_with_text("after_end", spec.texts):
        module.act(spec, text, outbox, mailbox, launcher_lost)


def _queries() -> tuple[type, ...]:
    return features.records("TO_AGENT", "queries")  # An agent of a run does not load them.


def _serve_until_run(stream: BinaryIO, outbox: Outbox) -> AgentSpec | tuple[int, ...]:
    """Sweep a run, or answer queries, until the launcher begins a run or has no more: then as ``_execute`` returns."""
    while (received := wire.read_record(stream, (AgentSpec, SweepNode), _queries)) is not None:
        signal.alarm(0)  # Set by remote_start, for an agent whose launcher is cut off before the first record.
        order = received[0]
        procfs.check_mounted(order.host if isinstance(order, AgentSpec) else "this node")
        if isinstance(order, AgentSpec):
            return order
        sweeps = isinstance(order, SweepNode)
        unkillable = _sweep_node(order) if sweeps else features.answering_module(order).serve(order, stream, outbox)
        if unkillable is not None:
            return tuple(unkillable)
    return ()


def _describe(error: Exception, host: str) -> AgentFailed:
    if isinstance(error, wire.ProtocolError):
        return AgentFailed(f"{host} received an invalid record: {error}", "", errors.INTERNAL)
    known = error if isinstance(error, LaunchError) else limits.shortage(error, host)
    if known:
        return AgentFailed(known.message, known.hint, known.exit_code)
    return AgentFailed(f"a bug in ddplaunch's agent on {host}\n{traceback.format_exc()}", "", errors.INTERNAL)


def _sweep_node(order: SweepNode) -> tuple[int, ...]:
    """Kill the run's cgroup first: that also ends processes without the run tag in their environment."""
    in_cgroup = cgroup.kill_tagged(order.node_tag, time.monotonic() + 1)
    excluded = frozenset((*order.excluded_pids, os.getpid()))
    by_environment = processes.sweep_run(f"{environment.RUN_ID}={order.node_tag}", excluded)
    return tuple(sorted({*in_cgroup, *by_environment}))
