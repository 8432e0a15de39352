"""Settings of an agent (AgentSpec) and of the processes that its forkserver starts, with the forkserver's answers.

The first group is sent by the launcher, the others are exchanged by agent and forkserver. The only rule here is
how workers are started, ``choose_start``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Literal

from ddplaunch.config import AgentConfig, Entry, WorkerConfig
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Descriptor, Pid


@dataclass(frozen=True)
class Program:
    """The script, module, program or function of the workers.

    ``python`` is the path of the interpreter, unused for a program; empty: the agent's interpreter. ``text`` is that
    of the script ``-``, or the ``FunctionCall`` of a function, encoded; ``path`` is then the file that defines it.
    """

    entry: Entry
    path: str
    args: tuple[str, ...]
    python: str
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class AgentSpec(AgentConfig):
    """Launcher to agent, first: all settings of one node.

    ``agent_spec`` in ``launcher/setup.py`` fills it: it copies each field of AgentConfig by its name, ``max_restarts``
    among them, and adds the fields below.

    The number of its ``workers`` and their devices may differ from other nodes'. ``rendezvous`` is None also where the
    launcher sends a JoinRendezvous.

    Attributes:
        host: display name of the node.
        same_python: ``program.python`` is also the interpreter of ddplaunch, so workers may be forked.
        node_dir: absolute path of the node folder; None: no files are kept.
        run_dir_name: on another machine, name of the folder that the agent creates in ``output.log_dir``, and in it the
            node folder; empty: it uses ``node_dir``.
        stdin_fd: inherited descriptor that becomes the workers' stdin; None: /dev/null.
        stdout_fd: inherited descriptor of the user's terminal, for the only worker of a job; None: a pipe.
        stderr_fd: as ``stdout_fd``, for stderr.
        one_launcher_leads: as in LaunchConfig. The launcher sends a JoinRendezvous for each rendezvous.
        texts: for parts of the agent, by name of the feature; each part reads its own.
    """

    run_id: str
    host: str
    program: Program
    same_python: bool
    node_dir: str | None = None
    run_dir_name: str = ""
    stdin_fd: Descriptor | None = None
    stdout_fd: Descriptor | None = None
    stderr_fd: Descriptor | None = None
    one_launcher_leads: bool = False
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def has_peers(self) -> bool:
        """As in LaunchConfig."""
        return self.one_launcher_leads or self.each_node_has_launcher


# How workers are started: the agent starts them so, and --plan shows it.

_PROFILERS = ("CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")


@dataclass(frozen=True)
class StartPlan:
    """How workers are started.

    Attributes:
        bootstrap: an exec'd interpreter runs ``worker.bootstrap`` first, which records exceptions.
        reason: why workers are exec'd without --start-method spawn; empty otherwise.
    """

    how: Literal["script", "module", "function", "exec"]
    bootstrap: bool = True
    reason: str = ""


def choose_start(spec: AgentSpec, env: Mapping[str, str], is_plain_script: Callable[[str], bool]) -> StartPlan:
    """Fork where possible; otherwise exec, with the reason. ``env`` is the environment of the agent."""
    entry, path = spec.program.entry, spec.program.path
    if entry == "program":
        return StartPlan("exec", bootstrap=False)
    if not spec.same_python:
        reason = f"{spec.program.python} is not the interpreter that runs ddplaunch"
        return StartPlan("exec", bootstrap=False, reason=reason)
    if entry == "script" and not spec.program.text and not is_plain_script(path):
        return StartPlan("exec", bootstrap=False, reason=f"{path} is not a plain script")
    if spec.workers.start_method == "spawn":
        return StartPlan("exec")
    injected = [name for name in _PROFILERS if env.get(name)]
    if injected:
        return StartPlan("exec", reason=f"{injected[0]} is set: the profiler must load at process start")
    return StartPlan(entry)


# Agent to forkserver.


@dataclass(frozen=True, kw_only=True)
class ForkserverSpec:
    """Agent to forkserver, first: the settings of the workers that it starts, imports and ``sys.path``.

    Attributes:
        imports: import torch and ``workers.preload`` for forked workers; otherwise the forkserver only forks and execs.
        script: path of a script, whose text names further parts of torch to import; empty for none.
        module: name of a module that workers run, with such a text; empty for none.
        script_dir: ``sys.path[0]`` of the workers during the imports; empty for none.
        env: the environment of a forkserver that a keeper has forked; None: it was started with it.
    """

    run_id: str
    agent_pid: Pid
    workers: WorkerConfig
    imports: bool
    script: str
    script_dir: str
    module: str = ""
    env: dict[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """Agent to forkserver: start one process; all workers are started so, also those that are not forked.

    The record carries its stdin, stdout and stderr (SCM_RIGHTS).

    Attributes:
        tag: chosen by the agent, returned in ProcessStarted.
        how: ``script``, ``module`` and ``function`` run in a fork of the forkserver, ``exec`` replaces the fork,
            ``store`` serves the workers' c10d store, ``member`` is the node's member of the rendezvous. The text of a
            program and the socket of the store are a fourth descriptor.
        argv: for ``exec`` the command; otherwise ``sys.argv``, script or module first.
        env: the complete environment; None keeps the forkserver's.
        binding: to which CPUs and memory the process is bound, for the module ``binding`` of a feature; empty: to none.
        cgroup: folder of a cgroup v2 that the process enters first; empty for none.
    """

    tag: str
    how: Literal["script", "module", "function", "exec", "store", "member"]
    argv: tuple[str, ...] = ()
    env: dict[str, str] | None = None
    binding: str = ""
    cgroup: str = ""


# Forkserver to agent.


@dataclass(frozen=True)
class ForkserverReady:
    """Forkserver to agent, after its imports. ``no_fork_reason``: why it must not fork workers; empty if it may."""

    no_fork_reason: str = ""


@dataclass(frozen=True)
class ForkserverUnfit:
    """Forkserver that a keeper has forked, in answer to its ForkserverSpec: why the imports must be made anew."""

    reason: str


@dataclass(frozen=True)
class ImportFailed:
    """Forkserver to agent: ``module`` cannot be imported.

    ``hidden_by``: the user's file that was imported in place of a module of the same name; empty if there is none.
    """

    module: str
    error: str
    hidden_by: str = ""


@dataclass(frozen=True)
class ProcessStarted:
    """Forkserver to agent, in answer to ProcessSpec ``tag``: ``pid`` runs as a child of the agent.

    If the fork failed, ``pid`` is 0 and ``error`` is the reason.
    """

    tag: str
    pid: Pid = 0
    error: str = ""


FROM_FORKSERVER = (ForkserverReady, ForkserverUnfit, ImportFailed, ProcessStarted)
