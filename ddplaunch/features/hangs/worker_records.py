"""How an agent examines its workers: requests and answers on their connections to its socket.

Used by the agent and the worker. No behaviour belongs here.

A worker connects when its script creates the first process group. A request is one byte; an answer is a header of two
lengths, then the two parts: JSON of this module's keys, and torch's flight record as torch wrote it.
"""

from __future__ import annotations

THREAD_NAME = b"ddplaunch-info"
"""Name of the thread that answers, in /proc/PID/task/TID/comm; at most 15 bytes."""

STATUS = b"s"
"""Request: torch's counters of collectives only. Takes about 0.1 ms."""

RECORD = b"r"
"""Request: process groups, pending call and the whole flight record. Takes about 60 us per recorded call."""

HEADER_BYTES = 8
MAX_PART_BYTES = 64 << 20

CPU_S, GROUPS, PENDING, FLIGHT_RECORD = "cpu_s", "groups", "pending", "flight_record"
"""Keys of the JSON. A STATUS answer has only the first, and only ``RECORD_FILE`` the last.

CPU seconds of all answers so far; name of a group -> [description, ranks]; [function, peer or null, name of the group]
or null.
"""

RECORD_FILE = "flight_record.json"
"""File in the log folder of a worker that has ended by an exception because a peer was gone or had not come: JSON with
what a RECORD answer would have said."""


def header(*lengths: int) -> bytes:
    """The header of an answer with two parts of these lengths. Without ``struct``: workers load this module first."""
    return b"".join(length.to_bytes(HEADER_BYTES // 2, "big") for length in lengths)


def lengths(data: bytes | bytearray) -> tuple[int, int]:
    """The lengths of the two parts, from the header with which ``data`` begins."""
    half = HEADER_BYTES // 2
    return int.from_bytes(data[:half], "big"), int.from_bytes(data[half:HEADER_BYTES], "big")
