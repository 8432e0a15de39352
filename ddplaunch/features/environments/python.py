"""What installs Python on a host that has none, before an agent starts there: uv, by a text for the shell.

Runs in the process of the command. The text asks for the launcher's uv as an agent asks for ddplaunch
(``features.remote.package``): a line with the number of bytes follows on its input, and these bytes, compressed. The
input of srun is one for all nodes: there the text finds uv in the home folder, which clusters share.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from ddplaunch.features.environments import hashes, sent_uv
from ddplaunch.features.remote import package
from ddplaunch.transport import transports
from ddplaunch.transport.failures import HostFailure

if TYPE_CHECKING:
    from ddplaunch.cluster.hosts import Host
    from ddplaunch.config import RemoteConfig

_MAX_HOSTS = 16
"""With more at a time, agents read more from their input than the text expects."""

_TEXT = r"""
ddplaunch_cache="${{XDG_CACHE_HOME:-$HOME/.cache}}/ddplaunch/files"
ddplaunch_uv="$(command -v uv || command -v "$HOME/.local/bin/uv" || echo "$ddplaunch_cache/{hash}")"
ddplaunch_get() {{
[ -z "$SLURM_STEP_ID" ] || {{ echo "uv is missing, and srun brings it only by a shared home folder"; return 1; }}
[ "$(uname -m)" = {machine} ] || {{ echo "uv is missing, and the launcher's uv is for {machine}"; return 1; }}
mkdir -p "$ddplaunch_cache" && printf '\n%s\n' '{request}' && IFS= read -r ddplaunch_size <&3 &&
dd bs=65536 count="$ddplaunch_size" iflag=fullblock,count_bytes <&3 2>/dev/null | gzip -dc >"$ddplaunch_uv.part" &&
chmod 700 "$ddplaunch_uv.part" && mv "$ddplaunch_uv.part" "$ddplaunch_uv"
}}
[ -x "$ddplaunch_uv" ] || ddplaunch_get || exit 1
{variables} "$ddplaunch_uv" python install {python} 2>&1 || exit 1
"""
"""For ``RemoteConfig.setup``: the launcher's input is descriptor 3."""


def installing(remote: RemoteConfig, uv: str, python: str) -> RemoteConfig:
    """``remote`` for hosts without Python: the user's setup, then the installation.

    ``uv`` is the path of that which is sent, ``python`` a request of uv.
    """
    package.ANSWERS["uv"] = cache(lambda: _compressed(uv))
    digest = hashes.of_files([uv], "uv")[uv]
    if not transports.row(remote.transport).takes_logins:
        _put_at_home(uv, digest)
    text = _TEXT.format(
        hash=digest,
        machine=shlex.quote(os.uname().machine),
        request=f"{package.PREFIX.decode()}uv",
        variables=" ".join(f"{name}={shlex.quote(value)}" for name, value in sent_uv.variables().items()),
        python=shlex.quote(python),
    )
    return replace(remote, setup=f"{remote.setup}\n{text}")


def _put_at_home(uv: str, digest: str) -> None:
    """Put uv where the text looks for it, on this machine."""
    cache_folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = os.path.join(cache_folder, "ddplaunch", "files", digest)
    if not os.path.exists(path):
        with contextlib.suppress(OSError):  # The nodes say that they lack it.
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            part = f"{path}.{os.uname().nodename}.{os.getpid()}.part"
            shutil.copyfile(uv, part)
            os.chmod(part, 0o700)
            os.replace(part, path)


def groups(hosts: Sequence[Host]) -> Iterator[Sequence[Host]]:
    """So many of these hosts at a time get a Python."""
    return (hosts[begin : begin + _MAX_HOSTS] for begin in range(0, len(hosts), _MAX_HOSTS))


def _compressed(path: str) -> bytes:
    with open(path, "rb") as file:
        return gzip.compress(file.read(), 1)


def why_not_installed(failure: HostFailure) -> HostFailure:
    """The failure of such a host, in words that do not name an option that the user has not given."""
    if failure.cause != "setup":
        return failure
    message = failure.message.replace("--remote-setup ended", "there is no Python, and its installation by uv ended", 1)
    return HostFailure(failure.host, "python", message, "Install Python there, or name it by --remote-python.")
