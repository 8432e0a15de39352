"""From the texts of options to the fields of LaunchConfig, as their rows say.

Runs in the launcher, once per command. Decides nothing about several options together: ``build_config`` does.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ddplaunch.cli.options import ROWS
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import StartNotice, UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_GROUPS = ("", "workers", "output", "timeouts", "remote")


def read(
    options: Mapping[str, Any], environ: Mapping[str, str], groups: Collection[str] = _GROUPS
) -> dict[str, dict[str, Any]]:
    """The fields that the options set, by group and name; those of LaunchConfig itself are in the group "".

    Raises:
        UsageError: the value of an option of these groups is not valid. Options without a field are in the group "".
    """
    found: dict[str, dict[str, Any]] = {group: {} for group in groups}
    for row in ROWS:
        group, _, name = row.sets.rpartition(".")
        if group not in groups:
            continue
        given, origin = options[row.name], row.long_name
        if given is None and row.variable:
            given, origin = environ.get(row.variable) or None, row.variable
        if row.is_given(given):
            value = row.value(given, origin)
            if row.sets:
                found[group][name] = value
    return found


def checked(config: LaunchConfig) -> LaunchConfig:
    """``config``, with a notice for each option that has no effect.

    Raises:
        UsageError: an option without effect, where that is an error.
    """
    notices, defaults = [], LaunchConfig(script="-")
    for row in ROWS:
        is_set = bool(row.only) and attrgetter(row.sets)(config) != attrgetter(row.sets)(defaults)
        for condition in row.only if is_set else ():
            if not condition.holds(config):
                text = f"{row.long_name} has an effect only {condition.text}"
                if condition.is_needed:
                    raise UsageError(text, "", (row.long_name,))
                notices.append(StartNotice("unused", text))
    return replace(config, notices=(*config.notices, *notices)) if notices else config
