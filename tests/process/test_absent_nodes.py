"""A node that fails before it has joined the others: they learn it at once, and do not wait for it.

Launchers are started by hand, one per node. That a node that has failed speaks to torch's own store as well:
tests/unit/test_torch_stub.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.installed_stub import STUBS
from tests.support.processes import children, command_line, wait_until
from tests.support.runs import TIMEOUT_S, Finished, Running, meeting, start

NODE_NOT_READY, NODE_LOST = 82, 84


def nodes(tmp_path: Path, *options: str, odd: int = -1, env: dict[str, str] | None = None) -> list[Running]:
    """Two nodes, of which the first serves the rendezvous; only the ``odd`` one gets options and variables."""
    script = tmp_path / "job.py"
    script.write_text("print('ran')\n")
    meet = meeting()
    running = []
    for index in range(2):
        conf = f"is_host={int(index == 0)},join_timeout=300"
        is_odd = index == odd
        own = options if is_odd else ()
        running.append(start("--nnodes", "2", *meet, "--rdzv-conf", conf, *own, script, env=env if is_odd else None))
    return running


def kill_helper(node: Running, name: str, *earlier: int) -> int:
    """A member starts once two nodes have imported torch at the same time."""
    agent = node.agent_pid()
    found = wait_until(
        lambda: [p for p in children(agent) if command_line(p).startswith(f"ddplaunch {name}") and p not in earlier],
        TIMEOUT_S,
    )
    os.kill(found[0], signal.SIGKILL)
    return found[0]


def assert_both_end(running: list[Running], absent: int, code: int, reason: str) -> Finished:
    """In far less than join_timeout. Returns how the other node has ended."""
    finished = [node.finish() for node in running]
    assert [done.returncode for done in finished] == [code, code], [done.err for done in finished]
    other = finished[1 - absent]
    assert " does not come: " in other.err
    assert reason in other.err
    assert other.out == ""
    return other


@pytest.fixture
def broken_torch(tmp_path: Path) -> dict[str, str]:
    """Variables with which torch cannot be imported."""
    (tmp_path / "path" / "torch").mkdir(parents=True)
    (tmp_path / "path" / "torch" / "__init__.py").write_text("raise OSError('libcudart.so')\n")
    return {"PYTHONPATH": str(tmp_path / "path")}


def test_a_node_without_torch_that_was_to_serve(broken_torch: dict[str, str], tmp_path: Path):
    assert_both_end(nodes(tmp_path, odd=0, env=broken_torch), 0, NODE_NOT_READY, "torch cannot be imported")


def test_a_node_without_a_module_of_preload_and_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DDPLAUNCH_SECRET", "0123456789abcdef")
    assert_both_end(nodes(tmp_path, "--preload", "no_such_module", odd=1), 1, NODE_NOT_READY, "no_such_module")


def test_a_node_whose_forkservers_die_that_was_to_serve(tmp_path: Path):
    running = nodes(tmp_path)
    kill_helper(running[0], "forkserver", kill_helper(running[0], "forkserver"))
    assert_both_end(running, 0, NODE_LOST, "was killed by SIGKILL")


def test_a_node_whose_member_dies(tmp_path: Path):
    # The node that serves waits for the file, or the member might have joined before it is killed.
    may_join = tmp_path / "may_join"
    (tmp_path / "waits.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(may_join)!r}): time.sleep(0.05)\n"
    )
    running = nodes(tmp_path, "--preload", "waits", odd=0, env={"PYTHONPATH": f"{tmp_path}:{STUBS}"})
    kill_helper(running[1], "member")
    may_join.touch()
    assert_both_end(running, 1, NODE_LOST, "member of the rendezvous has ended")


@pytest.mark.usefixtures("slow_import")
def test_another_forkserver_takes_the_place_of_one_that_dies_while_it_imports(tmp_path: Path):
    running = nodes(tmp_path)
    kill_helper(running[1], "forkserver")
    finished = [node.finish() for node in running]
    assert [done.returncode for done in finished] == [0, 0], [done.err for done in finished]
    assert "was killed by SIGKILL; trying again" in finished[1].err


def test_nodes_that_all_lack_torch_do_not_wait_for_each_other(
    broken_torch: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", broken_torch["PYTHONPATH"])
    finished = [node.finish(25) for node in nodes(tmp_path)]  # 30 s is how long each would tell the other.
    assert [done.returncode for done in finished] == [NODE_NOT_READY] * 2
