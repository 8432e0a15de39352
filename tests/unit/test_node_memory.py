"""Hosts with faults in earlier runs are used last; what a run finds out is written, shown, and can be forgotten."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ddplaunch.cluster.hosts import matching, parse_hosts
from ddplaunch.cluster.scheduled import SlurmJob
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import LaunchError, Level
from ddplaunch.features.health import node_memory, nodes_file
from ddplaunch.protocol.results import AttemptResult, WorkerExit
from ddplaunch.protocol.run_result import NodeOfRun, RunResult
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


class User:
    """Who starts one run after the other. The methods are the steps of a story."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def _tell(self, text: str) -> None:
        today = time.strftime("%Y-%m-%d")
        day = lambda found: "<today>" if found[0].startswith(today) else "<another day>"  # noqa: E731
        self.said += re.sub(r"20\d\d-\d\d-\d\d( \d\d:\d\d)?", day, text).splitlines()

    def fail(self, host: str, run: str, *how: str) -> None:
        """A worker on the host was killed: on two hosts, ``here`` on one machine, in a ``dry`` run; of ``hardware``."""
        config = launch_config(script="x.py", dry_run="dry" in how) if {"here", "dry"} & {*how} else None
        for text in remember(result_of(host, run, hardware=FALLEN if "hardware" in how else ""), config):
            self._tell(text)

    def lose(self, host: str, run: str, *others: str) -> None:
        hosts = tuple(NodeOfRun(each, 1) for each in (host, *others))
        result = RunResult(run, 84, "failed", 9.0, hosts=hosts)
        self.said += remember(result, lost={host: f"{host} has not answered for 5 s"})

    def plan(self, hosts: str, nnodes: str, dry: str = "") -> None:
        """The hosts of the next run, and its notices; without hosts ``-``."""
        config = launch_config(script="x.py") if hosts == "-" else config_of(hosts, int(nnodes))
        found = node_memory.prepare(given := replace(config, dry_run=bool(dry)))
        self.said.append(
            "as given" if found is given else " ".join(f"{host}:slots={host.slots}" for host in found.hosts)
        )
        self._tell("\n".join(notices(found)))

    def list(self) -> None:
        node_memory.list_all(asked("", self._tell))

    def forget(self, hosts: str) -> None:
        node_memory.forget(asked(hosts, self._tell))


def test_what_is_remembered_of_hosts_and_how_later_runs_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def story(text: str) -> str:
        name, _, steps = text.partition(": ")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / name))
        return golden.play(User(), steps)

    golden.check_pages("node_memory", story)


def test_two_runs_with_one_run_id_are_two() -> None:
    folders = [str(Path("/logs", name)) for name in ("job7", "job7.2")]
    assert [bool(remember(replace(result_of("gpu1", "job7"), run_dir=folder))) for folder in folders] == [False, True]


def test_all_launchers_of_a_run_note_one_event() -> None:
    config = launch_config(script="x.py", rendezvous=rendezvous_config(), max_nodes=2)
    for host in ("gpu1", "gpu2"):
        assert not remember(replace(result_of("gpu1", "job7"), run_dir=f"/logs/job7/{host}"), config)
    assert len(node_memory.remembered()[0]) == 1


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
        node_memory.forget(asked("all"))


def test_a_user_without_a_home_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, "")
    remember(result_of("gpu1", "run1", hardware=FALLEN))
    assert node_memory.remembered() == ([], "")


@pytest.mark.parametrize("host", ["gpu1:2222", "[fd00::1]:2222", "fd00::1"])
def test_a_host_is_forgotten_by_the_name_that_was_shown(host: str) -> None:
    (text,) = remember(result_of(host, "run1", hardware=FALLEN))
    said: list[str] = []
    node_memory.forget(asked(text.split("'")[1], said.append))
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
