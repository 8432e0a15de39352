"""Entry of the agent's process: the control channel, the signals, and what is told when the agent cannot go on."""

from __future__ import annotations

import os
import signal
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch import environ, errors, kernel, protocol
from ddplaunch.agent import cgroup, launcher_watch, limits, processes, program
from ddplaunch.agent.agent import Agent
from ddplaunch.agent.events import Signalled
from ddplaunch.agent.log_sender import LogSender
from ddplaunch.agent.outbox import Outbox
from ddplaunch.errors import LaunchError
from ddplaunch.mailbox import Mailbox
from ddplaunch.model import AgentSpec
from ddplaunch.node_check import LookAtNode
from ddplaunch.records import AgentEnded, AgentFailed, SweepRun
from ddplaunch.remains import ListRuns

if TYPE_CHECKING:
    from typing import BinaryIO

_LAST_WORDS_S = 3.0
"""How long the launcher may take nothing at the end: without the last record, the node counts as lost."""

_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""SLURM sends them to the tasks of a step, and in a step of ours that is the agent."""


def main() -> None:
    """Entry of the agent's process. Its stdin and stdout are the control channel, its stderr the user's."""
    control_in, control_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    mailbox: Mailbox[object] = Mailbox()
    for signum in _HEARD:
        if signal.getsignal(signum) != signal.SIG_IGN:  # As nohup has it, for workers too.
            signal.signal(signum, lambda number, _frame: mailbox.post(Signalled(number)))
    # Where it is ignored, the kernel reaps our children, and how they ended is never known.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        outbox = Outbox(control_out)
    except RuntimeError as error:  # No room for a thread.
        os.write(control_out, protocol.encode(_failure(error, "this node")) + protocol.encode(AgentEnded()))
        return
    logs = LogSender(outbox, mailbox)
    left = _serve(os.fdopen(control_in, "rb"), outbox, mailbox, logs)
    if left is not None:
        outbox.send(AgentEnded(left))
        logs.send()
    outbox.drain(_LAST_WORDS_S)


def _serve(stream: BinaryIO, outbox: Outbox, mailbox: Mailbox[object], logs: LogSender) -> tuple[int, ...] | None:
    """The pids that are left; None where there is no launcher to be told: to one that lives, this node is lost."""
    agent: Agent | None = None
    host = "this node"
    try:
        received = protocol.read_record(stream, (AgentSpec, SweepRun, ListRuns, LookAtNode))
        if received is None:
            return ()
        order = received[0]
        if isinstance(order, SweepRun):
            return _sweep_run(order)
        if isinstance(order, ListRuns):
            from ddplaunch.agent import end_run

            return end_run.serve(stream, outbox)
        if isinstance(order, LookAtNode):
            from ddplaunch.agent import node_check

            return node_check.serve(order, stream, outbox)
        host = order.host
        kernel.become_subreaper()
        is_gone = launcher_watch.start(stream, mailbox, outbox.send)
        order = program.at_home(order)
        if order.sends_logs and order.log_dir:
            logs.prepare(Path(order.log_dir), is_gone)
        program.check(order.program, host, os.environ.get("PATH", os.defpath))
        agent = Agent(order, outbox, mailbox)
        left = agent.run()
        return None if is_gone.is_set() else left
    except Exception as error:
        outbox.send(_failure(error, host))
    return agent.close() if agent else ()


def _failure(error: Exception, host: str) -> AgentFailed:
    if isinstance(error, protocol.ProtocolError):
        return AgentFailed(f"{host} does not understand what it is told: {error}", "", errors.INTERNAL)
    known = error if isinstance(error, LaunchError) else limits.shortage(error, host)
    if known:
        return AgentFailed(known.message, known.hint, known.exit_code)
    return AgentFailed(f"a bug in ddplaunch's agent\n{traceback.format_exc()}", "", errors.INTERNAL)


def _sweep_run(order: SweepRun) -> tuple[int, ...]:
    """First by cgroup, which has also what does not carry the run's mark any more."""
    in_cgroup = cgroup.kill_run(order.run_id, time.monotonic() + 1)
    spare = frozenset((*order.spare, os.getpid()))
    marked = processes.sweep_run(f"{environ.RUN_ID}={order.run_id}", spare)
    return tuple(sorted({*in_cgroup, *marked}))
