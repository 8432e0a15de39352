"""--on-exit: the command sees the result, and cannot hold up or change the end of the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddplaunch.config import LaunchConfig
from ddplaunch.errors import LaunchError, Level
from ddplaunch.features.on_exit import launcher as on_exit
from ddplaunch.launcher.watches import RunEnd
from ddplaunch.protocol.results import AttemptResult, WorkerExit
from ddplaunch.protocol.run_result import RunResult
from tests.support.configs import rendezvous_config
from tests.support.runs import run
from tests.support.watches import run_services

FAILED = RunResult("job7", 84, "failed", 61.7, (AttemptResult(0, "failed", (), 60.0, reason="gpu3 is lost\x1b"),))


def messages(command: str, node_rank: int | None = None, interrupted: bool = False) -> list[tuple[str, int]]:
    shown: list[tuple[str, int]] = []
    meets = None if node_rank is None else rendezvous_config(node_index=node_rank)
    config = LaunchConfig(script="x.py", on_exit=command, rendezvous=meets)
    for watch in on_exit.watches(run_services(config, show=lambda *message: shown.append(message))):
        watch.finish(RunEnd(FAILED, None, {}, lambda: interrupted))
    return shown


def test_the_command_sees_the_result(tmp_path: Path):
    assert messages(f"env > {tmp_path / 'seen'}") == []
    seen = (tmp_path / "seen").read_text().splitlines()
    assert {f"{name}={value}" for name, value in on_exit.result_variables(FAILED, None).items()} <= set(seen)
    assert "DDPLAUNCH_EXIT_REASON=gpu3 is lost\\x1b" in seen


def test_an_error_of_ddplaunch_is_the_reason():
    assert (
        on_exit.result_variables(FAILED, LaunchError("no host answers"))["DDPLAUNCH_EXIT_REASON"] == "no host answers"
    )


def test_the_rank_that_failed_first_is_named():
    first = WorkerExit(3, 1, "gpu2", 100, 7, stopped=False, time_s=0.0, duration_s=1.0)
    restarted = AttemptResult(0, "failed", (), 60.0, attempt_follows=True, restart_follows=True)
    found = on_exit.result_variables(replace(FAILED, first_failure=first, attempts=(restarted, *FAILED.attempts)), None)
    assert [found[f"DDPLAUNCH_{name}"] for name in ("FAILED_RANK", "FAILED_HOST", "RESTARTS")] == ["3", "gpu2", "1"]
    assert on_exit.result_variables(FAILED, None)["DDPLAUNCH_FAILED_RANK"] == ""


def test_the_docs_list_all_variables():
    page = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
    assert [name for name in on_exit.result_variables(FAILED, None) if f"`{name}`" not in page] == []


def test_a_command_that_fails_is_told():
    assert messages("exit 3") == [("--on-exit: exit 3 ended with exit code 3", Level.ALWAYS)]


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_command_that_does_not_end_is_killed_with_its_children(interrupted: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(on_exit, "LIMIT_S", 3600.0 if interrupted else 0.0)
    [(text, _)] = messages("sleep 3600 & sleep 3600", interrupted=interrupted)
    assert ("was killed: by a signal" if interrupted else "was killed: it did not end within 0 s") in text


def test_a_command_of_another_user_cannot_be_killed_and_is_left(monkeypatch: pytest.MonkeyPatch):
    """As ``sudo ...``, of which no process is this user's."""

    def refuse(pid: int, signum: int) -> None:
        raise PermissionError

    monkeypatch.setattr(on_exit.os, "killpg", refuse)
    [(text, _)] = messages("exec sleep 0.2", interrupted=True)
    assert "was killed: by a signal" in text


def test_a_command_with_a_null_byte_is_told():
    [(text, _)] = messages("echo \0")
    assert "the command cannot be started" in text


def test_only_node_rank_0_runs_it(tmp_path: Path):
    for node_rank in (0, 1, None):
        messages(f"echo {node_rank} >> {tmp_path / 'ran'}", node_rank)
    assert (tmp_path / "ran").read_text().split() == ["0", "None"]


def test_it_runs_after_the_last_line_and_leaves_the_exit_code(tmp_path: Path):
    script = tmp_path / "fail.py"
    script.write_text("import sys; sys.exit(7)\n")
    finished = run("--on-exit", "echo $DDPLAUNCH_OUTCOME $DDPLAUNCH_EXIT_CODE >&2; exit 1", script)
    assert finished.returncode == 7
    assert finished.err.splitlines()[-2] == "failed 7"
