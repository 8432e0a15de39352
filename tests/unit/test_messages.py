"""The messages of a run on one node, and of a node among others."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ddplaunch.config import LaunchConfig, OutputConfig
from ddplaunch.errors import RENDEZVOUS, LaunchError
from ddplaunch.launcher.display import report_files
from ddplaunch.launcher.display.line_prefix import Style
from ddplaunch.launcher.display.messages import UserMessages
from ddplaunch.protocol.launcher_agent import AttemptStarted
from ddplaunch.protocol.results import AttemptResult, WorkerExit
from ddplaunch.protocol.run_result import RunResult
from tests.support import consoles, golden
from tests.support.configs import rendezvous_config


class Console:
    """Keeps what is shown."""

    def __init__(self) -> None:
        self.logs, self.shown, self.has_progress = "", list[str](), False

    def show(self, text: str) -> None:
        self.shown.append(text)

    show_page = show

    def restyle(self, style: Style) -> None:
        """Lines have no prefix here."""

    def note(self, text: str) -> None:
        """Only in console.log."""


def messages(config: LaunchConfig, folder: Path | None = None) -> tuple[UserMessages, list[str]]:
    console = Console()
    return UserMessages(config, "r1", folder, console, lambda *_, **__: None), console.shown  # type: ignore[arg-type]


def test_a_success_ends_with_how_long_the_run_took_and_where_its_logs_are() -> None:
    """A question is a verbosity and a duration."""

    def shown(question: str) -> str:
        verbosity, duration_s = question.split()
        told, lines = messages(LaunchConfig(script="t.py", output=OutputConfig(verbosity=int(verbosity))))
        told.run_ended(RunResult("r1", 0, "succeeded", float(duration_s)), None)
        return "; ".join(lines)

    golden.check_answers("durations_of_runs", shown)


def test_the_last_line_of_a_success_names_the_folder_as_it_is_at_the_end(tmp_path: Path) -> None:
    told, lines = messages(LaunchConfig(script="t.py"), tmp_path)
    (tmp_path / "r1").mkdir()
    told.folder_moved(tmp_path / "r1", consoles.style())
    told.run_ended(RunResult("r1", 0, "succeeded", 1.0), None)
    assert lines == [f"ddplaunch: succeeded after 1.0 s; logs in {tmp_path / 'r1'}"]


def test_a_run_that_succeeds_without_a_lost_host_says_both() -> None:
    told, lines = messages(LaunchConfig(script="t.py", output=OutputConfig(verbosity=-1)))
    told.run_ended(RunResult("r1", 0, "succeeded", 5.0, unreachable_hosts=("gpu2",)), None)
    left = "left: unknown on gpu2, which could not be reached; check again with --ps"
    assert lines == [f"ddplaunch: succeeded after 5.0 s; {left}; no logs are kept"]


def test_a_launcher_shows_why_it_ends_by_itself_whoever_shows_what_was_before() -> None:
    told, lines = messages(LaunchConfig(script="t.py", min_nodes=2, max_nodes=2, rendezvous=rendezvous_config()))
    stopped = WorkerExit(
        rank=1, local_rank=0, host="node2", pid=7, returncode=143, stopped=True, time_s=1.0, duration_s=1.0
    )
    attempt = AttemptResult(0, "failed", (stopped,), 1.0, reason="node3 is lost")
    error = LaunchError("the endpoint node1:1 does not answer", "", RENDEZVOUS)
    told.run_ended(RunResult("r1", RENDEZVOUS, "failed", 1.0, attempts=(attempt,)), error)
    assert error.message in lines[0].splitlines()


def test_a_run_folder_that_was_deleted_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "r1"
    told, lines = messages(LaunchConfig(script="t.py"), folder)
    told.run_ended(RunResult("r1", 0, "succeeded", 1.0), None)
    lost = "its logs are lost, and there is no report"
    assert lines == [
        f"ddplaunch: the run folder {folder} was deleted during the run: {lost}",
        "ddplaunch: succeeded after 1.0 s; no logs are left",
    ]
    assert not folder.exists()


@pytest.mark.parametrize("asked", [1, 2])
def test_a_disk_that_does_not_answer_keeps_nobody_from_the_end(
    asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user asks for the end once, and waits for a moment, or twice."""
    monkeypatch.setattr("ddplaunch.launcher.display.messages._STOPPED_STALL_S", 0.1 if asked == 1 else 1000.0)
    answers = threading.Event()
    monkeypatch.setattr(report_files, "write_report", lambda *_: answers.wait(60))
    told, lines = messages(LaunchConfig(script="t.py"), tmp_path)
    attempt = AttemptResult(0, "failed", (), 1.0, reason="node1 is lost")
    result = RunResult("r1", 84, "failed", 1.0, attempts=(attempt,), run_dir=str(tmp_path))
    told.run_ended(result, None, asked_again=lambda: asked)
    answers.set()
    page, unwritten = lines
    assert f"report:   could not be written to {tmp_path}/report.json" in page
    assert unwritten == f"ddplaunch: not written, or only in part, in {tmp_path}: report.json: it took too long"


def test_what_features_add_to_the_report_is_in_the_file_only(tmp_path: Path) -> None:
    told, lines = messages(LaunchConfig(script="t.py"), tmp_path)
    attempt = AttemptResult(0, "failed", (), 1.0, reason="node1 is lost")
    told.run_ended(RunResult("r1", 84, "failed", 1.0, attempts=(attempt,)), None, ["why"], ["", "a\x1b table"])
    (page,) = lines
    assert "why" in page
    assert (tmp_path / "report.txt").read_text() == f"{page}\n\na\\x1b table\n"


def test_a_node_that_has_met_others_says_its_place_once_and_when_it_is_new() -> None:
    told, lines = messages(LaunchConfig(script="t.py", rendezvous=rendezvous_config()))
    started = AttemptStarted(0, 8, (11, 12, 13, 14), 1, 2, 4)
    for attempt, world_size in ((0, 8), (1, 8), (2, 4)):
        told.attempt_started(replace(started, attempt=attempt, world_size=world_size), is_first=True)
    assert lines == [
        "ddplaunch: node 1 of 2, 8 workers in all, ranks 4-7 here",
        "ddplaunch: node 1 of 2, 4 workers in all, ranks 4-7 here",
    ]


def test_a_run_that_meets_no_other_launcher_says_no_place() -> None:
    told, lines = messages(LaunchConfig(script="t.py"))
    told.attempt_started(AttemptStarted(0, 8, (11,), 0, 1, 0), is_first=True)
    assert lines == []
