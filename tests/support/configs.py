"""LaunchConfigs for tests that set single fields: flat names, as the options have them, put into their groups."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ddplaunch.config import LaunchConfig, OutputConfig, TimeoutConfig, WorkerConfig

GROUPS: dict[str, type] = {"workers": WorkerConfig, "output": OutputConfig, "timeouts": TimeoutConfig}
GROUP_OF = {field.name: group for group, cls in GROUPS.items() for field in fields(cls)}


def launch_config(**settings: Any) -> LaunchConfig:
    """``settings`` by field name, in whatever group the field is."""
    grouped: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name in GROUP_OF.keys() & settings.keys():
        grouped[GROUP_OF[name]][name] = settings.pop(name)
    return LaunchConfig(**settings, **{group: cls(**grouped[group]) for group, cls in GROUPS.items()})


def setting(config: LaunchConfig, name: str) -> object:
    """The field ``name`` of ``config``, in whatever group it is."""
    return getattr(getattr(config, GROUP_OF[name]) if name in GROUP_OF else config, name)
