"""Parsers of the core's options: text -> value. Run in the launcher; read nothing. OptionError means an invalid text.

``rows`` has those that features need, too.
"""

from __future__ import annotations

import os
import re
import signal

from ddplaunch.config import StartMethod, Streams
from ddplaunch.errors import OptionError, UsageError
from ddplaunch.text import DEVICE_ID, FREE_GPUS, quote


def parse_nproc(text: str, _option: str = "") -> int | str:
    """A number, or the text unchanged; ``WorkerConfig`` checks the words."""
    try:
        return int(text)
    except ValueError:
        return text


def parse_start_method(text: str, _option: str) -> StartMethod:
    """``fork`` is another word for ``forkserver``."""
    return "spawn" if text == "spawn" else "forkserver"


def parse_logs_specs(text: str, option: str) -> None:
    """Nothing.

    Raises:
        UsageError: a plug-in is named.
    """
    if text != "default":
        message = f"{option}: not supported, torch's LogsSpecs plug-ins run inside torchrun's agent"
        raise UsageError(
            message, "Use --log-dir, --redirects, --tee and --ranks-filter; the files have torchrun's names."
        )


def parse_run_id(text: str, _option: str) -> str | None:
    """A run id; None for torchrun's default, ``none``. ``LaunchConfig`` checks it."""
    return None if text in ("", "none") else text


def parse_nnodes(text: str) -> tuple[int, int]:
    """``N`` or ``MIN:MAX`` as a pair.

    Raises:
        OptionError: anything else, or not 0 < MIN <= MAX.
    """
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text.strip())
    if not match:
        raise OptionError("--nnodes", quote(text), "must be N or MIN:MAX")
    low, high = int(match[1]), int(match[2] or match[1])
    if not 0 < low <= high:
        raise OptionError("--nnodes", text, "must be 0 < MIN <= MAX")
    return low, high


def parse_streams(text: str, option: str) -> Streams:
    """Torchrun's ``-r``/``-t`` grammar: ``0``..``3``, or ``LOCAL_RANK:MASK,...`` (ranks of any length).

    Raises:
        OptionError: anything else, or a local rank named twice.
    """
    if re.fullmatch(r"[0-3]", text):
        return Streams(default=int(text))
    if not re.fullmatch(r"[0-9]{1,9}:[0-3](,[0-9]{1,9}:[0-3])*", text):
        raise OptionError(option, quote(text), "must be 0, 1, 2 or 3, or a list like 0:1,12:3 (local rank:mask)")
    pairs = tuple((int(rank), int(mask)) for rank, mask in (part.split(":") for part in text.split(",")))
    if len(dict(pairs)) < len(pairs):
        raise OptionError(option, text, "names a local rank twice")
    return Streams(by_local_rank=pairs)


_NOT_FOR_STOPPING = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)
"""SIGKILL and SIGSTOP cannot be caught; SIGCHLD can, but arrives whenever a child process ends."""


def parse_signals(text: str, option: str) -> tuple[str, ...]:
    """Comma-separated signal names, as torchrun's ``--signals-to-handle``.

    Raises:
        OptionError: no name, an unknown one, or a signal that cannot be handled.
    """
    names = tuple(filter(None, (name.strip().upper() for name in text.split(","))))
    if not names:
        raise OptionError(option, text, "names no signal")
    for name in names:
        if name not in signal.Signals.__members__ or signal.Signals[name] in _NOT_FOR_STOPPING:
            raise OptionError(option, text, f"{name} is not a signal that can be handled")
    return names


def parse_needles(text: str, _option: str) -> tuple[str, ...]:
    """Comma-separated texts of the duplicate filters; ``,,`` is a comma in a text."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(",") if part)


def parse_names(text: str, option: str, pattern: str, what: str) -> tuple[str, ...]:
    """Comma-separated unique names that match ``pattern``; ``what`` describes the pattern in the error message.

    Raises:
        OptionError: anything else.
    """
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not re.fullmatch(pattern, name):
            raise OptionError(option, text, f"must be {what}")
        if names.count(name) > 1:
            raise OptionError(option, text, f"names {name} twice")
    return names


def parse_gpus(text: str, option: str) -> tuple[str, ...]:
    """Device ids as in CUDA_VISIBLE_DEVICES: numbers, or UUIDs of GPUs and MIG slices; or ``free``, ``free:2``.

    Raises:
        OptionError: anything else, none, or one named twice.
    """
    if re.fullmatch(FREE_GPUS, text.strip()):
        return (text.strip(),)
    return parse_names(text, option, DEVICE_ID, "device ids like 2,4,7, or free:2")


def parse_preload(text: str, option: str) -> tuple[str, ...]:
    """Names of modules to import once, in order.

    Raises:
        OptionError: not a module's name, none, or one named twice.
    """
    pattern = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
    return parse_names(text, option, pattern, "modules like numpy,datasets")


def parse_host(text: str, option: str) -> str:
    """A host name or an address; IPv6 brackets are removed.

    Raises:
        OptionError: anything else.
    """
    host = text.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    # "%" is not in torchrun's pattern: it separates the zone of a link-local address (fe80::1%eth0).
    if not re.fullmatch(r"[\w.:%-]+", host):
        raise OptionError(option, text, "must be a host name, an IPv4 address or an IPv6 address")
    return host


def parse_endpoint(text: str, option: str) -> tuple[str, int | None]:
    """``HOST[:PORT]`` or ``[IPV6]:PORT`` as torchrun reads it: the last colon outside brackets starts the port.

    Raises:
        OptionError: anything else.
    """
    match = re.fullmatch(r"(\[[^]]*\]|.*?)(?::([^]:]*))?", text.strip())
    host, port = (match[1], match[2]) if match else ("", None)
    if port is not None and not (re.fullmatch(r"[0-9]{1,5}", port) and int(port) < 65536):
        raise OptionError(option, text, "the port must be a number between 0 and 65535")
    return parse_host(host, option), None if port is None else int(port)


def split_rdzv_conf(text: str) -> dict[str, str]:
    """``KEY=VALUE,...`` as a dict; a later value replaces an earlier one. Quotes around the whole are removed.

    A command that no shell has read may have them: ``["torchrun", "--rdzv-conf='timeout=5'"]``.

    Raises:
        OptionError: an empty key or value.
    """
    conf: dict[str, str] = {}
    text = re.sub(r"""^\s*(['"])(.*)\1\s*$""", r"\2", text)
    for part in text.split(",") if text.strip() else ():
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise OptionError("--rdzv-conf", text, "must be a list like join_timeout=600,last_call_timeout=30")
        conf[key] = value
    return conf


def parse_folder(text: str, option: str) -> str | None:
    """The path of a folder, which need not exist; None for an empty text.

    Raises:
        OptionError: it is a file.
    """
    if os.path.isfile(text):
        raise OptionError(option, text, "is a file, and must be a folder")
    return text or None
