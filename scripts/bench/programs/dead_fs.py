"""A file system with one file, whose reads are never answered, like a network file system whose server has gone.

``dead_fs.py MOUNT_POINT``; runs until it is killed. Speaks the kernel's FUSE protocol; needs root.
"""

import ctypes
import os
import stat
import struct
import sys

LOOKUP, GETATTR, OPEN, READ, INIT, OPENDIR, INTERRUPT = 1, 3, 14, 15, 26, 27, 36
ROOT, FILE = 1, 2


def attributes(node: int) -> bytes:
    mode, size = (stat.S_IFDIR | 0o755, 0) if node == ROOT else (stat.S_IFREG | 0o644, 1 << 20)
    return struct.pack("6Q10I", node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def answer(operation: int, node: int) -> "bytes | int | None":
    """The answer's body, an error number, or None: no answer ever."""
    return {
        INIT: struct.pack("4I2H2I2H8I", 7, 31, 1 << 17, 1, 0, 0, 4096, *[0] * 11),
        LOOKUP: struct.pack("4Q2I", FILE, 0, 3600, 3600, 0, 0) + attributes(FILE),
        GETATTR: struct.pack("Q2I", 3600, 0, 0) + attributes(node),
        OPEN: struct.pack("Q2I", 0, 0, 0),
        READ: None,
    }.get(operation, 38)


def main() -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    if ctypes.CDLL(None).mount(b"dead", os.fsencode(sys.argv[1]), b"fuse", 0, options.encode()):
        sys.exit("cannot mount")
    while True:
        request = os.read(device, 1 << 18)
        _length, operation, unique, node = struct.unpack_from("2I2Q", request)
        reply = answer(operation, node)
        if reply is not None and operation not in (2, 42):  # FORGET has no answer.
            body, error = (reply, 0) if isinstance(reply, bytes) else (b"", -reply)
            os.write(device, struct.pack("IiQ", 16 + len(body), error, unique) + body)


if __name__ == "__main__":
    main()
