"""Carries the frames of a link late and slowly, as netem does where the kernel has it.

``slow_link.py LINK TAP DELAY_S BITS_PER_S`` runs in the lab's network namespace. LINK leaves the bridge; TAP, which
this makes, takes its place there. Frames go between the two after the delay and no faster than the rate; beyond a
queue of ``_MAX_FRAMES`` they are dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_SIOCETHTOOL, _ETHTOOL_STXCSUM, _ETHTOOL_SGSO = 0x8946, 0x17, 0x24
_ETH_P_ALL, _PACKET_OUTGOING = 0x0003, 4
_MAX_FRAMES = 1000
_MAX_FRAME_BYTES = 65536


class Line:
    """One direction: frames with the time at which they arrive."""

    def __init__(self, delay_s: float, bits_per_s: float) -> None:
        self._delay_s = delay_s
        self._bits_per_s = bits_per_s
        self._free_at = 0.0
        self._frames: deque[tuple[float, bytes]] = deque()

    def put(self, frame: bytes) -> None:
        if len(self._frames) < _MAX_FRAMES:
            self._free_at = max(self._free_at, time.monotonic()) + len(frame) * 8 / self._bits_per_s
            self._frames.append((self._free_at + self._delay_s, frame))

    def take(self) -> list[bytes]:
        """The frames that have arrived."""
        arrived = []
        while self._frames and self._frames[0][0] <= time.monotonic():
            arrived.append(self._frames.popleft()[1])
        return arrived

    @property
    def next_at(self) -> float:
        return self._frames[0][0] if self._frames else float("inf")


def without_offload(device: str) -> None:
    """Have the kernel itself finish its frames, which nobody does for it on this link. In the device's namespace."""
    with socket.socket() as any_socket:
        for command in (_ETHTOOL_STXCSUM, _ETHTOOL_SGSO):
            value = bytearray(struct.pack("II", command, 0))
            pointer = (struct.pack("P", _address(value))).ljust(24, b"\0")
            fcntl.ioctl(any_socket, _SIOCETHTOOL, device.encode().ljust(16, b"\0") + pointer)


def _address(value: bytearray) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(value))


def open_tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return fd


def main() -> None:
    link, name, delay_s, bits_per_s = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    tap = open_tap(name)
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    raw.bind((link, _ETH_P_ALL))
    raw.setblocking(False)
    batch = f"link set {link} nomaster arp off\nlink set {name} master br0 up\n"
    subprocess.run(["ip", "-batch", "-"], input=batch, text=True, check=True)
    print("ready", flush=True)
    to_node, from_node = Line(delay_s, bits_per_s), Line(delay_s, bits_per_s)
    while True:
        wait_s = min(to_node.next_at, from_node.next_at) - time.monotonic()
        select.select([tap, raw], [], [], min(max(0.0, wait_s), 1.0))
        with contextlib.suppress(BlockingIOError):
            while True:
                to_node.put(os.read(tap, _MAX_FRAME_BYTES))
        with contextlib.suppress(OSError):  # There is no frame, or the link is down.
            while True:
                frame, address = raw.recvfrom(_MAX_FRAME_BYTES)
                if address[2] != _PACKET_OUTGOING:
                    from_node.put(frame)
        with contextlib.suppress(OSError):  # The link is down, or its queue is full: the frame is lost.
            for frame in to_node.take():
                raw.send(frame)
            for frame in from_node.take():
                os.write(tap, frame)


if __name__ == "__main__":
    main()
