"""Where a keeper of this user and machine is found: its socket, its lock, and why there is none.

The files lie beside the run folders. Their names hold the machine and namespaces: a home may be shared by many machines
and containers.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ddplaunch.system.files import run_folder

if TYPE_CHECKING:
    import socket
    from pathlib import Path

_MAX_REASON = 300


def path(environ: Mapping[str, str]) -> Path | None:
    """The socket of this user's keeper on this machine, whether it exists or not; None for a user without a home."""
    base = run_folder.base_at_home(environ)
    return base and in_base(base)


def exists(environ: Mapping[str, str]) -> bool:
    """Whether a keeper may wait. Cheap: every run asks."""
    socket_path = path(environ)
    return socket_path is not None and os.path.exists(socket_path)


def in_base(base: Path) -> Path:
    """The socket in the folder ``base``."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        machine = file.read(8)
    namespaces = "-".join(str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("pid", "net", "mnt"))
    return base / f"warm-{machine}-{namespaces}-{os.getuid()}.sock"


@contextlib.contextmanager
def short_path(socket_path: Path) -> Iterator[str]:
    """A path of the socket for bind and connect, where it may have at most 107 bytes."""
    folder = os.open(socket_path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{socket_path.name}"
    finally:
        os.close(folder)


def connected(socket_path: Path, timeout_s: float) -> socket.socket | None:
    """A connection to the keeper; None if there is none, or it is not this user's."""
    import socket

    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.settimeout(timeout_s)
        with short_path(socket_path) as address:
            client.connect(address)
        from ddplaunch.system import linux

        if linux.peer_credentials(client)[1] == os.geteuid():
            return client
    except OSError:
        pass
    client.close()
    return None


def lock_path(socket_path: Path) -> Path:
    """The file that the keeper holds locked for as long as it lives."""
    return socket_path.with_suffix(".lock")


def check_private(folder: Path) -> None:
    """Raise PermissionError if another user could put a file, or a link to one, in the place of a keeper's files."""
    status = os.stat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"another user may write in {folder}")


def write_reason(socket_path: Path, reason: str) -> None:
    """Note why no keeper waits, for ``-v`` of the next run; empty: one waits."""
    file = socket_path.with_suffix(".why")
    with contextlib.suppress(OSError):
        check_private(file.parent)
        if reason:
            file.write_text(reason[:_MAX_REASON], errors="backslashreplace")
        else:
            file.unlink(missing_ok=True)


def reason(socket_path: Path) -> str:
    """Why the last keeper has ended or could not be left; empty if that is not known."""
    try:
        check_private(socket_path.parent)
        with open(socket_path.with_suffix(".why"), errors="replace") as file:
            return "".join(character for character in file.read(_MAX_REASON) if character.isprintable())
    except PermissionError as error:
        return str(error)
    except OSError:
        return ""
