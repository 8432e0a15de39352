"""What a run would do: a command -> Plan -> one screen, or JSON."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.cli import main
from ddplaunch.cluster.scheduled import ScheduledTask
from ddplaunch.config import LaunchConfig
from ddplaunch.features.compile_cache import folder
from ddplaunch.features.plan.model import Plan
from ddplaunch.features.plan.page import as_json, page
from ddplaunch.features.plan.plan import plan
from ddplaunch.launcher import setup
from ddplaunch.launcher.display.messages import dry_run_banner
from ddplaunch.system import devices
from ddplaunch.transport import agent_process
from tests.support import golden
from tests.support.configs import launch_config, rendezvous_config


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without GPUs, with 8 CPUs and three scripts, and nothing of interest in the environment."""
    for name in [name for name in os.environ if name not in ("PATH", "HOME", "CI", "REFRESH_GOLDEN")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(sys, "executable", "/bin/python")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(devices, "_DRIVERS", ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr(folder, "chosen", lambda _environ, create=False: "/home/ada/.cache/ddplaunch/compile")
    monkeypatch.setattr(folder, "kind", lambda: "torch-2.13.0-1a2b3c4d")
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("folder").mkdir()
    Path("archive").write_bytes(b"PK\3\4\0")


def planned(command: str, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Of ``NAME=VALUE --option ...``; the script is train.py unless the last word is none."""
    words = shlex.split(command)
    argv = [word for number, word in enumerate(words) if "=" not in word or any("-" in each for each in words[:number])]
    with monkeypatch.context() as patch:
        for word in words[: len(words) - len(argv)]:
            patch.setenv(*word.split("=", 1))
        config = main.command.main([*argv], prog_name="ddplaunch", standalone_mode=False)
    return plan(config)


def test_the_screen(machine: None, monkeypatch: pytest.MonkeyPatch):
    def screen(command: str) -> str:
        shown = page(planned(command, monkeypatch))
        assert max(map(len, shown.splitlines())) <= 130
        assert len(shown.splitlines()) <= 43
        return shown.replace(agent_process.COMMAND[0], "/bin/python").replace(os.getcwd(), "<folder>")

    golden.check_pages("plan", screen)


def test_the_text_that_starts_the_agent_is_shown_with_v_only(machine: None, monkeypatch: pytest.MonkeyPatch):
    over_ssh = ("--dry-run --hosts a,b train.py", "over SSH: exec /bin/sh -c")
    for command, text in (("train.py", "import os, sys"), over_ssh):
        found = planned(command, monkeypatch)
        assert text in page(found, is_verbose=True)
        assert text not in page(found)


def test_the_scheduler_that_was_found_is_shown_with_v_only(machine: None, monkeypatch: pytest.MonkeyPatch):
    found = planned("SLURM_JOB_ID=77 SLURM_JOB_NODELIST=gpu[1-2] --nproc-per-node 8 train.py", monkeypatch)
    assert "SLURM job 77" in page(found, is_verbose=True)
    assert "SLURM job 77" not in page(found)


def test_the_warnings(machine: None, monkeypatch: pytest.MonkeyPatch):
    def warnings(command: str) -> str:
        said = " ;; ".join(planned(command, monkeypatch).warnings)
        return said.replace(os.getcwd(), "<folder>")

    golden.check_answers("plan_warnings", warnings)


# What no command line has.


def config(**fields: Any) -> LaunchConfig:
    return launch_config(**{"script": __file__, "min_nodes": 2, "max_nodes": 2, "nproc_per_node": 1, **fields})


def test_each_launcher_has_a_folder_in_that_of_the_run():
    here = setup.local_host_name()
    task = ScheduledTask(3, 1, 4, 2, 1, (2, 2))
    meets = rendezvous_config(node_index=1)
    found = [plan(config(rendezvous=meets, task=of, run_id="job7", log_dir="/logs")) for of in (None, task)]
    assert [{**each.environ, **each.ranks[0].environ}["TORCHELASTIC_ERROR_FILE"] for each in found] == [
        f"/logs/job7/{here}/attempt_0/0/error.json",
        f"/logs/job7/{here}.3/attempt_0/0/error.json",
    ]


def test_devices_of_this_shell_stay_here(machine: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert (
        "not forwarded to the hosts: CUDA_VISIBLE_DEVICES" in planned("--hosts a,b train.py", monkeypatch).warnings[0]
    )
    assert planned("--hosts a,b -x CUDA_VISIBLE_DEVICES=0 train.py", monkeypatch).warnings == ()
    assert planned("train.py", monkeypatch).nodes[0].gpus is None, "the agent looks at them"


@pytest.mark.parametrize("nodes", [9, 300])
def test_a_plan_is_one_screen_however_large_the_job(nodes: int, machine: None, monkeypatch: pytest.MonkeyPatch):
    names, calls = setup.node_names, []
    monkeypatch.setattr(setup, "node_names", lambda given: calls.append(1) or names(given))
    found = planned(f"--hosts gpu[1-{nodes}],spare1 --nnodes {nodes} --nproc-per-node 8 train.py", monkeypatch)
    assert len(page(found).splitlines()) <= 42
    assert max(map(len, page(found).splitlines())) <= 130
    assert len(calls) < 10, "each node is looked at once"


def test_nothing_of_the_users_can_move_the_cursor():
    found = plan(launch_config(script="a\x1b[2J\n.py", script_args=("\r",), nproc_per_node=1, chdir="/\x1b"))
    assert set(map(ord, filter(lambda c: not c.isprintable(), page(found)))) == {10}
    assert "\x1b" not in as_json(found)


def test_json_has_every_rank_and_no_secret(machine: None, monkeypatch: pytest.MonkeyPatch):
    given = "--hosts gpu[1-40] --nproc-per-node 8 -x API_TOKEN=hunter2 train.py --api-key hunter2"
    text = as_json(planned(given, monkeypatch))
    found = json.loads(text)
    assert [rank["rank"] for rank in found["ranks"]] == list(range(320))
    assert found["nodes"][39]["ranks"] == [312, 319]
    assert "hunter2" not in text


def test_the_banner_of_a_dry_run_says_what_it_is():
    alone = launch_config(script="x.py", dry_run=True)
    assert dry_run_banner(alone).startswith("dry run: 1 simulated node on this machine's CPU, gloo")
    assert "2 simulated nodes" in dry_run_banner(config(dry_run=True))
