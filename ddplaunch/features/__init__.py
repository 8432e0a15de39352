"""What a run does for its user besides starting, restarting and stopping workers: one folder per feature.

``FEATURES`` is the list. The core knows features only by it, and by the names of their standard modules (``Feature``):
without a folder and its line, everything else works. A feature uses the core, and the records and rules of the features
that it needs. Only a module that runs in a worker may import torch.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class Feature(NamedTuple):
    """A folder, and which of these modules it has. None is imported before it is needed.

    ``launcher``: ``watches(run)`` returns its parts of a run in the launcher, see ``launcher.watches``.
    ``agent``: ``part(node)`` returns its part of an agent, see ``agent.parts``.
    ``worker``: ``part(text)`` returns its part of a worker, see ``worker.parts``.
    ``plan``: ``worker_environ(config, inherited)`` returns what ``Part.worker_environ`` will, as ``--plan`` shows it.
    ``records``: ``TO_AGENT`` and ``FROM_AGENT`` are what launcher and agent say to each other for it; ``TO_LAUNCHER``
    and ``FROM_LAUNCHER`` what a command and a launcher say over the control socket.

    Attributes:
        name: the folder.
        modules: those that it has.
        needs: features whose records and rules it imports.
    """

    name: str
    modules: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


FEATURES = (
    Feature("usage", ("launcher", "agent", "records")),
    Feature("health", ("launcher", "agent", "records")),
    Feature("hangs", ("launcher", "agent", "worker", "plan", "records")),
    Feature("slow_ranks", ("launcher", "agent", "records"), needs=("hangs",)),
    Feature("slurm_nodes", ("launcher",)),
    Feature("debug", ("launcher", "agent", "worker", "records")),
    Feature("faults", ("agent", "records")),
    Feature("page", ("launcher",)),
    Feature("metrics", ("launcher",), needs=("usage",)),
    Feature("requeue", ("launcher",)),
    Feature("on_exit", ("launcher",)),
    Feature("come_back", ("launcher",)),
    Feature("ps"),
    Feature("plan"),
    Feature("check"),
    Feature("functions", ("agent", "worker")),
    Feature("warm"),
    Feature("dry_run", ("agent", "worker")),
)
"""Their parts are called in this order: the last usage sample comes before what takes time."""


def loaded(module: str) -> Iterator[Any]:
    """The modules of this name of all features, in their order; imported now if they have not been."""
    return (import_module(f"{__name__}.{each.name}.{module}") for each in FEATURES if module in each.modules)


def variable(name: str) -> str:
    """The environment variable with the agent's text for the part of feature ``name`` in a worker."""
    return f"DDPLAUNCH_FEATURE_{name.upper()}"


@cache
def records(direction: str) -> tuple[type, ...]:
    """The records of all features for a direction, as in ``Feature``."""
    return tuple(record for module in loaded("records") for record in getattr(module, direction, ()))
