"""A read-only file system that shows a folder, and answers each request a millisecond later, as one over a network.

``slow_fs.py FOLDER MOUNT_POINT [SECONDS]``; runs until it is killed. Speaks the kernel's FUSE protocol; needs root. The
kernel keeps attributes and names for a second, as NFS does for a few, and what it has read until the file is opened
again.
"""

import ctypes
import os
import stat
import struct
import sys
import threading
import time

LOOKUP, FORGET, GETATTR, READLINK, OPEN, READ, STATFS, RELEASE, FLUSH = 1, 2, 3, 5, 14, 15, 17, 18, 25
INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, BATCH_FORGET, NO_SYSCALL = 26, 27, 28, 29, 36, 42, 38
KEPT_S = 1
ROOT = 1

paths: "dict[int, str]" = {}
"""By node, a number that the kernel uses for a file: its path."""


def entry(path: str) -> bytes:
    found = os.lstat(path)
    node = ROOT if path == paths[ROOT] else found.st_ino + (found.st_dev << 48) % (1 << 63) + 2
    paths[node] = path
    return struct.pack("4Q2I", node, 0, KEPT_S, KEPT_S, 0, 0) + attributes(found)


def attributes(found: os.stat_result) -> bytes:
    times = [int(time_s) for time_s in (found.st_atime, found.st_mtime, found.st_ctime)]
    nanoseconds = [time_ns % 10**9 for time_ns in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
    head = struct.pack("6Q3I", found.st_ino, found.st_size, found.st_blocks, *times, *nanoseconds)
    return head + struct.pack("7I", found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0)


def listing(path: str) -> bytes:
    data = b""
    for name in [".", "..", *os.listdir(path)]:
        raw = os.fsencode(name)
        kind = stat.S_IFMT(os.lstat(os.path.join(path, name)).st_mode) >> 12
        end = len(data) + (24 + len(raw) + 7) // 8 * 8
        data += struct.pack("2Q2I", 1, end, len(raw), kind) + raw.ljust((len(raw) + 7) // 8 * 8, b"\0")
    return data


def whole_entries(data: bytes, offset: int, size: int) -> bytes:
    end = offset
    while end < len(data):
        length = (24 + struct.unpack_from("I", data, end + 16)[0] + 7) // 8 * 8
        if end + length - offset > size:
            break
        end += length
    return data[offset:end]


def answer(operation: int, node: int, body: bytes) -> "bytes | None":
    """The answer's body; None: there is none. Raises OSError, whose number is the answer."""
    path = paths.get(node, "")
    if operation == INIT:
        return struct.pack("4I2H2I2H8I", 7, 31, 1 << 17, 1, 12, 9, 4096, *[0] * 11)
    if operation == LOOKUP:
        return entry(os.path.join(path, os.fsdecode(body.rstrip(b"\0"))))
    if operation == GETATTR:
        return struct.pack("Q2I", KEPT_S, 0, 0) + attributes(os.lstat(path))
    if operation == READLINK:
        return os.fsencode(os.readlink(path))
    if operation == OPEN:
        return struct.pack("Q2I", os.open(path, os.O_RDONLY), 0, 0)
    if operation == OPENDIR:
        return struct.pack("Q2I", 0, 0, 0)
    if operation == READ:
        handle, offset, size = struct.unpack_from("2QI", body)
        return os.pread(handle, size, offset)
    if operation == READDIR:
        _, offset, size = struct.unpack_from("2QI", body)
        return whole_entries(listing(path), offset, size)
    if operation == RELEASE:
        os.close(struct.unpack_from("Q", body)[0])
        return b""
    if operation == STATFS:
        return struct.pack("5Q4I6I", 1 << 30, 0, 0, 1 << 20, 0, 4096, 255, 4096, *[0] * 7)
    if operation in (RELEASEDIR, FLUSH):
        return b""
    if operation in (FORGET, BATCH_FORGET, INTERRUPT):
        return None
    raise OSError(NO_SYSCALL, "not offered")


def serve(device: int, delay_s: float) -> None:
    while True:
        try:
            request = os.read(device, 1 << 18)
        except OSError:  # It is no longer mounted.
            return
        _, operation, unique, node = struct.unpack_from("2I2Q", request)
        error, reply = 0, None
        try:
            reply = answer(operation, node, request[40:])
        except OSError as problem:
            error, reply = -(problem.errno or 5), b""
        if reply is not None:
            time.sleep(delay_s)
            os.write(device, struct.pack("IiQ", 16 + len(reply), error, unique) + reply)


def main() -> None:
    paths[ROOT] = os.path.realpath(sys.argv[1])
    delay_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.001
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,max_read=131072"
    flags = 1 | 2 | 4  # MS_RDONLY, MS_NOSUID, MS_NODEV
    if ctypes.CDLL(None, use_errno=True).mount(
        b"slow", os.fsencode(sys.argv[2]), b"fuse.slow", flags, options.encode()
    ):
        sys.exit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    for _ in range(7):
        threading.Thread(target=serve, args=(device, delay_s), daemon=True).start()
    print("mounted", flush=True)
    serve(device, delay_s)


if __name__ == "__main__":
    main()
