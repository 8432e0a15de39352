"""Which hosts a run gets: where they were named, what --include and --exclude leave, who is a spare.

Runs in the launcher; pure but for reading the hostfile. No hosts is never a reason to run on this machine only.
"""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from ddplaunch.errors import UsageError
from ddplaunch.host_ranges import NAME, expand, fold
from ddplaunch.hostfile import read_hostfile
from ddplaunch.hosts import Host, parse_hosts
from ddplaunch.printable import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

HOSTS_VARIABLE = "DDPLAUNCH_HOSTS"
HOSTFILE_VARIABLE = "DDPLAUNCH_HOSTFILE"

_EXAMPLE = "Write it like gpu1@gpu2:0,2: all of gpu1, and devices 0 and 2 of gpu2."
_DEVICE = r"(?:[0-9]{1,3}|(?:GPU|MIG)-[0-9A-Za-z/-]+)"
_MAX_COMPARED = 2000


def resolve(
    environ: Mapping[str, str],
    hosts_option: str | None,
    hostfile_option: str | None,
    include: str | None = None,
    exclude: str | None = None,
) -> tuple[Host, ...]:
    """The hosts that the options name, else the environment; empty where neither does.

    An option that was given is None only if it was not given: an empty text, as from an unset shell variable, is an
    error. An empty variable of the environment names nothing.

    Raises:
        UsageError: something that cannot be meant, or a hostfile that cannot be read.
    """
    if hosts_option is None and hostfile_option is None:
        hosts = _from_environment(environ)
    elif hostfile_option is None:
        hosts = parse_hosts(hosts_option or "")
    elif hosts_option is None:
        hosts = _from_file(hostfile_option, "--hostfile")
    else:
        raise UsageError("--hosts and --hostfile exclude each other", "Both name all hosts of the run.")
    if not hosts and (include, exclude) != (None, None):
        option = "--exclude" if include is None else "--include"
        raise UsageError(f"{option}: no hosts are named to choose from", _WAYS)
    return select(hosts, include, exclude)


_WAYS = (
    "Name them with --hosts 'gpu1,gpu[2-4]' or --hostfile FILE, "
    f"or in the environment with {HOSTS_VARIABLE} or {HOSTFILE_VARIABLE}. On this machine --gpus chooses."
)


def _from_environment(environ: Mapping[str, str]) -> tuple[Host, ...]:
    hosts, path = environ.get(HOSTS_VARIABLE), environ.get(HOSTFILE_VARIABLE)
    if hosts and path:
        raise UsageError(
            f"{HOSTS_VARIABLE} and {HOSTFILE_VARIABLE} are both set, and each names all hosts of the run",
            "Unset one, or use --hosts or --hostfile: an option wins over the environment.",
        )
    if hosts:
        return parse_hosts(hosts, HOSTS_VARIABLE)
    return _from_file(path, HOSTFILE_VARIABLE) if path else ()


def _from_file(path: str, source: str) -> tuple[Host, ...]:
    if not path:
        raise UsageError(f"{source}: no file is named")
    return read_hostfile(path)


def select(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """The hosts that DeepSpeed's ``--include`` or ``--exclude`` leaves, in the user's order, with their devices.

    ``HOST[:DEVICE,...][@HOST...]``, where HOST may have ranges. Devices end up sorted; a host's slots, where it has
    some, become as many as its devices. Which devices to exclude from is known only for hosts with slots: 0 to N-1.

    Raises:
        UsageError: both texts, one that cannot be meant, an unknown host or device, or nothing left.
    """
    if include is not None and exclude is not None:
        raise UsageError("--include and --exclude exclude each other")
    left: list[Host | None]
    if include is not None:
        wanted = _selection(include, "--include", hosts)
        left = [_with_only(host, wanted[host]) for host in hosts if host in wanted]
    elif exclude is not None:
        unwanted = _selection(exclude, "--exclude", hosts)
        left = [_without(host, unwanted[host]) if host in unwanted else host for host in hosts]
    else:
        left = list(hosts)
    if not any(left) and hosts:
        raise UsageError(f"--exclude {shown(exclude or '')}: leaves no host")
    return tuple(host for host in left if host)


def _selection(text: str, option: str, hosts: Sequence[Host]) -> dict[Host, frozenset[str] | None]:
    """The devices that the text names for each of its hosts; None for all."""
    by_name: dict[str, list[Host]] = {}
    for host in hosts:
        by_name.setdefault(host.machine[0], []).append(host)
    chosen: dict[Host, frozenset[str] | None] = {}
    for entry in text.split("@"):
        where = f"{option} {shown(entry)}"
        for name, devices in _entry(entry.strip(), where):
            host = _found(name, by_name, where)
            before = chosen.get(host, devices)
            if (before is None) != (devices is None):
                raise UsageError(f"{where}: {host} is named once with devices and once without", _EXAMPLE)
            chosen[host] = None if before is None or devices is None else before | devices
    return chosen


def _entry(text: str, where: str) -> Iterator[tuple[Host, frozenset[str] | None]]:
    """The hosts of one place between two ``@``, so far only their names, each with its devices."""
    match = re.fullmatch(rf"({NAME})(?::({_DEVICE}(?:,{_DEVICE})*))?", text)
    if not match:
        raise UsageError(f"{where}: not HOST or HOST:DEVICE,...", _EXAMPLE)
    ids = match[2].split(",") if match[2] else ()
    devices = frozenset(str(int(id)) if id.isdigit() else id for id in ids) if ids else None
    try:
        yield from ((Host(name), devices) for name in expand(match[1]))
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", _EXAMPLE) from None


def _found(wanted: Host, by_name: Mapping[str, Sequence[Host]], where: str) -> Host:
    found = by_name.get(wanted.machine[0], ())
    if len(found) > 1:
        names = shown(fold(map(str, found)))
        raise UsageError(f"{where}: {wanted} could be any of {names}", "Name in --hosts only those that are meant.")
    if not found:
        raise UsageError(f"{where}: {wanted} is not one of the hosts", _guess(wanted.name, by_name))
    return found[0]


def _guess(name: str, by_name: Mapping[str, Sequence[Host]]) -> str:
    """Hint for a host that is not there."""
    if any(name == host.user for hosts in by_name.values() for host in hosts):
        return f"{name} is a user; hosts are written here without."
    # gpu1 for gpu1.example.com first; then misspelled ones, which are slow to find among many.
    longer = [known for known in by_name if known.startswith(f"{name.lower()}.")]
    near = longer[:3] or get_close_matches(name.lower(), list(by_name)[:_MAX_COMPARED], cutoff=0.7)
    names = [by_name[known][0].name for known in near]
    if names:
        return f"Did you mean {' or '.join(names)}?"
    return f"The hosts are {shown(fold(host.name for hosts in by_name.values() for host in hosts))}."


def _known_devices(host: Host) -> tuple[str, ...]:
    """Empty where nothing is known before the node is asked."""
    return host.devices or tuple(map(str, range(host.slots or 0)))


def _check_known(host: Host, devices: Iterable[str], option: str) -> None:
    known = _known_devices(host)
    wrong = sorted(set(devices) - set(known), key=_natural)
    if known and wrong:
        raise UsageError(f"{option}: {host} has no device {wrong[0]}, only {shown(','.join(known))}")


def _with_only(host: Host, devices: frozenset[str] | None) -> Host:
    if devices is None:
        return host
    # What a UUID names, only the node knows.
    _check_known(host, filter(str.isdigit, devices), "--include")
    return _with_devices(host, sorted(devices, key=_natural))


def _without(host: Host, devices: frozenset[str] | None) -> Host | None:
    if devices is None:
        return None
    if not _known_devices(host):
        hint = (
            "Give it slots (slots=8 in the hostfile, gpu1:slots=8 in --hosts), or --include the devices that are left."
        )
        raise UsageError(f"--exclude: which devices {host} has is not known", hint)
    _check_known(host, devices, "--exclude")
    left = [device for device in _known_devices(host) if device not in devices]
    return _with_devices(host, left) if left else None


def _with_devices(host: Host, devices: Sequence[str]) -> Host:
    return replace(host, devices=tuple(devices), slots=host.slots and len(devices))


def _natural(device: str) -> tuple[int, str]:
    return (int(device), "") if device.isdigit() else (1000, device)
