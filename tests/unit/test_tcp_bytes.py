"""What TCP connections have transferred, which /proc/PID/io does not count."""

from __future__ import annotations

import os
import socket

from ddplaunch.system import process_activity, tcp_bytes

SENT = 300_000


def test_what_is_received_counts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        with connection:
            before = process_activity.read(os.getpid())
            left = SENT
            client.sendall(bytes(SENT))
            while left:
                left -= len(connection.recv(left))
            assert process_activity.read(os.getpid()).io_since(before) >= SENT
            inode = os.fstat(connection.fileno()).st_ino
            assert tcp_bytes.of_process(os.getpid(), tcp_bytes.by_inode())[inode] == (SENT, "")


def test_a_process_that_is_gone_has_no_connection() -> None:
    assert tcp_bytes.of_process(1 << 22, {1: tcp_bytes.Connection(1)}) == {}
