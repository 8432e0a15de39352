"""Builds a ``LaunchConfig`` from the options' texts; torchrun's options have torchrun's meaning.

Runs in the launcher, once per command. Independent of click; starts nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddplaunch.cli import fields, host_options, scheduler_options, values
from ddplaunch.cli.rendezvous_options import SEARCH_TIMEOUT_S, RdzvConf, parse_rdzv_conf
from ddplaunch.config import (
    LINE_PREFIX,
    Entry,
    LaunchConfig,
    OutputConfig,
    RemoteConfig,
    RendezvousConfig,
    WorkerConfig,
)
from ddplaunch.errors import OptionError, StartNotice, UsageError
from ddplaunch.protocol.environment import SECRET
from ddplaunch.timeouts import TimeoutConfig

_MIN_SECRET = 16

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.cluster.hosts import Host


def build_config(options: Mapping[str, Any], environ: Mapping[str, str]) -> LaunchConfig:
    """Build the configuration of a run. What one option says alone, its row says (``fields``).

    Args:
        options: every option by its name, as text or bool, and ``script`` and ``script_args``.
        environ: environment with the variables that torchrun reads besides ``PET_*``, and those of schedulers.

    Raises:
        UsageError: an invalid value or combination.
    """
    return fields.checked(_config(scheduler_options.apply_scheduler(options, environ), environ))


def _config(completed: scheduler_options.CompletedOptions, environ: Mapping[str, str]) -> LaunchConfig:
    options = completed.options
    hosts = host_options.select_hosts(options, environ, completed.hosts)
    min_nodes, max_nodes = _nnodes(options, hosts)
    launcher_starts_nodes = bool(hosts or options["dry_run"])
    meets = max_nodes > 1 and not launcher_starts_nodes
    _check_verbosity(options)
    _check_rendezvous(options, max_nodes)
    conf = parse_rdzv_conf(
        "" if options["standalone"] else options["rdzv_conf"],
        is_static=options["rdzv_backend"] == "static",
        launcher_starts_nodes=launcher_starts_nodes,
    )
    warnings = [conf.ignored] if conf.ignored and max_nodes > 1 else []
    warnings += _without_effect(options, max_nodes)
    master_addr, master_port = _static_store(options)
    found = fields.read(options, environ)
    own = found[""]
    if completed.slurm_job:
        own["signals"] = (*own.get("signals", LaunchConfig.signals), *completed.slurm_job.requeue_on)
    forwards = hosts or options["export"] or options["env_file"]
    variables = host_options.forwarded(options, environ) if forwards else ()
    return LaunchConfig(
        **own,
        script=options["script"],
        script_args=tuple(options["script_args"]),
        entry=_entry(options),
        python=environ.get("PYTHON_EXEC") or None,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        workers=WorkerConfig(**found["workers"]),
        output=_output(found["output"], options, environ),
        timeouts=_timeouts(found["timeouts"], conf if launcher_starts_nodes else None),
        rendezvous=_rendezvous(completed, environ, conf, min_nodes, max_nodes, own) if meets else None,
        hosts=hosts,
        remote=RemoteConfig(**found["remote"], environ=variables, transport=completed.transport),
        master_addr=master_addr,
        master_port=master_port,
        task=completed.task,
        slurm_job=completed.slurm_job,
        notices=(*completed.notices, *(StartNotice("warning", text) for text in warnings)),
    )


def _output(found: Mapping[str, Any], options: Mapping[str, Any], environ: Mapping[str, str]) -> OutputConfig:
    template = environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or None
    if options["timestamps"]:
        template = f"${{time}} {LINE_PREFIX if template is None else template}"
    return OutputConfig(**found, line_prefix=template)


def _timeouts(found: Mapping[str, Any], conf: RdzvConf | None) -> TimeoutConfig:
    """``conf`` is None where every node has a launcher: ``RendezvousConfig`` then has these times."""
    timeouts = TimeoutConfig(**found)
    return replace(timeouts, join_timeout_s=conf.join_timeout_s, lost_after_s=conf.lost_after_s) if conf else timeouts


def _without_effect(options: Mapping[str, Any], max_nodes: int) -> list[str]:
    warnings, node_rank = [], options["node_rank"]
    if options["interface"] and max_nodes == 1 and not options["dry_run"]:
        warnings.append("--interface has an effect only with several nodes")
    if node_rank and int(node_rank) >= max_nodes and not options["standalone"]:
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
    found = fields.read(options, environ, ("remote", "timeouts"))
    remote = RemoteConfig(**found["remote"], environ=host_options.forwarded(options, environ) if hosts else ())
    if not hosts and remote != RemoteConfig(connect_timeout_s=remote.connect_timeout_s):
        options_of_hosts = "--ssh-*, --remote-* and the other options about hosts"
        raise UsageError(f"{options_of_hosts} have an effect only with --hosts or --hostfile")
    return hosts, remote, TimeoutConfig(**found["timeouts"]).shutdown_timeout_s


def _check_verbosity(options: Mapping[str, Any]) -> None:
    if options["verbose"] and options["quiet"]:
        raise UsageError("--verbose and --quiet exclude each other")


def _nnodes(options: Mapping[str, Any], hosts: tuple[Host, ...]) -> tuple[int, int]:
    """MIN and MAX."""
    text = str(len(hosts) or 1) if options["nnodes"] is None else options["nnodes"]
    min_nodes, max_nodes = values.parse_nnodes(text)
    return min_nodes, 1 if options["standalone"] and min_nodes == 1 and not hosts else max_nodes


def _check_rendezvous(options: Mapping[str, Any], max_nodes: int) -> None:
    if options["standalone"]:
        if max_nodes > 1:
            message = f"--standalone means one node, and --nnodes is {options['nnodes']}"
            raise UsageError(message, "", ("--standalone", "--nnodes"))
        return
    _check_backend(options["rdzv_backend"])
    if options["master_addr"]:
        values.parse_host(options["master_addr"], "--master-addr")
    if options["rdzv_endpoint"]:
        values.parse_endpoint(options["rdzv_endpoint"], "--rdzv-endpoint")
    node_rank = values.parse_count(options["node_rank"] or "0", "--node-rank")
    if options["rdzv_backend"] == "static" and node_rank >= max_nodes > 1:
        raise OptionError("--node-rank", node_rank, f"must be between 0 and {max_nodes - 1} with --nnodes {max_nodes}")


def _rendezvous(
    completed: scheduler_options.CompletedOptions,
    environ: Mapping[str, str],
    conf: RdzvConf,
    min_nodes: int,
    max_nodes: int,
    own: Mapping[str, Any],
) -> RendezvousConfig | None:
    """Torchrun's two backends: static, served by node rank 0, and c10d, served by the node that owns the endpoint."""
    options, scheduler = completed.options, completed.endpoint_source
    static = options["rdzv_backend"] == "static"
    endpoint = _endpoint(options, 29500 if static else 29400)
    if endpoint is None:
        return None
    # Torchrun's c10d ignores the node rank, so it may be any number.
    given = int(options["node_rank"] or max_nodes)
    node_rank = given if given < max_nodes else None
    is_server = (node_rank or 0) == 0 if static else conf.is_host
    return RendezvousConfig(
        token=(scheduler.token if scheduler else None) or options["rdzv_id"] or "none",
        min_nodes=max_nodes if static else min_nodes,
        max_nodes=max_nodes,
        node_index=node_rank or 0 if static else node_rank,
        server_addresses=(endpoint[0], *(scheduler.other_addresses if scheduler else ())),
        port=endpoint[1],
        other_ports=scheduler.ports[1:] if scheduler else (),
        is_server=is_server,
        local_addr=own.get("local_addr"),
        interface=own.get("interface"),
        join_timeout_s=conf.join_timeout_s,
        search_timeout_s=conf.search_timeout_s or (SEARCH_TIMEOUT_S if is_server is None else None),
        last_call_timeout_s=conf.last_call_timeout_s,
        lost_after_s=conf.lost_after_s,
        secret=_secret(environ),
    )


def _secret(environ: Mapping[str, str]) -> str:
    """The secret of the rendezvous; empty for none.

    Raises:
        UsageError: it is too short: a stranger could find it by trial. Its text is not in the message.
    """
    secret = environ.get(SECRET, "")
    if SECRET in environ and len(secret) < _MIN_SECRET:
        hint = f"For example {SECRET}=$(openssl rand -hex 16), once, and the same text on every node."
        raise UsageError(f"{SECRET} has {len(secret)} characters, and at least {_MIN_SECRET} are needed", hint)
    return secret


def _endpoint(options: Mapping[str, Any], default_port: int) -> tuple[str, int] | None:
    if options["rdzv_endpoint"]:
        host, port = values.parse_endpoint(options["rdzv_endpoint"], "--rdzv-endpoint")
        return host, default_port if port is None else port
    if options["master_addr"] is None or options["rdzv_backend"] != "static":
        return None
    port_text = options["master_port"]
    port = default_port if port_text is None else values.parse_whole(port_text, "--master-port")
    return values.parse_host(options["master_addr"], "--master-addr"), port


def _check_backend(name: str) -> None:
    if name in ("etcd", "etcd-v2"):
        raise OptionError(
            "--rdzv-backend",
            name,
            "ddplaunch does not use etcd",
            "Use --rdzv-backend c10d: one of the nodes serves the rendezvous, and nothing needs to be installed.",
        )
    if name not in ("static", "c10d"):
        raise OptionError("--rdzv-backend", name, "must be static or c10d", "torchrun's plug-ins are not supported.")


def _static_store(options: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Address and port of the workers' store, if torchrun's static backend fixes them; otherwise None."""
    port = None if options["master_port"] is None else values.parse_whole(options["master_port"], "--master-port")
    if options["standalone"] or options["rdzv_backend"] != "static":
        return None, None
    if options["rdzv_endpoint"]:
        host, port = values.parse_endpoint(options["rdzv_endpoint"], "--rdzv-endpoint")
        if port is None:
            raise OptionError("--rdzv-endpoint", options["rdzv_endpoint"], "the static backend needs a port too")
        return host, port
    if port is None:
        return None, None
    return values.parse_host(options["master_addr"] or "127.0.0.1", "--master-addr"), port


def _entry(options: Mapping[str, Any]) -> Entry:
    if options["run_path"]:
        return "script"
    if options["module"] and options["no_python"]:
        message = "--module and --no-python exclude each other: a program is not a module"
        raise UsageError(message, "", ("--module", "--no-python"))
    return "module" if options["module"] else "program" if options["no_python"] else "script"
