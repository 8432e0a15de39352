"""Whether workers are forked or executed: the agent starts them so, and --plan shows it.

Pure: the caller says which scripts are plain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ddplaunch.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddplaunch.protocol.specs import AgentSpec

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


def choose(spec: AgentSpec, env: Mapping[str, str], is_plain_script: Callable[[str], bool]) -> StartPlan:
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
