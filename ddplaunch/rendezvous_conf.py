"""``--rdzv-conf``: torchrun's settings of a rendezvous, each honoured, or named with the reason why not. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ddplaunch import option_values as values
from ddplaunch.errors import UsageError

NOT_HOSTED_S = 60.0
"""Torchrun's ``read_timeout``: so long may nobody answer at an endpoint of which no node is known to be the host."""

_LED = dict.fromkeys(
    ("is_host", "read_timeout", "last_call_timeout"), "the launcher starts all nodes and tells them where to meet"
)

_MAX_S = 30 * 86400.0
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")

HONOURED = (
    *("join_timeout", "timeout", "read_timeout", "last_call_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt", "is_host", "store_type"),
)
IGNORED = {
    "close_timeout": "the end of a run is told to all nodes",
    "heartbeat_timeout": "keep_alive_interval x keep_alive_max_attempt counts",
    "rank": "--node-rank counts",
    **dict.fromkeys(
        ("etcd_prefix", "protocol", "ssl_cert", "ssl_cert_key", "ca_cert", "cert", "key", "cacert"), "of etcd"
    ),
}
"""Keys of torchrun's backends that mean nothing here, and why. Torchrun itself passes over unknown ones in silence."""


@dataclass(frozen=True)
class RendezvousConf:
    """What counts of it; the fields are ``Meeting``'s, None where nothing is said.

    Attributes:
        ignored: a sentence that names the keys that do not count; empty if all do.
    """

    join_timeout_s: float
    silence_s: float | None
    last_call_s: float
    lost_after_s: float
    is_host: bool | None
    ignored: str


def read(text: str, *, is_static: bool = False, is_led: bool = False) -> RendezvousConf:
    """The settings in ``KEY=VALUE,...``.

    ``is_static``: torchrun's static backend, where node rank 0 is the host; ``is_led``: one launcher starts all nodes.

    Raises:
        UsageError: not such a list, or a value that cannot be meant.
    """
    conf = values.parse_rdzv_conf(text)
    if conf.get("store_type", "tcp").lower() != "tcp":
        raise UsageError(
            f"--rdzv-conf store_type={conf['store_type']}: the nodes meet over TCP only",
            "Give a --rdzv-endpoint HOST:PORT of one of the nodes, and leave store_type out.",
        )
    return RendezvousConf(
        join_timeout_s=_seconds(conf, "join_timeout", _seconds(conf, "timeout", 600.0)),
        silence_s=_seconds(conf, "read_timeout", 0.0) or None,
        last_call_s=_seconds(conf, "last_call_timeout", 30.0, may_be_0=True),
        lost_after_s=_seconds(conf, "keep_alive_interval", 5 / 3) * _seconds(conf, "keep_alive_max_attempt", 3.0),
        is_host=_flag(conf, "is_host"),
        ignored=_ignored(conf, _LED if is_led else {"is_host": "node rank 0 is the host"} if is_static else {}),
    )


def _seconds(conf: dict[str, str], key: str, default: float, *, may_be_0: bool = False) -> float:
    if key not in conf:
        return default
    number = values.parse_seconds(conf[key], f"--rdzv-conf {key}")
    if not 0 <= number <= _MAX_S or (number == 0 and not may_be_0):
        raise UsageError(f"--rdzv-conf {key}={conf[key]}: must be above 0, and at most {_MAX_S:.0f}")
    return number


def _flag(conf: dict[str, str], key: str) -> bool | None:
    text = conf.get(key, "").lower()
    if text and text not in (*_TRUE, *_FALSE):
        raise UsageError(f"--rdzv-conf {key}={conf[key]}: must be true or false")
    return text in _TRUE if text else None


def _ignored(conf: dict[str, str], more: dict[str, str]) -> str:
    reasons: dict[str, list[str]] = {}
    for key in conf:
        if key not in HONOURED or key in more:
            reasons.setdefault({**IGNORED, **more}.get(key, "unknown"), []).append(key)
    named = "; ".join(f"{', '.join(keys)} ({reason})" for reason, keys in reasons.items())
    hint = f". Known are {', '.join(HONOURED)}" if "unknown" in reasons else ""
    return f"--rdzv-conf: without effect here: {named}{hint}" if named else ""
