"""Options about nodes and their rendezvous, with torchrun's meaning: how many, where they meet, ``--rdzv-conf``.

Runs in the launcher. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddplaunch.cli import values
from ddplaunch.config import RendezvousConfig
from ddplaunch.errors import OptionError, UsageError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.environment import SECRET
from ddplaunch.rows import Option, flag, parse_count, parse_whole
from ddplaunch.text import grouped, seconds
from ddplaunch.timeouts import TimeoutConfig

if TYPE_CHECKING:
    from ddplaunch.cluster.hosts import Host

ROWS = (
    Option(
        "--nnodes",
        "N|MIN:MAX",
        "Nodes of the job. Default: all named hosts, else 1.",
        pet=True,
        short="nodes of the job; default: all hosts, or one",
    ),
    flag("--standalone", "One node, like --nnodes 1, also with --nnodes 1:MAX; ignore endpoint options.", pet=True),
    Option(
        "--rdzv-id",
        "ID",
        "Run id: the name of the run on all nodes. Default: a new one.",
        pet=True,
        sets="run_id",
        parse=values.parse_run_id,
    ),
    Option(
        "--rdzv-backend",
        "NAME",
        "Which node serves the rendezvous. static: node rank 0; c10d: the node of the endpoint. Default: static.",
        "static",
        pet=True,
        completes=("static", "c10d"),
    ),
    Option(
        "--rdzv-endpoint",
        "HOST:PORT",
        "Endpoint of the rendezvous. With c10d the port may be left out: 29400.",
        "",
        pet=True,
    ),
    Option(
        "--rdzv-conf",
        "K=V,...",
        "Settings of the rendezvous: join_timeout, last_call_timeout, keep_alive_interval, is_host, ...",
        "",
        pet=True,
    ),
    Option(
        "--node-rank",
        "N",
        "Number of this node. Default: 0; with c10d, by arrival, as among nodes with an equal one.",
        pet=True,
    ),
    Option("--master-addr", "HOST", "With static: address of node rank 0.", pet=True),
    Option(
        "--master-port",
        "PORT",
        "On one node: port of the workers' store. With static: port at which node rank 0 serves the rendezvous.",
        pet=True,
    ),
    Option(
        "--local-addr",
        "HOST",
        "Address at which other nodes reach this one. Default: the one on the way to the endpoint.",
        pet=True,
        sets="local_addr",
        parse=values.parse_host,
    ),
)


SEARCH_TIMEOUT_S = 60.0
"""Torchrun's default of ``read_timeout``: seconds to search for the serving node if no option says which it is."""

_LAUNCHER_ASSIGNS = dict.fromkeys(
    ("is_host", "read_timeout", "last_call_timeout"), "the launcher starts all nodes and assigns their endpoint"
)

_STATIC_ASSIGNS = {"is_host": "node rank 0 is the host"}

_MAX_S = 30 * 86400.0
_MIN_SECRET = 16
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")

EFFECTIVE = (
    *("join_timeout", "timeout", "read_timeout", "last_call_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt", "is_host", "store_type"),
)
IGNORED = {
    "close_timeout": "ddplaunch ends all nodes without a timeout",
    "heartbeat_timeout": "keep_alive_interval x keep_alive_max_attempt is used",
    "rank": "--node-rank is used",
    **dict.fromkeys(
        ("etcd_prefix", "protocol", "ssl_cert", "ssl_cert_key", "ca_cert", "cert", "key", "cacert"), "of etcd"
    ),
}
"""Keys of torchrun's backends that have no effect here, with the reason. Torchrun ignores unknown keys silently."""


@dataclass(frozen=True)
class RdzvConf:
    """The settings that have an effect; None where not given. Those without a line are as in ``RendezvousConfig``.

    Attributes:
        keep_alive_s: ``silent_after_s`` of RendezvousConfig, or ``lost_after_s`` of TimeoutConfig where this launcher
            starts all nodes.
        ignored: a sentence that names the keys without effect; empty if all have one.
    """

    join_timeout_s: float
    search_timeout_s: float | None
    last_call_timeout_s: float
    keep_alive_s: float
    is_host: bool | None
    ignored: str


def parse_rdzv_conf(text: str, *, is_static: bool, starts_all_nodes: bool) -> RdzvConf:
    """Parse ``KEY=VALUE,...``.

    Args:
        text: value of ``--rdzv-conf``.
        is_static: torchrun's static backend, in which node rank 0 is the host.
        starts_all_nodes: this launcher does, over SSH or in a dry run, and so assigns their rendezvous.

    Raises:
        OptionError: not such a list, or an invalid value.
    """
    conf = values.split_rdzv_conf(text)
    if conf.get("store_type", "tcp").lower() != "tcp":
        hint = "Give a --rdzv-endpoint HOST:PORT of one of the nodes, and leave store_type out."
        raise OptionError("--rdzv-conf", f"store_type={conf['store_type']}", "the nodes connect over TCP only", hint)
    unused = _LAUNCHER_ASSIGNS if starts_all_nodes else _STATIC_ASSIGNS if is_static else {}
    return RdzvConf(
        join_timeout_s=_seconds(conf, "join_timeout", _seconds(conf, "timeout", TimeoutConfig.join_timeout_s)),
        search_timeout_s=_seconds(conf, "read_timeout", 0.0) or None,
        last_call_timeout_s=_seconds(conf, "last_call_timeout", 30.0, may_be_0=True),
        keep_alive_s=_seconds(conf, "keep_alive_interval", 5 / 3) * _number(conf, "keep_alive_max_attempt", 3.0),
        is_host=_flag(conf, "is_host"),
        ignored=_without_effect(conf, unused),
    )


def _seconds(conf: dict[str, str], key: str, default: float, *, may_be_0: bool = False) -> float:
    """A number of seconds, or a time with units."""
    found_s = seconds(conf.get(key, ""))
    return _number(conf if found_s is None else {key: str(found_s)}, key, default, may_be_0=may_be_0)


def _number(conf: dict[str, str], key: str, default: float, *, may_be_0: bool = False) -> float:
    if key not in conf:
        return default
    try:
        number = float(conf[key])
    except ValueError:
        number = math.nan
    if not 0 <= number <= _MAX_S or (number == 0 and not may_be_0):
        least = "0 or more" if may_be_0 else "above 0"
        raise OptionError("--rdzv-conf", f"{key}={conf[key]}", f"must be a number {least}, and at most {_MAX_S:.0f}")
    return number


def _flag(conf: dict[str, str], key: str) -> bool | None:
    text = conf.get(key, "").lower()
    if text and text not in (*_TRUE, *_FALSE):
        raise OptionError("--rdzv-conf", f"{key}={conf[key]}", "must be true or false")
    return text in _TRUE if text else None


def _without_effect(conf: dict[str, str], unused: dict[str, str]) -> str:
    """The keys of ``conf`` that have no effect, with the reasons; ``unused`` are further keys and their reasons."""
    useless = [key for key in conf if key not in EFFECTIVE or key in unused]
    reasons = grouped(({**IGNORED, **unused}.get(key, "unknown"), key) for key in useless)
    named = "; ".join(f"{', '.join(keys)} ({reason})" for reason, keys in reasons.items())
    hint = f". Known are {', '.join(EFFECTIVE)}" if "unknown" in reasons else ""
    return f"--rdzv-conf: without effect: {named}{hint}" if named else ""


def nnodes(options: Mapping[str, Any], hosts: tuple[Host, ...]) -> tuple[int, int]:
    """The smallest and the largest number of nodes."""
    text = str(len(hosts) or 1) if options["nnodes"] is None else options["nnodes"]
    min_nodes, max_nodes = values.parse_nnodes(text)
    return min_nodes, 1 if options["standalone"] and min_nodes == 1 and not hosts else max_nodes


def check(options: Mapping[str, Any], max_nodes: int) -> None:
    """Raise UsageError for a rendezvous that cannot be meant, also where it has no effect."""
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
    node_rank = parse_count(options["node_rank"] or "0", "--node-rank")
    if options["rdzv_backend"] == "static" and node_rank >= max_nodes > 1:
        raise OptionError("--node-rank", node_rank, f"must be between 0 and {max_nodes - 1} with --nnodes {max_nodes}")


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


def static_store(options: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Address and port of the workers' store, if torchrun's static backend fixes them; otherwise None."""
    port = None if options["master_port"] is None else parse_whole(options["master_port"], "--master-port")
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


def rendezvous(
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    conf: RdzvConf,
    min_nodes: int,
    max_nodes: int,
    fields: Mapping[str, Any],
) -> RendezvousConfig | None:
    """Torchrun's two backends: static, served by node rank 0, and c10d, served by the node that owns the endpoint.

    ``fields`` are those of ``LaunchConfig`` that options set.
    """
    static = options["rdzv_backend"] == "static"
    endpoint = _endpoint(options, 29500 if static else 29400)
    if endpoint is None:
        return None
    # Torchrun's c10d ignores the node rank, so it may be any number.
    given = int(options["node_rank"] or max_nodes)
    node_rank = given if given < max_nodes else None
    is_server = (node_rank or 0) == 0 if static else conf.is_host
    return RendezvousConfig(
        token=options["rdzv_id"] or "none",
        min_nodes=max_nodes if static else min_nodes,
        max_nodes=max_nodes,
        node_index=node_rank or 0 if static else node_rank,
        server_addresses=(endpoint[0],),
        port=endpoint[1],
        is_server=is_server,
        local_addr=fields.get("local_addr"),
        interface=fields.get("interface"),
        join_timeout_s=conf.join_timeout_s,
        search_timeout_s=conf.search_timeout_s or (SEARCH_TIMEOUT_S if is_server is None else None),
        last_call_timeout_s=conf.last_call_timeout_s,
        silent_after_s=conf.keep_alive_s,
        secret=_secret(environ),
    )


def _endpoint(options: Mapping[str, Any], default_port: int) -> tuple[str, int] | None:
    if options["rdzv_endpoint"]:
        host, port = values.parse_endpoint(options["rdzv_endpoint"], "--rdzv-endpoint")
        return host, default_port if port is None else port
    if options["master_addr"] is None or options["rdzv_backend"] != "static":
        return None
    port_text = options["master_port"]
    port = default_port if port_text is None else parse_whole(port_text, "--master-port")
    return values.parse_host(options["master_addr"], "--master-addr"), port


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
