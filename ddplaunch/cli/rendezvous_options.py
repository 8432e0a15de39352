"""Parser of ``--rdzv-conf``: torchrun's rendezvous settings, and the reason for each key without effect.

Runs in the launcher. Pure.
"""

from __future__ import annotations

import math

from ddplaunch.cli import values
from ddplaunch.errors import OptionError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import seconds
from ddplaunch.timeouts import TimeoutConfig

SEARCH_TIMEOUT_S = 60.0
"""Torchrun's default of ``read_timeout``: seconds to search for the serving node if no option says which it is."""

_LAUNCHER_ASSIGNS = dict.fromkeys(
    ("is_host", "read_timeout", "last_call_timeout"), "the launcher starts all nodes and assigns their endpoint"
)

_STATIC_ASSIGNS = {"is_host": "node rank 0 is the host"}

_MAX_S = 30 * 86400.0
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
    """The settings that have an effect, as in ``RendezvousConfig``; None where not given.

    Attributes:
        ignored: a sentence that names the keys without effect; empty if all have one.
    """

    join_timeout_s: float
    search_timeout_s: float | None
    last_call_timeout_s: float
    lost_after_s: float
    is_host: bool | None
    ignored: str


def parse_rdzv_conf(text: str, *, is_static: bool, launcher_starts_nodes: bool) -> RdzvConf:
    """Parse ``KEY=VALUE,...``.

    Args:
        text: value of ``--rdzv-conf``.
        is_static: torchrun's static backend, in which node rank 0 is the host.
        launcher_starts_nodes: one launcher starts all nodes and assigns their rendezvous.

    Raises:
        OptionError: not such a list, or an invalid value.
    """
    conf = values.split_rdzv_conf(text)
    if conf.get("store_type", "tcp").lower() != "tcp":
        hint = "Give a --rdzv-endpoint HOST:PORT of one of the nodes, and leave store_type out."
        raise OptionError("--rdzv-conf", f"store_type={conf['store_type']}", "the nodes connect over TCP only", hint)
    unused = _LAUNCHER_ASSIGNS if launcher_starts_nodes else _STATIC_ASSIGNS if is_static else {}
    return RdzvConf(
        join_timeout_s=_seconds(conf, "join_timeout", _seconds(conf, "timeout", TimeoutConfig.join_timeout_s)),
        search_timeout_s=_seconds(conf, "read_timeout", 0.0) or None,
        last_call_timeout_s=_seconds(conf, "last_call_timeout", 30.0, may_be_0=True),
        lost_after_s=_seconds(conf, "keep_alive_interval", 5 / 3) * _number(conf, "keep_alive_max_attempt", 3.0),
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
    reasons: dict[str, list[str]] = {}
    for key in conf:
        if key not in EFFECTIVE or key in unused:
            reasons.setdefault({**IGNORED, **unused}.get(key, "unknown"), []).append(key)
    named = "; ".join(f"{', '.join(keys)} ({reason})" for reason, keys in reasons.items())
    hint = f". Known are {', '.join(EFFECTIVE)}" if "unknown" in reasons else ""
    return f"--rdzv-conf: without effect: {named}{hint}" if named else ""
