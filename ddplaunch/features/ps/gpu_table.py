"""``--ps --gpus``: the GPUs of this machine and of the hosts, who uses them, and which runs wait for some.

Runs in the process that the user started; an agent on every host looks (``gpu_finder``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ddplaunch.errors import UsageError
from ddplaunch.features.free_gpus import choice, register
from ddplaunch.features.ps import ps
from ddplaunch.features.ps.queries import GpusFound, ListGpus
from ddplaunch.text import plural, quote, size, table

if TYPE_CHECKING:
    from ddplaunch.cli.commands import Request
    from ddplaunch.features.ps.queries import GpuOnHost

_HEAD = ("host", "GPU", "model", "memory", "used by")


def show(request: Request) -> None:
    """Show the table, and below it the runs that wait, those that get GPUs first at the top.

    Raises:
        UsageError: --gpus has a value.
        LaunchError: some hosts could not be queried; the results of the others have been shown.
    """
    if request.options["gpus"]:
        raise UsageError("--ps --gpus shows all GPUs, and takes no value")
    with ps.agents(request.hosts, request.remote, ListGpus()) as queries:
        found = ps.answers(queries, GpusFound)
        rows = [row for host, on_host in found.items() for row in _rows(host, on_host)]
        if rows:
            request.show("\n".join([*table([_HEAD, *rows]), *_waiting(found)]))
        else:
            request.report(f"no GPU on {'these hosts' if request.hosts else 'this machine'}")
        for host, on_host in found.items():
            if on_host.problem:
                request.report(f"{host}: {on_host.problem}")
        ps.raise_failures(queries)


def _rows(host: str, found: GpusFound) -> Iterator[tuple[str, ...]]:
    """Of the GPUs, and of MIG instances that runs use."""
    users = [user for user in found.users if not user.ticket]
    for gpu in found.gpus:
        who = [choice.describe(user) for user in users if {gpu.key, gpu.uuid} & {*user.gpus}]
        memory = f"{size(gpu.used_bytes)} of {size(gpu.memory_bytes)}" if gpu.memory_bytes else "-"
        yield host, str(gpu.index), quote(gpu.name) or "-", memory, ", ".join(who) or _by_driver(gpu)
    known = {key for gpu in found.gpus for key in (gpu.key, gpu.uuid)}
    for user in users:
        for key in user.gpus:
            if key not in known:
                yield host, quote(key), "-", "-", choice.describe(user)


def _by_driver(gpu: GpuOnHost) -> str:
    return quote(gpu.in_use, 200) or "free"


def _waiting(found: Mapping[str, GpusFound]) -> Iterator[str]:
    """A line for each run that waits, in the order of the hosts and of their tickets."""
    for host, on_host in found.items():
        for place, user in enumerate(sorted(filter(lambda user: user.ticket, on_host.users), key=register.order), 1):
            yield f"waiting on {host}: {place}. {choice.describe(user)}, for {plural(user.needs, 'GPU')}"
