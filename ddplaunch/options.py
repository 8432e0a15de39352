"""What torchrun's options mean here: the options' texts -> ``LaunchConfig``. Pure; knows nothing of click."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddplaunch import cluster_options, host_options, rendezvous_conf
from ddplaunch import option_values as values
from ddplaunch.config import NO_LOGS, Entry, LaunchConfig, Meeting, Remote
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.hosts import Host
    from ddplaunch.injection import Injection


def build_config(options: Mapping[str, Any], environ: Mapping[str, str]) -> LaunchConfig:
    """What the options and the environment ask for; pure.

    Args:
        options: every option by its name in ``OPTIONS``, as text or bool, and ``script`` and ``script_args``.
        environ: read for what torchrun reads besides ``PET_*``.

    Raises:
        UsageError: a value or a combination that cannot be meant.
    """
    return _config(cluster_options.heard(options, environ))


def _config(start: cluster_options.Start) -> LaunchConfig:
    options, environ = start.options, start.environ
    hosts = host_options.chosen_hosts(options, environ)
    min_nodes, max_nodes = host_options.nnodes(options["nnodes"], hosts)
    _check_accepted(options)
    _check_rendezvous(options, max_nodes)
    master_addr, master_port = _static_store(options)
    is_led = bool(hosts or options["dry_run"])
    conf = rendezvous_conf.read(options["rdzv_conf"] if is_led else "")
    return LaunchConfig(
        script=options["script"],
        script_args=tuple(options["script_args"]),
        entry=_entry(options),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        meeting=start.at_its_place(_meeting(options, min_nodes, max_nodes)) if max_nodes > 1 and not is_led else None,
        task=start.task,
        job=start.job,
        notices=(*start.notices, *_without_effect(options, max_nodes, is_led=is_led)),
        nproc_per_node=values.parse_nproc(options["nproc_per_node"]),
        gpus=values.parse_gpus(options["gpus"]),
        gpus_per_proc=values.parse_whole(options["gpus_per_proc"], "--gpus-per-proc"),
        virtual_local_rank=options["virtual_local_rank"],
        pass_local_rank=options["pass_local_rank"],
        run_id=None if options["rdzv_id"] == "none" else options["rdzv_id"],
        max_restarts=values.parse_whole(options["max_restarts"], "--max-restarts"),
        start_method="spawn" if options["start_method"] == "spawn" else "forkserver",
        preload=values.parse_preload(options["preload"]),
        python=environ.get("PYTHON_EXEC") or None,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=None if options["local_addr"] is None else values.parse_host(options["local_addr"], "--local-addr"),
        shutdown_timeout_s=_shutdown_timeout_s(options, environ),
        hang_timeout_s=_hang_timeout_s(options),
        signals=(*values.parse_signals(options["signals_to_handle"]), *(start.job.requeue_on if start.job else ())),
        log_dir=options["log_dir"] or None,
        **_shown(options),
        line_prefix=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or None,
        join_timeout_s=conf.join_timeout_s,
        lost_after_s=conf.lost_after_s,
        hosts=hosts,
        remote=start.reached(host_options.remote(options, environ) if hosts or _gives(options) else Remote()),
        role=options["role"],
        numa_binding=options["numa_binding"],
        chdir=options["chdir"] or None,
        interface=options["interface"] or None,
        **_rehearsed(options, max_nodes),
    )


def find_options(options: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[tuple[Host, ...], Remote, float]:
    """For ``--ps`` and ``--kill``: other machines to ask, how they are reached, and the grace.

    Raises:
        UsageError: as ``build_config``.
    """
    hosts = host_options.chosen_hosts(options, environ)
    remote = host_options.remote(options, environ) if hosts else Remote()
    return hosts, remote, _shutdown_timeout_s(options, environ)


def _rehearsed(options: Mapping[str, Any], max_nodes: int) -> dict[str, Any]:
    injections = _injections(options, max_nodes) if options["inject"] else ()
    return {**{name: options[name] for name in ("dry_run", "rehearse_compile")}, "injections": injections}


def _injections(options: Mapping[str, Any], max_nodes: int) -> tuple[Injection, ...]:
    """Checked here where the number of workers is known; else once the agents have counted."""
    from ddplaunch import injection

    asked = tuple(injection.parse(text) for text in options["inject"])
    nproc = values.parse_nproc(options["nproc_per_node"])
    if isinstance(nproc, int):
        injection.check(asked, max_nodes * nproc, max_nodes)
    return asked


def _gives(options: Mapping[str, Any]) -> bool:
    return bool(options["export"] or options["env_file"])


def _shown(options: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept and shown of the workers' output, and what is said."""
    return {
        "collect_logs": options["collect_logs"],
        "events": "console" if options["event_log_handler"] == "console" else "null",
        "verbosity": options["verbose"] - options["quiet"],
        "redirects": values.parse_streams(options["redirects"], "--redirects"),
        "tee": values.parse_streams(options["tee"], "--tee"),
        "show_ranks": values.parse_ranks(options["ranks_filter"], "--ranks-filter"),
        "show_local_ranks": values.parse_ranks(options["local_ranks_filter"], "--local-ranks-filter"),
        "duplicate_stdout_filters": values.parse_needles(options["duplicate_stdout_filters"]),
        "duplicate_stderr_filters": values.parse_needles(options["duplicate_stderr_filters"]),
    }


def _check_accepted(options: Mapping[str, Any]) -> None:
    """Options that change nothing here, and combinations of which one half would be lost."""
    if options["verbose"] and options["quiet"]:
        raise UsageError("--verbose and --quiet exclude each other")
    if values.parse_seconds(options["monitor_interval"], "--monitor-interval") <= 0:
        raise UsageError(f"--monitor-interval {options['monitor_interval']}: must be above 0")
    # dynamic_rendezvous logs what torchrun's agents tell each other; on one node there is nothing to tell.
    if options["event_log_handler"] not in ("null", "console", "dynamic_rendezvous"):
        raise UsageError(f"--event-log-handler {options['event_log_handler']}: must be null or console")
    if options["collect_logs"] and options["log_dir"] == NO_LOGS:
        raise UsageError("--collect-logs: with --log-dir /dev/null there are none")
    if options["logs_specs"] is not None:
        raise UsageError(
            "--logs-specs: not supported, torch's LogsSpecs plug-ins run inside torchrun's agent",
            "Use --log-dir, --redirects, --tee and --ranks-filter; the files have torchrun's names.",
        )


def _check_rendezvous(options: Mapping[str, Any], max_nodes: int) -> None:
    if options["standalone"]:
        if max_nodes > 1:
            raise UsageError(f"--standalone means one node, and --nnodes says {options['nnodes']}")
        return
    _check_backend(options["rdzv_backend"])
    if options["rdzv_endpoint"]:
        values.parse_endpoint(options["rdzv_endpoint"], "--rdzv-endpoint")
    rendezvous_conf.read(options["rdzv_conf"])
    node_rank = values.parse_whole(options["node_rank"] or "0", "--node-rank")
    if not 0 <= node_rank < max_nodes:
        raise UsageError(f"--node-rank {node_rank}: must be between 0 and {max_nodes - 1} with --nnodes {max_nodes}")


def _meeting(options: Mapping[str, Any], min_nodes: int, max_nodes: int) -> Meeting | None:
    """Torchrun's two ways to meet: static, at node rank 0, and c10d, at the node that owns the endpoint."""
    static = options["rdzv_backend"] == "static"
    where = _meeting_place(options, 29500 if static else 29400)
    if where is None:
        return None
    conf = rendezvous_conf.read(options["rdzv_conf"])
    node_rank = None if options["node_rank"] is None else int(options["node_rank"])
    serves = (node_rank or 0) == 0 if static else conf.is_host
    return Meeting(
        token=options["rdzv_id"] or "none",
        min_nodes=max_nodes if static else min_nodes,
        max_nodes=max_nodes,
        node_rank=node_rank or 0 if static else node_rank,
        hosts=(where[0],),
        port=where[1],
        serves=serves,
        local_addr=None if options["local_addr"] is None else values.parse_host(options["local_addr"], "--local-addr"),
        interface=options["interface"],
        join_timeout_s=conf.join_timeout_s,
        silence_s=rendezvous_conf.NOT_HOSTED_S if serves is None and conf.silence_s is None else conf.silence_s,
        last_call_s=conf.last_call_s,
        lost_after_s=conf.lost_after_s,
    )


def _without_effect(options: Mapping[str, Any], max_nodes: int, *, is_led: bool) -> tuple[tuple[int, str], ...]:
    """What is likely not meant is said; where there is one node, nobody meets."""
    if max_nodes == 1 or not options["rdzv_conf"].strip():
        return ()
    is_static = options["rdzv_backend"] == "static"
    ignored = rendezvous_conf.read(options["rdzv_conf"], is_static=is_static, is_led=is_led).ignored
    return ((0, ignored),) if ignored else ()


def _meeting_place(options: Mapping[str, Any], default_port: int) -> tuple[str, int] | None:
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
        raise UsageError(
            f"--rdzv-backend {name}: ddplaunch does not use etcd",
            "Use --rdzv-backend c10d: the nodes meet at the first of them, and nothing needs to be installed.",
        )
    if name not in ("static", "c10d"):
        raise UsageError(f"--rdzv-backend {name}: must be static or c10d", "torchrun's plug-ins cannot be used here.")


def _static_store(options: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Where the workers' store must listen. Only torchrun's static backend with a port fixes that; else both None."""
    port = None if options["master_port"] is None else values.parse_whole(options["master_port"], "--master-port")
    if options["standalone"] or options["rdzv_backend"] != "static":
        return None, None
    if options["rdzv_endpoint"]:
        host, port = values.parse_endpoint(options["rdzv_endpoint"], "--rdzv-endpoint")
        if port is None:
            raise UsageError(f"--rdzv-endpoint {options['rdzv_endpoint']}: the static backend needs a port too")
        return host, port
    if port is None:
        return None, None
    return values.parse_host(options["master_addr"] or "127.0.0.1", "--master-addr"), port


def _entry(options: Mapping[str, Any]) -> Entry:
    if options["run_path"]:
        return "script"
    if options["module"] and options["no_python"]:
        raise UsageError("--module and --no-python exclude each other: a program is not a module")
    return "module" if options["module"] else "program" if options["no_python"] else "script"


def _shutdown_timeout_s(options: Mapping[str, Any], environ: Mapping[str, str]) -> float:
    if options["shutdown_timeout"] is not None:
        return values.parse_seconds(options["shutdown_timeout"], "--shutdown-timeout")
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    return values.parse_seconds(environ.get(name) or "30", name)


def _hang_timeout_s(options: Mapping[str, Any]) -> float | None:
    text = options["hang_timeout"]
    return None if text is None else values.parse_seconds(text, "--hang-timeout")
