"""The names of machines, as users write them: one text -> ``Host`` values. Pure.

A list is ``HOST,HOST,...``, each of them ``[USER@]NAME[:PORT][:slots=N]``. NAME is a DNS name, an ssh alias, an IPv4
address, or an IPv6 address in brackets. Other brackets hold numbers: ``gpu[1-4,7]``, zero padded as a range's first,
several groups in one name. ``:N`` is always ssh's port, never the number of slots that it is to Open MPI and horovod.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddplaunch.config import MAX_WORKERS_PER_NODE
from ddplaunch.errors import UsageError
from ddplaunch.host_ranges import MAX_HOSTS, MAX_NAME, NAME, expand
from ddplaunch.printable import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sized

EXAMPLE = "Write hosts like gpu1,gpu[2-4],admin@gpu5:2222,[fd00::1]:22,gpu6:slots=4."

_FIRST_SSH_PORT = 22
"""Nobody's sshd listens below: ``gpu1:8`` is Open MPI's way to say 8 slots."""

_DEVICE = re.compile(r"[0-9]{1,5}|(GPU|MIG)-[0-9A-Za-z/-]+")


@dataclass(frozen=True)
class Host:
    """A machine that ssh reaches, as the user named it.

    No field can be read as an option or as shell by a program that gets it as an argument.

    Attributes:
        name: DNS name, ssh alias, IPv4 address, or IPv6 address without its brackets.
        user: None leaves it to ssh's configuration, likewise ``port``.
        slots: how many workers the user wants there; None if not said.
        devices: ids of the devices its workers may use; None for all.

    Raises:
        UsageError: a value that cannot be meant; the message begins with what is wrong.
    """

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    devices: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.user is not None:
            _check_text(self.user, "user name", r"[^A-Za-z0-9_.+-]")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise UsageError("the port must be between 1 and 65535")
        if self.slots is not None and not 1 <= self.slots <= MAX_WORKERS_PER_NODE:
            raise UsageError(f"slots must be between 1 and {MAX_WORKERS_PER_NODE}", "Leave out hosts that get none.")
        if self.devices is not None and not (self.devices and all(map(_DEVICE.fullmatch, self.devices))):
            raise UsageError("devices must be ids like 0,2, or UUIDs like GPU-8f1c2a")

    def __str__(self) -> str:
        """As one would write it in ``--hosts``, without slots and devices."""
        user = "" if self.user is None else f"{self.user}@"
        return user + (f"[{self.name}]" if ":" in self.name else self.name) + ("" if not self.port else f":{self.port}")

    @property
    def machine(self) -> tuple[str, int]:
        """Equal for hosts that are one, as far as their names tell: two sshds of one machine count as two hosts."""
        name = str(ipaddress.ip_address(self.name)) if ":" in self.name else self.name.lower()
        return name, self.port or 22


def parse_hosts(text: str, source: str = "--hosts") -> tuple[Host, ...]:
    """The hosts of a comma-separated list, in its order, ranges expanded.

    Args:
        text: what the user wrote.
        source: the option or variable it came from, for messages.

    Raises:
        UsageError: anything that is not a list of hosts, a host named twice, or too many of them.
    """
    if not text.strip():
        raise UsageError(f"{source}: names no host", EXAMPLE)
    hosts: list[Host] = []
    for entry in _places(text):
        if not entry:
            raise UsageError(f"{source} {shown(text)}: nothing between two commas", EXAMPLE)
        hosts += parse_entry(entry, source)
        check_count(hosts, source)
    check_unique(hosts, source)
    return tuple(hosts)


def parse_entry(text: str, where: str) -> tuple[Host, ...]:
    """The hosts of one ``[USER@]NAME[:PORT][:slots=N]``; more than one where NAME has ranges.

    Raises:
        UsageError: anything else; the message begins with ``where``.
    """
    try:
        return tuple(_entry_hosts(text))
    except UsageError as error:
        raise UsageError(f"{where} {shown(text)}: {error.message}", error.hint) from None


def _entry_hosts(text: str) -> Iterator[Host]:
    _refuse_bare_ipv6(text)
    match = re.fullmatch(rf"(?:([^@]*)@)?({NAME})(:.*)?", text, re.DOTALL)
    if not match:
        raise UsageError("brackets hold an IPv6 address, or numbers and ranges like [1-4,7]", EXAMPLE)
    user, pattern, rest = match.groups()
    port, slots = _port_and_slots(rest or "")
    for name in expand(pattern):
        yield Host(name, user, port, slots)


def _refuse_bare_ipv6(text: str) -> None:
    address = text.rpartition("@")[2]
    if address.count(":") > 1 and _is_ipv6(address):
        hint = f"Write [{address}], or [{address}]:22 with a port: without brackets its end could be either."
        raise UsageError("an IPv6 address without brackets", hint)


def _port_and_slots(text: str) -> tuple[int | None, int | None]:
    match = re.fullmatch(r"(?::([0-9]{1,9}))?(?::slots=([0-9]{1,9}))?", text)
    if not match:
        raise UsageError("after the name can follow only :PORT and :slots=N", EXAMPLE)
    port, slots = (None if number is None else int(number) for number in match.groups())
    if port is not None and port < _FIRST_SSH_PORT:
        hint = f"For {port} workers write :slots={port}. A port this low can be set in ssh's configuration."
        raise UsageError(f"the number after the colon is ssh's port, and {port} looks like slots", hint)
    return port, slots


def _places(text: str) -> tuple[str, ...]:
    """The places of a list; commas in brackets do not separate."""
    places = [""]
    for piece in re.findall(r"\[[^\]]*\]?|[^,\[]+|,", text):
        if piece == ",":
            places.append("")
        else:
            places[-1] += piece
    return tuple(place.strip() for place in places)


def check_count(hosts: Sized, where: str) -> None:
    """Raises ``UsageError`` beyond ``MAX_HOSTS``."""
    if len(hosts) > MAX_HOSTS:
        raise UsageError(f"{where}: more than {MAX_HOSTS:,} hosts", "Is a range mistyped?")


def check_unique(hosts: Iterable[Host], where: str) -> None:
    """Raises ``UsageError`` if two of the hosts are one machine."""
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
    # The C library reads a leading zero as octal.
    if re.fullmatch(r"[0-9]+(\.[0-9]+){3}", name) and not _is_address(name):
        raise UsageError(f"{name} is not an IPv4 address", "Each number is at most 255, and without leading zeros.")


def _check_text(text: str, what: str, forbidden: str) -> None:
    """Only what is harmless in an argument, a shell and a file name; ssh refuses most of the others too."""
    if not text:
        raise UsageError(f"no {what}", EXAMPLE)
    if text.startswith("-"):
        raise UsageError(f"a {what} must not start with a dash: ssh would read an option")
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
