"""Sends a snapshot to hosts that do not share a file system with this machine, for ``--sync``.

Runs in the process of the command, before the run: an agent on each host makes a copy, and gets only the files that the
host does not have. The hosts are served together.
"""

from __future__ import annotations

import base64
import functools
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError, StartNotice
from ddplaunch.features.runs.asked_nodes import QueriedNode, Queries, query_transport
from ddplaunch.features.snapshot import content, copies
from ddplaunch.features.snapshot.queries import PART_BYTES, ROUND_BYTES, CopyAnswer, MakeCopy, PutPart, Wanted
from ddplaunch.features.snapshot.records import HOME_BASE, MARKER
from ddplaunch.text import plural, size
from ddplaunch.transport.failures import HostFailure, failures_table

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.snapshot.copies import Facts

_ANSWER_S = 180.0
"""For the parts of one round, over a slow link, and the copy that is made of them."""

_ALL_BYTES, _LEAST_BYTES = 256 << 20, 1 << 20
"""So many bytes are on the way to all hosts at once, but no less than the second to each."""

_KEPT_PARTS = 32
_TIMES = 3
"""So many times the code is sent to a host on which it does not arrive as it was."""

_OTHER_VERSION = "Is ddplaunch there of the same version as here?"


def paths(folder: str) -> tuple[str, str]:
    """The copy of a snapshot on a host, and the folder in which its workers run; both below the home there."""
    project, name = folder.split("/")[-2:]
    return f"{HOME_BASE}/{copies.FOLDER}/{project}/{name}", f"{HOME_BASE}/work/{project}"


def send(config: LaunchConfig, folder: str, found: Facts, cwd: str) -> LaunchConfig:
    """Have all hosts make a copy of the snapshot ``folder``. Returns ``config`` with those that have, and with notices.

    ``cwd``: working directory of the workers, relative to that of the code.

    Raises:
        LaunchError: a host cannot be reached, or has no copy, and so the job cannot run.
    """
    with open(os.path.join(folder, MARKER), "rb") as file:
        marker = file.read()
    project, name = folder.split("/")[-2:]
    own = content.hash_of(marker)
    round_bytes = max(_LEAST_BYTES, min(ROUND_BYTES, _ALL_BYTES // len(config.hosts)))
    order = MakeCopy(project=project, name=name, marker=own, marker_bytes=len(marker), cwd=cwd, round_bytes=round_bytes)
    files = {noted[2]: os.path.join(folder, path) for path, noted in found.files.items() if len(noted) > 1}
    files[own] = os.path.join(folder, MARKER)
    queries = Queries(_ANSWER_S)
    transport = query_transport(config.hosts, config.remote, queries.post)
    try:
        queries.start(transport, order)
        sent = _serve(queries, order, files)
    finally:
        queries.close()
        transport.close()
    failed = {node.name: failure for node in queries.nodes if (failure := _failure(node))}
    hosts = tuple(host for host, node in zip(config.hosts, queries.nodes, strict=True) if node.name not in failed)
    table = failures_table(failed.values())
    if len(hosts) < config.min_nodes:
        raise LaunchError(f"the code cannot be copied to hosts\n{table}", "", NODE_NOT_READY)
    notices = [StartNotice("detail", f"sent {size(sent)} of code to {plural(len(hosts), 'host')}")]
    if failed:
        notices.append(StartNotice("warning", f"the run goes on without hosts that have no code\n{table}"))
    for node in queries.nodes:
        for link in node.answers[CopyAnswer].links if CopyAnswer in node.answers else ():
            notices.append(StartNotice("warning", f"the link {link} of the code leads to nothing on {node.name}"))
    return replace(
        config,
        hosts=hosts,
        max_nodes=min(config.max_nodes, len(hosts)),
        notices=(*config.notices, *notices),
    )


def _failure(node: QueriedNode) -> HostFailure | None:
    answer: CopyAnswer | None = node.answers.get(CopyAnswer)
    if node.failure or not answer or not answer.problem:
        return node.failure
    return HostFailure(node.name, "directory", answer.problem)


def _serve(queries: Queries, order: MakeCopy, files: dict[str, str]) -> int:
    """Send what the hosts want until they want nothing. Returns the number of bytes."""
    queries.wait(queries.nodes, CopyAnswer)
    sent = dict.fromkeys((node.name for node in queries.nodes), 0)
    most = _TIMES * sum(map(os.path.getsize, files.values()))
    while wanting := [node for node in queries.nodes if not node.failure and node.answers[CopyAnswer].wanted]:
        for node in wanting:
            sent[node.name] += _send_wanted(node, order, files)
            if sent[node.name] > most:
                node.failure = HostFailure(node.name, "start", "what is sent arrives damaged, again and again")
        queries.ask(wanting, lambda _: order, CopyAnswer, _ANSWER_S)
    return sum(sent.values())


def _send_wanted(node: QueriedNode, order: MakeCopy, files: dict[str, str]) -> int:
    """Send a node what it wants. Returns the number of bytes. A node fails that wants more than one of ours can."""
    answer: CopyAnswer = node.answers.pop(CopyAnswer)
    nbytes = sum(wanted.nbytes for wanted in answer.wanted)
    if nbytes > order.round_bytes or any(wanted.hash not in files for wanted in answer.wanted):
        node.failure = HostFailure(node.name, "start", "asks for files that are not in the snapshot", _OTHER_VERSION)
        return 0
    for wanted in answer.wanted:
        for part in _parts(order.project, files[wanted.hash], wanted):
            node.handle.send(part)
    return nbytes


def _parts(project: str, path: str, wanted: Wanted) -> Iterator[PutPart]:
    end, nbytes = wanted.offset + wanted.nbytes, os.path.getsize(path)
    for offset in range(wanted.offset, max(end, wanted.offset + 1), PART_BYTES):
        text = _text_of_part(path, offset, min(PART_BYTES, end - offset))
        yield PutPart(project, wanted.hash, offset, nbytes, text)


@functools.lru_cache(_KEPT_PARTS)
def _text_of_part(path: str, offset: int, nbytes: int) -> str:
    """Most hosts want the same parts: each is read and compressed once."""
    with open(path, "rb") as file:
        data = os.pread(file.fileno(), nbytes, offset)
    return base64.b64encode(zlib.compress(data, 1)).decode()


def on_hosts(config: LaunchConfig, folder: str, cwd: str) -> LaunchConfig:
    """``config`` of a run whose hosts have copies of the snapshot ``folder``: workers run there."""
    copy, work = paths(folder)
    script = config.script
    if config.script_file:
        script = f"{copy}/{os.path.relpath(config.script, folder)}"
    return replace(config, chdir=f"{work}/{cwd}".rstrip("/"), script=script)
