"""What NCCL and the GPU driver of this node know about a job that stands still.

Runs in the agent, in any thread but the main one: it blocks for seconds. Changes nothing but short-lived threads and a
child process that reads GPUs. Where NCCL's RAS listens is chosen at the start, and shown by ``--plan``.

RAS answers for people. Every process with a communicator has a RAS thread since NCCL 2.24. The RAS threads of a job are
connected, so that one of them answers for all nodes. Those of a node share the address NCCL_RAS_ADDR (SO_REUSEPORT):
the kernel chooses which of them gets a connection, also one that is suspended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ddplaunch.features.hangs.records import MAX_RAS_CHARS, NodeEvidence
from ddplaunch.system import devices
from ddplaunch.text import quote
from ddplaunch.threads import start_work

if TYPE_CHECKING:
    from ddplaunch.features.gpus.records import GpuReading

_MARGIN_S = 0.5
"""Both sources end by themselves before the limit, unless the name in NCCL_RAS_ADDR must be looked up."""


def gather(host: str, ras_address: str, gpus: Collection[str] | None, limit_s: float) -> NodeEvidence:
    """The evidence of this node, named ``host``, within ``limit_s`` seconds; raises nothing.

    Args:
        host: display name of the node.
        ras_address: where NCCL's RAS listens; empty: NCCL is not asked.
        gpus: indices or UUIDs of the GPUs of the job, as in CUDA_VISIBLE_DEVICES; None: all of this machine.
        limit_s: after this time, a source that has not answered is missing.
    """
    deadline = time.monotonic() + limit_s
    own_limit_s = limit_s - min(_MARGIN_S, limit_s / 4)
    late = f"no answer within {limit_s:g} s, or no room for a thread that asks"
    no_gpus: tuple[tuple[GpuReading, ...], str] = ((), late)
    ras = start_work("nccl ras", lambda: ask_ras(ras_address, own_limit_s), ("", late))
    nvml_limit_s = min(devices.NVML_LIMIT_S, own_limit_s)
    read = start_work("nvml", lambda: _gpus(gpus, nvml_limit_s), no_gpus)
    (text, ras_missing), (found, gpus_missing) = ras(deadline), read(deadline)
    return NodeEvidence(host=host, ras=text, ras_missing=ras_missing, gpus=found, gpus_missing=gpus_missing)


def _gpus(names: Collection[str] | None, limit_s: float) -> tuple[tuple[GpuReading, ...], str]:
    from ddplaunch.features.gpus import reader  # Not at the start of the agent.

    if not devices.has_nvml():
        return (), "this node has no GPU of NVIDIA"
    read = reader.read_once("activity", limit_s)
    return tuple(gpu for gpu in read.gpus if names is None or any(map(gpu.is_named, names))), read.missing


def throttled(device: str) -> str:
    """Why the clock of one GPU, named as in CUDA_VISIBLE_DEVICES, is lowered; empty if it is not, or unknown."""
    gpus, _ = _gpus((device,), devices.NVML_LIMIT_S)
    return next((gpu.throttled for gpu in gpus), "")


# NCCL's RAS.

RAS_VARIABLE = "NCCL_RAS_ADDR"
"""``HOST:PORT`` at which the RAS threads of a machine listen; without it ``localhost:28028``, for every job on it."""

CUT = "the answer of NCCL's RAS is cut"
_HANDSHAKE_S = 0.5
_MAX_LINE_BYTES = 4096
_READ_BYTES = 1 << 16
_NVIDIA_DEVICE = "/dev/nvidiactl"


def own_address(environ: Mapping[str, str]) -> dict[str, str]:
    """``NCCL_RAS_ADDR`` of a run for its workers on this machine: a free port on loopback.

    Empty if the user has set it, or RAS is turned off, or there is no GPU of NVIDIA. The port is not reserved: where
    another process takes it before NCCL starts, NCCL runs without RAS.
    """
    if RAS_VARIABLE in environ or _is_off(environ) or not (os.path.exists(_NVIDIA_DEVICE) or devices.has_nvml()):
        return {}
    with contextlib.suppress(OSError), socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return {RAS_VARIABLE: f"127.0.0.1:{chosen.getsockname()[1]}"}
    return {}


def _is_off(environ: Mapping[str, str]) -> bool:
    with contextlib.suppress(ValueError):
        return int(environ.get("NCCL_RAS_ENABLE", "1"), 0) == 0
    return False


class _NoAnswer(Exception):
    """The sentence that ``ask_ras`` returns."""


def ask_ras(address: str, limit_s: float) -> tuple[str, str]:
    """The status of all communicators: JSON from NCCL 2.28.7 on, else text for people; at most ``MAX_RAS_CHARS``.

    And a sentence that says why it is empty, or that it is cut; else empty. It is cut where it is too long, or where
    the connection failed or the time ended before its end.

    Blocks for up to ``limit_s`` seconds, and longer only where the host in ``address`` is a name that must be looked
    up. Raises nothing. RAS waits up to a third of that time for processes that do not respond, and names them.
    """
    if not address:
        return "", "NCCL was not asked: this node has no GPU of NVIDIA, or NCCL's RAS is turned off"
    deadline = time.monotonic() + limit_s
    try:
        with _connected(address, deadline) as connection:
            return _status(connection, deadline, max(1, int(limit_s / 3)))
    except _NoAnswer as error:
        return "", str(error)
    except (TimeoutError, OSError, ValueError, OverflowError) as error:
        return "", f"NCCL's RAS at {quote(address)}: {_reason(error)}"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return getattr(error, "strerror", "") or quote(str(error))


def _connected(address: str, deadline: float) -> socket.socket:
    """A connection to a RAS thread that answers. One that does not, as in a suspended process, is not waited for."""
    host, port = _host_and_port(address)
    last_try_at = deadline - (deadline - time.monotonic()) / 2
    while True:
        try:
            return _greeted(host, port, min(deadline, time.monotonic() + _HANDSHAKE_S), address)
        except ConnectionRefusedError:
            raise _NoAnswer(
                f"nobody listens at {quote(address)}: no worker here has a communicator of NCCL, or NCCL is older than "
                "2.24 or was started without RAS"
            ) from None
        except TimeoutError:
            if time.monotonic() > last_try_at:
                raise _NoAnswer(
                    f"NCCL's RAS at {quote(address)} does not answer: its process may be suspended"
                ) from None


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise _NoAnswer(f"{RAS_VARIABLE}={quote(address)} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _greeted(host: str, port: int, deadline: float, address: str) -> socket.socket:
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((host, port), timeout=_left_s(deadline)))
        if not _replied(connection, "CLIENT PROTOCOL 2", deadline).startswith("SERVER PROTOCOL "):
            raise _NoAnswer(f"what listens at {quote(address)} is not NCCL's RAS")
        stack.pop_all()
    return connection


def _status(connection: socket.socket, deadline: float, ranks_timeout_s: int) -> tuple[str, str]:
    _replied(connection, f"TIMEOUT {ranks_timeout_s}", deadline)
    _replied(connection, "SET FORMAT json", deadline)  # An old version answers with an error, and then sends text.
    connection.sendall(b"VERBOSE STATUS\n")
    received = bytearray()
    is_complete = False
    with contextlib.suppress(OSError):  # What has arrived until then is worth something.
        while len(received) <= MAX_RAS_CHARS and not is_complete:
            connection.settimeout(_left_s(deadline))
            chunk = connection.recv(_READ_BYTES)
            received += chunk
            is_complete = not chunk
    if not received:
        raise _NoAnswer("NCCL's RAS has accepted the question, and sent no answer")
    text = received[:MAX_RAS_CHARS].decode(errors="replace")
    return text, "" if is_complete else CUT


def _replied(connection: socket.socket, command: str, deadline: float) -> str:
    """The line that RAS sends in reply. It sends nothing else meanwhile.

    Raises:
        OSError: the connection has failed, or the deadline has passed (TimeoutError).
        _NoAnswer: it has been closed, or the line is too long.
    """
    connection.settimeout(_left_s(deadline))
    connection.sendall(f"{command}\n".encode("ascii"))
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(_left_s(deadline))
        chunk = connection.recv(_MAX_LINE_BYTES)
        line += chunk
        if not chunk or len(line) > _MAX_LINE_BYTES:
            raise _NoAnswer(f"NCCL's RAS has closed the connection, or sent no reply to {command}")
    return line.decode(errors="replace")


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
