"""What a run does for its user besides starting, restarting and stopping workers: one folder per feature.

``FEATURES`` is the list. The core knows features only by it, and by the names of their standard modules (``Feature``):
without a folder and its line, everything else works. A feature uses the core, and the records and rules of the features
that it needs. Only a module that runs in a worker may import torch.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator


Config = TypeVar("Config")


class Feature(NamedTuple):
    """A folder, and which of these modules it has. None is imported before it is needed.

    ``launcher``: ``watches(run)`` returns its parts of a run in the launcher, see ``launcher.watches``.
    ``agent``: ``part(node)`` returns its part of an agent, see ``agent.parts``.
    ``worker``: ``part(text)`` returns its part of a worker, see ``worker.parts``.
    ``plan``: ``worker_environ(config, inherited)`` returns what ``Part.worker_environ`` will, as ``--plan`` shows it.
    ``options``: in the launcher, only if the user has set one of ``fields``. It may have ``check(config)``, which
    raises UsageError when the configuration is made; ``check_start(config, stdout_fd)``, which does before a run
    starts; and ``for_agent(config)``, a text that its part of each agent finds in ``AgentSpec.texts``.
    ``early_agent``: may offer an agent in place of a new process, see ``transport.agent_process``.
    ``target``: ``launch(target, args, kwargs, stdout_fd, options)`` runs a job of something that is no script.
    ``records``: ``TO_AGENT`` and ``FROM_AGENT`` are what launcher and agent say to each other for it; ``TO_LAUNCHER``
    and ``FROM_LAUNCHER`` what a command and a launcher say over the control socket.
    ``queries``: the same for agents without a run. ``TO_AGENT`` names the module of the feature that answers each
    query: its ``serve(query, stream, outbox)`` returns None, or at the end the pids that SIGKILL has not ended.

    Attributes:
        name: the folder.
        modules: those that it has.
        fields: those of LaunchConfig that its module ``options`` is for.
        needs: features whose records and rules it imports.
        before_run: a setting, as an attribute of LaunchConfig, and a module: its ``prepare(config)`` checks and
            completes the configuration of runs with this setting before anything starts, see ``prepared``.
    """

    name: str
    modules: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    before_run: tuple[str, str] | None = None


FEATURES = (
    Feature("usage", ("launcher", "agent", "records"), needs=("come_back",)),
    Feature("health", ("launcher", "agent", "records"), before_run=("hosts", "node_memory")),
    Feature("hangs", ("launcher", "agent", "worker", "plan", "records"), needs=("ps",)),
    Feature("slow_ranks", ("launcher", "agent", "records"), needs=("hangs",)),
    Feature("slurm_nodes", ("launcher",)),
    Feature("debug", ("launcher", "agent", "worker", "records", "options"), fields=("workers.debug_on_error",)),
    Feature("faults", ("launcher", "agent", "records", "options"), fields=("injections",)),
    Feature("page", ("launcher",), needs=("come_back",)),
    Feature("metrics", ("launcher",), needs=("usage",), before_run=("output.metrics_file", "metrics_file")),
    Feature("requeue", ("launcher",), before_run=("slurm_job", "slurm_requeue")),
    Feature("on_exit", ("launcher",)),
    Feature("come_back", ("launcher",)),
    Feature("ps", ("queries",)),
    Feature("plan", needs=("faults",)),
    Feature("check", ("queries",), needs=("health",)),
    Feature("functions", ("launcher", "agent", "worker", "target")),
    Feature("warm", ("agent", "options", "early_agent"), fields=("keep_warm_s",)),
    Feature("dry_run", ("agent", "worker")),
)
"""Their parts are called in this order: the last usage sample comes before what takes time."""


@cache
def names() -> frozenset[str]:
    """The names of all features."""
    return frozenset(each.name for each in FEATURES)


def loaded(module: str) -> Iterator[Any]:
    """The modules of this name of all features, in their order; imported now if they have not been."""
    return map(import_module, paths(module))


def paths(module: str) -> tuple[str, ...]:
    """The full names of these modules."""
    return tuple(f"{__name__}.{each.name}.{module}" for each in FEATURES if module in each.modules)


def call(name: str, config: object, *args: object) -> dict[str, Any]:
    """Call ``name`` of the modules ``options`` that have it, if ``config``, a LaunchConfig, sets one of their fields.

    Returns the results by name of the feature.
    """
    used = (each.name for each in FEATURES if any(attrgetter(path)(config) for path in each.fields))
    modules = ((feature, import_module(f"{__name__}.{feature}.options")) for feature in used)
    return {feature: getattr(module, name)(config, *args) for feature, module in modules if hasattr(module, name)}


def variable(name: str) -> str:
    """The environment variable with the agent's text for the part of feature ``name`` in a worker."""
    return f"DDPLAUNCH_FEATURE_{name.upper()}"


def prepared(config: Config) -> Config:
    """``config`` of a run, a LaunchConfig, checked and completed by the features that it concerns.

    Others are not imported.

    Raises:
        LaunchError: the run cannot do what the user wants.
    """
    for each in FEATURES:
        if each.before_run and attrgetter(each.before_run[0])(config):
            config = import_module(f"{__name__}.{each.name}.{each.before_run[1]}").prepare(config)
    return config


@cache
def records(direction: str, module: str = "records") -> tuple[type, ...]:
    """The records of all features for a direction, as in ``Feature``; of their modules ``records`` or ``queries``."""
    return tuple(record for each in loaded(module) for record in getattr(each, direction, ()))


def answering(query: object) -> Any:
    """The module that answers a query to an agent without a run."""
    each = next(each for each in loaded("queries") if type(query) in each.TO_AGENT)
    return import_module(f"{each.__package__}.{each.TO_AGENT[type(query)]}")
