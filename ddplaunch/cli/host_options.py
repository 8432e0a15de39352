"""Options about other machines: which hosts, how they are reached, and the variables of their workers.

Runs in the launcher. Reads the hostfile; starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddplaunch import features
from ddplaunch.cluster.hostfile import read_hostfile
from ddplaunch.cluster.hosts import HOSTFILE_VARIABLE, HOSTS_VARIABLE, Host, parse_hosts
from ddplaunch.errors import UsageError
from ddplaunch.rows import HOSTS, REAL_RUN, Option
from ddplaunch.transport import transports

ROWS = (
    Option(
        "--hosts",
        "gpu[1-4],USER@HOST:PORT",
        "Hosts to start nodes on. Default: DDPLAUNCH_HOSTS.",
        short="hosts to start nodes on",
    ),
    Option(
        "--hostfile",
        "FILE",
        "File with a host per line. Default: DDPLAUNCH_HOSTFILE.",
        completes="file",
    ),
    Option(
        "--chdir",
        "DIR",
        "Working directory of the workers on every node. Default: the current one.",
        sets="chdir",
        completes="folder",
    ),
    Option(
        "--interface",
        "NAME",
        "Network interface between the nodes. Default: detected.",
        sets="interface",
        only=(REAL_RUN,),
    ),
    Option(
        "--transport",
        "NAME",
        f"How the hosts are reached: {transports.choice()}. Default: that of the scheduler which names them, else ssh.",
        sets="remote.transport",
        parse=transports.parse,
        only=(REAL_RUN, HOSTS),
        completes="ddplaunch.transport.transports:of_hosts",
    ),
)

HOST_OPTIONS = ("hosts", "hostfile", *(row.name for row in features.rows() if getattr(row, "names_hosts", False)))
"""Options that name hosts, also of features."""

_PER_NODE_OPTIONS = ("rdzv_endpoint", "master_addr", "standalone")
"""Options for one launcher per node; they contradict hosts, on which one launcher leads all nodes."""


def select_hosts(
    options: Mapping[str, Any], environ: Mapping[str, str], scheduler_hosts: tuple[Host, ...] = ()
) -> tuple[Host, ...]:
    """The machines on which this launcher starts all nodes; empty if it starts only one, on this machine.

    ``scheduler_hosts`` are used if neither the options nor the environment names hosts.

    Raises:
        UsageError: invalid hosts, or hosts together with an endpoint, which the launcher would not use.
    """
    given = [f"--{name}" for name in HOST_OPTIONS if options[name] is not None]
    if not (given or scheduler_hosts or environ.get(HOSTS_VARIABLE) or environ.get(HOSTFILE_VARIABLE)):
        return ()
    option = next((f"--{name.replace('_', '-')}" for name in _PER_NODE_OPTIONS if options[name]), "")
    if option and not options["dry_run"]:
        if given:
            hint = "With hosts, the launcher assigns the endpoint; without hosts, start ddplaunch on every node."
            raise UsageError(f"{given[0]} and {option} exclude each other", hint, (option,))
        return ()
    if options["master_port"] is not None and not options["dry_run"]:
        hint = "Every attempt has a new port on the first node; it must be open to the other nodes."
        raise UsageError("--master-port has no effect where hosts are named", hint, ("--master-port",))
    hosts = _named(options["hosts"], options["hostfile"], environ) or scheduler_hosts
    for module in features.modules("hosts"):
        hosts = module.select(hosts, options)
    return hosts


def _named(hosts: str | None, hostfile: str | None, environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts of the options, else of the environment; empty if there are none.

    An option is None if it is absent. An empty one, as from an unset shell variable, is an error; an empty environment
    variable counts as absent.
    """
    if hosts is not None and hostfile is not None:
        raise UsageError("--hosts and --hostfile exclude each other", "Each names all hosts of the run.")
    if hosts is not None:
        return parse_hosts(hosts)
    if hostfile is not None:
        return _from_file(hostfile, "--hostfile")
    inherited, path = environ.get(HOSTS_VARIABLE), environ.get(HOSTFILE_VARIABLE)
    if inherited and path:
        raise UsageError(
            f"{HOSTS_VARIABLE} and {HOSTFILE_VARIABLE} are both set; each names all hosts of the run",
            "Unset one, or use --hosts or --hostfile: an option takes precedence over the environment.",
        )
    if inherited:
        return parse_hosts(inherited, HOSTS_VARIABLE)
    return _from_file(path, HOSTFILE_VARIABLE) if path else ()


def _from_file(path: str, source: str) -> tuple[Host, ...]:
    if not path:
        raise UsageError(f"{source}: no file is named")
    return read_hostfile(path)


def forwarded(
    options: Mapping[str, Any], environ: Mapping[str, str], hosts: tuple[Host, ...]
) -> tuple[tuple[str, str], ...]:
    """The variables that the workers get, here and on the hosts.

    Raises:
        UsageError: they cannot be forwarded as the options say.
    """
    found = features.call_each("variables", options, environ, to_hosts=bool(hosts))
    return tuple(pair for each in found for pair in each.items())
