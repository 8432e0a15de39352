"""Hosts on which ddplaunch is not installed, or another one: they are sent the launcher's, for whatever is started."""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import sys
import sysconfig
from pathlib import Path

import pytest

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig, RemoteConfig
from ddplaunch.features.remote import package
from ddplaunch.features.remote.command_handle import CommandTransport
from ddplaunch.protocol.launcher_agent import AgentEnded, Notice, SweepNode
from ddplaunch.transport.handle import ChannelClosed, FromNode, NodeFacts, discard_output
from ddplaunch.version import __version__
from tests.support.connecting import connecting
from tests.support.installed_stub import STUBS, other_pythons
from tests.support.nodes import Lab, Node
from tests.support.processes import wait_until
from tests.support.repositories import repository
from tests.support.runs import PROGRAMS, ROOT, Finished
from tests.support.ssh_jobs import job

pytestmark = pytest.mark.ssh

WITH_TORCH = (
    *("torch*", "functorch", "numpy*", "typing_extensions.py", "sympy", "mpmath", "networkx", "jinja2", "markupsafe"),
    *("filelock", "fsspec", "setuptools", "_distutils_hack"),
)
OWN = str(ROOT / "ddplaunch")
FIND = """
import multiprocessing, os, sys

def tell():
    import ddplaunch
    print("found", os.environ["RANK"], ddplaunch.__file__, flush=True)

if __name__ == "__main__":
    tell()
    child = multiprocessing.get_context("spawn").Process(target=tell)
    child.start()
    child.join()
    sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A Python without any package; runs find the stub of torch by PYTHONPATH."""
    python = tmp_path / "bare" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    (tmp_path / "bare" / "pyvenv.cfg").write_text(Path(sys.prefix, "pyvenv.cfg").read_text())
    python.symlink_to(Path(sys.executable).resolve())
    return str(python)


def site_of(python: str) -> Path:
    """Where packages of the bare Python would be."""
    return Path(python).parents[1] / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"


def without_package(lab: Lab) -> Lab:
    """Hides the launcher's ddplaunch from all nodes: it shares no file system with them."""
    for node in lab.nodes:
        node.run(["mount", "-t", "tmpfs", "none", OWN])
    return lab


def copies(node: Node) -> Path:
    return node.folder / "home/.local/state/ddplaunch/packages"


def names(node: Node) -> list[str]:
    return sorted(path.name for path in copies(node).iterdir() if path.name != ".lock")


def test_a_run_and_its_restarts_and_the_next_run_use_what_was_sent_once(make_lab, bare: str, tmp_path: Path) -> None:
    lab, script = without_package(make_lab(2)), tmp_path / "find.py"
    script.write_text(FIND)
    options = ("-v", "--remote-python", bare, "--nproc-per-node", "1", "--max-restarts", "1")
    first = job(lab, *options, script).finish()
    assert first.returncode == 0, first.err
    written = []
    for rank, node in enumerate(lab.nodes):
        (name,) = names(node)
        found = re.findall(rf"found {rank} (\S+)", first.out)
        # In the second attempt, and in what the script has spawned; the first may be ended by the other rank before.
        assert len(found) > 2, first.out
        assert set(found) == {f"{copies(node)}/{name}/ddplaunch/__init__.py"}
        assert f"{node.name}: runs the ddplaunch that was sent to it" in first.err
        written.append((copies(node) / name).stat().st_ino)
    assert job(lab, *options, script).finish().returncode == 0
    assert [(copies(node) / names(node)[0]).stat().st_ino for node in lab.nodes] == written


@pytest.mark.slow
def test_it_runs_there_in_each_version_of_python(make_lab, tmp_path: Path) -> None:
    lab, script = without_package(make_lab(2)), tmp_path / "version.py"
    script.write_text("import sys, ddplaunch; print('runs', sys.version_info[:2], ddplaunch.__version__)")
    for python in other_pythons():
        done = job(lab, "--remote-python", python, "--nproc-per-node", "1", script).finish()
        version = tuple(map(int, Path(python).name.removeprefix("python").split(".")))
        assert done.out.count(f"runs {version} {__version__}") == 2, done.err


def test_commands_reach_such_a_host(make_lab, bare: str, tmp_path: Path) -> None:
    lab = without_package(make_lab(1))
    run_id, end = f"sent-{os.getpid()}", tmp_path / "end"

    def asked(*command: str) -> Finished:
        return job(lab, "--remote-python", bare, *command).finish()

    running = job(
        lab, "--remote-python", bare, "--rdzv-id", run_id, "--nproc-per-node", "1", PROGRAMS / "rounds.py", end
    )
    running.wait_for("rank 0 of 1 in round 0")
    seen = asked("--ps")
    assert re.search(rf"{run_id} .*1 agent, 1 forkserver, .*1 worker", seen.out), (seen.out, seen.err)
    assert run_id in asked("--stacks", run_id).out
    killed = asked("--kill", run_id)
    assert killed.returncode == 0, killed.err
    assert running.finish().returncode == 128 + signal.SIGTERM
    looked = asked("--logs", run_id)
    assert looked.returncode == 0, looked.err
    assert not lab.leftovers()


@pytest.mark.torch
@pytest.mark.slow
def test_a_check_says_where_it_was_sent(make_lab, bare: str) -> None:
    """Its job runs with the real torch and what that needs, and no other package."""
    own, site = Path(sysconfig.get_path("purelib")), site_of(bare)
    site.mkdir(parents=True)
    for name in WITH_TORCH:
        for path in own.glob(name):
            (site / path.name).symlink_to(path)
    lab = make_lab(2)
    lab["node2"].run(["mount", "-t", "tmpfs", "none", OWN])
    checked = job(lab, "--remote-python", bare, "--check").finish()
    assert "ddplaunch was sent to node2: it is not installed there, or not as here" in checked.out, checked.err
    assert "all-reduce by gloo over 2 nodes" in checked.out


def test_code_is_synced_to_such_a_host(make_lab, bare: str, tmp_path: Path) -> None:
    root = repository(tmp_path / "project", {"train.py": "print('runs')", "lib.py": ""})
    lab = without_package(make_lab(1))
    for folder in (root, *(node.folder / "home/.local" for node in lab.nodes)):
        folder.mkdir(parents=True, exist_ok=True)
        lab["node1"].run(["mount", "-t", "tmpfs", "none", str(folder)])
    options = ("--sync", "--remote-python", bare, "--nproc-per-node", "1", "--log-dir", tmp_path / "logs")
    done = job(lab, *options, "train.py", cwd=root).finish()
    assert "runs" in done.out, done.err


def test_another_version_is_not_used(make_lab, bare: str, tmp_path: Path) -> None:
    """That of the launcher is found where the launcher has it; or else it is sent."""
    other = tmp_path / "other" / "ddplaunch"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text('__version__ = "99.1"\nraise SystemExit("used")\n')
    (other / "version.py").touch()
    lab = make_lab(2)
    lab["node2"].run(["mount", "-t", "tmpfs", "none", OWN])
    with connecting(lab) as them:
        them.start(python=bare, env={"PYTHONPATH": f"{other.parent}:{ROOT}"}, needs_torch=False)
        connected, failures = them.settle()
        assert failures == []
        assert {facts.ddplaunch for facts in connected} == {__version__}
        assert sorted(facts.sent for facts in connected) == [False, True]


def test_a_clone_with_other_files_is_not_used_and_one_with_equal_files_is(make_lab, bare: str, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    equal = shutil.copytree(OWN, tmp_path / "equal" / "ddplaunch", ignore=ignored).parent
    other = shutil.copytree(OWN, tmp_path / "other" / "ddplaunch", ignore=ignored).parent
    (other / "ddplaunch" / "agent" / "main.py").write_text("raise SystemExit('used')\n")
    lab = without_package(make_lab(1))
    for root, is_sent in ((equal, False), (other, True)):
        with connecting(lab) as them:
            them.start(python=bare, env={"PYTHONPATH": f"{root}:{ROOT}"}, needs_torch=False)
            ((facts,), failures) = them.settle()
            assert (facts.sent, failures) == (is_sent, [])


def test_an_agent_that_connects_to_the_launcher_comes_from_what_was_sent(make_lab, bare: str) -> None:
    lab = without_package(make_lab(2))
    with connecting(lab, connects=True) as them:
        them.start(python=bare, needs_torch=False, setup="export A=1")
        connected, failures = them.settle()
        assert (failures, them.not_connected) == ([], [])
        assert [facts.sent for facts in connected] == [True, True]
        for handle in them.handles.values():
            handle.send(SweepNode("still there", ()))
        them.wait_for(Notice, 4)
        assert [handle.close() for handle in them.handles.values()] == [7, 7]


def test_without_room_or_in_a_folder_of_others_it_is_kept_elsewhere_or_the_reasons_are_told(
    make_lab, bare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = without_package(make_lab(1))
    full, public, last = tmp_path / "full", tmp_path / "public", tmp_path / "last-{uid}"
    full.mkdir()
    public.mkdir()
    public.chmod(0o777)
    lab["node1"].run(["mount", "-t", "tmpfs", "-o", "size=500k", "none", str(full)])
    (lab["node1"].folder / "home/.local").mkdir()
    lab["node1"].run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(lab["node1"].folder / "home/.local")])

    def started(*bases: str | Path) -> object:
        monkeypatch.setattr(package, "_BASES", tuple(map(str, bases)))
        package._receiver.cache_clear()
        with connecting(lab) as them:
            them.start(python=bare, needs_torch=False)
            connected, failures = them.settle()
            return (connected or failures)[0]

    refused = ("~/.local/state/ddplaunch/packages", full / "packages", public)
    facts = started(*refused, last)
    assert isinstance(facts, NodeFacts)
    assert facts.sent
    assert list(Path(str(last).format(uid=os.getuid())).glob("[0-9a-f]*"))
    failure = str(started(*refused))
    for told in ("Read-only file system", "No space left on device", f"{public}: another user may write in it"):
        assert told in failure
    assert list(public.iterdir()) == []
    assert lab["node1"].run(["find", str(full), "-name", "*.py"]).stdout == ""


@pytest.mark.slow
def test_on_a_slow_link_the_time_that_it_is_sent_does_not_count(make_lab, bare: str) -> None:
    lab = without_package(make_lab(1))
    lab["node1"].slow_down(0.02, 300_000)
    finished = job(lab, "--remote-python", bare, "--start-timeout", "8", "--ps").finish(110)
    assert finished.returncode == 0, finished.err
    assert len(names(lab["node1"])) == 1


def test_two_launchers_at_once_and_one_that_is_killed_while_it_sends(make_lab, bare: str) -> None:
    lab = without_package(make_lab(1))
    node = lab["node1"]
    node.slow_down(0.02, 500_000)  # 60 kB/s: it takes some 10 s.
    killed = job(lab, "--remote-python", bare, "--ps")
    wait_until(lambda: (copies(node) / ".lock").exists(), 60)
    os.kill(killed.pid, signal.SIGKILL)
    killed.finish()
    wait_until(lambda: not node.pids(), 60)
    assert names(node) == []
    node.full_speed()
    both = [job(lab, "--remote-python", bare, "--ps") for _ in range(2)]
    assert [each.finish().returncode for each in both] == [0, 0]
    assert len(names(node)) == 1


@pytest.mark.slow
def test_a_keeper_is_left_and_taken_over_on_such_a_host(
    make_lab, bare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    shutil.copytree(STUBS, site_of(bare))
    lab, script = without_package(make_lab(1)), tmp_path / "quick.py"
    script.write_text("print('runs')")
    options = ("-v", "--remote-python", bare, "--nproc-per-node", "1")
    first = job(lab, *options, "--keep-warm", "5m", script).finish()
    assert first.returncode == 0, first.err
    wait_until(lambda: list(Path(os.environ["XDG_STATE_HOME"], "ddplaunch").glob("warm-*.sock")), 60)
    second = job(lab, *options, script).finish()
    assert "node1: torch was imported by an earlier run" in second.err, second.err
    killed = job(lab, "--remote-python", bare, "--kill", "warm").finish()
    assert killed.returncode == 0, killed.err
    wait_until(lambda: not lab["node1"].pids())


class HiddenTransport(CommandTransport):
    """Its command reaches what has neither the launcher's ddplaunch nor its home."""

    home = ""

    @classmethod
    def carrier(cls, _config: LaunchConfig, _host: Host) -> tuple[str, ...]:  # type: ignore[override]
        hidden = f'mount -t tmpfs none {OWN} && exec "$@"'
        return "unshare", "--mount", "sh", "-c", hidden, "sh", "env", "-u", "PYTHONPATH", f"HOME={cls.home}"


@pytest.mark.usefixtures("ssh_keys")
def test_a_command_that_carries_stdin_carries_it_too(bare: str, tmp_path: Path) -> None:
    HiddenTransport.home = str(tmp_path)
    posted: queue.SimpleQueue[object] = queue.SimpleQueue()
    config = LaunchConfig(script="x.py", hosts=(Host("one"),), remote=RemoteConfig(python=bare))
    handle = HiddenTransport(config, ("one",), "tag", discard_output, posted.put).start(0, "query")
    try:
        connected = posted.get(timeout=60)
        assert isinstance(connected, FromNode)
        assert isinstance(connected.event, NodeFacts), connected
        assert connected.event.sent
        handle.send(SweepNode("tag.of.nothing", ()))
        handle.end_input()
        events = [posted.get(timeout=60) for _ in range(3)]
        assert [event.event for event in events[1:]] == [AgentEnded(()), ChannelClosed()]  # type: ignore[attr-defined]
    finally:
        handle.close()
    assert len(list((tmp_path / ".local/state/ddplaunch/packages").glob("[0-9a-f]*"))) == 1
