"""``--stacks``: what the workers of a run do now, and where they wait for whom.

Runs in the process that the user started. The agent on each machine with a launcher of the run asks that launcher over
its control socket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError, UsageError
from ddplaunch.features.hangs.records import ExamineRun, RunExamined
from ddplaunch.features.ps.ps import agents, find_runs, parts_of_run, raise_failures, with_launcher
from ddplaunch.features.ps.queries import AskLaunchers, LaunchersAnswered, RunOnHost
from ddplaunch.features.runs import run_folders
from ddplaunch.launcher import setup
from ddplaunch.protocol.control import ANSWER_S, Answer, RequestRefused

if TYPE_CHECKING:
    from ddplaunch.cli.commands import Request
    from ddplaunch.features.runs.asked_nodes import QueriedNode, Queries

_END_S = ANSWER_S + 15
"""Seconds for an agent: it gives each launcher ANSWER_S and a few seconds more."""


def stacks(request: Request) -> None:
    """Have the launchers of a run, here and on the hosts, examine their workers, and print what they found.

    Raises:
        UsageError: there is no such run, or its launcher is not on these machines.
        LaunchError: no launcher has answered; or the answers are of some nodes, and a host could not be queried.
    """
    run_id = run_folders.id_for("--stacks", request.value, request.log_dir)
    with agents(request.hosts, request.remote) as queries:
        parts = parts_of_run("--stacks", run_id, queries, find_runs(queries))
        names = with_launcher(parts)
        if not names:
            raise_failures(queries)
            raise _without_launcher(run_id, parts)
        answers = _ask(queries, {name: parts[name] for name in names})
    examined = [(host, answer) for host, _, answer in answers if isinstance(answer, RunExamined)]
    refused = ((host, pid, answer) for host, pid, answer in answers if isinstance(answer, RequestRefused))
    problems = [f"{host}: launcher {pid}: {answer.reason}" for host, pid, answer in refused]
    if not examined:
        if not problems:
            raise_failures(queries)
        text = "\n  ".join(problems or ["the run has just ended"])
        raise LaunchError(f"--stacks {run_id}: no launcher has examined its workers\n  {text}", "", NODE_NOT_READY)
    # One that knows all nodes is enough, where each node has a launcher.
    whole = [(host, answer) for host, answer in examined if not answer.all_nodes_at]
    shown = whole or examined
    request.show("\n\n".join(_page(host, answer, is_only=len(shown) == 1) for host, answer in shown))
    if not whole:
        for line in problems:
            request.report(line)
        raise_failures(queries)


def _without_launcher(run_id: str, parts: Mapping[str, Sequence[RunOnHost]]) -> UsageError:
    is_alive = any(run.launcher_alive for runs in parts.values() for run in runs)
    text, hint = "its launcher has ended", f"`ddplaunch --kill {run_id}` ends the processes that are left."
    if is_alive:
        host = run_folders.host_of_launcher(run_id)
        text, hint = f"its launcher is on {host or 'another host'}", f"Name it with --hosts{host and ' '}{host}."
    return UsageError(f"--stacks {run_id}: {text}", hint)


def _ask(queries: Queries, parts: Mapping[str, Sequence[RunOnHost]]) -> list[tuple[str, int, Answer | RequestRefused]]:
    """What the launchers have answered, each with its host and pid."""

    def query(machine: QueriedNode) -> AskLaunchers:
        launchers = tuple((pid, run.run_tag) for run in parts[machine.name] for pid in run.launchers)
        return AskLaunchers(launchers, ExamineRun(""))

    machines = [machine for machine in queries.nodes if machine.name in parts]
    queries.ask(machines, query, LaunchersAnswered, _END_S)
    none = LaunchersAnswered(())
    return [(each.name, *found) for each in machines for found in each.answers.get(LaunchersAnswered, none).answers]


def _page(host: str, answer: RunExamined, *, is_only: bool) -> str:
    lines = [*([] if is_only else [f"{host}:"]), *answer.sentences]
    lines += ["", *answer.lines] if answer.lines else []
    on_host = "" if host == setup.local_host_name() else f"{host}:"
    lines += [f"all stacks: {on_host}{answer.path}"] if answer.path else []
    if answer.all_nodes_at:
        lines.append(f"only {host}; for all nodes, add --hosts with the node that serves {answer.all_nodes_at}")
    return "\n".join(lines)
