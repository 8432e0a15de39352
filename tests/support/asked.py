"""What a command is asked for, in tests that call its function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddplaunch.cli.commands import Request
from ddplaunch.config import LaunchConfig

_OPTIONS = {
    "log_dir": None,
    "verbose": False,
    "deep": False,
    "script": "",
    "ranks": None,
    "attempt": None,
    "follow": False,
    "stdout": False,
    "stderr": False,
}


def asked(
    value: object = "",
    say: Callable[[str], None] = print,
    *,
    config: LaunchConfig | None = None,
    grace_s: float = 30.0,
    **options: Any,
) -> Request:
    """A request whose results and messages go to ``say``; ``config`` is what the options stand for."""

    def configure(**_: object) -> LaunchConfig:
        assert config
        return config

    given = {**_OPTIONS, **options}
    return Request(value=value, options=given, show=say, report=say, configure=configure, grace_s=grace_s)
