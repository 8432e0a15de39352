"""Hosts as users write them: text -> ``Host`` values, and ``fold``: many names -> a short text. Used everywhere. Pure.

A list is ``HOST,HOST,...``; a host is ``[USER@]NAME[:PORT][:slots=N]``. NAME is a DNS name, an ssh alias, an IPv4
address, or an IPv6 address in brackets. Other brackets hold number ranges: ``gpu[1-4,7]``, ``gpu[01-12]``.
``:N`` is always ssh's port, never a number of slots as in Open MPI and horovod.
"""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized

from ddplaunch.errors import UsageError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import is_device_id, quote

MAX_HOSTS = 100_000
"""More hosts than this are a typing mistake."""

MAX_NAME = 253
"""The longest DNS name."""

NAME = r"\[[^:\[\]]*:[^\[\]]*\]|(?:[^:\[\]]|\[[^:\[\]]*\])*"
"""Regular expression: an IPv6 address in brackets, or a name with number ranges. ``Host`` checks the characters."""

HOSTS_VARIABLE = "DDPLAUNCH_HOSTS"
HOSTFILE_VARIABLE = "DDPLAUNCH_HOSTFILE"

EXAMPLE = "Write hosts like gpu1,gpu[2-4],admin@gpu5:2222,[fd00::1]:22,gpu6:slots=4."

MAX_SLOTS_PER_HOST = 4096
"""More slots are probably a typing mistake: the kernel's default limit of pids is 32,768."""

_FIRST_SSH_PORT = 22
"""No sshd listens on a lower port: ``gpu1:8`` is Open MPI's notation for 8 slots."""


@dataclass(frozen=True)
class Host:
    """A machine as the user named it.

    Every field is safe as a program's argument: it is neither an option nor shell syntax.

    Attributes:
        name: DNS name, ssh alias, IPv4 address, or IPv6 address without its brackets.
        user: login name; None for the one of ssh's configuration.
        port: ssh's port; None for the one of ssh's configuration.
        slots: number of workers; None if not given.
        devices: ids of the devices that workers may use; None for all.
        python: interpreter of its agent; None for that of all hosts. Users cannot name it; a feature may set it.

    Raises:
        UsageError: an invalid value; the message does not name the host.
    """

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    devices: tuple[str, ...] | None = None
    python: str | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.user is not None:
            _check_text(self.user, "user name", r"[^A-Za-z0-9_.+-]")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise UsageError("the port must be between 1 and 65535")
        if self.slots is not None and not 1 <= self.slots <= MAX_SLOTS_PER_HOST:
            raise UsageError(f"slots must be between 1 and {MAX_SLOTS_PER_HOST}", "Leave out hosts that get none.")
        if self.devices is not None and not (self.devices and all(map(is_device_id, self.devices))):
            raise UsageError("devices must be ids like 0,2, or UUIDs like GPU-8f1c2a")

    def __str__(self) -> str:
        """The host as in ``--hosts``, without slots and devices."""
        user = "" if self.user is None else f"{self.user}@"
        return user + (f"[{self.name}]" if ":" in self.name else self.name) + ("" if not self.port else f":{self.port}")

    @property
    def machine(self) -> tuple[str, int]:
        """Name and port; equal for two spellings of one host. Two ports of one machine are two hosts."""
        name = str(ipaddress.ip_address(self.name)) if ":" in self.name else self.name.lower()
        return name, self.port or 22


def parse_hosts(text: str, source: str = "--hosts") -> tuple[Host, ...]:
    """The hosts of a comma-separated list in its order, with ranges expanded.

    Args:
        text: the list.
        source: name of the option or variable, for messages.

    Raises:
        UsageError: not a list of hosts, a host named twice, or too many hosts.
    """
    if not text.strip():
        raise UsageError(f"{source}: names no host", EXAMPLE)
    hosts: list[Host] = []
    for entry in _entries(text):
        if not entry:
            raise UsageError(f"{source} {quote(text)}: nothing between two commas", EXAMPLE)
        hosts += parse_entry(entry, source)
        check_host_count(hosts, source)
    check_unique(hosts, source)
    return tuple(hosts)


def parse_entry(text: str, where: str) -> tuple[Host, ...]:
    """The hosts of one ``[USER@]NAME[:PORT][:slots=N]``; more than one where NAME has ranges.

    Raises:
        UsageError: any other text; the message begins with ``where``.
    """
    try:
        return tuple(_parse_entry(text))
    except UsageError as error:
        raise UsageError(f"{where} {quote(text)}: {error.message}", error.hint) from None


def _parse_entry(text: str) -> Iterator[Host]:
    _reject_bare_ipv6(text)
    match = re.fullmatch(rf"(?:([^@]*)@)?({NAME})(:.*)?", text, re.DOTALL)
    if not match:
        raise UsageError("brackets hold an IPv6 address, or numbers and ranges like [1-4,7]", EXAMPLE)
    user, pattern, rest = match.groups()
    port, slots = _port_and_slots(rest or "")
    for name in expand(pattern):
        yield Host(name, user, port, slots)


def _reject_bare_ipv6(text: str) -> None:
    address = text.rpartition("@")[2]
    if address.count(":") > 1 and _is_ipv6(address):
        hint = f"Write [{address}], or [{address}]:22 with a port: without brackets its end could be a port."
        raise UsageError("an IPv6 address without brackets", hint)


def _port_and_slots(text: str) -> tuple[int | None, int | None]:
    match = re.fullmatch(r"(?::([0-9]{1,9}))?(?::slots=([0-9]{1,9}))?", text)
    if not match:
        raise UsageError("only :PORT and :slots=N can follow the name", EXAMPLE)
    port, slots = (None if number is None else int(number) for number in match.groups())
    if port is not None and port < _FIRST_SSH_PORT:
        hint = f"For {port} workers write :slots={port}. A port this low can be set in ssh's configuration."
        raise UsageError(f"the number after the colon is ssh's port, and {port} looks like slots", hint)
    return port, slots


def _entries(text: str) -> tuple[str, ...]:
    """The entries of a list; commas in brackets do not separate."""
    entries = [""]
    for piece in re.findall(r"\[[^\]]*\]?|[^,\[]+|,", text):
        if piece == ",":
            entries.append("")
        else:
            entries[-1] += piece
    return tuple(entry.strip() for entry in entries)


def display_names(hosts: Sequence[Host]) -> tuple[str, ...]:
    """A different name for each host: its name, with ssh's port if another host differs only by it."""
    counts = Counter(host.name for host in hosts)
    return tuple(host.name if counts[host.name] == 1 else str(Host(host.name, port=host.machine[1])) for host in hosts)


def matching(names: Iterable[str], hosts: Iterable[str]) -> dict[str, str]:
    """Those of ``hosts`` that are in ``names``, each with its spelling there; ``gpu1`` is also ``gpu1.example.com``.

    Both are display names, or names as ``str(Host)``.
    """
    whole = {name.lower(): name for name in names}
    short = {_first_label(name): whole[name] for name in whole if _first_label(name) != name}
    found = {}
    for host in hosts:
        key = host.lower()
        name = whole.get(key) or whole.get(_first_label(key)) or short.get(key)
        if name is not None:
            found[host] = name
    return found


def _first_label(name: str) -> str:
    """Up to the first dot of a DNS name; an address, or a name with a user or port, is left whole."""
    return name if re.search(r"[:@]|^[0-9.]+$", name) else name.partition(".")[0]


def check_host_count(hosts: Sized, where: str) -> None:
    """Raises ``UsageError`` beyond ``MAX_HOSTS``."""
    if len(hosts) > MAX_HOSTS:
        raise UsageError(f"{where}: more than {MAX_HOSTS:,} hosts", "Is a range mistyped?")


def check_unique(hosts: Iterable[Host], where: str) -> None:
    """Raises ``UsageError`` if a host occurs twice."""
    seen: dict[tuple[str, int], Host] = {}
    for host in hosts:
        other = seen.setdefault(host.machine, host)
        if other is not host:
            names = f"{host} twice" if str(other) == str(host) else f"one host twice, as {other} and {host}"
            raise UsageError(f"{where}: names {names}", f"For more workers on it write {host}:slots=N, once.")


def _check_name(name: str) -> None:
    if ":" in name:
        if not _is_ipv6(name):
            raise UsageError("not an IPv6 address", EXAMPLE)
        return
    _check_text(name, "host name", r"[^A-Za-z0-9_.-]")
    if name.startswith("."):
        raise UsageError("a host name must not start with a dot")
    # The C library reads a number with a leading zero as octal.
    if re.fullmatch(r"[0-9]+(\.[0-9]+){3}", name) and not _is_address(name):
        raise UsageError(f"{name} is not an IPv4 address", "Each number is at most 255, and without leading zeros.")


def _check_text(text: str, what: str, forbidden: str) -> None:
    """Allow only characters that are harmless in an argument, a shell and a file name."""
    if not text:
        raise UsageError(f"no {what}", EXAMPLE)
    if text.startswith("-"):
        raise UsageError(f"a {what} must not start with a dash: ssh would take it for an option")
    wrong = re.search(forbidden, text)
    if wrong:
        raise UsageError(f"{wrong[0]!a} cannot be in a {what}", EXAMPLE)
    if len(text) > MAX_NAME:
        raise UsageError(f"longer than a {what} can be ({MAX_NAME} characters)")


def _is_ipv6(text: str) -> bool:
    # The zone of a link-local address is a network interface (fe80::1%eth0).
    return bool(re.fullmatch(r"[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9_.-]{1,15})?", text)) and _is_address(text)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# Number ranges: ``fold`` is the inverse of ``expand``, so a user can paste the hosts of a message into ``--hosts``.


def expand(pattern: str) -> Iterable[str]:
    """The names in a text of form ``NAME``; the last range varies fastest.

    Raises:
        UsageError: invalid text in brackets, or too many names.
    """
    if ":" in pattern:
        return (pattern[1:-1],)
    pieces = re.split(r"\[([^\[\]]*)\]", pattern)
    if sum(map(len, pieces[::2])) + len(pieces) // 2 > MAX_NAME:
        raise UsageError(f"longer than a host name can be ({MAX_NAME} characters)")
    groups = [_ranges(piece) for piece in pieces[1::2]]
    # Counted before any name is built: 0-999999999 must not fill the memory.
    if math.prod(sum(len(numbers) for numbers, _ in group) for group in groups) > MAX_HOSTS:
        raise UsageError(f"means more than {MAX_HOSTS:,} hosts", "Is a range mistyped?")
    choices: list[tuple[str, ...]] = [(piece,) for piece in pieces]
    choices[1::2] = [tuple(str(n).zfill(width) for numbers, width in group for n in numbers) for group in groups]
    return map("".join, itertools.product(*choices))


def _ranges(text: str) -> tuple[tuple[range, int], ...]:
    """The text in one pair of brackets as ranges, each with the number of digits."""
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,15})(?:-([0-9]{1,15}))?\s*", part)
        if not match:
            raise UsageError("brackets hold an IPv6 address, or numbers and ranges like [1-4,7]")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise UsageError(f"[{first}-{last}] runs backwards")
        if len(last) < len(first) or (len(last) > len(first) and last[0] == "0"):
            raise UsageError(f"[{first}-{last}]: both ends must be padded with zeros to one length")
        ranges.append((range(int(first), int(last) + 1), len(first)))
    return tuple(ranges)


_HOST_OF = re.compile(r"((?:[^@]*@)?)([^:@,\[\]]+)((?::[0-9]+)?)")
_NUMBER = re.compile(r"(?<![0-9])([0-9]{1,15})(?![0-9])")


def fold(names: Iterable[str]) -> str:
    """Many names as one short text in natural order: ``gpu[03-07,11],login``. ``parse_hosts`` accepts it.

    Args:
        names: hosts as ``str(host)`` or ``Host.name`` gives them; repeated names count once.

    Returns:
        Comma-separated text. Names with several numbers become one entry if all combinations occur, else more.
    """
    entries = sorted({_parts(name) for name in names}, key=_natural)
    # From right to left: the last numbers must be folded before names can differ in the first number only.
    for position in range(max(map(len, entries), default=0) // 2 * 2 - 1, 0, -2):
        entries = _merged(entries, position)
    return ",".join(map("".join, entries))


def _parts(name: str) -> tuple[str, ...]:
    """Split ``name`` into text, number, text and so on. ``fold`` may fold the numbers.

    A number in the user's name or in the port is part of a text.
    """
    match = _HOST_OF.fullmatch(name)
    if not match:
        # A second colon: an IPv6 address.
        return (f"[{name}]" if name.count(":") > 1 and "[" not in name else name,)
    first, *others = _NUMBER.split(match[2])
    parts = [match[1] + first, *others]
    parts[-1] += match[3]
    return tuple(parts)


def _natural(parts: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    return tuple((int(part) if position % 2 else 0, part) for position, part in enumerate(parts))


def _merged(entries: list[tuple[str, ...]], position: int) -> list[tuple[str, ...]]:
    """Merge entries that differ only in the number at ``position``."""
    by_rest: dict[tuple[str, ...], list[str]] = {}
    for parts in entries:
        if len(parts) > position:
            by_rest.setdefault((*parts[:position], "", *parts[position + 1 :]), []).append(parts[position])
        else:
            by_rest[parts] = []
    return [
        (*parts[:position], _in_brackets(numbers), *parts[position + 1 :]) if numbers else parts
        for parts, numbers in by_rest.items()
    ]


def _in_brackets(numbers: list[str]) -> str:
    runs: list[tuple[str, str]] = []
    for number in numbers:
        first, last = runs[-1] if runs else ("", "")
        if runs and number == str(int(last) + 1).zfill(len(first)):
            runs[-1] = (first, number)
        else:
            runs.append((number, number))
    inside = ",".join(first if first == last else f"{first}-{last}" for first, last in runs)
    return f"[{inside}]" if len(numbers) > 1 else inside
