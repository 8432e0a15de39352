"""``--env pack``: the launcher's own environment is copied to the same path on all hosts.

Runs in the process of the command, before the run. The copies travel as those of ``--sync``: only what a host does not
have is sent, and one that was cut off goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError, StartNotice
from ddplaunch.features import mounts
from ddplaunch.features.environments import listing, own, places, python, sent_uv
from ddplaunch.features.environments.queries import EnvironmentFound, LookForEnvironment
from ddplaunch.features.runs.asked_nodes import QueriedNode, Queries, query_transport
from ddplaunch.features.snapshot import content
from ddplaunch.features.snapshot.hosts import STUCK_S, Sending
from ddplaunch.features.snapshot.queries import CopyAnswer, MakeCopy
from ddplaunch.launcher import setup
from ddplaunch.launcher.display.console import Progress
from ddplaunch.launcher.launch import told_if_slow
from ddplaunch.text import duration, plural, quote, size
from ddplaunch.transport.failures import HostFailure, failures_table

if TYPE_CHECKING:
    from ddplaunch.cluster.hosts import Host
    from ddplaunch.config import LaunchConfig, RemoteConfig
    from ddplaunch.features.environments.own import Folder, OwnEnvironment, Packed

_FILE_HINT = "--env FILE makes an environment on each host, of a uv.lock, pyproject.toml or requirements.txt."
_PLACE_HINT = (
    "An environment has its path in its files, so --env pack can copy it to the same path only. --env FILE makes one "
    "elsewhere."
)


def at_start(config: LaunchConfig) -> LaunchConfig:
    """``config`` of a run whose hosts have the launcher's environment, and run with it.

    Raises:
        LaunchError: a host cannot be reached, or gets no copy, and so the job cannot run. UsageError: the environment
            is none that can be copied.
    """
    if config.is_local:
        return replace(config, notices=(*config.notices, _of_this_machine(config)))
    environment = own.environment(needs_torch=config.entry != "program")
    with contextlib.closing(setup.open_console(config, None, 1)) as console:
        packing = _Packing(config, environment, Progress(console, is_quiet=config.output.verbosity < 0))
        packing.run()
    return packing.configured()


def _of_this_machine(config: LaunchConfig) -> StartNotice:
    kind, _ = mounts.mount_of(os.path.realpath(sys.prefix))
    if mounts.is_shared(kind):
        text = (
            f"--env pack has no effect on the launcher's machine: {sys.prefix} is on a network file system ({kind}), "
        )
        return StartNotice("warning", quote(f"{text}and a copy of it must have the same path; {_FILE_HINT}", 1000))
    return StartNotice("detail", f"--env pack: the environment {quote(sys.prefix, 500)} is on this machine")


class _Packing:
    """Brings the environment to the hosts of a run. Main thread."""

    def __init__(self, config: LaunchConfig, environment: OwnEnvironment, progress: Progress) -> None:
        self._config, self._own, self._progress = config, environment, progress
        self._begun, self._sent, self._given = time.monotonic(), 0, 0
        self._copied = False
        self._results: dict[Host, HostFailure | None] = {}
        self._warnings: list[str] = []
        self._folders: dict[Folder, Packed] = {}

    def run(self) -> None:
        """Each host has a copy then, or a failure."""
        hosts, remote = self._config.hosts, self._config.remote
        self._results = dict(zip(hosts, self._bring(hosts, remote), strict=True))
        without = [host for host, failure in self._results.items() if failure and failure.cause == "python"]
        if without and not remote.python and (uv := sent_uv.own_uv()):
            version = ".".join(map(str, sys.version_info[:2]))
            remote = python.installing(remote, uv, version)
            for some in python.groups(without):
                again = (failure and python.why_not_installed(failure) for failure in self._bring(some, remote))
                self._results.update(zip(some, again, strict=True))

    def configured(self) -> LaunchConfig:
        """The configuration with the hosts that have it, and with notices. Raises LaunchError: they are too few."""
        config, folder = self._config, quote(self._own.folder.path, 500)
        failed = [failure for failure in self._results.values() if failure]
        hosts = tuple(replace(host, python=sys.executable) for host, failed in self._results.items() if not failed)
        table = failures_table(failed)
        if len(hosts) < config.min_nodes:
            raise LaunchError(f"the environment {folder} cannot be copied to hosts\n{table}", "", NODE_NOT_READY)
        notices = [*config.notices, self._notice(len(hosts))]
        if failed:
            notices.append(StartNotice("warning", f"the run goes on without hosts that have no environment\n{table}"))
        warnings = list(dict.fromkeys(self._warnings)) if self._sent else []
        if self._sent and (outside := own.outside(self._own.folder.path)):
            named = quote(", ".join(outside), 500)
            warnings.append(f"the environment has modules in {named}, which are not copied: --sync copies code")
        notices += [StartNotice("warning", text) for text in warnings]
        return replace(config, hosts=hosts, max_nodes=min(config.max_nodes, len(hosts)), notices=tuple(notices))

    def _notice(self, count: int) -> StartNotice:
        folder, hosts = quote(self._own.folder.path, 500), plural(count, "host")
        if not self._sent:
            return StartNotice("detail", f"{hosts} had the environment {folder} already")
        took = duration(time.monotonic() - self._begun)
        given = f", and they gave each other {size(self._given)}" if self._given else ""
        text = f"copied the environment {folder} to {hosts} in {took}, sent {size(self._sent)}{given}"
        return StartNotice("info", text)

    def _bring(self, hosts: Sequence[Host], remote: RemoteConfig) -> list[HostFailure | None]:
        queries = Queries(STUCK_S)
        transport = query_transport(hosts, remote, queries.post)
        try:
            queries.start(transport, self._question)
            queries.wait(queries.nodes, EnvironmentFound)
            self._bring_to(queries)
        finally:
            queries.close()
            transport.close()
        return [node.failure for node in queries.nodes]

    @cached_property
    def _question(self) -> LookForEnvironment:
        folder, base = self._own.folder, self._own.base
        return LookForEnvironment(
            folder=folder.path,
            python=folder.python,
            identity=listing.identity_of(folder.python),
            left_out=folder.left_out,
            base=base.python if base else "",
            base_folder=sys.base_prefix,
        )

    def _bring_to(self, queries: Queries) -> None:
        if others := [node for node in _usable(queries) if _found(node).is_other]:
            signature = listing.signature_of(own.files_of(self._own.folder))
            self._ask(queries, others, replace(self._question, signature=signature))
        for node in _usable(queries):
            node.failure = None if _found(node).is_same else self._why_unfit(node)
        base, folder = self._own.base, self._own.folder
        if base:
            lacking = [node for node in _usable(queries) if not _is_version(_found(node).base)]
            for node in lacking if self._own.is_base_of_machine else ():
                has = f"is Python {_found(node).base}" if _found(node).base else "is missing"
                text = f"{base.python} {has}: the environment was made with that of Python {_minor()}"
                node.failure = HostFailure(node.name, "start", text, f"Install it there. {_FILE_HINT}")
            self._copy(queries, base, lacking)
        self._copy(queries, folder, [node for node in _usable(queries) if not _found(node).is_same])
        if self._copied:
            self._ask(queries, _usable(queries), self._question)
            for node in _usable(queries):
                if not _is_version(_found(node).python):
                    text = _found(node).problem or f"{folder.python} is Python {_found(node).python} there"
                    node.failure = HostFailure(node.name, "start", text, _FILE_HINT)

    def _ask(self, queries: Queries, nodes: Sequence[QueriedNode], question: LookForEnvironment) -> None:
        for node in nodes:
            del node.answers[EnvironmentFound]
        queries.ask(nodes, lambda _: question, EnvironmentFound, STUCK_S)

    def _why_unfit(self, node: QueriedNode) -> HostFailure | None:
        """Why a copy could not run there, as far as it is known before there is one."""
        found, (machine, libc) = _found(node), (os.uname().machine, places.libc())
        if found.machine != machine:
            text = f"its processor is of type {found.machine}, that of the launcher's machine is {machine}"
        elif found.libc.split()[0] != libc.split()[0]:
            text = f"it has {found.libc}, and the launcher's machine {libc}"
        else:
            if _numbers(found.libc) < _numbers(libc):
                self._warnings.append(f"{node.name} has {found.libc}, older than {libc} here: programs may not run")
            return None
        return HostFailure(node.name, "start", f"{text}: the environment does not run there", _FILE_HINT)

    # The copies.

    def _copy(self, queries: Queries, folder: Folder, nodes: Sequence[QueriedNode]) -> None:
        nodes = [node for node in nodes if not node.failure]
        if not nodes:
            return
        packed, self._copied = self._packed(folder), True
        marker = json.dumps(vars(packed.facts)).encode()
        with _in_file(marker) as path:
            own_hash = content.hash_of(marker)
            order = MakeCopy(
                project=f"environment-{content.hash_of(os.fsencode(folder.path))[:8]}",
                name=own.name_of(packed),
                marker=own_hash,
                marker_bytes=len(marker),
                place=folder.path,
            )
            for node in nodes:
                node.answers.pop(CopyAnswer, None)
                node.handle.send(order)
            sending = Sending(queries, nodes, order, {**packed.sources, own_hash: path}, "the environment")
            sending.run(self._progress)
        self._sent += sending.sent
        self._given += sending.given
        for node in (node for node in nodes if not node.failure):
            answer: CopyAnswer = node.answers[CopyAnswer]
            if answer.problem:
                node.failure = HostFailure(node.name, "start", answer.problem, _PLACE_HINT)
            self._warnings += [f"the link {link} of the environment leads to nothing there" for link in answer.links]

    def _packed(self, folder: Folder) -> Packed:
        if folder not in self._folders:
            text = f"the files in {quote(folder.path, 500)} are read, to know which of them the hosts lack"
            with told_if_slow(self._config, 3.0, text):
                self._folders[folder] = own.packed(folder)
        return self._folders[folder]


def _usable(queries: Queries) -> list[QueriedNode]:
    return [node for node in queries.nodes if not node.failure]


def _found(node: QueriedNode) -> EnvironmentFound:
    found: EnvironmentFound = node.answers[EnvironmentFound]
    return found


def _minor() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def _is_version(version: str) -> bool:
    """Whether this interpreter takes modules that were compiled for ours."""
    return version.startswith(f"{_minor()}.")


def _numbers(libc: str) -> tuple[int, ...]:
    return tuple(int(each) for each in libc.split()[-1].split(".") if each.isdecimal())


@contextlib.contextmanager
def _in_file(data: bytes) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(prefix="ddplaunch-") as file:
        file.write(data)
        file.flush()
        yield file.name
