"""What a command line means: the settings in which its run differs from the usual one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

import pytest

from ddplaunch.cli import main
from ddplaunch.config import LaunchConfig, RendezvousConfig
from tests.support.configs import GROUPS

USUAL = LaunchConfig(script="x.py")
TORCHRUNS = {"token": "none", "join_timeout_s": 600, "last_call_timeout_s": 30, "silent_after_s": 5}


def told(question: str) -> str:
    """Of ``NAME=VALUE ddplaunch --option x.py``, the settings that differ."""
    environ, argv = parsed(question)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        return changes(main.command.main(argv, prog_name="ddplaunch", standalone_mode=False))


def parsed(question: str) -> tuple[dict[str, str], list[str]]:
    """Variables of the environment, and the words behind ``ddplaunch``."""
    words = shlex.split(question)
    start = words.index("ddplaunch")
    return dict(word.split("=", 1) for word in words[:start]), words[start + 1 :]


def changes(config: LaunchConfig) -> str:
    """By the names of fields. What hosts are reached by and what is noticed stand at the end."""
    parts = [f"{name}={value!a}" for name, value in _changed(config, USUAL)]
    if config.hosts:
        hosts = [f"{host} {host.slots or ''} {host.devices or ''}".rstrip() for host in config.hosts]
        parts += [f"hosts: {', '.join(hosts)} over {config.transport}"]
    if config.one_launcher_leads:
        parts += ["one launcher leads all nodes"]
    return "; ".join([*parts, *map(str, config.notices)]) or "as usual"


def _changed(config: LaunchConfig, usual: LaunchConfig) -> Iterator[tuple[str, object]]:
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in GROUPS or field.name == "remote":
            prefix = "remote." if field.name == "remote" else ""
            yield from ((prefix + name, each) for name, each in _differences(value, getattr(usual, field.name)))
        elif field.name == "rendezvous" and value:
            yield from ((f"rendezvous.{name}", each) for name, each in _place_to_meet(value))
        elif field.name not in ("hosts", "notices") and value != getattr(usual, field.name):
            yield field.name, value


def _differences(group: Any, usual: Any) -> Iterator[tuple[str, object]]:
    """Without the variables for workers, which are those of this process."""
    names = [field.name for field in fields(group) if field.name != "environ"]
    yield from ((name, getattr(group, name)) for name in names if getattr(group, name) != getattr(usual, name))


def _place_to_meet(rendezvous: RendezvousConfig) -> Iterator[tuple[str, object]]:
    for field in fields(rendezvous):
        value = getattr(rendezvous, field.name)
        if value != TORCHRUNS.get(field.name, None if field.default is MISSING else field.default):
            yield field.name, value
