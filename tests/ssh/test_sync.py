"""--sync: hosts that share nothing with the launcher's machine get the code over SSH, but only what they lack."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.nodes import Lab, Node
from tests.support.processes import wait_until
from tests.support.repositories import repository
from tests.support.runs import Finished, Running, environment, run
from tests.support.ssh_jobs import job, pid_on

pytestmark = pytest.mark.ssh

TRAIN = """
import os, pathlib, sys
import lib.model
print("runs", os.environ["RANK"], lib.model.VERSION, pathlib.Path("config.txt").read_text(), os.getcwd(), __file__)
out = pathlib.Path("out.txt")
print("before:", out.read_text() if out.exists() else "nothing", flush=True)
out.write_text(lib.model.VERSION)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {"train.py": TRAIN, "lib/__init__.py": "", "lib/model.py": "VERSION = 'first'", "config.txt": "config"}
    return repository(tmp_path / "my project", {**files, ".gitignore": "data\n"})


@pytest.fixture
def lab(make_lab, root: Path) -> Lab:
    """Two hosts whose file systems have neither the code nor the launcher's home."""
    found: Lab = make_lab(2)
    for node in found.nodes:
        hide(node, root)
    return found


def hide(node: Node, root: Path) -> None:
    """Have the node see neither the code nor the launcher's home."""
    for folder in (root, local(node)):
        folder.mkdir(parents=True, exist_ok=True)
        node.run(["mount", "-t", "tmpfs", "none", str(folder)])


def local(node: Node) -> Path:
    """The folder with the state of programs, of the user on the node."""
    return node.folder / "home/.local"


def snapshots(node: Node) -> Path:
    """The copies on the node, as this process can see them."""
    return Path(f"/proc/{node.init_pid}/root{local(node)}/state/ddplaunch/snapshots")


def begin(lab: Lab, root: Path, *arguments: str, **popen: object) -> Running:
    options = ("-v", "--sync", "--nproc-per-node", "1", "--log-dir", root.parent / "logs")
    return job(lab, *options, *arguments, cwd=root, **popen)


def sync(lab: Lab, root: Path, *arguments: str, **popen: object) -> Finished:
    return begin(lab, root, *arguments, **popen).finish(90)


def test_code_comes_to_hosts_without_it_and_only_changes_come_again(lab: Lab, root: Path):
    first = sync(lab, root, "train.py")
    assert first.returncode == 0, first.err
    for rank, node in enumerate(lab.nodes):
        state = local(node) / "state/ddplaunch"
        where = rf"{state}/work/my project-\w+ {state}/snapshots/my project-\w+/\w+/train\.py"
        assert re.search(rf"runs {rank} first config {where}", first.out), first.out
    assert first.out.count("before: nothing") == 2
    (root / "lib/model.py").write_text("VERSION = 'second'")
    second = sync(lab, root, "-m", "train")
    assert second.returncode == 0, second.err
    assert second.out.count(" second config ") == 2
    assert second.out.count("before: first") == 2  # What workers write stays in their working directory.
    assert "sent 0 B of code" not in second.err
    third = sync(lab, root, "train.py")
    assert third.out.count(" second config ") == 2, third.err
    assert "sent 0 B of code to 2 hosts" in third.err
    assert [node.log.count("Accepted publickey") for node in lab.nodes] == [3, 3]  # One login for each run.


def test_a_working_directory_below_the_root_is_the_same_there(lab: Lab, root: Path):
    (root / "lib/run.py").write_text("import os, model; print('runs', model.VERSION, os.getcwd().split('/')[-1])")
    options = ("--sync", "--nproc-per-node", "1", "--log-dir", root.parent / "logs")
    finished = job(lab, *options, "run.py", cwd=root / "lib").finish()
    assert finished.out.count("runs first lib") == 2, finished.err


def test_data_that_was_not_sent_is_named_on_the_failure_page_and_can_be_sent(lab: Lab, root: Path):
    (root / "data").mkdir()
    (root / "data/x").write_text("found")
    (root / "train.py").write_text("print('runs', open('data/x').read())")
    failed = sync(lab, root, "train.py")
    assert failed.returncode == 1
    assert "data is on this machine, but was not sent to the hosts: --snapshot-include data sends it" in failed.err
    assert sync(lab, root, "--snapshot-include", "data", "train.py").out.count("runs found") == 2


def test_a_job_of_variable_size_goes_on_without_a_host_that_has_no_room_for_the_code(lab: Lab, root: Path):
    (root / "big.bin").write_bytes(os.urandom(1 << 20))
    lab["node2"].run(["mount", "-o", "remount,size=500k", str(local(lab["node2"]))])
    finished = sync(lab, root, "--nnodes", "1:2", "train.py")
    assert finished.returncode == 0, finished.err
    assert "runs 0 first" in finished.out
    assert "warning: the run goes on without hosts that have no code" in finished.err
    assert re.search(r"node2: \S.*No space left on device", finished.err), finished.err
    assert "1 worker on node1" in finished.err


@pytest.mark.torch
def test_a_check_of_hosts_that_get_the_code_needs_no_script_there(lab: Lab, root: Path):
    checked = job(lab, "--check", "--sync", "train.py", cwd=root).finish()
    assert "problems found" in checked.err, checked.err  # Perhaps with a warning about this machine.


def test_what_is_in_the_way_or_does_not_fit_is_one_message_for_each_host(lab: Lab, root: Path):
    assert sync(lab, root, "train.py").returncode == 0
    (root / "out.txt").write_text("now of the code")
    (root / "big.bin").write_bytes(os.urandom(3 << 20))
    lab["node1"].run(["mount", "-o", "remount,size=2m", str(local(lab["node1"]))])
    finished = sync(lab, root, "train.py")
    assert finished.returncode == 82
    assert "the code cannot be copied to hosts" in finished.err
    assert "out.txt is in the way: the code has a file or folder of this name" in finished.err
    assert "No space left on device" in finished.err
    assert "runs" not in finished.out


def test_checkpoints_in_a_folder_of_the_code_are_found_by_a_run_of_other_code_from_another_folder(lab: Lab, root: Path):
    (root / "saved").mkdir()
    (root / "saved/.gitkeep").write_text("")
    (root / "lib/save.py").write_text("open('../saved/x', 'w').write('found')")
    options = ("--sync", "--nproc-per-node", "1", "--log-dir", root.parent / "logs")
    saved = job(lab, *options, "save.py", cwd=root / "lib").finish()
    assert saved.returncode == 0, saved.err
    (root / "train.py").write_text("print('runs', open('saved/x').read())")
    loaded = sync(lab, root, "train.py")
    assert loaded.out.count("runs found") == 2, loaded.err


def arrives(node: Node) -> None:
    """Wait until a part of a large file has arrived there."""
    wait_until(lambda: part_bytes(node) > 1 << 20, 30)


def part_bytes(node: Node) -> int:
    """So much of a file has arrived that is not complete."""
    with suppress(FileNotFoundError):
        return max([path.stat().st_size for path in snapshots(node).glob("*/received/*.part")], default=0)
    return 0


def copy_on(node: Node) -> Path:
    """The copy that is complete; or a path that does not exist."""
    return next(iter(snapshots(node).glob("*/[!r.]*")), Path("/nonexistent"))


@pytest.mark.slow
def test_a_cable_that_is_pulled_while_code_is_sent_is_told_soon_and_holds_up_nobody(lab: Lab, root: Path):
    (root / "big.bin").write_bytes(big := os.urandom(4 << 20))
    lab["node2"].slow_down(0.05, 4e6)
    running = begin(lab, root, "--nnodes", "1:2", "train.py")
    arrives(lab["node2"])
    lab["node2"].unplug()
    pulled_at = time.monotonic()
    running.wait_for("node2: has said nothing for 20 s while the code was sent to it", 1, 40)
    assert time.monotonic() - pulled_at < 30
    first = running.finish(60)
    assert first.returncode == 0, first.err
    assert "the code is on 1 of 2 hosts; " in first.err
    assert "runs 0 first" in first.out
    lab["node2"].replug()
    lab["node2"].full_speed()
    second = sync(lab, root, "train.py")
    assert second.returncode == 0, second.err
    assert second.out.count(" first config ") == 2
    assert [path.read_bytes() for path in snapshots(lab["node2"]).glob("*/*/big.bin")] == [big]
    sent = re.search(r"sent (\S+) MB of code to 2 hosts", second.err)
    assert sent, second.err
    assert float(sent[1]) < 3.5


@pytest.mark.slow
def test_a_host_behind_a_slow_link_is_waited_for_and_said_to_lack_some(lab: Lab, root: Path):
    """3 MB over 1 Mbit/s take longer than a host may be silent."""
    (root / "big.bin").write_bytes(os.urandom(3 << 20))
    lab["node2"].slow_down(0.1, 1e6)
    running = begin(lab, root, "train.py")
    running.wait_for(r"the code is on 1 of 2 hosts; \S+ MB left for node2", 1, 40)
    finished = running.finish(120)
    assert finished.returncode == 0, finished.err
    assert finished.out.count(" first config ") == 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "agent", "node"])
def test_after_a_death_in_the_middle_of_a_transfer_the_next_run_is_right(lab: Lab, root: Path, victim: str):
    (root / "big.bin").write_bytes(big := os.urandom(4 << 20))
    lab["node2"].slow_down(0.05, 8e6)
    running = begin(lab, root, "train.py")
    arrives(lab["node2"])
    if victim == "node":
        lab["node2"].crash()
    else:
        os.kill(
            running.process.pid if victim == "launcher" else pid_on(lab["node2"], "DDPLAUNCH_START"), signal.SIGKILL
        )
    killed = running.finish(60)
    assert killed.returncode == (-signal.SIGKILL if victim == "launcher" else 82), killed.err
    assert "runs" not in killed.out
    lab["node2"].full_speed()
    if victim == "node":
        lab["node2"].start()
        lab["node2"].wait()
    wait_until(lambda: not lab.leftovers(), 30, "an agent is left")
    again = sync(lab, root, "train.py")
    assert again.returncode == 0, again.err
    assert again.out.count(" first config ") == 2
    for node in lab.nodes:
        assert [path.read_bytes() for path in snapshots(node).glob("*/[!r.]*/big.bin")] == [big]
        assert not [*snapshots(node).glob("*/received"), *snapshots(node).glob("*/.part-*")]


GOES_ON = """
import os, pathlib, socket, sys, time
import lib.model
host = socket.gethostname()
print("runs", os.environ["RANK"], "on", host, lib.model.VERSION, pathlib.Path("config.txt").read_text(), flush=True)
while host != "node3" and not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
pathlib.Path(sys.argv[1]).touch()
"""


def test_a_spare_has_the_code_too_and_runs_what_was_sent(make_lab, root: Path, tmp_path: Path):
    lab: Lab = make_lab(3)
    for node in lab.nodes:
        hide(node, root)
    (root / "train.py").write_text(GOES_ON)
    running = begin(lab, root, "--nnodes", "2", "--max-restarts", "2", "train.py", str(tmp_path / "end"))
    running.wait_for("runs 1 on node2 first config")
    (root / "lib/model.py").write_text("VERSION = 'edited'")
    lab["node2"].crash()
    finished = running.finish(90)
    assert finished.returncode == 0, finished.err
    assert "node3 replaces node2" in finished.err
    assert "runs 1 on node3 first config" in finished.out


def test_a_snapshot_that_was_taken_before_is_sent(lab: Lab, root: Path):
    taken = run("--take-snapshot", "--log-dir", root.parent / "logs", "train.py", cwd=root)
    (root / "lib/model.py").write_text("VERSION = 'edited'")
    for options in (("--use-snapshot", taken.out.strip()), ("--use-snapshot", taken.out.strip(), "-m")):
        script = "train" if "-m" in options else "train.py"
        finished = sync(lab, root, *options, script)
        assert finished.returncode == 0, finished.err
        assert finished.out.count(" first config ") == 2
    shutil.copytree(taken.out.strip(), root.parent / "a copy", symlinks=True)
    finished = sync(lab, root, "--use-snapshot", str(root.parent / "a copy"), "train.py")
    assert finished.out.count(" first config ") == 2, finished.err


def test_a_home_that_cannot_be_written_is_one_message(lab: Lab, root: Path):
    lab["node1"].run(["mount", "-o", "remount,ro", str(local(lab["node1"]))])
    finished = sync(lab, root, "train.py")
    assert finished.returncode == 82
    assert re.search(r"node1: \S.*Read-only file system", finished.err), finished.err
    assert "node2" not in finished.err.partition("cannot be copied")[2]


def test_a_copy_that_is_deleted_before_the_workers_start_is_named(lab: Lab, root: Path):
    """While the run waits for node2, somebody deletes the copy on node1."""
    (root / "big.bin").write_bytes(os.urandom(4 << 20))
    lab["node2"].slow_down(0.05, 8e6)
    running = begin(lab, root, "train.py")
    copies = lambda: snapshots(lab["node1"]).glob("*/*/train.py")  # noqa: E731
    copy = wait_until(lambda: [path for path in copies() if "/.part-" not in str(path)], 30)[0]
    shutil.rmtree(copy.parent)
    finished = running.finish(60)
    assert finished.returncode == 82, finished.err
    assert "there is no snapshot" in finished.err
    assert "It was sent to this host, and has been deleted since: start the run again." in finished.err


def test_odd_names_arrive(lab: Lab, root: Path):
    names = ["a b.py", "new\nline", os.fsdecode(b"not utf \xff"), "ü", "--x", "a'\"b", "[1]"]
    for name in names:
        (root / name).write_text(f"text of {name!r}")
    text = "print('runs', [open(name).read() == f'text of {name!r}' for name in NAMES])"
    (root / "train.py").write_text(text.replace("NAMES", repr(names)))
    finished = sync(lab, root, "train.py")
    assert finished.out.count(f"runs {[True] * len(names)}") == 2, finished.err


@pytest.mark.slow
@pytest.mark.parametrize("with_launcher", [False, True])
def test_hosts_that_share_a_home_make_one_copy(make_lab, root: Path, tmp_path: Path, with_launcher: bool):
    """With each other only, or with the launcher's machine, too."""
    home, here = tmp_path / "home", tmp_path / ("home" if with_launcher else "here")
    (root / "big.bin").write_bytes(os.urandom(2 << 20))
    options = ("-v", "--sync", "--nproc-per-node", "1", "-x", f"HOME={home}")
    env = {"XDG_STATE_HOME": str(here / ".local/state")}
    finished = job(make_lab(2), *options, "train.py", extra=env, cwd=root).finish()
    assert finished.returncode == 0, finished.err
    assert finished.out.count(" first config ") == 2
    assert len(list((home / ".local/state/ddplaunch/snapshots").glob("*/[!r.]*/big.bin"))) == 1
    assert ("sent 0 B" if with_launcher else "sent 2.0 MB") in finished.err


FEW = """
import ddplaunch.features.snapshot.hosts as hosts, ddplaunch.features.snapshot.spread as spread
hosts._SPREAD_ABOVE, spread._PLACES, spread._ONE_MORE_S = 2, 1, 100
"""


@pytest.fixture
def few(make_lab, root: Path, tmp_path: Path) -> tuple[Lab, dict[str, str]]:
    """Four hosts that count as many: the launcher serves one at a time. The variables of a launcher for that."""
    lab: Lab = make_lab(4)
    for node in lab.nodes:
        hide(node, root)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(FEW)
    (root / "big.bin").write_bytes(os.urandom(4 << 20))
    return lab, {"PYTHONPATH": f"{tmp_path / 'site'}:{environment()['PYTHONPATH']}"}


@pytest.mark.slow
def test_hosts_that_have_the_code_give_it_to_others(few: tuple[Lab, dict[str, str]], root: Path):
    lab, path = few
    finished = sync(lab, root, "train.py", extra=path)
    assert finished.returncode == 0, finished.err
    assert finished.out.count(" first config ") == 4
    sent = re.search(r"sent (\S+) MB of code to 4 hosts, which gave each other (\S+) MB", finished.err)
    assert sent, finished.err
    assert float(sent[1]) < 5
    assert float(sent[2]) > 11


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped", "cut off"])
def test_a_host_that_gives_code_and_is_lost_is_replaced_by_the_launcher(
    few: tuple[Lab, dict[str, str]], root: Path, how: str
):
    """The first host gives the code to the others over a slow link; then its agent dies, or it is silent."""
    lab, path = few
    for node in lab.nodes:  # Before the start: a host would have given all before a later command takes effect.
        node.slow_down(0.05, 8e6)
    running = begin(lab, root, "--nnodes", "1:4", "train.py", extra=path)
    first = wait_until(lambda: [node for node in lab.nodes if (copy_on(node) / "big.bin").exists()], 60)[0]
    takers = [node for node in lab.nodes if node is not first]
    wait_until(lambda: all(part_bytes(node) > 100_000 for node in takers), 30)
    if how == "cut off":
        first.unplug()
    else:
        os.kill(pid_on(first, "DDPLAUNCH_START"), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    finished = running.finish(120)
    assert finished.returncode == 0, finished.err
    assert len(set(re.findall(r"runs \d first config (\S+)/work", finished.out))) >= 3, finished.err
    for node in takers:
        assert (copy_on(node) / "big.bin").read_bytes() == (root / "big.bin").read_bytes()
    first.crash()  # Its agent does not see the end of the launcher.
