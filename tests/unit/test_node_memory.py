"""Hosts with faults in earlier runs are used last; what a run finds out is written, shown, and can be forgotten."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ddplaunch.cluster.hosts import Host, matching, parse_hosts
from ddplaunch.cluster.slurm import SlurmJob
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import LaunchError, Level
from ddplaunch.features.health import known_nodes, node_memory, nodes_file
from ddplaunch.protocol.results import AttemptResult, NodeOfRun, RunResult, WorkerExit
from tests.support import golden
from tests.support.asked import asked
from tests.support.configs import launch_config, rendezvous_config

FALLEN = "Xid 79, GPU 3 (GPU-8f1c2a33) has fallen off the bus"


@pytest.fixture
def path() -> Path:
    return Path(os.environ["XDG_STATE_HOME"], "ddplaunch", nodes_file.FILE)


def config_of(hosts: str, nnodes: int) -> LaunchConfig:
    return launch_config(script="x.py", hosts=parse_hosts(hosts), min_nodes=nnodes, max_nodes=nnodes)


def result_of(host: str, run: str, *, hardware: str = "") -> RunResult:
    """A worker on ``host`` was killed by SIGKILL."""
    killed = WorkerExit(3, 1, host, 7, -signal.SIGKILL, False, 1.0, 9.0, hardware=hardware)
    hosts = (NodeOfRun("gpu1", 1), NodeOfRun("gpu2", 1))
    return RunResult(run, 1, "failed", 9.0, (AttemptResult(0, "failed", (killed,), 9.0),), killed, hosts=hosts)


def remember(result: RunResult, config: LaunchConfig | None = None, lost: dict[str, str] | None = None) -> list[str]:
    said: list[str] = []
    config = config or config_of("gpu[1-2]", 2)
    node_memory.remember(config, result, lost or {}, lambda text, _level: said.append(text))
    return said


def notices(config: LaunchConfig) -> list[str]:
    return [str(notice) for notice in config.notices]


def test_a_host_whose_hardware_failed_is_the_last_spare_of_later_runs() -> None:
    said = remember(result_of("gpu2", "run1", hardware=FALLEN))
    assert said == ["later runs use gpu2 last, for 7 days; once repaired: ddplaunch --forget 'gpu2'"]
    config = node_memory.prepare(config_of("gpu[1-4]", 2))
    assert [host.name for host in config.hosts] == ["gpu1", "gpu3", "gpu4", "gpu2"]
    today = time.strftime("%Y-%m-%d")
    (notice,) = notices(config)
    assert notice.startswith(
        f"warning: gpu2 is used last, after faults in earlier runs (gpu2: {FALLEN}, {today} ",
    )
    assert notice.endswith(" in run1); to forget it: ddplaunch --forget 'gpu2'")


def test_it_is_used_where_there_are_too_few_others_and_that_is_said() -> None:
    remember(result_of("gpu1", "run1", hardware=FALLEN))
    remember(result_of("gpu2", "run1", hardware=FALLEN))
    config = node_memory.prepare(config_of("gpu[1-3]", 2))
    assert [host.name for host in config.hosts] == ["gpu3", "gpu1", "gpu2"]
    (notice,) = notices(config)
    assert "gpu1 is used although earlier runs had faults there, for lack of other hosts, gpu2 is used last" in notice
    assert notice.endswith("ddplaunch --forget 'gpu[1-2]'")


def test_a_failure_without_a_cause_counts_from_the_second_run_on() -> None:
    assert remember(result_of("gpu1", "run1")) == remember(result_of("gpu1", "run1")) == []
    config = config_of("gpu[1-2]", 1)
    assert node_memory.prepare(config) is config
    assert remember(result_of("gpu1", "run2"))
    config = node_memory.prepare(config)
    assert config.hosts[0].name == "gpu2"
    assert "gpu1: failed in 2 runs without a known cause, last: rank 3 was killed by SIGKILL, 20" in notices(config)[0]


def test_two_runs_with_one_run_id_are_two() -> None:
    folders = [str(Path("/logs", name)) for name in ("job7", "job7.2")]
    assert [bool(remember(replace(result_of("gpu1", "job7"), run_dir=folder))) for folder in folders] == [False, True]


def test_all_launchers_of_a_run_note_one_event() -> None:
    config = launch_config(script="x.py", rendezvous=rendezvous_config(), max_nodes=2)
    for host in ("gpu1", "gpu2"):
        assert not remember(replace(result_of("gpu1", "job7"), run_dir=f"/logs/job7/{host}"), config)
    assert len(node_memory.remembered()[0]) == 1


def test_lost_nodes_are_noted_unless_most_are_lost() -> None:
    lost = {"gpu1": "gpu1 has not answered for 5 s"}
    remember(RunResult("run1", 84, "failed", 9.0, hosts=(NodeOfRun("gpu1", 1), NodeOfRun("gpu2", 1))), lost=lost)
    assert [event.text for event in node_memory.remembered()[0]] == ["gpu1 has not answered for 5 s"]
    remember(RunResult("run2", 84, "failed", 9.0, hosts=(NodeOfRun("gpu1", 1),)), lost=lost)
    assert len(node_memory.remembered()[0]) == 1


def test_a_run_on_one_machine_notes_only_hardware_and_a_dry_run_nothing(path: Path) -> None:
    here = launch_config(script="x.py")
    remember(result_of("gpu1", "run1"), here)
    dry_run = launch_config(script="x.py", dry_run=True)
    remember(result_of("gpu1", "run1", hardware=FALLEN), dry_run)
    assert not path.exists()
    remember(result_of("gpu1", "run1", hardware=FALLEN), here)
    assert path.exists()


def test_a_dry_run_and_a_run_without_hosts_read_nothing(path: Path) -> None:
    remember(result_of("gpu1", "run1", hardware=FALLEN))
    for config in (launch_config(script="x.py"), replace(config_of("gpu[1-2]", 1), dry_run=True)):
        assert node_memory.prepare(config) is config


@pytest.mark.parametrize("content", ["{", '{"schema": 1, "nodes": 7}'])
def test_a_damaged_file_stops_no_run_and_is_told_with_v(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(content)
    config = node_memory.prepare(config_of("gpu[1-2]", 1))
    assert notices(config) == [f"{path} is damaged, and not used; it is nodes.json.damaged now"]
    assert config.notices[0].min_verbosity == Level.VERBOSE
    assert [host.name for host in config.hosts] == ["gpu1", "gpu2"]
    assert path.with_name("nodes.json.damaged").read_text() == content
    assert notices(node_memory.prepare(config_of("gpu[1-2]", 1))) == []


def test_entries_that_are_none_are_passed_over(path: Path) -> None:
    remember(result_of("gpu1", "run1", hardware=FALLEN))
    body = json.loads(path.read_text())
    good = body["nodes"][0]
    bad = [7, {}, {**good, "text": "a\nb"}, {**good, "time_s": "x"}, {**good, "kind": "?"}, {**good, "new": 1}]
    path.write_text(json.dumps({**body, "nodes": [*bad, good]}))
    assert [event.text for event in node_memory.remembered()[0]] == [FALLEN]


def test_a_folder_that_takes_no_file_changes_nothing_but_a_message(path: Path) -> None:
    path.parent.parent.mkdir(parents=True)
    path.parent.touch()
    levels: list[int] = []
    node_memory.remember(
        config_of("gpu[1-2]", 2),
        result_of("gpu1", "run1", hardware=FALLEN),
        {},
        lambda _text, level: levels.append(level),
    )
    assert levels == [Level.VERBOSE]
    assert "cannot be read: Not a directory" in notices(node_memory.prepare(config_of("gpu[1-2]", 1)))[0]
    with pytest.raises(LaunchError, match=r"nodes\.json cannot be written"):
        node_memory.forget(None, lambda _: None)


def test_a_user_without_a_home_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, "")
    remember(result_of("gpu1", "run1", hardware=FALLEN))
    assert node_memory.remembered() == ([], "")


def test_hosts_are_forgotten_and_listed() -> None:
    for host in ("gpu1", "gpu2.cluster", "gpu3"):
        remember(result_of(host, "run1", hardware=FALLEN))
    remember(result_of("gpu4", "run1"))
    said: list[str] = []
    known_nodes.list_all(asked("", said.append))
    lines = said.pop().splitlines()
    assert lines[0].split() == ["host", "effect", "until", "what", "GPU", "when", "run"]
    assert [line.split()[:3] for line in lines[1:]] == [
        *([host, "used", "last"] for host in ("gpu1", "gpu2.cluster", "gpu3")),
        ["gpu4", "none", "yet"],
    ]
    node_memory.forget(parse_hosts("gpu[2-3]"), said.append)
    node_memory.forget(parse_hosts("gpu9"), said.append)
    node_memory.forget(None, said.append)
    node_memory.forget(None, said.append)
    known_nodes.list_all(asked("", said.append))
    assert said == [
        "forgotten: 2 events of gpu2.cluster,gpu3",
        "nothing is known about gpu9",
        "forgotten: 2 events of gpu[1,4]",
        "nothing is known about any node",
        "nothing is known about any node",
    ]


@pytest.mark.parametrize("host", ["gpu1:2222", "[fd00::1]:2222", "fd00::1"])
def test_a_host_is_forgotten_by_the_name_that_was_shown(host: str) -> None:
    (text,) = remember(result_of(host, "run1", hardware=FALLEN))
    said: list[str] = []
    node_memory.forget(parse_hosts(text.split("'")[1]), said.append)
    assert said[0].startswith("forgotten: 1 event of ")


def test_a_short_name_is_also_the_whole_one() -> None:
    golden.check_answers("same_hosts", lambda names: matching(names.split()[:1], names.split()[1:]))


def test_in_a_job_of_slurm_the_administrators_command_is_shown_for_nodes_of_this_launcher() -> None:
    config = replace(config_of("gpu[1-2]", 2), slurm_job=SlurmJob("7"))
    said = remember(result_of("gpu2", "run1", hardware=FALLEN), config)
    reason = "ddplaunch: Xid 79, GPU 3 (GPU-8f1c2a33) has fallen off the bus"
    assert said[0] == f"for the administrator of SLURM: scontrol update nodename=gpu2 state=drain reason='{reason}'"
    elsewhere = result_of("gpu2", "run1", hardware=FALLEN)
    attempt = replace(elsewhere.attempts[0], exits=(), cause=elsewhere.first_failure)
    assert not any("scontrol" in text for text in remember(replace(elsewhere, attempts=(attempt,)), config))
    assert not any("scontrol" in text for text in remember(result_of("gpu2", "run2"), config))


def test_hosts_keep_their_slots() -> None:
    remember(result_of("gpu1", "run1", hardware=FALLEN))
    config = node_memory.prepare(config_of("gpu1:slots=4,gpu2:slots=2", 1))
    assert config.hosts == (Host("gpu2", slots=2), Host("gpu1", slots=4))
