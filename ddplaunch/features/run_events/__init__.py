"""What happened in a run, and when: events.jsonl in the run folder, and torchelastic's worker events on the console.

The launcher writes them while the run goes on. ``page`` and programs of users read the file; docs/run-events.md shows
the kinds of events and the keys of all features. Must not import torch.
"""

from ddplaunch.errors import OptionError

EVENTS = {
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

EVENT_KEYS = {
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


def rows() -> tuple[object, ...]:
    """``--event-log-handler``."""
    from ddplaunch.rows import Option

    return (
        Option(
            "--event-log-handler",
            "NAME",
            "null, or console: events as JSON lines. Default: null.",
            pet=True,
            sets="output.events",
            parse=_parse_events,
            completes=("null", "console"),
            after="--timestamps",
        ),
    )


def _parse_events(text: str, option: str) -> str:
    """Where torchrun's events go. Its ``dynamic_rendezvous`` has messages between agents, which there are none of here.

    Raises:
        OptionError: another word.
    """
    if text not in ("null", "console", "dynamic_rendezvous"):
        raise OptionError(option, text, "must be null or console")
    return "console" if text == "console" else "null"
