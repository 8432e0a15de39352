"""Whether systemd ends this process when its user logs out, as far as files tell it: logind.conf(5), loginctl(1).

Used by the command ``--detach``. Reads a few small files; starts no process and asks no service.
"""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path

from ddplaunch.system import procfs

_FOLDERS = ("etc", "run", "usr/local/lib", "usr/lib")
"""Of settings, the most important first."""

_LINGER = "var/lib/systemd/linger"
"""Has a file for each user whose services outlive the last logout."""

_SESSION, _USER_SERVICES = re.compile(rb"/session-[^/]+\.scope"), re.compile(rb"/user@\d+\.service")
_TRUE = ("1", "yes", "y", "true", "t", "on")
_WAY_OUT = "`loginctl enable-linger` once, then systemd-run --user --scope ddplaunch --detach ..."


def ends_at_logout(root: Path = Path("/")) -> str:
    """Why a logout ends this process, and what to do; empty if it does not, or if that cannot be known.

    ``root`` is the folder that has /etc, /proc and the others.
    """
    cgroup = procfs.read(str(root / "proc/self/cgroup"))
    if _SESSION.search(cgroup):
        is_ended = _kills_processes_of(_user_name(), _settings(root))
        return f"a logout ends this run: logind has KillUserProcesses=yes. {_WAY_OUT}" if is_ended else ""
    if _USER_SERVICES.search(cgroup) and not os.path.exists(root / _LINGER / _user_name()):
        return "the last logout ends this run with the user's services: `loginctl enable-linger` keeps them"
    return ""


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # As in a container with an arbitrary user id.
        return str(os.getuid())


def _kills_processes_of(user: str, settings: dict[str, str]) -> bool:
    excluded, only = (settings.get(key, "").split() for key in ("KillExcludeUsers", "KillOnlyUsers"))
    if "KillExcludeUsers" not in settings:
        excluded = ["root"]
    # Without a setting it depends on how systemd was compiled; distributions choose no.
    is_on = settings.get("KillUserProcesses", "").lower() in _TRUE
    return is_on and user not in excluded and (not only or user in only)


def _settings(root: Path) -> dict[str, str]:
    """The last assignment of each key: those of logind.conf come before those of logind.conf.d, by name."""
    whole = [root / folder / "systemd/logind.conf" for folder in _FOLDERS]
    parts: dict[str, Path] = {}
    for folder in reversed(_FOLDERS):  # A file hides those of its name that are less important.
        parts.update({path.name: path for path in (root / folder / "systemd/logind.conf.d").glob("*.conf")})
    paths = [*[path for path in whole if os.path.isfile(path)][:1], *(parts[name] for name in sorted(parts))]
    lines = [line for path in paths for line in procfs.read(str(path)).decode("utf-8", "replace").splitlines()]
    pairs = (line.partition("=") for line in lines if not line.lstrip().startswith(("#", ";")))
    return {key.strip(): value.strip() for key, is_set, value in pairs if is_set}
