"""Reads hostfiles of DeepSpeed, Open MPI, PBS and LSF: file -> ``Host`` values.

Runs in the launcher. One host per line, as in ``--hosts``, then words like ``slots=8``; ``#`` starts a comment. If a
host without such words has several lines, as in $PBS_NODEFILE, every line of the file means one slot.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import replace
from typing import Any

from ddplaunch.cluster.hosts import MAX_SLOTS_PER_HOST, Host, check_host_count, parse_entry
from ddplaunch.errors import UsageError
from ddplaunch.text import quote

_MAX_BYTES = 16 << 20
_MAX_LINE = 1 << 16
_MAX_SLOTS = 1_000_000

_SETTINGS = {
    **dict.fromkeys(("slots", "count", "cpu"), "slots"),
    **dict.fromkeys(("max_slots", "slots_max", "max_count", "count_max", "max_cpu", "cpu_max"), "max_slots"),
    **dict.fromkeys(("username", "user_name"), "user"),
    "port": "port",
}
"""Open MPI's words, in which a dash may replace an underscore, and the fields of ``Host`` that they set."""

_EXAMPLE = "A line is a host, then its settings: admin@gpu1:2222 slots=8."


def read_input(path: str, max_bytes: int = -1) -> bytes:
    """The first ``max_bytes`` of a file of the user; by default all. A FIFO without a writer does not block.

    Raises:
        OSError: the file cannot be read, or is a FIFO into which nothing is written.
        ValueError: a null byte in the path.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        os.set_blocking(fd, True)
        data = file.read(max_bytes)
        if not data and stat.S_ISFIFO(os.fstat(fd).st_mode):
            raise OSError(errno.ENODATA, "a FIFO into which nothing is written")
    return data


def read_hostfile(path: str) -> tuple[Host, ...]:
    """The hosts of a file in its order.

    Raises:
        UsageError: the file cannot be read or is not a hostfile.
    """
    name = quote(path, 200)
    try:
        data = read_input(path, _MAX_BYTES + 1)
    except FileNotFoundError:
        hint = "" if path.startswith("/") else "The path is relative to the directory that ddplaunch was started in."
        raise UsageError(f"there is no hostfile {name}", hint) from None
    # ValueError: a null byte in the path.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read the hostfile {name}: {reason}") from None
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{name}: larger than {_MAX_BYTES >> 20} MiB", "Is this the hostfile?")
    try:
        return parse_hostfile(data.decode(), name)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(f"{name}:{line}: not text in UTF-8", "Is this the hostfile?") from None


def parse_hostfile(text: str, source: str) -> tuple[Host, ...]:
    """The hosts of a hostfile's text, in order of their first lines.

    Args:
        text: contents of the file; a byte order mark and any line ends are allowed.
        source: name of the file, for messages.

    Raises:
        UsageError: an invalid line, contradictory lines, no host, or too many; the message names file and line.
    """
    lines: dict[Host, list[int]] = {}
    parsed: dict[str, tuple[Host, ...]] = {"": ()}
    slots = 0
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff")), 1):
        content = line.partition("#")[0].strip()
        hosts = parsed.get(content)
        if hosts is None:
            hosts = parsed[content] = _line_hosts(content, f"{source}:{number}:")
        for host in hosts:
            lines.setdefault(host, []).append(number)
        slots += len(hosts)
        check_host_count(lines, f"{source}:{number}")
        if slots > _MAX_SLOTS:
            raise UsageError(f"{source}:{number}: more than {_MAX_SLOTS:,} slots", "Is this the hostfile?")
    if not lines:
        raise UsageError(f"{source}: names no host", _EXAMPLE)
    return _with_slot_counts(lines, source)


def _line_hosts(line: str, where: str) -> tuple[Host, ...]:
    if len(line) > _MAX_LINE:
        raise UsageError(f"{where} a line of {len(line):,} characters", "Is this the hostfile?")
    # Open MPI allows "slots = 4".
    entry, *words = " ".join(line.split()).replace(" =", "=").replace("= ", "=").split(" ")
    if "," in re.sub(r"\[[^\[\]]*\]", "", entry):
        raise UsageError(f"{where} {quote(entry)}: a line names one host", "Write one per line, or use --hosts.")
    hosts = parse_entry(entry, where)
    try:
        fields = _fields(words)
        twice = [field for field in fields if getattr(hosts[0], field) is not None]
        if twice:
            raise UsageError(f"{twice[0]} is set twice")
        return tuple(replace(host, **fields) for host in hosts)
    except UsageError as error:
        raise UsageError(f"{where} {quote(entry)}: {error.message}", error.hint) from None


def _fields(words: list[str]) -> dict[str, Any]:
    """The words after a host, as fields of ``Host``."""
    fields: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        field = _SETTINGS.get(key.replace("-", "_").lower())
        if field is None or not re.fullmatch(r".+" if field == "user" else r"[0-9]{1,9}", value):
            raise UsageError(f"{quote(word)} is not a valid setting", _EXAMPLE)
        if field in fields:
            raise UsageError(f"{field} is set twice")
        fields[field] = value if field == "user" else int(value)
    limit = fields.pop("max_slots", None)
    if limit is not None and fields.setdefault("slots", limit) > limit:
        raise UsageError(f"slots={fields['slots']} is more than max_slots={limit}")
    return fields


def _with_slot_counts(lines: dict[Host, list[int]], source: str) -> tuple[Host, ...]:
    """The hosts; if a bare host has several lines, each host gets one slot per line."""
    first: dict[tuple[str, int], int] = {}
    for host, numbers in lines.items():
        # A bare host on two lines means two slots; any other repetition is a mistake.
        once = numbers[:1] if host.slots is None and len(set(numbers)) == len(numbers) else numbers
        for number in once:
            if host.machine in first:
                message = f"{source}:{number}: {host} is on line {first[host.machine]} already"
                raise UsageError(message, "Name it once with slots=N, or once per slot without settings.")
            first[host.machine] = number
    if all(len(numbers) == 1 for numbers in lines.values()):
        return tuple(lines)
    return tuple(_with_slots(host, len(numbers), source) for host, numbers in lines.items())


def _with_slots(host: Host, lines: int, source: str) -> Host:
    if lines > MAX_SLOTS_PER_HOST:
        raise UsageError(f"{source}: {host} has {lines:,} lines", f"A host can have {MAX_SLOTS_PER_HOST:,} slots.")
    return host if host.slots is not None else replace(host, slots=lines)
