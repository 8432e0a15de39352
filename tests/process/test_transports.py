"""A transport is a class and a row: runs, queries and the plan then know it."""

from __future__ import annotations

import queue
from pathlib import Path

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig, RemoteConfig
from ddplaunch.transport.command_handle import CommandTransport
from ddplaunch.transport.handle import FromNode, discard_output
from tests.support import runs

PROGRAM = Path(runs.__file__).parent / "programs" / "shell_transport.py"


def test_a_class_and_a_row_are_a_transport(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os; print(*map(os.environ.get, ('WAY', 'RANK', 'WORLD_SIZE')))\n")
    done = runs.python(PROGRAM, script, tmp_path / "logs")
    assert done.returncode == 0, done.err
    assert "on 2 nodes, started through a shell" in done.out
    assert "on each node  through a shell: " in done.out
    assert "[one:0] shell 0 2" in done.out
    assert "[two:1] shell 1 2" in done.out


class SilentTransport(CommandTransport):
    """Its command never reaches the host."""

    @staticmethod
    def carrier(_config: LaunchConfig, _host: Host) -> tuple[str, ...]:
        return "sh", "-c", "echo no answer yet >&2; exec sleep 1000"


def test_a_command_that_does_not_start_the_agent_is_given_up() -> None:
    posted: queue.SimpleQueue[object] = queue.SimpleQueue()
    config = LaunchConfig(script="x.py", hosts=(Host("one"),), remote=RemoteConfig(start_timeout_s=0.5))
    handle = SilentTransport(config, ("one",), "tag", discard_output, posted.put).start(0, "query")
    try:
        posted_by = posted.get(timeout=60)
    finally:
        handle.close()
    assert isinstance(posted_by, FromNode)
    assert "sh did not start the agent within 0.5 s: no answer yet" in str(posted_by.event)
