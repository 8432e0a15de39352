"""What happened in a run, and when: events.jsonl in the run folder, and torchelastic's worker events on the console.

The launcher writes them while the run goes on. Must not import torch.
"""

from ddplaunch.errors import OptionError


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
