"""The entry of the launcher: first what takes longest, the agent's loading, then the launcher's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch import run_folder, run_marks
from ddplaunch.launcher import agent_process

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.model import RunResult


def launch(config: LaunchConfig, stdout_fd: int = 1) -> RunResult:
    """Run the job to its end and return the verdict; nothing of it runs any more, but what ``left`` names.

    From the main thread, signals are handled as the command does until it returns; from another they are left alone.
    What workers write to their stdout goes to ``stdout_fd``.

    Raises:
        LaunchError: the job could not be started, or an agent was lost.
    """
    run_id = config.run_id or run_folder.new_run_id()
    mark = run_marks.new_mark(run_id, is_unique=not config.run_id)
    with run_marks.badge(mark), agent_process.started_ahead(config, mark) as agent:
        from ddplaunch.launcher import launcher  # Loads beside the agent.

        return launcher.run(config, run_id, mark, agent, stdout_fd)
