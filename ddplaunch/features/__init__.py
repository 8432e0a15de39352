"""What a run does for its user besides starting, restarting and stopping workers: one folder per feature.

``FEATURES`` is the list. The core knows features only by it, and by the names of their standard modules (``Feature``):
without a folder and its line, everything else works. A feature uses the core, and the records and rules of the features
that it needs. Only what runs in a worker, or prepares one (``warm``, ``dry_run``), may import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

Config = TypeVar("Config")
_ADDRESS = "\0ddplaunch"


class Feature(NamedTuple):
    """A folder, and which of these modules it has. None is imported before it is needed.

    The package itself may have ``rows()``: its options and commands, as ``rows`` describes them; ``EVENTS`` and
    ``EVENT_KEYS``: the kinds of events that it notes (``Watches.note``), what each says, and keys that only it has;
    ``prepare(config, stdout_fd)``, ``at_start(config)``, ``planned(config)`` and ``for_agent(config)``, which
    ``prepare``, ``at_start``, ``planned`` and ``texts`` below call;
    ``default_environ(config, inherited, workers)``: what ``Part.default_environ``, or ``environ``, will return on a
    node with so many workers, as ``--plan`` shows it;
    ``variables(options, environ, to_hosts)``: variables that all agents and workers get in place of those that they
    have, and ``shown_variables`` of these: the lines for ``-v``.

    ``launcher``: ``watches(run)`` returns its parts of a run in the launcher, see ``launcher.watches``.
    ``agent``: ``part(node)`` returns its part of an agent; ``begin``, if it has one, begins something ahead, and
    ``with_devices(spec, node)`` chooses devices; see ``agent.parts``.
    ``worker``: ``part(text)`` returns its part of a worker, see ``worker.parts``.
    ``after_end``: in an agent that has a text of the feature, see ``texts``: ``act`` is called after the agent has
    sent AgentEnded.
    ``early_agent``: may offer an agent in place of a new process, see ``transport.agent_process``.
    ``scheduler``: ``completed(options, environ)`` returns the CompletedOptions of a run, see ``cli.build_config``;
    ``transport_of_command`` is as there; ``is_first_task(environ)`` says whether to show a usage error.
    ``hosts``: ``select(hosts, options)`` returns those of the named hosts that a run or a command uses.
    ``environ``: ``shared_environ(spec, inherited, workers)`` returns variables for all processes of a node, which the
    forkserver has before it imports torch; ``workers`` share the CPUs of the agent.
    ``cpus``: ``of_workers(spec, visible, nproc)`` returns a text for each worker of a node: to which CPUs and memory it
    is bound; none: empty. ``binding``: in the new process of a worker, ``bind(text)`` does it.
    ``tables``: rows of two tables: ``TRANSPORTS`` (``transport.transports``), and ``SCHEDULERS`` (of ``schedulers``).
    Each start of the command imports it.
    ``hints``: ``hint(first, is_dry_run)`` returns what the user can do about a worker's failure; empty: not known.
    ``instead``: in a run with ``watch_if``: its ``run(config, run_id, folder, stdout_fd, ends_process)`` runs something
    in place of a single job, as many of them, and returns the RunResult.
    ``target``: ``launch(target, args, kwargs, stdout_fd, options)`` runs a job of something that is no script.
    ``records``: ``TO_AGENT`` and ``FROM_AGENT`` are what launcher and agent say to each other for it; ``TO_LAUNCHER``
    and ``FROM_LAUNCHER`` what a command and a launcher say over the control socket.
    ``queries``: the same for agents without a run. ``TO_AGENT`` names the module of the feature that answers each
    query: its ``serve(query, stream, outbox)`` returns None, or at the end the pids that SIGKILL has not ended.

    Attributes:
        name: the folder.
        modules: those that it has.
        needs: features of which it imports modules: records, rules, or the class from which a transport is derived.
        early_if: settings, as attributes of LaunchConfig: ``prepare``, ``at_start`` and ``for_agent`` are called,
            before the agent starts, for a run with one of them, or with ``watch_if``. They import late what they need.
        watch_if: another such setting: the launcher has a part of the feature only in runs with it; empty: in all
            runs. Agents have the part of the feature in every run.
        declares: the package itself has ``rows``, ``EVENTS``, ``EVENT_KEYS``, ``default_environ`` or ``variables``.
            False for one that has only a docstring or other functions: commands do not import it. A test compares it.
    """

    name: str
    modules: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    early_if: tuple[str, ...] = ()
    watch_if: str = ""
    declares: bool = True


_PARTS = ("launcher", "agent", "records")
_IN_ALL = ("launcher", "agent", "worker", "records", "queries")
_OF_CHECK = ("compile_cache", "gpus", "health", "name_servers", "numa", "runs")
"""Modules of a feature that is in all processes."""

FEATURES = (
    Feature("ssh", ("tables",), needs=("remote",)),
    Feature("remote"),
    Feature("node_progress", ("launcher",), declares=False),
    Feature("redraws", ("launcher",), declares=False),
    Feature("tracebacks", ("launcher",), declares=False),
    Feature("collect_logs", ("launcher", "records", "after_end"), early_if=("text",), watch_if="output.collect_logs"),
    Feature("runs", declares=False),
    Feature("ps", ("queries",), needs=("free_gpus", "gpus", "health", "runs")),
    Feature("gpus", ("agent",), declares=False),
    Feature("usage", ("launcher", "agent", "records"), needs=("come_back", "gpus", "runs")),
    Feature("free_gpus", _PARTS, ("gpus", "health"), early_if=("workers.gpus",), watch_if="wait_for_gpus_s"),
    Feature("health", ("launcher", "agent", "records"), needs=("gpus",), early_if=("hosts", "check_first")),
    Feature("nccl", ("launcher", "agent"), needs=("health",)),
    Feature("hangs", ("launcher", "agent", "worker", "records"), needs=("gpus", "ps", "runs")),
    Feature("slow_ranks", ("launcher", "agent", "records"), needs=("hangs",)),
    Feature("debug", ("launcher", "agent", "worker", "records"), early_if=("workers.debug_on_error",)),
    Feature("faults", ("launcher", "agent", "records"), watch_if="injections"),
    Feature("page", ("launcher",), needs=("come_back", "runs", "usage")),
    Feature("schedulers", ("scheduler",)),
    Feature("slurm", ("launcher", "tables"), ("remote", "schedulers"), early_if=("requeue_on",), watch_if="slurm_job"),
    Feature("time_limit", ("launcher", "agent", "records"), needs=("schedulers",), watch_if="stop_before_end"),
    Feature("checkpoints", ("launcher", "agent", "records"), watch_if="checkpoint"),
    Feature("metrics", ("launcher",), needs=("usage",), watch_if="output.metrics_file"),
    Feature("on_exit", ("launcher",), watch_if="on_exit"),
    Feature("come_back", ("launcher", "queries"), needs=("runs",)),
    Feature("misplaced_options", ("launcher",), watch_if="script_args", declares=False),
    Feature("host_filter", ("hosts",)),
    Feature("forwarding"),
    Feature("compile_cache", ("agent", "environ")),
    Feature("numa", ("agent", "cpus", "binding")),
    Feature("hints", ("hints",), declares=False),
    Feature("other_schedulers", ("tables",), needs=("schedulers",), declares=False),
    Feature("name_servers", ("agent",), declares=False),
    Feature("keep_runs", ("launcher", "agent"), needs=("runs",)),
    Feature("plan", needs=("faults", "forwarding", "remote")),
    Feature("check", ("queries",), _OF_CHECK, early_if=("check_first", "passing_hosts_file")),
    Feature("functions", ("launcher", "agent", "worker", "target"), ("collect_logs",), watch_if="text", declares=False),
    Feature("environments", ("agent", "queries"), needs=("remote", "runs", "snapshot"), early_if=("env",)),
    Feature("snapshot", _IN_ALL, needs=("remote", "runs", "ssh"), early_if=("snapshot", "sync", "code")),
    Feature("warm", ("agent", "early_agent"), needs=("schedulers",), early_if=("keep_warm_s",)),
    Feature("dry_run", ("agent", "worker")),
    Feature("run_events", ("launcher",), needs=("runs",)),
    Feature("control", ("launcher",), declares=False),
    Feature("parameter_sweep", ("instead",), ("come_back", "runs", "warm"), early_if=("sweep",), watch_if="sweep_jobs"),
)
"""Watches and parts are called in this order. So ``redraws`` and ``tracebacks``, which shorten the output for the
console, get it last (the first wraps the console's function), the part of ``gpus`` knows the GPUs before others ask for
them, ``usage`` takes its last sample before others do what takes time, and ``run_events`` ends its file when all others
have noted what they know.

Options of features stand in this order below their heading of the help page.
"""


@cache
def rows() -> tuple[Any, ...]:
    """The options and the commands that the features bring: what ``rows`` of their packages return."""
    return tuple(row for found in call_each("rows") for row in found)


def packages() -> Iterator[Any]:
    """The packages of the features that declare something, in their order."""
    return (import_module(f"{__name__}.{each.name}") for each in FEATURES if each.declares)


def call_each(function: str, *arguments: Any, **named: Any) -> Iterator[Any]:
    """What ``function`` returns of each package that has it."""
    return (getattr(each, function)(*arguments, **named) for each in packages() if hasattr(each, function))


def declarations(name: str) -> dict[str, str]:
    """What the packages of the features declare in a dictionary ``name``, as ``EVENTS``: all of them together."""
    return {key: text for package in packages() for key, text in getattr(package, name, {}).items()}


def modules(module: str) -> Iterator[Any]:
    """The modules of this name of all features, in their order; imported now if they have not been."""
    return map(import_module, module_paths(module))


def watch_modules(config: object) -> Iterator[Any]:
    """The modules ``launcher`` of the features that have a part in a run with this configuration, in their order."""
    for each in FEATURES:
        if "launcher" in each.modules and (not each.watch_if or attrgetter(each.watch_if)(config)):
            yield import_module(f"{__name__}.{each.name}.launcher")


def instead(config: object) -> Any:
    """The module that runs something else in place of a run with this configuration; None: there is none."""
    found = (each for each in FEATURES if "instead" in each.modules and attrgetter(each.watch_if)(config))
    return next((import_module(f"{__name__}.{each.name}.instead") for each in found), None)


def module_paths(module: str) -> tuple[str, ...]:
    """The full names of these modules."""
    return tuple(f"{__name__}.{each.name}.{module}" for each in FEATURES if module in each.modules)


def modules_with_text(module: str, texts: Mapping[str, str]) -> Iterator[tuple[Any, str]]:
    """The modules of this name of the features that have a text for an agent, with it."""
    for each in FEATURES:
        if module in each.modules and each.name in texts:
            yield import_module(f"{__name__}.{each.name}.{module}"), texts[each.name]


def text_variable(name: str) -> str:
    """The environment variable with the agent's text for the part of feature ``name`` in a worker."""
    return f"DDPLAUNCH_FEATURE_{name.upper()}"


def worker_address(name: str) -> bytes:
    """An address in Linux's abstract namespace (unix(7)) for a worker's connection to its agent, for feature ``name``.

    No other connection has it.
    """
    return f"{_ADDRESS}.{name}.{os.urandom(8).hex()}".encode()


def of_worker_address(address: bytes) -> str:
    """The name of the feature for which a worker has connected; empty if the address is not as ``worker_address``."""
    begin, _, name = address.rpartition(b".")[0].decode("ascii", "replace").partition(".")
    return name if begin == _ADDRESS else ""


def _prepared(config: object, function: str) -> Iterator[tuple[str, Any]]:
    """The features that look at this run before it starts, with ``function`` of their packages that have it."""
    for each in FEATURES:
        if any(attrgetter(setting)(config) for setting in (*each.early_if, each.watch_if) if setting):
            package = import_module(f"{__name__}.{each.name}")
            if hasattr(package, function):
                yield each.name, getattr(package, function)


def prepare(config: Config, stdout_fd: int | None = None) -> Config:
    """``config`` of a run, a LaunchConfig, checked and completed by the features that it concerns.

    ``stdout_fd`` will be the stdout of its workers; None: they have no terminal, or are not started.

    Raises:
        LaunchError: the run cannot do what the user wants.
    """
    for _, of_feature in _prepared(config, "prepare"):
        config = of_feature(config, stdout_fd)
    return config


def at_start(config: Config) -> Config:
    """``config`` of a run that starts now, completed by what features make for it, as a copy of the code.

    Raises:
        LaunchError: it cannot be made.
    """
    for _, of_feature in _prepared(config, "at_start"):
        config = of_feature(config)
    return config


def planned(config: Config) -> Config:
    """``config`` of a run that --plan shows, with what ``at_start`` would change, as far as nothing must be made.

    Raises:
        LaunchError: it cannot be made.
    """
    for _, of_feature in _prepared(config, "planned"):
        config = of_feature(config)
    return config


def texts(config: object) -> dict[str, str]:
    """By feature, the text that its part of each agent of a run finds in ``AgentSpec.texts``; without None."""
    found = ((name, for_agent(config)) for name, for_agent in _prepared(config, "for_agent"))
    return {name: text for name, text in found if text is not None}


@cache
def items(name: str, module: str) -> tuple[Any, ...]:
    """The items of the lists ``name`` in the modules ``module`` of all features."""
    return tuple(item for each in modules(module) for item in getattr(each, name, ()))


def records(direction: str, module: str = "records") -> tuple[type, ...]:
    """The records of all features for a direction, as in ``Feature``; of their modules ``records`` or ``queries``."""
    return items(direction, module)


def answering_module(query: object) -> Any:
    """The module that answers a query to an agent without a run."""
    each = next(each for each in modules("queries") if type(query) in each.TO_AGENT)
    return import_module(f"{each.__package__}.{each.TO_AGENT[type(query)]}")
