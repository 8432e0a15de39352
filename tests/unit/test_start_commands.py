"""What the agent starts without importing it, forkserver and exec'd workers, and what their outermost frame runs."""

from __future__ import annotations

import ast
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.agent.rendezvous import cannot_join
from ddplaunch.agent.workers import forkserver_client, start_plan
from ddplaunch.agent.workers.forkserver_client import ForkserverClient
from ddplaunch.features.warm import keeper_start
from ddplaunch.protocol.specs import ForkserverReady, StartPlan
from ddplaunch.transport import agent_process
from ddplaunch.worker import bootstrap
from tests.support import runs
from tests.support.configs import agent_spec


def test_what_the_agent_starts_by_name_exists() -> None:
    assert find_spec(forkserver_client.FORKSERVER_MODULE)
    assert find_spec(keeper_start.KEEPER_MODULE)
    assert find_spec(cannot_join.TELLER_MODULE)
    assert Path(start_plan.EXEC_WORKER).is_file()


def test_all_starts_of_a_worker_execute_the_same() -> None:
    own = ast.dump(ast.parse(bootstrap.OUTERMOST).body[0])
    for text in (forkserver_client._START, keeper_start._START, Path(start_plan.EXEC_WORKER).read_text()):
        executed = [ast.dump(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.With)]
        assert executed == [own]


def test_imports_have_taken_the_time_until_the_forkserver_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not until the main thread has heard it: that may wait for the file system of the log folder."""
    posted: list[Any] = []
    plan = StartPlan("script")
    client = ForkserverClient(agent_spec(), plan, {}, (1024, 1024), posted.append, posted.append, posted.append)
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    client._take(ForkserverReady())
    monkeypatch.setattr(time, "monotonic", lambda: 80.0)
    client.handle_event(posted[0])
    assert client.import_s == 5.0


def test_nothing_is_run_in_a_process_without_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "exit_code", None)
    exec(bootstrap.OUTERMOST, {name: getattr(bootstrap, name) for name in ("caught", "finished", "script")})
    assert bootstrap.exit_code is None


SHOW = """import atexit, gc, os
atexit.register(lambda: os.write(2, b"%d %d" % (gc.get_threshold()[0], gc.get_freeze_count())))"""
LAUNCHER = "import sys; sys.argv[1:] = ['--version']; from ddplaunch.__main__ import main; main()"


@pytest.mark.parametrize("start", [LAUNCHER, agent_process._START], ids=["launcher", "agent"])
def test_garbage_is_searched_for_seldom_and_not_at_the_end(start: str) -> None:
    """The searches took an eighth of the time that launcher and agent compute in a short run."""
    done = runs.python("-c", f"{SHOW}\n{start}", agent_process.PACKAGE_ROOT)
    threshold, frozen = map(int, done.err.split())
    assert threshold == 10_000
    assert frozen > 10_000, "all that was imported"


@pytest.mark.parametrize("modules", ["exec_worker, late_import, requests", "forkserver"])
def test_the_start_of_a_worker_loads_no_module_for_another_ones_sake(modules: str) -> None:
    """``importlib.abc`` loads them all."""
    code = f"import sys; from ddplaunch.worker import {modules}; from ddplaunch.features import worker_patches"
    done = runs.python("-c", f"{code}; print({{'random', 'shutil', 'tempfile', 'zipfile'}} & {{*sys.modules}})")
    assert done.out == "set()\n", done.err
