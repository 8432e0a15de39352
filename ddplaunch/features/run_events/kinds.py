"""The kinds of events in events.jsonl, and the keys of a line.

Here are those that the core notes, and those of ``event_file``; a feature declares its own in ``EVENTS`` and
``EVENT_KEYS`` of its package. docs/run-events.md shows all of them. ``page`` and programs of users read the file.
"""

from __future__ import annotations

from ddplaunch.features import declarations

SCHEMA = 1
"""Version of the keys, in the first line of a file. New kinds and keys may be added without a change."""

_KINDS = {
    "run_started": "the launcher has started",
    "agent_connected": "the agent of a node accepts records",
    "agent_ready": "the agent has read its settings and can start `workers` workers",
    "attempt_started": "all workers of a node run; without `world_size` if one failed before all of them ran",
    "first_output": "the first output of a node in an attempt has arrived",
    "worker_failed": "a worker has failed; at most 20 for a node and attempt",
    "attempt_ended": "all workers of a node have ended",
    "restart": "another attempt follows, also one that is no restart: a node was lost, has joined or leaves",
    "node_joined": "a node is ready after the first attempt has started: a spare in place of another",
    "node_lost": "the agent of a node no longer answers, or has gone",
    "node_left": "a node has ended its part of the run",
    "signal": "a signal stops the run",
    "terminal_left": "`--leave`: the run goes on without its terminal",
    "message": "a message of the launcher to the user, also one that its verbosity has hidden",
    "run_ended": "the run has ended; its outcome. What is shown after it is no event",
    "dropped": "`count` events could not be written, because the disk was full or too slow",
    "limit": "the file is full: only `run_ended` may follow",
}

_KEYS = {
    "schema": "version of this format; only in the first line",
    "t": "when, by the launcher's clock, in seconds since 1970",
    "event": "the kind",
    "text": "for people; at most 2,000 characters",
    "attempt": "number of the attempt, from 0",
    "node": "index of the node among those that this launcher has started, spares included",
    "host": "the host of the node",
    "rank": "global rank",
    "workers": "number of workers of the node",
    "first_rank": "rank of the node's first worker",
    "world_size": "number of workers of the attempt",
    "folder": "of a node on another machine: the folder there that has its log files",
    "import_s": "seconds that the node needed to import torch before it could start a worker",
    "outcome": "`succeeded`, `failed` or `stopped`",
    "exit_code": "exit code of ddplaunch",
    "level": "of a message: -1 always shown, 0 not with `--quiet`, 1 only with `--verbose`",
    "s": "a duration in seconds",
    "count": "number of events",
}


def kinds() -> dict[str, str]:
    """All kinds, and what has happened."""
    return _KINDS | declarations("EVENTS")


def keys() -> dict[str, str]:
    """The keys of a line, and their values."""
    return _KEYS | declarations("EVENT_KEYS")
