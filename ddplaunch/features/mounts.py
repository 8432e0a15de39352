"""The file system of a path: whether other machines use it too, and how full it is. Any process."""

from __future__ import annotations

import contextlib
import os
import re

from ddplaunch.system import procfs

_SHARED_KINDS = (
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "glusterfs", "afs", "virtiofs"),
    *("wekafs", "fuse"),
)
_LOCAL_FUSE = ("fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.ext2", "fuse.ntfs-3g")


def mount_of(path: str) -> tuple[str, str]:
    """Kind and mount point of the file system of ``path``, which is not touched; two empty texts without /proc.

    What a link in ``path`` leads to is not looked at.
    """
    lines = (line.split() for line in procfs.read("/proc/self/mounts").splitlines())
    mounts = {_unescaped(line[1]): line[2].decode() for line in lines}
    while path not in mounts and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return (mounts[path], path) if path in mounts else ("", "")


def _unescaped(field: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), field))


def is_shared(kind: str) -> bool:
    """Whether a file system of this kind is one that other machines use too, over a network."""
    return kind in _SHARED_KINDS or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)


def used_share(folder: str) -> float | None:
    """The share of the disk of a folder that is used, from 0 to 1, as ``df`` shows it; None: not known. May block."""
    with contextlib.suppress(OSError):
        disk = os.statvfs(folder)
        used = disk.f_blocks - disk.f_bfree
        if used + disk.f_bavail:  # Without what is reserved for root.
            return used / (used + disk.f_bavail)
    return None
