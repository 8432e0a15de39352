"""What was started stands in the run folder from the start on, and in the report at the end."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from ddplaunch import LaunchConfig
from ddplaunch.features.runs import run_json
from ddplaunch.launcher import run_facts
from ddplaunch.launcher.nodes import Node
from ddplaunch.protocol.launcher_agent import NodeDetails
from ddplaunch.protocol.run_result import NodeOfRun, RunResult, Versions
from ddplaunch.system.files.run_folder import RunFacts
from ddplaunch.version import __version__, commit
from tests.support import golden
from tests.support.fake_agents import FakeHandle


def facts(script: str = "train.py") -> RunFacts:
    return run_facts.of_this_process("job7", "job7.0a1b2c", LaunchConfig(script=script))


def test_they_are_a_whole_file_of_the_user_alone(tmp_path: Path) -> None:
    written = run_facts.write(facts("na\udcefve.py"), tmp_path)
    [file] = tmp_path.iterdir()
    assert (file.name, file.stat().st_mode & 0o777) == ("run.json", 0o600)
    body = json.loads(file.read_bytes())
    assert [*body][:4] == ["schema", "run_id", "run_tag", "script"]
    assert (body["schema"], body["script"], body["pid"]) == (run_facts.SCHEMA, "na\udcefve.py", os.getpid())
    assert run_json.facts(tmp_path) == written


@pytest.mark.parametrize("damage", [{}, {"run_id": 3, "pid": -1, "command": "x"}, {"pid": 10**400, "on_terminal": [1]}])
def test_what_cannot_be_read_is_empty(damage: object, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(damage))
    assert run_json.facts(tmp_path) == RunFacts()


def test_of_a_file_of_lines_each_damaged_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_json, "_MAX_LINE_BYTES", 10)
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n\n[]\n{"b": 22222222222}\n{"a": 2')
    assert [*run_json.lines(path)] == [{"a": 1}, None, None, None, None]
    assert [*run_json.lines(path, b'"a"')] == [{"a": 1}, None]
    assert [*run_json.lines(path, max_bytes=5)] == [{"a": 1}]
    assert [*run_json.lines(tmp_path)] == []


def test_without_a_folder_or_room_in_it_nothing_is_written(tmp_path: Path) -> None:
    run_facts.write(facts(), None)
    run_facts.write(facts(), tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


def test_a_run_id_on_which_nodes_agree_is_written(tmp_path: Path) -> None:
    before = facts()
    assert run_facts.with_run_id(before, "job7", tmp_path) == before
    assert list(tmp_path.iterdir()) == []
    assert run_facts.with_run_id(before, "job8", tmp_path).run_id == "job8"
    assert json.loads((tmp_path / "run.json").read_bytes())["run_id"] == "job8"


def test_the_command_is_the_one_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question is what Python was started with."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/venv/bin/{name}")

    def typed(question: str) -> str:
        argv = shlex.split(question)
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(sys, "orig_argv", ["python3", "launch_all.py", *argv[1:]])
        return shlex.join(facts().command)

    golden.check_answers("typed_commands", typed)


def test_a_deleted_working_folder_is_an_empty_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert facts().cwd == ""


def test_the_report_names_the_nodes_that_were_ready() -> None:
    nodes = [Node(index, f"gpu{index}", FakeHandle()) for index in range(3)]
    nodes[0].workers, nodes[2].workers = 8, 4
    nodes[2].details = NodeDetails(64, ("NVIDIA H100",) * 4, "3.11.7", "2.13.0")
    started = facts()
    result = run_facts.completed(RunResult("job7", 0, "succeeded", 1.0), started, nodes)
    assert result.hosts == (NodeOfRun("gpu0", 8), NodeOfRun("gpu2", 4, 64, ("NVIDIA H100",) * 4))
    assert result.versions == Versions(__version__, "3.11.7", "2.13.0", commit())
    assert (result.command, result.cwd, result.start) == (started.command, started.cwd, started.start)
    assert result.end >= result.start


def test_without_a_node_only_our_own_version_is_known() -> None:
    result = run_facts.completed(RunResult("job7", 82, "failed", 1.0), facts(), [])
    assert (result.versions, result.hosts) == (Versions(__version__, commit=commit()), ())
