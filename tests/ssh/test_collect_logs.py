"""``--collect-logs``: what the workers wrote on other machines is here at the end, byte for byte, or it is said."""

from __future__ import annotations

import hashlib
import re
import signal
from pathlib import Path

import pytest

from tests.ssh.test_job import EXIT_WITH, job, rounds, wait_for_world
from tests.support.nodes import Lab
from tests.support.processes import wait_until
from tests.support.runs import PROGRAMS, start

pytestmark = pytest.mark.ssh

THERE = "XDG_STATE_HOME=/run/state"
"""Every node's /run is its own; the rest of the file system they share."""


def digests(folder: Path) -> dict[str, str]:
    """Of all files below a folder, by their path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def digests_there(lab: Lab, node: str, run_dir: Path) -> dict[str, str]:
    """The same of a node's own folder of a run."""
    find = f"cd /run/state/ddplaunch/{run_dir.name}/{node} && find . -type f -exec sha256sum {{}} +"
    lines = lab[node].run(["sh", "-c", find]).stdout.splitlines()
    return {line.split()[1].removeprefix("./"): line.split()[0] for line in lines}


def test_all_files_of_all_attempts_and_nodes_are_here_as_they_are_there(make_lab):
    lab = make_lab(2)
    options = ("--collect-logs", "--nproc-per-node", "2", "--max-restarts", "1", "-r", "3", "-x", THERE)
    filters = ("--duplicate-stderr-filters", "rank")
    finished = job(lab, *options, *filters, PROGRAMS / "write_logs.py", "4000000").finish()
    assert finished.returncode == 0, finished.err
    for node in ("node1", "node2"):
        here = digests(finished.run_dir / node)
        assert here == digests_there(lab, node, finished.run_dir)
        assert {"attempt_0/filtered_stderr.log", "attempt_0/1/stderr.log", "attempt_1/1/stdout.log"} <= here.keys()
    assert (finished.run_dir / "node1/attempt_0/1/error.json").exists()
    said = rf"^ddplaunch: logs of 4 ranks \(\d\d MB\) from 2 nodes are in {finished.run_dir}$"
    assert re.search(said, finished.err, re.MULTILINE)


def test_what_is_on_a_common_file_system_is_not_copied_onto_itself_and_the_page_names_rank_and_host(make_lab):
    lab = make_lab(2)
    finished = job(lab, "--collect-logs", "--nproc-per-node", "1", EXIT_WITH, "1=raise:no such luck").finish()
    assert finished.returncode == 1
    assert re.search(r"^rank 1 on node2 failed: RuntimeError: no such luck", finished.err, re.MULTILINE)
    assert "stopped:  rank 0" in finished.err
    assert f"logs of node[1-2] are in {finished.run_dir}, on a file system that these nodes share" in finished.err
    assert "no such luck" in (finished.run_dir / "node2/attempt_0/0/stderr.log").read_text()
    assert not list(finished.run_dir.rglob("*.part"))
    assert finished.err.rstrip().endswith("=" * 80), "the page is the last thing on the screen"


def test_a_lost_nodes_logs_are_missed_and_the_others_are_here(make_lab, tmp_path):
    lab = make_lab(2)
    running = rounds(lab, tmp_path / "end", "--collect-logs", "--nnodes", "1:2", "-x", THERE)
    wait_for_world(running, 0, "node1,node2")
    lab["node2"].crash()
    wait_for_world(running, 1, "node1")
    (tmp_path / "end").touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err
    assert "logs of node2 could not be copied: the nodes were lost" in finished.err
    assert digests(finished.run_dir / "node1") == digests_there(lab, "node1", finished.run_dir)


def test_a_full_disk_here_costs_one_warning_and_not_the_report(make_lab, tmp_path):
    lab = make_lab(2)
    (state := tmp_path / "state").mkdir(exist_ok=True)
    script = 'mount -t tmpfs -o size=4m none "$0" && { "$@"; code=$?; find "$0" -type f; exit $code; }'
    under = [*lab.prefix, "sh", "-c", script, str(state)]
    hosts = ("--hosts", "node[1-2]", "--ssh-config", lab.ssh_config, "-x", "DDPLAUNCH_TEST_MARK", "-x", THERE)
    options = ("--collect-logs", "--nproc-per-node", "1", "-r", "3")
    env = {"XDG_STATE_HOME": str(state)}
    finished = start(*hosts, *options, PROGRAMS / "write.py", "big:8000000", under=under, env=env).finish()
    assert finished.returncode == 0, finished.err
    assert finished.err.count("No space left on device") == 1
    assert "ddplaunch: logs of node[1-2] are incomplete: " in finished.err
    assert "report.json" in finished.out
    assert "stdout.log\n" not in finished.out


CHATTY = """
import os, pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
for number in range(60_000):
    print("rank", os.environ["RANK"], number, "x" * 200)
time.sleep(3600)
"""


@pytest.mark.slow
def test_a_slow_link_loses_no_node_and_a_signal_or_a_crash_ends_the_collecting_alone(make_lab, tmp_path):
    """Workers say more than the link takes, for longer than a node may be silent; then their logs come over it."""
    lab = make_lab(2)
    (tmp_path / "chatty.py").write_text(CHATTY)
    options = ("--collect-logs", "--nproc-per-node", "1", "-x", THERE)
    running = job(lab, *options, tmp_path / "chatty.py", tmp_path / "go")
    run_dir = Path(running.wait_for("logs in (.*)")[0][1])
    for node in lab.nodes:
        node.slow_down(0.1, 1e6)
    (tmp_path / "go").touch()
    wait_until(lambda: len(running.lines) > 7000, 60)
    running.signal(signal.SIGINT)
    parts = [run_dir / node.name / "attempt_0/0/stdout.log.part" for node in lab.nodes]
    wait_until(lambda: all(part.exists() for part in parts), 60)
    lab["node2"].crash()
    running.signal(signal.SIGINT)
    finished = running.finish(30)
    assert finished.returncode == 130, finished.err
    assert "ddplaunch: SIGINT: logs that were not copied yet stay on their nodes" in finished.err
    assert re.search(
        r"logs of node(1|\[1-2\]) are incomplete: SIGINT; the complete files stay on the nodes", finished.err
    )
    assert re.search(r"logs of node(2|\[1-2\]) are incomplete", finished.err)
    assert "has not answered" not in finished.err
    wait_until(lambda: not lab.leftovers(), 20)
