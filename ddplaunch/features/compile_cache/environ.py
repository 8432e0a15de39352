"""The variables of the caches of torch.compile and Triton, and of the processes that compile.

Runs in the agent, and in the launcher for ``--plan``. torch reads the number of processes when it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.features.compile_cache import folder

if TYPE_CHECKING:
    from ddplaunch.protocol.specs import AgentSpec

TORCH, TRITON, THREADS = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"

VARIABLES = (TORCH, TRITON, THREADS)

_MAX_THREADS = 32
"""torch itself takes no more (``decide_compile_threads`` in torch._inductor.config, 2.13)."""


def shared_environ(spec: AgentSpec, inherited: Mapping[str, str], workers: int) -> dict[str, str]:
    """The variables for this node; creates the folder of the caches. ``workers`` share the CPUs of this process."""
    if spec.dry_run or spec.workers.compile_cache == "off":
        return {}
    return of_machine(inherited, workers, create=True)


def of_machine(inherited: Mapping[str, str], workers: int, *, create: bool = False) -> dict[str, str]:
    """Those that the user has not chosen, for ``workers`` on this machine."""
    names, chosen = _unset(inherited), folder.chosen(inherited, create=create)
    below = os.path.join(chosen, folder.kind()) if names and chosen else ""
    return {
        **({name: os.path.join(below, part) for name, part in names.items()} if below else {}),
        **threads(inherited, workers, len(os.sched_getaffinity(0))),
    }


def of_other_machine(inherited: Mapping[str, str], workers: int) -> dict[str, str]:
    """The same for ``--plan``, for a machine that is not asked."""
    shown = {name: f"<a folder on the node's disk>/{part}" for name, part in _unset(inherited).items()}
    has_threads = workers > 1 and THREADS not in inherited
    return {**shown, **({THREADS: "<CPUs of the node / its workers>"} if has_threads else {})}


def _unset(inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of folders to set, each with the name of the folder.

    A folder that the user chose for torch has Triton's below it, and TRITON_HOME names Triton's.
    """
    if TORCH in inherited:
        return {}
    of_triton = {} if TRITON in inherited or "TRITON_HOME" in inherited else {TRITON: "triton"}
    return {TORCH: "inductor", **of_triton}


def threads(inherited: Mapping[str, str], workers: int, cpus: int) -> dict[str, str]:
    """The number of processes with which each worker compiles; torch itself takes one for each CPU of the node."""
    is_set = workers > 1 and THREADS not in inherited
    return {THREADS: str(max(1, min(_MAX_THREADS, cpus // workers)))} if is_set else {}


def in_use(inherited: Mapping[str, str], *, sets: bool) -> dict[str, str]:
    """By the variable that chooses it, the folder of each cache of a run here; ``sets``: not --compile-cache off."""
    env = {**inherited, **(of_machine(inherited, 1) if sets else {})}
    of_torch = env.get(TORCH) or os.path.join(env.get("TMPDIR") or "/tmp", "torchinductor_")
    home = env.get("TRITON_HOME") or os.path.expanduser("~")
    default = os.path.join(of_torch, "triton") if TORCH in inherited else str(Path(home, ".triton/cache"))
    return {TORCH: of_torch, TRITON: env.get(TRITON) or default}
