"""Shows a plan: as text of one screen, and as one JSON object.

Runs in the launcher. Pure: reads only the plan.
"""

from __future__ import annotations

import itertools
import json
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import fold
from ddplaunch.text import plural, quote, table

if TYPE_CHECKING:
    from ddplaunch.features.plan.model import NodePlan, Plan, RankPlan

_WIDTH = 118
_MAX_ROWS = 8
_MAX_GIVEN = 12
_MAX_CELL = 24
"""Longer values, which are paths, are shown for one rank only."""

Row = tuple[str, ...]


def as_json(plan: Plan) -> str:
    """One JSON object with the fields of ``Plan``."""
    return json.dumps(asdict(plan))


def page(plan: Plan, *, is_verbose: bool = False) -> str:
    """The plan as text: at most about 40 lines for a job of any size.

    ``is_verbose``: show how agents start, and which scheduler was found.
    """
    parts: list[Iterable[str]] = [
        _head(plan),
        plan.details if is_verbose else (),
        _nodes(plan),
        _commands(plan, is_verbose=is_verbose),
        _list("before the run", plan.copied),
        _environment_by_rank(plan),
        _common_environment(plan),
        _list("faults that --inject injects", plan.injections),
        _list("warnings", plan.warnings),
    ]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def _head(plan: Plan) -> Iterator[str]:
    count = (
        "a number of workers that depends on the nodes' devices,"
        if plan.world_size is None
        else plural(plan.world_size, "worker")
    )
    nodes = plural(plan.max_nodes, "node")
    if plan.min_nodes < plan.max_nodes:
        nodes = f"{plan.min_nodes} to {nodes}"
        count = count if plan.world_size is None else f"at most {count}"
    how = {
        "here": "simulated here, on the CPU with gloo in place of NCCL" if plan.dry_run else "on this machine",
        "this node of several": "with one ddplaunch process each",
        "this worker of several": "with one ddplaunch process for each worker",
    }.get(plan.starts, f"started {plan.starts}")
    yield f"plan: {count} on {nodes}, {how}; {_restarts(plan.max_restarts)}"
    if plan.starts == "this node of several":
        yield "The plan assumes that the other nodes are like this one."
    yield "Nothing has been started, and no host has been contacted."


def _restarts(count: int) -> str:
    return (
        f"after a failure started again, at most {plural(count, 'time')}"
        if count
        else "not started again after a failure"
    )


# Nodes.


def _nodes(plan: Plan) -> Iterator[str]:
    head = ("node", "host", "workers", "ranks", "GPUs", "connects to")
    groups = [list(group) for _, group in itertools.groupby(plan.nodes, _kind)]
    if len(plan.nodes) <= _MAX_ROWS:
        groups = [[node] for node in plan.nodes]
    rows = [_node_row(plan, group) for group in groups]
    is_same = all(node.reached in ("", node.host) for node in plan.nodes)
    yield from table([row[: -1 if is_same else None] for row in (head, *_elided(rows))])


def _kind(node: NodePlan) -> tuple[object, ...]:
    prefix = node.reached.rpartition(node.host)
    return node.is_spare, node.workers, node.gpus, prefix[0], prefix[2]


def _node_row(plan: Plan, nodes: Sequence[NodePlan]) -> Row:
    first, last = nodes[0], nodes[-1]
    number = (
        "spare"
        if first.is_spare
        else "by arrival"
        if first.node_rank is None
        else _span([str(node.node_rank) for node in nodes])
    )
    each = " each" if len(nodes) > 1 else ""
    ranks = f"{first.ranks[0]}-{last.ranks[1]}" if first.ranks and last.ranks else "?"
    if first.ranks and last.ranks and first.ranks[0] == last.ranks[1]:
        ranks = str(first.ranks[0])
    return (
        number,
        quote(fold(node.host for node in nodes), 60),
        _workers(first) + each,
        "-" if first.is_spare else ranks,
        _gpus(plan, first) + (each if first.gpus else ""),
        quote(fold(node.reached for node in nodes), 60),
    )


def _workers(node: NodePlan) -> str:
    return node.counted if node.workers is None else str(node.workers)


def _gpus(plan: Plan, node: NodePlan) -> str:
    if node.gpus is None:
        return "counted there" if node.reached else "counted at the start"
    if not node.gpus:
        return "none found"
    return quote(_span(node.gpus), 40) + (" (simulated)" if plan.dry_run else "")


# Commands.


def _commands(plan: Plan, *, is_verbose: bool) -> Iterator[str]:
    node = plan.nodes[0]
    agent = f"{_typed([node.python])} as ddplaunch's agent"
    setup = f"{quote(node.setup)}; " if node.setup else ""
    yield "commands of the real run" if plan.dry_run else "commands"
    if node.reached:
        yield f"  on each node  {node.way}: " + (_typed(node.command, shell=True) if is_verbose else setup + agent)
        if is_verbose:
            yield f"                sent on stdin: environment; {setup}{agent}"
    elif node.command:
        command = _typed(node.command) if is_verbose else agent
        yield f"  {'on this node' if plan.starts != 'here' else 'here':<13} {command}"
    else:
        yield "  on each node  ddplaunch's agent: --hosts names the nodes, or ddplaunch is started on every one"
    yield f"  each worker   {_typed(plan.command)}"
    yield f"                in {_typed([node.directory])}"
    if plan.how == "forked":
        yield "                forked from a process that has imported torch; the script runs as under this command"


def _typed(command: Sequence[str], *, shell: bool = False) -> str:
    return quote(command[0] if shell and len(command) == 1 else shlex.join(command), 400)


# The environment.


def _environment_by_rank(plan: Plan) -> Iterator[str]:
    if plan.depends_on:
        yield f"environment that differs between ranks: RANK, LOCAL_RANK and others depend on {plan.depends_on}"
    if len(plan.ranks) < 2:
        return
    heads: dict[Row, str] = {}
    for name in plan.ranks[0].environ:
        values = tuple(rank.environ.get(name, "") for rank in plan.ranks)
        heads[values] = f"{heads[values]}, {name}" if values in heads else name
    short = {values: names for values, names in heads.items() if max(map(len, values)) <= _MAX_CELL}
    yield "environment that differs between ranks"
    yield from _indented(table([("host", *short.values()), *_elided(_rank_rows(plan.ranks, list(short)))]))
    for values in (values for values in heads if values not in short):
        yield from (f"  {heads[values]}, as of rank 0:", f"    {quote(values[0], 110)}")


def _rank_rows(ranks: Sequence[RankPlan], columns: Sequence[Row]) -> list[Row]:
    """One row per rank; one per node if there are too many ranks."""
    if len(ranks) <= _MAX_ROWS:
        return [(rank.host, *(column[position] for column in columns)) for position, rank in enumerate(ranks)]
    rows = []
    for host, group in itertools.groupby(range(len(ranks)), lambda position: ranks[position].host):
        positions = list(group)
        rows.append((host, *(_span([column[position] for position in positions]) for column in columns)))
    return rows


def _common_environment(plan: Plan) -> Iterator[str]:
    yield f"environment of every worker{' of the dry run' if plan.dry_run else ''}, besides inherited variables"
    texts = [f"{name}={_quoted(value)}" for name, value in plan.environ.items()]
    more = len(plan.given) - _MAX_GIVEN
    given = [quote(text, 80) for text in plan.given[:_MAX_GIVEN]] + ([f"... {more} more"] if more > 0 else [])
    yield from _indented(_wrapped([*texts, *given]))


def _quoted(value: str) -> str:
    return quote(value) if "<" in value else quote(shlex.quote(value), 80)


def _wrapped(words: Iterable[str]) -> list[str]:
    # A line must not break at a space inside a value.
    lines = textwrap.wrap("  ".join(word.replace(" ", "\0") for word in words), _WIDTH - 2, break_long_words=False)
    return [line.replace("\0", " ") for line in lines]


# Texts.


def _list(head: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield head
        for line in lines:
            yield from textwrap.wrap(line, _WIDTH, initial_indent="  - ", subsequent_indent="    ")


def _span(values: Sequence[str]) -> str:
    """``0-7`` for consecutive numbers, one value if all are equal, else the first and the last."""
    if len(set(values)) == 1:
        return values[0]
    numbers = [int(value) for value in values if value.isdigit()]
    if len(values) == len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(values) if len(values) < 9 and all(map(str.isdigit, values)) else f"{values[0]} .. {values[-1]}"


def _elided(rows: Sequence[Row]) -> Sequence[Row]:
    if len(rows) <= _MAX_ROWS:
        return rows
    dots = (f"... {len(rows) - _MAX_ROWS + 2} more", *([""] * (len(rows[0]) - 1)))
    return [*rows[: _MAX_ROWS - 2], dots, rows[-1]]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]
