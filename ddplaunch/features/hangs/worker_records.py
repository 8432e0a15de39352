"""How an agent examines its workers: a signal for Python stacks; requests and answers on connections to its socket.

Used by the agent and the worker. No behaviour belongs here.

A worker connects when its script creates the first process group. A request is one byte; an answer is a line of JSON
with this module's keys, followed by torch's flight record as torch wrote it.
"""

from __future__ import annotations

import signal

THREAD_NAME = b"ddplaunch-info"
"""Name of the thread that answers, in /proc/PID/task/TID/comm; at most 15 bytes."""

STACKS_SIGNAL = signal.SIGRTMIN + 11
"""A real-time signal that scripts and libraries do not use: the worker writes its stacks."""

STATUS = b"s"
"""Request: torch's counters of collectives only. Takes about 0.1 ms."""

RECORD = b"r"
"""Request: process groups, pending call and the whole flight record. Takes about 60 us per recorded call."""

MAX_PART_BYTES = 64 << 20
"""Limit of the line, and of the flight record."""

NBYTES = "nbytes"
"""Key of the JSON: the length of the flight record, which may be 0."""

CPU_S, GROUPS, PENDING, FLIGHT_RECORD = "cpu_s", "groups", "pending", "flight_record"
"""The other keys. A STATUS answer has only the first, and only ``RECORD_FILE`` the last.

CPU seconds of all answers so far; name of a group -> [description, ranks]; a ``PendingCall`` or null.
"""

RECORD_FILE = "flight_record.json"
"""File in the folder of a worker that has ended by an exception because a peer was gone or had not come: JSON with
what a RECORD answer would have said."""
