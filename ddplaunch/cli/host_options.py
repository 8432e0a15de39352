"""Options about other machines: which hosts, how they are reached, and the variables of their workers.

Runs in the launcher. Reads the hostfile and the env file; starts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddplaunch.cli import values
from ddplaunch.cluster.hostfile import read_input
from ddplaunch.cluster.hosts import HOSTFILE_VARIABLE, HOSTS_VARIABLE
from ddplaunch.errors import OptionError, UsageError
from ddplaunch.rows import HOSTS, REAL_RUN, SSH, Option, flag, parse_positive_seconds, parse_whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.cluster.hosts import Host

ROWS = (
    Option(
        "--hosts",
        "gpu[1-4],USER@HOST:PORT",
        "Hosts to start nodes on. Default: DDPLAUNCH_HOSTS.",
        short="hosts to start nodes on, over SSH",
    ),
    Option(
        "--hostfile",
        "FILE",
        "File with a host per line. Default: DDPLAUNCH_HOSTFILE.",
        completes="file",
    ),
    Option("--include", "gpu1@gpu2:0,2", "Use only these hosts, or only these devices of a host."),
    Option("--exclude", "gpu1@gpu2:0,2", "Use all hosts, or all devices of a host, except these."),
    Option("--avoid", "gpu[7-8]", "Do not use these hosts of the list, also as spares."),
    Option(
        "-x --export",
        "NAME[=VALUE]",
        "Forward a variable to the workers; 'PRE*': all with this prefix.",
        multiple=True,
    ),
    Option(
        "--env-file",
        "FILE",
        "Forward the variables in FILE to the workers; a NAME=VALUE per line.",
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
        "--remote-python",
        "PATH",
        "Python interpreter on the hosts. Default: the path of this one.",
        sets="remote.python",
        only=(REAL_RUN, HOSTS),
        completes="file",
    ),
    Option(
        "--remote-setup",
        "TEXT",
        "Shell text to run first on the hosts, like 'module load cuda'.",
        sets="remote.setup",
        only=(REAL_RUN, HOSTS),
    ),
    Option(
        "--transport",
        "NAME",
        "How the hosts are reached: ssh, or srun in a SLURM job. Default: srun for the nodes of the job, else ssh.",
        sets="remote.transport",
        parse=values.parse_transport,
        only=(REAL_RUN, HOSTS),
        completes="ddplaunch.transport.transports:of_hosts",
    ),
    Option("--ssh-user", "NAME", "Login name, like ssh -l.", sets="remote.user", only=(SSH,)),
    Option(
        "--ssh-port",
        "PORT",
        "Port of the SSH server, like ssh -p.",
        sets="remote.port",
        parse=parse_whole,
        only=(SSH,),
    ),
    Option(
        "--ssh-identity",
        "FILE",
        "File of the private key, like ssh -i.",
        sets="remote.identity",
        only=(SSH,),
        completes="file",
    ),
    Option(
        "--ssh-config",
        "FILE",
        "SSH configuration file, like ssh -F.",
        sets="remote.config",
        only=(SSH,),
        completes="file",
    ),
    flag("--ssh-accept-new", "Accept and store the keys of unknown hosts.", sets="remote.accept_new", only=(SSH,)),
    Option(
        "--connect-timeout",
        "TIME",
        "Time for one attempt to connect. Default: 15 s.",
        sets="remote.connect_timeout_s",
        parse=parse_positive_seconds,
        only=(SSH,),
    ),
)

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
