"""The folder of the compile caches: where it is, whether it is safe, and what is deleted of it.

torch unpickles what it finds in a cache: whoever can write there runs code as the user. So the folder and all above it
belong to the user or to root, and nobody else can write to them. A folder that other machines or only the memory has
is not used: NFS gives stale handles to ranks that compile at the same time.
"""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ddplaunch.features import mounts
from ddplaunch.system import devices, procfs

_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "overlay")
_TEMPORARY = ("/var/tmp", "/tmp")
_MIN_FREE_BYTES = 2 << 30

_KEPT_S, _IN_USE_S = 30 * 86400.0, 2 * 86400.0
"""What was not used for so long is deleted; and what may still be in use: the kernel notes a use once a day."""

_MAX_BYTES = 20 << 30
_CLEANED = ".cleaned"
_EACH_S = 86400.0


def chosen(environ: Mapping[str, str], *, create: bool = False) -> str:
    """The folder for all caches of this user on this machine; empty if no place is safe, local and has space.

    ``create``: make it, where other users could make one of that name.
    """
    found = (os.path.join(place, *own) for place, own in _candidates(environ) if _is_usable(place, own, create=create))
    return next(found, "")


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each place for files, with the names of the folders there that are this user's alone."""
    cache = environ.get("XDG_CACHE_HOME") or (os.path.expanduser("~/.cache") if environ.get("HOME", "~") else "")
    if os.path.isabs(cache):
        yield cache, ("ddplaunch", "compile")
    for temporary in _TEMPORARY:
        yield temporary, (f"ddplaunch-{os.geteuid()}", "compile")


def _is_usable(place: str, own: tuple[str, ...], *, create: bool) -> bool:
    if mounts.mount_of(place)[0] not in _LOCAL:  # Before anything is touched: an NFS server may not answer.
        return False
    with contextlib.suppress(OSError):
        place = os.path.realpath(place)
        return mounts.mount_of(place)[0] in _LOCAL and _has_space(place) and is_safe(place, own, create=create)
    return False


def _has_space(path: str) -> bool:
    if not os.path.lexists(path):
        return _has_space(os.path.dirname(path))
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize >= _MIN_FREE_BYTES


def is_safe(place: str, own: tuple[str, ...], *, create: bool) -> bool:
    """Whether only this user and root can change what is in the folders ``own`` in ``place``, a path without links.

    ``create``: make the folders that are missing, from the first on, and only in one that is safe.

    Raises:
        OSError: a folder cannot be looked at or made.
    """
    for folder in (*reversed(Path(place).parents), Path(place), *(Path(place, *own[: i + 1]) for i in range(len(own)))):
        if not os.path.lexists(folder):
            if not create:
                return True
            with contextlib.suppress(FileExistsError):  # Another run makes it.
                folder.mkdir(mode=0o700)
        if not _is_guarded(folder, is_own=len(folder.parts) > len(Path(place).parts)):
            return False
    return True


def _is_guarded(folder: Path, *, is_own: bool) -> bool:
    """Whether others can change nothing in ``folder``; if it is not this user's own, only nothing of this user's."""
    found = os.lstat(folder)
    owners = (os.geteuid(),) if is_own else (0, os.geteuid())
    is_sticky = bool(found.st_mode & stat.S_ISVTX) and not is_own
    return stat.S_ISDIR(found.st_mode) and found.st_uid in owners and (is_sticky or not found.st_mode & 0o022)


def kind() -> str:
    """A name for what compiled code depends on: the version of torch, the CPU and the models of GPUs."""
    cpu = [line for line in _first_cpu().splitlines() if line.startswith(_OF_CPU)]
    pci = sorted({procfs.read(f"/sys/bus/pci/devices/{each}/device") for each in devices.gpu_pci_addresses()})
    return f"torch-{devices.torch_versions()[0] or 'unknown'}-{zlib.crc32(b''.join([*cpu, *pci])):08x}"


def _first_cpu() -> bytes:
    """Of a machine with many, the kernel takes milliseconds to describe all."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", "rb", buffering=0) as file:
        return file.read(4096).partition(b"\n\n")[0]
    return b""


_OF_CPU = (b"model name", b"flags", b"Features", b"CPU implementer", b"CPU part", b"isa", b"cpu\t")


# Cleaning.


def clean(base: str, now: float) -> None:
    """Once a day, delete what was not used for 30 days; and of more than 20 GB what was not used for longest.

    Never raises. Folders are deleted whole: Triton's files name each other.
    """
    mark = os.path.join(base, _CLEANED)
    with contextlib.suppress(OSError):
        if os.path.exists(mark) and now - os.lstat(mark).st_mtime < _EACH_S:
            return
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        os.utime(mark, follow_symlinks=False)
        found = sorted(_folders(base))
        excess = sum(size for _, size, _ in found) - _MAX_BYTES
        for used_at, size, files in found:
            if now - used_at > _KEPT_S or (excess > 0 and now - used_at > _IN_USE_S):
                _delete(files, base)
                excess -= size


def _folders(base: str) -> Iterator[tuple[float, int, list[str]]]:
    """Of each folder with files: when one of them was last used, their size, and their paths; follows no link."""
    for folder, _, names in os.walk(base):
        files, sizes, times = [os.path.join(folder, name) for name in names if name != _CLEANED], [0], [0.0]
        for file in files:
            with contextlib.suppress(OSError):  # Another run may delete it.
                found = os.lstat(file)
                sizes.append(found.st_blocks * 512)
                times.append(max(found.st_atime, found.st_mtime))
        if files:
            yield max(times), sum(sizes), files


def _delete(files: list[str], base: str) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)
    folder = os.path.dirname(files[0])
    with contextlib.suppress(OSError):  # Until one is not empty.
        while folder != base:
            os.rmdir(folder)
            folder = os.path.dirname(folder)
