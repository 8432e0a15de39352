"""Filters the named hosts of a run by --include, --exclude and --avoid.

Runs in the launcher. Pure. An empty selection is an error: must not fall back to this machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from ddplaunch.cli.values import parse_nnodes
from ddplaunch.cluster.hosts import HOSTFILE_VARIABLE, HOSTS_VARIABLE, NAME, Host, expand, fold, matching, parse_hosts
from ddplaunch.errors import UsageError
from ddplaunch.text import DEVICE_ID, grouped, quote

_EXAMPLE = "Write it like gpu1@gpu2:0,2: all of gpu1, and devices 0 and 2 of gpu2."
_DEVICE = rf"(?![0-9]{{4}}){DEVICE_ID}"
"""Four digits are rejected: probably a port."""

_MAX_COMPARED = 2000


_HOW_TO_NAME_HOSTS = (
    "Name hosts with --hosts 'gpu1,gpu[2-4]' or --hostfile FILE, "
    f"or in the environment with {HOSTS_VARIABLE} or {HOSTFILE_VARIABLE}. On this machine --gpus chooses."
)


def select(hosts: tuple[Host, ...], options: Mapping[str, Any]) -> tuple[Host, ...]:
    """Those of ``hosts`` that the options leave. An empty option, as from an unset shell variable, is an error.

    Raises:
        UsageError: an invalid option, or one without hosts to choose from; too few hosts are left.
    """
    include, exclude, avoid, nnodes = (options[name] for name in ("include", "exclude", "avoid", "nnodes"))
    if not hosts and (include, exclude) != (None, None):
        option = "--exclude" if include is None else "--include"
        raise UsageError(f"{option}: no hosts are named to choose from", _HOW_TO_NAME_HOSTS)
    selected = filtered(hosts, include, exclude)
    return selected if avoid is None else _without(selected, avoid, 1 if nnodes is None else parse_nnodes(nnodes)[0])


def filtered(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Filter hosts and devices by DeepSpeed's ``--include`` or ``--exclude``: ``HOST[:DEVICE,...][@HOST...]``.

    HOST may have ranges. The hosts keep their order, their devices are sorted, and slots, if set, become the number of
    devices. Without ``devices`` a host with N slots has the devices 0 to N-1; without slots they are unknown.

    Raises:
        UsageError: both texts, an invalid text, an unknown host or device, or no selected host.
    """
    if include is not None and exclude is not None:
        raise UsageError("--include and --exclude exclude each other")
    selected: list[Host | None]
    if include is not None:
        included = _selection(include, "--include", hosts)
        selected = [_include_devices(host, included[host]) for host in hosts if host in included]
    elif exclude is not None:
        excluded = _selection(exclude, "--exclude", hosts)
        selected = [_exclude_devices(host, excluded[host]) if host in excluded else host for host in hosts]
    else:
        selected = list(hosts)
    if not any(selected) and hosts:
        raise UsageError(f"--exclude {quote(exclude or '')}: excludes all hosts")
    return tuple(host for host in selected if host)


def _without(hosts: Sequence[Host], avoid: str, least: int) -> tuple[Host, ...]:
    """``hosts`` without those in the list ``avoid``, which is written as ``--hosts``; it may name other hosts too.

    Raises:
        UsageError: an invalid list, no hosts to choose from, or fewer than ``least`` hosts are left.
    """
    avoided = parse_hosts(avoid, "--avoid")
    if not hosts:
        raise UsageError("--avoid: no hosts are named to choose from", _HOW_TO_NAME_HOSTS)
    machines = {host.machine for host in avoided if host.port}
    by_name = matching([host.name for host in avoided if not host.port], [host.name for host in hosts])
    left = tuple(host for host in hosts if host.name not in by_name and host.machine not in machines)
    if len(left) < max(1, least):
        rest = f"only {quote(fold(map(str, left)))}" if left else "no host"
        needed = f", and --nnodes needs {least}" if left else ""
        hint = "Name more hosts, avoid fewer, or lower --nnodes."
        raise UsageError(f"--avoid {quote(avoid)}: leaves {rest} of {len(hosts)}{needed}", hint, ("--avoid",))
    return left


def _selection(text: str, option: str, hosts: Sequence[Host]) -> dict[Host, frozenset[str] | None]:
    """The devices that the text names for each host; None for all."""
    by_name = grouped((host.machine[0], host) for host in hosts)
    chosen: dict[Host, frozenset[str] | None] = {}
    for entry in text.split("@"):
        where = f"{option} {quote(entry)}"
        for name, devices in _parse_entry(entry.strip(), where):
            host = _matching_host(name, by_name, where)
            before = chosen.get(host, devices)
            if (before is None) != (devices is None):
                raise UsageError(f"{where}: {host} is named once with devices and once without", _EXAMPLE)
            chosen[host] = None if before is None or devices is None else before | devices
    return chosen


def _parse_entry(text: str, where: str) -> Iterator[tuple[Host, frozenset[str] | None]]:
    """The hosts of one entry (the text between two ``@``) and their devices; None for all devices."""
    match = re.fullmatch(rf"({NAME})(?::({_DEVICE}(?:,{_DEVICE})*))?", text)
    if not match:
        raise UsageError(f"{where}: not HOST or HOST:DEVICE,...", _EXAMPLE)
    ids = match[2].split(",") if match[2] else ()
    devices = frozenset(str(int(id)) if id.isdigit() else id for id in ids) if ids else None
    try:
        yield from ((Host(name), devices) for name in expand(match[1]))
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", _EXAMPLE) from None


def _matching_host(named: Host, by_name: Mapping[str, Sequence[Host]], where: str) -> Host:
    found = by_name.get(named.machine[0], ())
    if len(found) > 1:
        names = quote(fold(map(str, found)))
        raise UsageError(f"{where}: {named} matches {names}", "Name only the wanted one in --hosts.")
    if not found:
        raise UsageError(f"{where}: {named} is not one of the hosts", _hint_for_unknown(named.name, by_name))
    return found[0]


def _hint_for_unknown(name: str, by_name: Mapping[str, Sequence[Host]]) -> str:
    if any(name == host.user for hosts in by_name.values() for host in hosts):
        return f"{name} is a user; name hosts here without users."
    # Proposes gpu1.example.com for gpu1; otherwise similar names, whose search is slow among many hosts.
    longer = [known for known in by_name if known.startswith(f"{name.lower()}.")]
    near = longer[:3] or get_close_matches(name.lower(), list(by_name)[:_MAX_COMPARED], cutoff=0.7)
    names = [by_name[known][0].name for known in near]
    if names:
        return f"Did you mean {' or '.join(names)}?"
    return f"The hosts are {quote(fold(host.name for hosts in by_name.values() for host in hosts))}."


def _known_devices(host: Host) -> tuple[str, ...]:
    """Ids of the host's devices; empty if only the node can list them."""
    return host.devices or tuple(map(str, range(host.slots or 0)))


def _check_known(host: Host, devices: Iterable[str], option: str) -> None:
    known = _known_devices(host)
    wrong = sorted(set(devices) - set(known), key=_natural)
    if known and wrong:
        raise UsageError(f"{option}: {host} has no device {wrong[0]}, only {quote(','.join(known))}")


def _include_devices(host: Host, devices: frozenset[str] | None) -> Host:
    if devices is None:
        return host
    # Only the node can resolve a UUID.
    _check_known(host, filter(str.isdigit, devices), "--include")
    return _with_devices(host, sorted(devices, key=_natural))


def _exclude_devices(host: Host, devices: frozenset[str] | None) -> Host | None:
    if devices is None:
        return None
    if not _known_devices(host):
        hint = "Give it slots (slots=8 in the hostfile, gpu1:slots=8 in --hosts), or --include the other devices."
        raise UsageError(f"--exclude: the devices of {host} are not known", hint)
    _check_known(host, devices, "--exclude")
    remaining = [device for device in _known_devices(host) if device not in devices]
    return _with_devices(host, remaining) if remaining else None


def _with_devices(host: Host, devices: Sequence[str]) -> Host:
    return replace(host, devices=tuple(devices), slots=host.slots and len(devices))


def _natural(device: str) -> tuple[int, str]:
    return (int(device), "") if device.isdigit() else (1000, device)
