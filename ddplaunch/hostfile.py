"""A hostfile -> ``Host`` values: DeepSpeed's, Open MPI's, and the lists that PBS and LSF hand to a job.

One host per line, written as in ``--hosts``, then words like ``slots=8``; ``#`` starts a comment. Where a bare host has
several lines, as in $PBS_NODEFILE, every line of the file is one slot.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddplaunch.config import MAX_WORKERS_PER_NODE
from ddplaunch.errors import UsageError
from ddplaunch.hosts import Host, check_count, parse_entry
from ddplaunch.printable import shown

_MAX_BYTES = 16 << 20
_MAX_LINE = 1 << 16
_MAX_SLOTS = 1_000_000

_WORDS = {
    **dict.fromkeys(("slots", "count", "cpu"), "slots"),
    **dict.fromkeys(("max_slots", "slots_max", "max_count", "count_max", "max_cpu", "cpu_max"), "max_slots"),
    **dict.fromkeys(("username", "user_name"), "user"),
    "port": "port",
}
"""Open MPI's words, which may be written with a dash too, and what they say of a host."""

_EXAMPLE = "A line is a host, then what is said of it: admin@gpu1:2222 slots=8."


def read_hostfile(path: str) -> tuple[Host, ...]:
    """The hosts of a file, in its order.

    Raises:
        UsageError: the file cannot be read, or means nothing.
    """
    name = shown(path, 200)
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        hint = "" if path.startswith("/") else "Looked for in the directory ddplaunch was started in."
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
        text: the file's contents; a byte order mark and any line ends are welcome.
        source: the file's name, for messages.

    Raises:
        UsageError: a line that means nothing, a host with two meanings, no host, or too many; names file and line.
    """
    lines: dict[Host, list[int]] = {}
    understood: dict[str, tuple[Host, ...]] = {"": ()}
    slots = 0
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff")), 1):
        content = line.partition("#")[0].strip()
        hosts = understood.get(content)
        if hosts is None:
            hosts = understood[content] = _line_hosts(content, f"{source}:{number}:")
        for host in hosts:
            lines.setdefault(host, []).append(number)
        slots += len(hosts)
        check_count(lines, f"{source}:{number}")
        if slots > _MAX_SLOTS:
            raise UsageError(f"{source}:{number}: more than {_MAX_SLOTS:,} slots", "Is this the hostfile?")
    if not lines:
        raise UsageError(f"{source}: names no host", _EXAMPLE)
    return _merged(lines, source)


def _line_hosts(line: str, where: str) -> tuple[Host, ...]:
    if len(line) > _MAX_LINE:
        raise UsageError(f"{where} a line of {len(line):,} characters", "Is this the hostfile?")
    # Open MPI allows "slots = 4".
    entry, *words = " ".join(line.split()).replace(" =", "=").replace("= ", "=").split(" ")
    if "," in re.sub(r"\[[^\[\]]*\]", "", entry):
        raise UsageError(f"{where} {shown(entry)}: a line names one host", "Write one per line, or use --hosts.")
    hosts = parse_entry(entry, where)
    try:
        said = _said(words)
        twice = [field for field in said if getattr(hosts[0], field) is not None]
        if twice:
            raise UsageError(f"says {twice[0]} twice")
        return tuple(replace(host, **said) for host in hosts)
    except UsageError as error:
        raise UsageError(f"{where} {shown(entry)}: {error.message}", error.hint) from None


def _said(words: list[str]) -> dict[str, Any]:
    """What the words after a host say, as fields of ``Host``."""
    said: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        field = _WORDS.get(key.replace("-", "_").lower())
        if field is None or not re.fullmatch(r".+" if field == "user" else r"[0-9]{1,9}", value):
            raise UsageError(f"{shown(word)} is not understood", _EXAMPLE)
        if field in said:
            raise UsageError(f"says {field} twice")
        said[field] = value if field == "user" else int(value)
    limit = said.pop("max_slots", None)
    if limit is not None and said.setdefault("slots", limit) > limit:
        raise UsageError(f"slots={said['slots']} is more than max_slots={limit}")
    return said


def _merged(lines: dict[Host, list[int]], source: str) -> tuple[Host, ...]:
    """The hosts, each with a slot per line of its own where the file counts so."""
    first: dict[tuple[str, int], int] = {}
    for host, numbers in lines.items():
        # The same bare host on two lines is two slots; anything else that comes twice is a mistake.
        once = numbers[:1] if host.slots is None and len(set(numbers)) == len(numbers) else numbers
        for number in once:
            if host.machine in first:
                message = f"{source}:{number}: {host} is on line {first[host.machine]} already"
                raise UsageError(message, "Name it once with slots=N, or once per slot with nothing else said of it.")
            first[host.machine] = number
    if all(len(numbers) == 1 for numbers in lines.values()):
        return tuple(lines)
    return tuple(_with_slots(host, len(numbers), source) for host, numbers in lines.items())


def _with_slots(host: Host, lines: int, source: str) -> Host:
    if lines > MAX_WORKERS_PER_NODE:
        raise UsageError(f"{source}: {host} has {lines:,} lines", f"A host can have {MAX_WORKERS_PER_NODE:,} slots.")
    return host if host.slots is not None else replace(host, slots=lines)
