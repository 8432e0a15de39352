"""The memory of nodes across runs: which hosts are used last, and what a run adds to nodes.json at its end.

Runs in the launcher, before and after a run, and in the commands ``--ps --nodes`` and ``--forget``. ``node_history``
has the rules. A file that is damaged or cannot be written never stops a run.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import Host, display_names, fold, matching, parse_hosts
from ddplaunch.errors import LaunchError, Level, StartNotice
from ddplaunch.features.health import node_history, nodes_file
from ddplaunch.features.health.node_history import NodeEvent
from ddplaunch.protocol import wire
from ddplaunch.text import plural, quote, table

if TYPE_CHECKING:
    from ddplaunch.cli.commands import Request
    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.health.nodes_file import Entries
    from ddplaunch.protocol.results import AttemptResult
    from ddplaunch.protocol.run_result import RunResult

_MAX_REASONS = 3
"""Reasons in one message."""

_MAX_DRAIN_REASON = 200

ALL = "all"
"""In place of hosts, for ``--forget``."""

_HEAD = ("host", "effect", "until", "what", "GPU", "when", "run")


def remembered() -> tuple[list[NodeEvent], str]:
    """What is known about nodes, the oldest first, and what is wrong with the file; a damaged one is set aside."""
    path = nodes_file.of_user()
    try:
        return (_decoded(nodes_file.read(path)) if path else []), ""
    except nodes_file.Damaged:
        return [], f"{path} is damaged, and not used{_set_aside()}"
    except OSError as error:
        return [], f"{path} cannot be read: {error.strerror}"


def _set_aside() -> str:
    """Rename the damaged file; another launcher may have done it."""
    try:
        _change(lambda events: events)
    except OSError as error:
        return f"; it cannot be renamed: {error.strerror or error}"
    return "; it is nodes.json.damaged now"


def _decoded(entries: Entries) -> list[NodeEvent]:
    """The entries that are events and have not expired; others, as of a later version, are passed over."""
    events = []
    for entry in entries:
        try:
            events.append(wire.from_json(NodeEvent, entry))
        except wire.ProtocolError:
            continue
    return node_history.kept(events, time.time())


def _change(new: Callable[[list[NodeEvent]], list[NodeEvent]]) -> None:
    """Replace the events by ``new`` of them; may raise OSError."""
    if path := nodes_file.of_user():
        nodes_file.change(path, lambda entries: [wire.to_json(event) for event in new(_decoded(entries))])


# Before a run.


def prepare(config: LaunchConfig) -> LaunchConfig:
    """``config`` with the hosts of which earlier runs know faults at the end of the list, and a notice about them."""
    if not config.hosts or config.dry_run:
        return config
    events, problem = remembered()
    notices = [StartNotice("detail", problem)] if problem else []
    names = display_names(config.hosts)
    reasons = node_history.suspects(events)
    known = {host: reasons[name] for host, name in matching(reasons, names).items()}
    if not (known or problem):
        return config
    if known:
        notices.append(StartNotice("warning", _used_last(known, names, config.max_nodes)))
    return replace(config, hosts=_ordered(config.hosts, names, known), notices=(*config.notices, *notices))


def _ordered(hosts: Sequence[Host], names: Sequence[str], known: Mapping[str, str]) -> tuple[Host, ...]:
    pairs = sorted(zip(names, hosts, strict=True), key=lambda pair: pair[0] in known)
    return tuple(host for _, host in pairs)


def _used_last(known: Mapping[str, str], names: Sequence[str], max_nodes: int) -> str:
    """The sentence about the hosts that earlier runs know; the job needs some of them if too few others are named."""
    too_few = max(0, min(max_nodes, len(names)) - (len(names) - len(known)))
    used, spares = list(known)[:too_few], list(known)[too_few:]
    parts = [f"{_listed(used)} used although earlier runs had faults there, for lack of other hosts"] if used else []
    parts += [f"{_listed(spares)} used last, after faults in earlier runs"] if spares else []
    reasons = [f"{host}: {reason}" for host, reason in known.items()][:_MAX_REASONS]
    more = f"; {len(known) - len(reasons)} more (--ps --nodes)" if len(known) > len(reasons) else ""
    return f"{', '.join(parts)} ({'; '.join(reasons)}{more}); to forget it: ddplaunch --forget '{fold(known)}'"


def _listed(names: Sequence[str]) -> str:
    return f"{quote(fold(names))} {'is' if len(names) == 1 else 'are'}"


# After a run.


def remember(
    config: LaunchConfig,
    result: RunResult,
    lost: Mapping[str, str],
    show: Callable[[str, int], None],
) -> None:
    """Add what the run has found out; ``show`` tells which hosts later runs use last because of it.

    ``lost`` has the reason for each host whose node was lost.
    """
    if config.dry_run:
        return
    result = replace(result, run_id=_unique_name(config, result))
    if not config.each_node_has_launcher:
        result = replace(result, attempts=tuple(map(_in_own_words, result.attempts)))
    events = node_history.of_run(result, _of_single_nodes(lost, result), time.time())
    if not (
        config.hosts or config.each_node_has_launcher
    ):  # Nothing to compare with: the program may fail on any machine.
        events = [event for event in events if event.kind == "hardware"]
    if not events:
        return
    _propose_drain(config, result, events, show)
    try:
        _add(events, show)
    except OSError as error:
        show(f"nodes.json cannot be written: {error.strerror or error}; later runs do not know of this", Level.VERBOSE)


def _in_own_words(attempt: AttemptResult) -> AttemptResult:
    """``attempt`` of several nodes, each of which names a cause: it counts as the node that it is about has told it."""
    cause = attempt.cause
    return replace(attempt, cause=next((exit_ for exit_ in attempt.exits if cause and exit_.rank == cause.rank), None))


def _add(events: Sequence[NodeEvent], show: Callable[[str, int], None]) -> None:
    """Write the events, and show the hosts that are used last from now on; may raise OSError."""
    after: list[NodeEvent] = []

    def add(before: list[NodeEvent]) -> list[NodeEvent]:
        after[:] = node_history.kept([*before, *events], time.time())
        return after

    _change(add)
    hosts = sorted({event.host for event in events} & node_history.suspects(after).keys())
    if hosts:
        days = plural(round(node_history.KEEP_S / 86400), "day")
        names = quote(fold(hosts))
        show(f"later runs use {names} last, for {days}; once repaired: ddplaunch --forget '{names}'", Level.NORMAL)


def _propose_drain(
    config: LaunchConfig, result: RunResult, events: Sequence[NodeEvent], show: Callable[[str, int], None]
) -> None:
    """In a SLURM job: the commands for the administrator, for nodes of this launcher. They are never run."""
    own = {exit_.host for attempt in result.attempts for exit_ in attempt.exits} | {
        found.host for found in result.health
    }
    broken = {event.host: event.text for event in events if event.kind == "hardware" and event.host in own}
    for host, text in broken.items() if config.slurm_job else ():
        if command := drain_command(host, text):
            show(f"for the administrator of SLURM: {command}", Level.ALWAYS)


def _unique_name(config: LaunchConfig, result: RunResult) -> str:
    """The name of the run's folder, the same for all launchers of a run: two runs may have one run id."""
    if not result.run_dir:
        return result.run_id
    folder = Path(result.run_dir)
    return (folder.parent if config.each_node_has_launcher else folder).name


def _of_single_nodes(lost: Mapping[str, str], result: RunResult) -> Mapping[str, str]:
    """``lost``, unless more than half of the nodes were: then the network of the launcher is the likelier cause."""
    return lost if 2 * len(lost) <= len(result.hosts) else {}


# Commands.


def list_all(request: Request) -> None:
    """``--ps --nodes``: list the nodes in which earlier runs have found faults."""
    events, problem = remembered()
    if problem:
        request.report(problem)
    if events:
        request.show(node_table(events))
    else:
        request.report("nothing is known about any node")


def node_table(events: Sequence[NodeEvent]) -> str:
    """One line per event, by host, the oldest first."""
    suspects = node_history.suspects(events)
    rows = [_row(event, suspects) for event in sorted(events, key=lambda event: (event.host, event.time_s))]
    return "\n".join(table([_HEAD, *rows]))


def _row(event: NodeEvent, suspects: Collection[str]) -> tuple[str, ...]:
    return (
        event.host,
        "used last" if event.host in suspects else "none yet",
        node_history.day(event.time_s + node_history.KEEP_S),
        event.text,
        event.uuid,
        node_history.day(event.time_s),
        event.run_id,
    )


def forget(request: Request) -> None:
    """``--forget``: forget what is known of some hosts, or of all, and tell how much that was.

    Raises:
        LaunchError: the file cannot be written.
    """
    hosts = None if request.value == ALL else parse_hosts(request.value, "--forget")
    dropped: list[NodeEvent] = []

    def without(events: list[NodeEvent]) -> list[NodeEvent]:
        known = {event.host for event in events}
        chosen = known if hosts is None else matching(map(_display_name, hosts), known).keys()
        dropped[:] = [event for event in events if event.host in chosen]
        return [event for event in events if event.host not in chosen]

    try:
        _change(without)
    except OSError as error:
        raise LaunchError(f"nodes.json cannot be written: {error.strerror or error}") from None
    names = quote(fold(event.host for event in dropped), 1000)
    named = "any node" if hosts is None else quote(fold(host.name for host in hosts), 1000)
    done = f"forgotten: {plural(len(dropped), 'event')} of {names}" if dropped else f"nothing is known about {named}"
    request.report(done)


def _display_name(host: Host) -> str:
    return str(replace(host, user=None)) if host.port else host.name


def drain_command(node: str, reason: str) -> str:
    """The command by which an administrator takes a node out of service; empty if it can be no node of SLURM.

    Safe to paste into a shell, whatever ``reason`` is.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", node):
        return ""
    # SLURM cuts a reason at a double quote, and prints it in lines of fields.
    text = re.sub(r"[^ -~]|[\"'`$\\!=]", " ", f"ddplaunch: {reason}")
    return (
        f"scontrol update nodename={node} state=drain reason={shlex.quote(' '.join(text.split())[:_MAX_DRAIN_REASON])}"
    )
