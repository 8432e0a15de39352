"""Looks at this node for ``--check``: what a job would find here, and whether another node can be reached."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ddplaunch import protocol
from ddplaunch.agent import endpoint, gpu_users
from ddplaunch.node_check import NodeLook, NodesReached, ReachNodes, TellTime, TimeTold

if TYPE_CHECKING:
    from ddplaunch.agent.outbox import Outbox
    from ddplaunch.node_check import Listening, LookAtNode

_TRY_S, _ALL_TRIES_S = 3.0, 12.0
_WIDTH = 32


def serve(order: LookAtNode, stream: BinaryIO, outbox: Outbox) -> tuple[int, ...]:
    """Tell what is here, and answer until ``stream`` ends. Nothing is left.

    Raises:
        LaunchError: there is no address that other nodes could reach.
    """
    addresses = _addresses(order)
    where = addresses[0] if len(addresses) == 1 else endpoint.any_address()
    with endpoint.listen("this node", where, 0) as listener:
        threading.Thread(target=_accept, args=(listener,), name="accept", daemon=True).start()
        outbox.send(_look(addresses, listener.getsockname()[1]))
        while received := protocol.read_record(stream, (TellTime, ReachNodes)):
            asked = received[0]
            outbox.send(TimeTold(time.time()) if isinstance(asked, TellTime) else _reach_all(asked))
    return ()


def _addresses(order: LookAtNode) -> tuple[str, ...]:
    if not order.meets:
        return ("127.0.0.1",)
    if order.interface and not order.local_addr:
        return (endpoint.address_of("this node", order.interface),)
    given = (order.local_addr,) if order.local_addr else ()
    return given or endpoint.own_addresses(os.environ) or ("127.0.0.1",)


def _look(addresses: tuple[str, ...], port: int) -> NodeLook:
    torch, cuda = _torch_versions()
    name, name_s = _name_of(addresses[0])
    return NodeLook(
        python=".".join(map(str, sys.version_info[:3])),
        torch=torch,
        cuda=cuda,
        gpus=gpu_users.models(),
        gpu_users=gpu_users.find(),
        shm_free_bytes=_free("/dev/shm"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        address=addresses[0],
        name=name,
        name_s=name_s,
        addresses=addresses,
        port=port,
    )


def _torch_versions() -> tuple[str, str]:
    """Torch's own and that of its CUDA, read from its files: importing it takes a second."""
    spec = find_spec("torch")
    if not spec or not spec.submodule_search_locations:
        return "", ""
    try:
        text = Path(spec.submodule_search_locations[0], "version.py").read_text(errors="replace")
    except OSError:
        return "unknown", ""
    found = {name: re.search(rf"^{name}\b.*= *['\"]([^'\"]+)", text, re.MULTILINE) for name in ("__version__", "cuda")}
    torch, cuda = found["__version__"], found["cuda"]
    return torch[1] if torch else "unknown", cuda[1] if cuda else ""


def _name_of(address: str) -> tuple[str, float]:
    """The name of an own address, asked for as every client of a TCPStore does, and how long that took."""
    mapped = address if ":" in address else f"::ffff:{address}"
    started_s = time.monotonic()
    try:
        name = socket.getnameinfo((mapped, 0, 0, 0), socket.NI_NAMEREQD | socket.NI_NUMERICSERV)[0]
    except OSError:
        name = ""
    return name, time.monotonic() - started_s


def _free(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _accept(listener: socket.socket) -> None:
    """Else those that connect fill the kernel's queue, and the rest cannot."""
    with contextlib.suppress(OSError):  # It is closed.
        while True:
            listener.accept()[0].close()


def _reach_all(asked: ReachNodes) -> NodesReached:
    deadline = time.monotonic() + _ALL_TRIES_S
    with ThreadPoolExecutor(_WIDTH) as pool:
        errors = pool.map(partial(_reach, deadline), asked.nodes)
        return NodesReached(tuple((node.host, error) for node, error in zip(asked.nodes, errors, strict=True) if error))


def _reach(deadline: float, node: Listening) -> str:
    """Why none of its addresses answers; empty if one does."""
    errors: dict[str, None] = {}
    for address in node.addresses:
        left_s = min(_TRY_S, deadline - time.monotonic())
        try:
            socket.create_connection((address, node.port), max(0.1, left_s)).close()
        except OSError as error:
            errors[str(error.strerror or error)] = None
        else:
            return ""
    return ", ".join(errors)
