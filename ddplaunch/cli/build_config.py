"""Builds a ``LaunchConfig`` from the options' texts; torchrun's options have torchrun's meaning.

Runs in the launcher, once per command. Independent of click; starts nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, get_args

from ddplaunch.cli import host_options, scheduler_options, values
from ddplaunch.cli.rendezvous_options import SEARCH_TIMEOUT_S, RdzvConf, parse_rdzv_conf
from ddplaunch.config import (
    LINE_PREFIX,
    Entry,
    HealthPolicy,
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
    """Build the configuration of a run.

    Args:
        options: every option by its name in ``OPTIONS``, as text or bool, and ``script`` and ``script_args``.
        environ: environment with the variables that torchrun reads besides ``PET_*``, and those of schedulers.

    Raises:
        UsageError: an invalid value or combination.
    """
    return _config(scheduler_options.apply_scheduler(options, environ), environ)


def _config(completed: scheduler_options.CompletedOptions, environ: Mapping[str, str]) -> LaunchConfig:
    options = completed.options
    hosts = host_options.select_hosts(options, environ, completed.hosts)
    min_nodes, max_nodes = _nnodes(options, hosts)
    launcher_starts_nodes = bool(hosts or options["dry_run"])
    meets = max_nodes > 1 and not launcher_starts_nodes
    _check_supported(options)
    _check_rendezvous(options, max_nodes)
    conf = parse_rdzv_conf(
        "" if options["standalone"] else options["rdzv_conf"],
        is_static=options["rdzv_backend"] == "static",
        launcher_starts_nodes=launcher_starts_nodes,
    )
    warnings = [conf.ignored] if conf.ignored and max_nodes > 1 else []
    warnings += _without_effect(options, max_nodes)
    master_addr, master_port = _static_store(options)
    return LaunchConfig(
        script=options["script"],
        script_args=tuple(options["script_args"]),
        entry=_entry(options),
        python=environ.get("PYTHON_EXEC") or None,
        chdir=options["chdir"] or None,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        run_id=None if options["rdzv_id"] in ("", "none") else options["rdzv_id"],
        max_restarts=values.parse_whole(options["max_restarts"], "--max-restarts"),
        on_exit=options["on_exit"] or None,
        signals=(
            *values.parse_signals(options["signals_to_handle"]),
            *(completed.slurm_job.requeue_on if completed.slurm_job else ()),
        ),
        workers=_workers(options),
        output=_output(options, environ),
        timeouts=_timeouts(options, environ, conf if launcher_starts_nodes else None),
        rendezvous=_rendezvous(completed, environ, conf, min_nodes, max_nodes) if meets else None,
        hosts=hosts,
        remote=_remote(completed, environ, hosts),
        master_addr=master_addr,
        master_port=master_port,
        local_addr=_local_addr(options),
        interface=options["interface"] or None,
        dry_run=options["dry_run"],
        compile_on_cpu=options["rehearse_compile"],
        injections=tuple(options["inject"] or ()),
        task=completed.task,
        slurm_job=completed.slurm_job,
        health=_health(options["health"]),
        keep_warm_s=_keep_warm_s(options["keep_warm"], environ),
        notices=(*completed.notices, *(StartNotice("warning", text) for text in warnings)),
    )


def _workers(options: Mapping[str, Any]) -> WorkerConfig:
    return WorkerConfig(
        nproc_per_node=values.parse_nproc(options["nproc_per_node"]),
        gpus=values.parse_gpus(options["gpus"]),
        gpus_per_proc=values.parse_whole(options["gpus_per_proc"], "--gpus-per-proc"),
        virtual_local_rank=options["virtual_local_rank"],
        pass_local_rank=options["pass_local_rank"],
        role=options["role"],
        start_method="spawn" if options["start_method"] == "spawn" else "forkserver",
        preload=values.parse_preload(options["preload"]),
        numa_binding=options["numa_binding"],
        debug_on_error=options["debug_on_error"],
        debug_ranks=values.parse_ranks(options["debug_ranks"], "--debug-ranks"),
    )


def _keep_runs(text: str | None) -> int | None:
    return None if text is None else values.parse_count(text, "--keep-runs")


def _output(options: Mapping[str, Any], environ: Mapping[str, str]) -> OutputConfig:
    return OutputConfig(
        log_dir=options["log_dir"] or None,
        keep_runs=_keep_runs(options["keep_runs"]),
        collect_logs=options["collect_logs"],
        redirects=values.parse_streams(options["redirects"], "--redirects"),
        tee=values.parse_streams(options["tee"], "--tee"),
        show_ranks=values.parse_ranks(options["ranks_filter"], "--ranks-filter"),
        show_local_ranks=values.parse_ranks(options["local_ranks_filter"], "--local-ranks-filter"),
        duplicate_stdout_filters=values.parse_needles(options["duplicate_stdout_filters"]),
        duplicate_stderr_filters=values.parse_needles(options["duplicate_stderr_filters"]),
        line_prefix=_line_prefix(environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or None, options["timestamps"]),
        page=not options["no_page"],
        events="console" if options["event_log_handler"] == "console" else "null",
        samples=not options["no_samples"],
        metrics_file=options["metrics_file"] or None,
        verbosity=options["verbose"] - options["quiet"],
    )


def _line_prefix(template: str | None, timestamps: bool) -> str | None:
    return f"${{time}} {LINE_PREFIX if template is None else template}" if timestamps else template


def _timeouts(options: Mapping[str, Any], environ: Mapping[str, str], conf: RdzvConf | None) -> TimeoutConfig:
    """``conf`` is None where every node has a launcher: ``RendezvousConfig`` then has these times."""
    report = options["hang_report"]
    timeouts = TimeoutConfig(
        shutdown_timeout_s=_shutdown_timeout_s(options, environ),
        hang_timeout_s=_seconds(options, "hang_timeout"),
        busy_timeout_s=_seconds(options, "busy_timeout"),
    )
    if report is not None:
        timeouts = replace(timeouts, hang_report_s=None if report == "off" else _seconds(options, "hang_report"))
    return replace(timeouts, join_timeout_s=conf.join_timeout_s, lost_after_s=conf.lost_after_s) if conf else timeouts


def _seconds(options: Mapping[str, Any], name: str) -> float | None:
    value = options[name]
    return None if value is None else values.parse_seconds(value, f"--{name.replace('_', '-')}")


def _without_effect(options: Mapping[str, Any], max_nodes: int) -> list[str]:
    warnings, node_rank = [], options["node_rank"]
    if options["interface"] and max_nodes == 1 and not options["dry_run"]:
        warnings.append("--interface has an effect only with several nodes")
    if node_rank and int(node_rank) >= max_nodes and not options["standalone"]:
        last = f"the last of {max_nodes} nodes is {max_nodes - 1}, and this one is numbered by arrival"
        reason = "the job has one node (--nnodes N makes it larger)" if max_nodes == 1 else last
        warnings.append(f"--node-rank {node_rank} has no effect: {reason}")
    return warnings


def _keep_warm_s(text: str | None, environ: Mapping[str, str]) -> float | None:
    option = "DDPLAUNCH_KEEP_WARM" if text is None else "--keep-warm"
    text = environ.get(option) if text is None else text
    return values.parse_seconds(text, option) if text else None


def _health(policy: str) -> HealthPolicy:
    if policy not in get_args(HealthPolicy):
        raise OptionError("--health", policy, "must be off, warn or refuse")
    return cast("HealthPolicy", policy)


def _local_addr(options: Mapping[str, Any]) -> str | None:
    return None if options["local_addr"] is None else values.parse_host(options["local_addr"], "--local-addr")


def connection_options(
    options: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[tuple[Host, ...], RemoteConfig, float]:
    """For commands about existing runs: the other machines, how to connect to them, and the grace period in seconds.

    Raises:
        UsageError: as ``build_config``.
    """
    hosts = host_options.select_hosts(options, environ)
    remote = host_options.remote(options, environ, forwards=bool(hosts))
    if not hosts and remote != RemoteConfig(connect_timeout_s=remote.connect_timeout_s):
        options_of_hosts = "--ssh-*, --remote-* and the other options about hosts"
        raise UsageError(f"{options_of_hosts} have an effect only with --hosts or --hostfile")
    return hosts, remote, _shutdown_timeout_s(options, environ)


def _remote(
    completed: scheduler_options.CompletedOptions, environ: Mapping[str, str], hosts: tuple[Host, ...]
) -> RemoteConfig:
    options = completed.options
    forwards = bool(hosts or options["export"] or options["env_file"])
    remote = host_options.remote(options, environ, forwards=forwards)
    is_by_ssh = options["dry_run"] or (hosts and not completed.by_srun)
    if remote.connect_timeout_s != RemoteConfig.connect_timeout_s and not is_by_ssh:
        raise UsageError("--connect-timeout has an effect only over SSH, with --hosts or --hostfile")
    return replace(remote, by_srun=completed.by_srun)


def _check_supported(options: Mapping[str, Any]) -> None:
    """Reject options that are not supported or contradict each other, and invalid values of options without effect."""
    if options["verbose"] and options["quiet"]:
        raise UsageError("--verbose and --quiet exclude each other")
    if values.parse_seconds(options["monitor_interval"], "--monitor-interval") <= 0:
        raise OptionError("--monitor-interval", options["monitor_interval"], "must be above 0")
    # torchrun's dynamic_rendezvous logs messages between its agents; ddplaunch has no such messages.
    if options["event_log_handler"] not in ("null", "console", "dynamic_rendezvous"):
        raise OptionError("--event-log-handler", options["event_log_handler"], "must be null or console")
    if options["logs_specs"] not in (None, "default"):
        raise UsageError(
            "--logs-specs: not supported, torch's LogsSpecs plug-ins run inside torchrun's agent",
            "Use --log-dir, --redirects, --tee and --ranks-filter; the files have torchrun's names.",
        )


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
        local_addr=_local_addr(options),
        interface=options["interface"],
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


def _shutdown_timeout_s(options: Mapping[str, Any], environ: Mapping[str, str]) -> float:
    if options["shutdown_timeout"] is not None:
        return values.parse_seconds(options["shutdown_timeout"], "--shutdown-timeout")
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    return values.parse_seconds(environ[name], name) if environ.get(name) else TimeoutConfig.shutdown_timeout_s
