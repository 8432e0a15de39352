"""Options about other machines: which hosts, and the variables of their workers.

Runs in the launcher. Reads the hostfile and the env file; starts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddplaunch.cli import values
from ddplaunch.cluster.hostfile import read_input
from ddplaunch.cluster.hosts import HOSTFILE_VARIABLE, HOSTS_VARIABLE
from ddplaunch.errors import OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.cluster.hosts import Host

HOST_OPTIONS = ("hosts", "hostfile", "include", "exclude", "avoid")
"""Options that name hosts."""

_PER_NODE_OPTIONS = ("rdzv_endpoint", "master_addr", "standalone")
"""Options for one launcher per node; they contradict hosts, on which one launcher starts all nodes."""


def select_hosts(
    options: Mapping[str, Any], environ: Mapping[str, str], scheduler_hosts: tuple[Host, ...] = ()
) -> tuple[Host, ...]:
    """The machines on which this launcher starts all nodes; empty if it starts only one, on this machine.

    ``scheduler_hosts`` are used if neither the options nor the environment names hosts.

    Raises:
        UsageError: invalid hosts, or hosts together with an endpoint, which the launcher would not use.
    """
    given = [options[name] for name in HOST_OPTIONS]
    has_host_options = given != [None] * len(HOST_OPTIONS)
    if not (has_host_options or scheduler_hosts or environ.get(HOSTS_VARIABLE) or environ.get(HOSTFILE_VARIABLE)):
        return ()
    option = next((f"--{name.replace('_', '-')}" for name in _PER_NODE_OPTIONS if options[name]), "")
    if option and not options["dry_run"]:
        if has_host_options:
            hint = "With hosts, the launcher assigns the endpoint; without hosts, start ddplaunch on every node."
            given_option = next(f"--{name}" for name in HOST_OPTIONS if options[name] is not None)
            raise UsageError(f"{given_option} and {option} exclude each other", hint, (option,))
        return ()
    if options["master_port"] is not None and not options["dry_run"]:
        hint = "Every attempt has a new port on the first node; it must be open to the other nodes."
        raise UsageError("--master-port has no effect where hosts are named", hint, ("--master-port",))
    from ddplaunch.cluster import host_filter

    hosts, hostfile, include, exclude, avoid = given
    selected = host_filter.resolve(environ, hosts, hostfile, include, exclude, scheduler_hosts)
    return selected if avoid is None else host_filter.without(selected, avoid, _least(options["nnodes"]))


def _least(nnodes: str | None) -> int:
    return 1 if nnodes is None else values.parse_nnodes(nnodes)[0]


def forwarded(options: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that the workers get, here and on the hosts.

    Raises:
        UsageError: an invalid name, or an env file that cannot be read.
    """
    from ddplaunch.protocol import env_forwarding

    return tuple(env_forwarding.forwarded(environ, options["export"], _env_file_text(options["env_file"])).items())


def _env_file_text(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return read_input(path).decode()
    except (OSError, ValueError) as error:
        raise OptionError("--env-file", path, getattr(error, "strerror", None) or "is not UTF-8 text") from None
