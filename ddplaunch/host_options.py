"""What the options about other machines mean: which they are, how they are reached, what they are given.

Reads the hostfile and the env file; starts nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplaunch import option_values as values
from ddplaunch.config import Remote
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.hosts import Host

_VARIABLES = ("DDPLAUNCH_HOSTS", "DDPLAUNCH_HOSTFILE")

_ONLY_WITH_HOSTS = (
    "remote_python",
    "remote_setup",
    "ssh_user",
    "ssh_port",
    "ssh_identity",
    "ssh_config",
    "ssh_accept_new",
)

_PLACES = ("rdzv_endpoint", "master_addr", "standalone")
"""Options of those who start every node themselves."""


def chosen_hosts(options: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The machines that the launcher shall start the nodes on; empty where it shall not.

    Raises:
        UsageError: hosts that cannot be meant, or hosts and a place to meet: the launcher would not use it.
    """
    names = [options[name] for name in ("hosts", "hostfile", "include", "exclude")]
    if names == [None] * 4 and not any(environ.get(name) for name in _VARIABLES):
        _check_needless(options)
        return ()
    place = next((f"--{name.replace('_', '-')}" for name in _PLACES if options[name]), "")
    if place and not options["dry_run"]:
        if any(name is not None for name in names):
            hint = "With hosts the nodes meet by themselves; without, start ddplaunch on every node."
            raise UsageError(f"--hosts and {place} exclude each other", hint)
        _check_needless(options)
        return ()
    if options["master_port"] is not None and not options["dry_run"]:
        hint = "Every attempt has a fresh port, on the first node; it needs to be open to the others."
        raise UsageError("--master-port: is not obeyed where hosts are named", hint)
    from ddplaunch import host_selection

    return host_selection.resolve(environ, *names)


def _check_needless(options: Mapping[str, Any]) -> None:
    """What would be lost is said, but in a rehearsal of a command that has it."""
    name = next((name for name in _ONLY_WITH_HOSTS if options[name]), None)
    if name and not options["dry_run"]:
        raise UsageError(
            f"--{name.replace('_', '-')}: no hosts are named",
            "Name them with --hosts 'gpu1,gpu[2-4]' or --hostfile FILE.",
        )


def remote(options: Mapping[str, Any], environ: Mapping[str, str]) -> Remote:
    """How they are reached, and what workers are given, here too.

    Raises:
        UsageError: a value that cannot be meant, or an env file that cannot be read.
    """
    from ddplaunch import forwarding

    port = options["ssh_port"]
    given = forwarding.forwarded(environ, options["export"], _env_file_text(options["env_file"]))
    timeout_s = values.parse_seconds(options["connect_timeout"], "--connect-timeout")
    if timeout_s <= 0:
        raise UsageError(f"--connect-timeout {options['connect_timeout']}: must be above 0")
    return Remote(
        user=options["ssh_user"],
        port=None if port is None else values.parse_whole(port, "--ssh-port"),
        identity=options["ssh_identity"],
        config=options["ssh_config"],
        accept_new=options["ssh_accept_new"],
        connect_timeout_s=timeout_s,
        python=options["remote_python"],
        setup=options["remote_setup"] or "",
        environ=tuple(given.items()),
    )


def _env_file_text(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--env-file {path}: {getattr(error, 'strerror', None) or 'is not UTF-8 text'}") from None


def nnodes(text: str | None, hosts: tuple[Host, ...]) -> tuple[int, int]:
    """MIN and MAX of ``--nnodes``: without it one, or all hosts that are named."""
    return values.parse_nnodes(text if text is not None else str(len(hosts) or 1))
