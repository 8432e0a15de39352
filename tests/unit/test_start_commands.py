"""The agent starts forkserver and exec'd workers by a name or path that it does not import; both must exist."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ddplaunch.agent.workers import forkserver_client, start_plan


def test_what_the_agent_starts_by_name_exists() -> None:
    assert find_spec(forkserver_client.FORKSERVER_MODULE)
    assert Path(start_plan.EXEC_WORKER).is_file()
