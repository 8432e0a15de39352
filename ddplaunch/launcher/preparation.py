"""From a LaunchConfig to what a run starts with: its folder, how its console looks, what its agents are told."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.config import NO_LOGS, LaunchConfig
from ddplaunch.launcher import run_folder
from ddplaunch.launcher.console import Style
from ddplaunch.model import AgentSpec, Program, StreamName

if TYPE_CHECKING:
    from ddplaunch.records import Output


def make_folder(config: LaunchConfig, run_id: str) -> tuple[Path | None, str]:
    """The run's folder, or None and why there is none."""
    if config.log_dir == NO_LOGS:
        return None, ""
    base = Path(config.log_dir).absolute() if config.log_dir else run_folder.default_base(os.environ)
    try:
        folder = run_folder.create(base, run_id)
    except OSError as error:
        return None, f"no logs are kept: {base}: {error.strerror}"
    if config.log_dir is None:
        run_folder.prune(base)
    return folder, ""


def style(config: LaunchConfig, host: str, folder: Path | None) -> Style:
    colour = not os.environ.get("NO_COLOR")

    def log_hint(header: Output) -> str:
        return f"{folder}/attempt_*/{header.local_rank}/{header.stream}.log" if folder else "no log (none is kept)"

    return Style(
        host=host,
        role=config.role,
        template="[${host}:${rank}] " if config.line_prefix is None else config.line_prefix,
        colour={"stdout": colour and os.isatty(1), "stderr": colour and os.isatty(2)},
        log_hint=log_hint,
    )


def agent_spec(
    config: LaunchConfig, run_id: str, host: str, log_dir: str | None, stdin_fd: int | None, terminals: dict[str, int]
) -> AgentSpec:
    python = config.python or sys.executable
    return AgentSpec(
        run_id=run_id,
        host=host,
        program=Program(config.entry, config.script, config.script_args, python),
        python_is_ours=shutil.which(python) == sys.executable,
        nproc_per_node=config.nproc_per_node,
        gpus=config.gpus,
        gpus_per_proc=config.gpus_per_proc,
        virtual_local_rank=config.virtual_local_rank,
        pass_local_rank=config.pass_local_rank,
        role=config.role,
        max_restarts=config.max_restarts,
        start_method=config.start_method,
        preload=config.preload,
        numa_binding=config.numa_binding,
        master_addr=config.master_addr or config.local_addr,
        master_port=config.master_port,
        shutdown_timeout_s=config.shutdown_timeout_s,
        log_dir=log_dir,
        redirects=config.redirects,
        tee=config.tee,
        show_ranks=config.show_ranks,
        show_local_ranks=config.show_local_ranks,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        meeting=config.meeting,
        stdin_fd=stdin_fd,
        stdout_fd=terminals.get("stdout"),
        stderr_fd=terminals.get("stderr"),
    )


def shared_terminals(config: LaunchConfig) -> dict[str, int]:
    """The standard streams a lone worker gets as they are: a terminal, unless the user asked for what needs a pipe."""
    return {name: fd for name, fd in (("stdout", 1), ("stderr", 2)) if os.isatty(fd) and not _is_piped(config, name)}


def _is_piped(config: LaunchConfig, name: str) -> bool:
    stream: StreamName = "stdout" if name == "stdout" else "stderr"
    filters = config.duplicate_stdout_filters if name == "stdout" else config.duplicate_stderr_filters
    hidden = config.show_ranks is not None or config.show_local_ranks is not None
    kept = config.tee.covers(0, stream) or config.redirects.covers(0, stream)
    return kept or hidden or bool(filters or config.line_prefix)
