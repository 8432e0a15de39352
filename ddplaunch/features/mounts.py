"""The file system of a path, and whether other machines use it too. Any process; no path is touched."""

from __future__ import annotations

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
