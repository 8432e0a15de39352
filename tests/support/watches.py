"""What a run offers its watches, as far as a test of one watch needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ddplaunch.config import LaunchConfig
from ddplaunch.launcher.watches import RunServices


def ignore(*_: object, **__: object) -> None:
    """Takes everything and does nothing."""


def run_services(
    config: LaunchConfig,
    send: Callable[[object], None] = ignore,
    folder: Path | None = None,
    show: Callable[..., None] = ignore,
    post: Callable[[Any], object] = ignore,
    **parts: Any,
) -> RunServices:
    """``send`` gets what goes to all nodes of the launcher, ``show`` the messages, ``post`` the events of threads.

    ``parts`` take the place of others.
    """
    rest: Any = SimpleNamespace(send=send, show=show, note=ignore, drain=ignore, run_id="job7")
    run = RunServices(config, "job7", rest, rest, rest, rest, rest, ignore, lambda: folder, post, lambda _: False)  # type: ignore[arg-type]
    return run._replace(**parts)


def call(function: Callable[[], object]) -> None:
    """In place of ``post``: the main thread is this one."""
    function()
