"""Has all hosts of a run make an environment, at the same time, and shows how far they are.

Runs in the process of the command, before the run.
"""

from __future__ import annotations

import base64
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import fold
from ddplaunch.errors import NODE_NOT_READY, LaunchError, StartNotice
from ddplaunch.features.environments import python
from ddplaunch.features.environments.queries import (
    PART_BYTES,
    ROUND_BYTES,
    EnvironmentAnswer,
    EnvironmentProgress,
    MakeEnvironment,
    PutFilePart,
    WantedFile,
)
from ddplaunch.features.runs.asked_nodes import QueriedNode, Queries, query_transport
from ddplaunch.text import duration, escape, grouped, plural, quote
from ddplaunch.transport.failures import HostFailure, failures_table

if TYPE_CHECKING:
    from ddplaunch.cluster.hosts import Host
    from ddplaunch.config import LaunchConfig, RemoteConfig

_SILENT_S = 60.0
"""An agent that makes an environment says every few seconds what it does."""

_FIRST_S, _AGAIN_S = 3.0, 15.0
_MAX_SHOWN = 5


class Progress:
    """Shows what hosts do that make an environment: a line after a few seconds, and others if it takes long."""

    def __init__(self, config: LaunchConfig, main: str) -> None:
        is_first = not config.task or not config.task.local_rank
        self._is_shown, self._main = config.output.verbosity >= 0 and is_first, main
        self._show_at, self._last = time.monotonic() + _FIRST_S, dict[str, str]()

    def tell(self, host: str, text: str) -> None:
        """What ``host`` does now."""
        self._last[host] = text
        if self._is_shown and time.monotonic() >= self._show_at:
            self._show_at = time.monotonic() + _AGAIN_S
            show(f"making the environment of {quote(self._main, 500)}: {self._states()}")

    def done(self, host: str) -> None:
        """``host`` has its environment, or has none."""
        self._last.pop(host, None)

    def _states(self) -> str:
        states = grouped((text, host) for host, text in self._last.items())
        shown = [f"{fold(hosts)}: {text}" for text, hosts in [*states.items()][:_MAX_SHOWN]]
        more = len(states) - len(shown)
        return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


def show(text: str) -> None:
    """Print a line of this command; it has no console yet."""
    if sys.stderr:
        sys.stderr.write(f"ddplaunch: {escape(text)}\n")


class _Hosts(Queries):
    """The hosts that make an environment: one that says what it does has time to go on."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(_SILENT_S)
        self._progress = progress

    def _on_event(self, node: QueriedNode, event: object, received_s: float) -> None:
        super()._on_event(node, event, received_s)
        if isinstance(event, EnvironmentProgress):
            node.deadline = time.monotonic() + _SILENT_S
            self._progress.tell(node.name, event.text)
        if isinstance(event, EnvironmentAnswer) or node.failure:
            self._progress.done(node.name)


def on_hosts(config: LaunchConfig, order: MakeEnvironment, files: Mapping[str, str]) -> LaunchConfig:
    """``config`` with the hosts that have the environment, each with its interpreter, and with notices.

    ``files``: by hash, the paths of the files that hosts may want.

    Raises:
        LaunchError: a host cannot be reached, or has no environment, and so the job cannot run.
    """
    progress = Progress(config, order.main)
    found = dict(zip(config.hosts, _made(config.hosts, config.remote, order, files, progress), strict=True))
    without = [host for host, each in found.items() if isinstance(each, HostFailure) and each.cause == "python"]
    if order.uv and without and not config.remote.python:
        remote = python.installing(config.remote, files[order.uv.hash], order.python)
        for some in python.groups(without):
            made = _made(some, remote, order, files, progress)
            again = (python.why_not_installed(each) if isinstance(each, HostFailure) else each for each in made)
            found.update(zip(some, again, strict=True))
    return _with_hosts(config, order, found)


_Made = EnvironmentAnswer | HostFailure


def _made(
    hosts: Sequence[Host], remote: RemoteConfig, order: MakeEnvironment, files: Mapping[str, str], progress: Progress
) -> list[_Made]:
    """The answer of each host, or why it has no environment, in their order."""
    queries = _Hosts(progress)
    transport = query_transport(hosts, remote, queries.post)
    try:
        queries.start(transport, order)
        queries.wait(queries.nodes, EnvironmentAnswer)
        while wanting := [node for node in queries.nodes if not node.failure and _answer(node).wanted]:
            for node in wanting:
                _send(node, _answer(node).wanted[0], files)
                node.answers.pop(EnvironmentAnswer)
            queries.ask(wanting, lambda _: order, EnvironmentAnswer, _SILENT_S)
    finally:
        queries.close()
        transport.close()
    return [_failure(node) or _answer(node) for node in queries.nodes]


def _with_hosts(config: LaunchConfig, order: MakeEnvironment, found: Mapping[Host, _Made]) -> LaunchConfig:
    failed = [each for each in found.values() if isinstance(each, HostFailure)]
    answers = {host: each for host, each in found.items() if isinstance(each, EnvironmentAnswer)}
    table = failures_table(failed)
    if len(answers) < config.min_nodes:
        message = f"the environment of {quote(order.main)} cannot be made on hosts\n{table}"
        raise LaunchError(message, "", NODE_NOT_READY)
    notices = [*config.notices, notice([*answers.values()], order.main)]
    if failed:
        notices.append(StartNotice("warning", f"the run goes on without hosts that have no environment\n{table}"))
    if differences := _differences({host.name: each.packages for host, each in answers.items()}):
        notices.append(StartNotice("warning", f"the environments of the hosts differ: {differences}; pin the versions"))
    hosts = tuple(replace(host, python=each.python) for host, each in answers.items())
    return replace(config, hosts=hosts, max_nodes=min(config.max_nodes, len(hosts)), notices=tuple(notices))


def _answer(node: QueriedNode) -> EnvironmentAnswer:
    answer: EnvironmentAnswer = node.answers[EnvironmentAnswer]
    return answer


def _failure(node: QueriedNode) -> HostFailure | None:
    if node.failure or not _answer(node).problem:
        return node.failure
    return HostFailure(node.name, "start", problem_of(_answer(node)), _answer(node).hint)


def problem_of(answer: EnvironmentAnswer) -> str:
    """Why there is no environment, on lines that can be shown."""
    return "\n".join(quote(line, 500) for line in answer.problem.splitlines())


def _send(node: QueriedNode, wanted: WantedFile, files: Mapping[str, str]) -> None:
    """Send a host the next parts of a file that it wants; it fails if it wants another one than we have offered."""
    if wanted.hash not in files:
        node.failure = HostFailure(node.name, "start", "asks for a file that was not offered")
        return
    with open(files[wanted.hash], "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        end = min(nbytes, wanted.offset + ROUND_BYTES)
        for offset in range(wanted.offset, end, PART_BYTES):
            data = os.pread(file.fileno(), min(PART_BYTES, end - offset), offset)
            node.handle.send(PutFilePart(wanted.hash, offset, nbytes, base64.b64encode(data).decode()))


def notice(answers: Sequence[EnvironmentAnswer], main: str) -> StartNotice:
    """What to say of the environments at the start of the run."""
    pythons = list(dict.fromkeys(answer.python for answer in answers))
    where = quote(os.path.dirname(os.path.dirname(pythons[0])), 500)
    others = f" and {plural(len(pythons) - 1, 'other folder')}" if len(pythons) > 1 else ""
    made_s = max(answer.made_s for answer in answers)
    if not made_s:
        return StartNotice("detail", f"the environment of {quote(main)} is in {where}{others}")
    return StartNotice("info", f"made the environment of {quote(main)} in {duration(made_s)}: {where}{others}")


def _differences(packages: Mapping[str, Iterable[str]]) -> str:
    """The packages that not all hosts have in the same version, shortly; empty: there are none."""
    by_host = {host: frozenset(found) for host, found in packages.items()}
    common = frozenset.intersection(*by_host.values()) if by_host else frozenset()
    others = {host: sorted(found - common) for host, found in by_host.items() if found - common}
    return "; ".join(f"{host} has {', '.join(names[:_MAX_SHOWN])}" for host, names in [*others.items()][:2])
