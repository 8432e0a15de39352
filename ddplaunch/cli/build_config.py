"""Builds a ``LaunchConfig`` from the options' texts; torchrun's options have torchrun's meaning.

Runs in the launcher, once per command. Independent of click; starts nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ddplaunch import features
from ddplaunch.cli import host_options, rendezvous_options
from ddplaunch.cli.options import ROWS
from ddplaunch.cluster.hosts import Host
from ddplaunch.cluster.scheduled import ScheduledTask, SlurmJob
from ddplaunch.config import LINE_PREFIX, Entry, LaunchConfig, OutputConfig, RemoteConfig, WorkerConfig
from ddplaunch.errors import StartNotice, UsageError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.rows import GROUPS, SSH
from ddplaunch.timeouts import TimeoutConfig
from ddplaunch.transport import transports

if TYPE_CHECKING:
    from ddplaunch.cli.rendezvous_options import RdzvConf


@dataclass(frozen=True)
class CompletedOptions:
    """The options of a run, completed by what has started ddplaunch.

    Attributes:
        options: the user's values; those of a scheduler where the user gave none.
        hosts: the nodes of the scheduler, for one launcher that starts all nodes; empty if the user names hosts.
        rendezvous: fields of RendezvousConfig that differ from what the options say.
        task: the only worker of this launcher, if the scheduler started a process for every worker.
        notices: the detected scheduler, and probable mistakes.
        transport: how ``hosts`` are reached: a name in ``transport.transports.TABLE``.
        slurm_job: the SLURM job that contains this process, if any.
    """

    options: Mapping[str, Any]
    hosts: tuple[Host, ...] = ()
    rendezvous: Mapping[str, Any] = field(default_factory=dict)
    task: ScheduledTask | None = None
    notices: tuple[StartNotice, ...] = ()
    transport: str = RemoteConfig.transport
    slurm_job: SlurmJob | None = None


def build_config(options: Mapping[str, Any], environ: Mapping[str, str]) -> LaunchConfig:
    """Build the configuration of a run. What one option says alone, its row says.

    Args:
        options: every option by its name, as text or bool, and ``script`` and ``script_args``.
        environ: environment with the variables that torchrun reads besides ``PET_*``, and those of schedulers.

    Raises:
        UsageError: an invalid value or combination.
    """
    return checked(_config(_completed(options, environ), environ))


def _completed(options: Mapping[str, Any], environ: Mapping[str, str]) -> CompletedOptions:
    """The options, completed by what has started ddplaunch.

    Raises:
        UsageError: what it says cannot be read, or contradicts the options.
    """
    for module in features.modules("scheduler"):
        found: CompletedOptions = module.completed(options, environ)
        return found
    return CompletedOptions(options)


def transport_of_command(hosts: Collection[Host], options: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """How a command that is not a run reaches ``hosts`` that the user names: those of an allocation as a run does.

    Raises:
        UsageError: the scheduler's hostfile cannot be read.
    """
    for module in features.modules("scheduler"):
        found: str = module.transport_of_command(hosts, options, environ)
        return found
    return CompletedOptions.transport


def _config(completed: CompletedOptions, environ: Mapping[str, str]) -> LaunchConfig:
    options = completed.options
    hosts = host_options.select_hosts(options, environ, completed.hosts)
    min_nodes, max_nodes = rendezvous_options.nnodes(options, hosts)
    starts_all_nodes = bool(hosts or options["dry_run"])
    meets = max_nodes > 1 and not starts_all_nodes
    if options["verbose"] and options["quiet"]:
        raise UsageError("--verbose and --quiet exclude each other")
    conf = rendezvous_options.parse_rdzv_conf(
        "" if options["standalone"] else options["rdzv_conf"],
        is_static=options["rdzv_backend"] == "static",
        starts_all_nodes=starts_all_nodes,
    )
    rendezvous_options.check(options, max_nodes)  # The endpoint of store_type=file is a path.
    warnings = [conf.ignored] if conf.ignored and max_nodes > 1 else []
    warnings += _without_effect(options, max_nodes)
    master_addr, master_port = rendezvous_options.static_store(options)
    found = read(options, environ)
    fields = found[""]
    meeting = rendezvous_options.rendezvous(options, environ, conf, min_nodes, max_nodes, fields) if meets else None
    if meeting and meeting.min_nodes > min_nodes:
        needs = f"with --rdzv-backend static all {max_nodes} nodes are needed; c10d goes on with fewer"
        warnings.append(f"--nnodes {min_nodes}:{max_nodes}: {needs}")
    variables = host_options.forwarded(options, environ, hosts)
    return LaunchConfig(
        **fields,
        script=options["script"],
        script_args=tuple(options["script_args"]),
        entry=_entry(options),
        python=environ.get("PYTHON_EXEC") or None,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        workers=WorkerConfig(**found["workers"]),
        output=_output(found["output"], options),
        timeouts=_timeouts(found["timeouts"], conf if starts_all_nodes else None),
        rendezvous=replace(meeting, **completed.rendezvous) if meeting else None,
        hosts=hosts,
        remote=RemoteConfig(**{"transport": completed.transport, **found["remote"]}, environ=variables),
        master_addr=master_addr,
        master_port=master_port,
        task=completed.task,
        slurm_job=completed.slurm_job,
        notices=(*completed.notices, *(StartNotice("warning", text) for text in warnings)),
    )


def _output(found: Mapping[str, Any], options: Mapping[str, Any]) -> OutputConfig:
    output = OutputConfig(**found)
    if not options["timestamps"]:
        return output
    return replace(output, line_prefix=f"${{time}} {LINE_PREFIX if output.line_prefix is None else output.line_prefix}")


def _timeouts(found: Mapping[str, Any], conf: RdzvConf | None) -> TimeoutConfig:
    """``conf`` is None unless this launcher starts all nodes: ``RendezvousConfig`` has these times, or none has."""
    timeouts = TimeoutConfig(**found)
    return replace(timeouts, join_timeout_s=conf.join_timeout_s, lost_after_s=conf.keep_alive_s) if conf else timeouts


def _without_effect(options: Mapping[str, Any], max_nodes: int) -> list[str]:
    warnings, node_rank = [], options["node_rank"]
    if options["interface"] and max_nodes == 1 and not options["dry_run"]:
        warnings.append("--interface has an effect only with several nodes")
    if node_rank and not options["standalone"] and int(node_rank) >= max_nodes:  # A number: ``check`` has looked.
        last = f"the last of {max_nodes} nodes is {max_nodes - 1}, and this one is numbered by arrival"
        reason = "the job has one node (--nnodes N makes it larger)" if max_nodes == 1 else last
        warnings.append(f"--node-rank {node_rank} has no effect: {reason}")
    return warnings


def connection_options(
    options: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[tuple[Host, ...], RemoteConfig, float]:
    """For commands about existing runs: the other machines, how to connect to them, and the grace period in seconds.

    Raises:
        UsageError: as ``build_config``.
    """
    hosts = host_options.select_hosts(options, environ)
    found = read(options, environ, ("remote", "timeouts"))
    if not any(row.is_given(options[row.name]) for row in ROWS if SSH in row.only):
        found["remote"].setdefault("transport", transport_of_command(hosts, options, environ))
    variables = host_options.forwarded(options, environ, hosts) if hosts else ()
    remote = RemoteConfig(**found["remote"], environ=variables)
    transports.check(remote.transport, hosts)
    if not hosts and remote != RemoteConfig(connect_timeout_s=remote.connect_timeout_s):
        options_of_hosts = "--ssh-*, --remote-* and the other options about hosts"
        raise UsageError(f"{options_of_hosts} have an effect only with --hosts or --hostfile")
    return hosts, remote, TimeoutConfig(**found["timeouts"]).shutdown_timeout_s


def _entry(options: Mapping[str, Any]) -> Entry:
    if options["run_path"]:
        return "script"
    if options["module"] and options["no_python"]:
        message = "--module and --no-python exclude each other: a program is not a module"
        raise UsageError(message, "", ("--module", "--no-python"))
    return "module" if options["module"] else "program" if options["no_python"] else "script"


def read(
    options: Mapping[str, Any], environ: Mapping[str, str], groups: Collection[str] = GROUPS
) -> dict[str, dict[str, Any]]:
    """The fields that the options set, by group and name; those of LaunchConfig itself are in the group "".

    Raises:
        UsageError: the value of an option of these groups is not valid. Options without a field are in the group "".
    """
    found: dict[str, dict[str, Any]] = {group: {} for group in groups}
    for row in ROWS:
        group, _, name = row.sets.rpartition(".")
        if group not in groups:
            continue
        given, origin = options[row.name], row.long_name
        if given is None and row.variable:
            given, origin = environ.get(row.variable) or None, row.variable
        if row.is_given(given):
            value = row.value(given, origin)
            if row.sets:
                found[group][name] = value
    return found


def checked(config: LaunchConfig) -> LaunchConfig:
    """``config``, with a notice for each option that has no effect.

    Raises:
        UsageError: an option without effect, where that is an error.
    """
    if config.hosts:
        transports.check(config.remote.transport, config.hosts)
    notices, defaults = [], LaunchConfig(script="-")
    for row in ROWS:
        is_set = bool(row.only) and attrgetter(row.sets)(config) != attrgetter(row.sets)(defaults)
        for condition in row.only if is_set else ():
            if not condition.holds(config):
                text = f"{row.long_name} has an effect only {condition.text}"
                if condition.is_error:
                    raise UsageError(text, "", (row.long_name,))
                notices.append(StartNotice("unused", text))
    return replace(config, notices=(*config.notices, *notices)) if notices else config
