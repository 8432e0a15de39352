"""--logs -f prints every line of every attempt, however quickly one follows another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ddplaunch.features.come_back import logs
from ddplaunch.features.come_back.logs import RankLogs
from tests.support.asked import asked


class Run:
    """A run of two ranks; with each look of the command at the run, the next of ``steps`` happens."""

    run_id = "job7"
    name = Path("job7")
    other_host = ""

    def __init__(self, folder: Path, *steps: Callable[[Run], None]) -> None:
        self._folder, self._steps = folder, [*steps]
        self.found: dict[int, dict[int, RankLogs]] = {}

    def is_running(self) -> bool:
        if self._steps:
            self._steps.pop(0)(self)
        return bool(self._steps)

    def unknown(self) -> str:
        return ""

    def begin(self, attempt: int, rank: int) -> None:
        """A rank of an attempt has started."""
        folder = self._folder / f"{attempt}-{rank}"
        folder.mkdir()
        self.found.setdefault(attempt, {})[rank] = RankLogs(rank, "gpu1", folder, "")
        self.say(attempt, rank, "begins")

    def say(self, attempt: int, rank: int, text: str) -> None:
        with (self._folder / f"{attempt}-{rank}" / "stdout.log").open("a") as file:
            file.write(f"{attempt} {rank} {text}\n")


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """The lines of the run that the command prints."""

    def lines(run: Run, ranks: tuple[int, ...] | None = None) -> list[str]:
        monkeypatch.setattr(logs, "find", lambda *_: run)
        monkeypatch.setattr(logs, "_of_run", lambda run: run.found)
        monkeypatch.setattr(logs, "_AGAIN_S", 0)
        logs.logs(asked("job7", ranks=ranks, follow=True))
        return [line for line in capfd.readouterr().out.splitlines() if line[:1].isdigit()]

    return lines


def next_attempts(run: Run) -> None:
    run.say(0, 0, "ends")
    run.begin(1, 0)
    run.say(1, 0, "ends")
    run.begin(2, 0)


def test_no_line_of_an_attempt_is_left_out(follow: Callable[..., list[str]], tmp_path: Path) -> None:
    run = Run(tmp_path, next_attempts, lambda run: run.say(2, 0, "ends"))
    run.begin(0, 0)
    assert follow(run) == ["0 0 begins", "0 0 ends", "1 0 begins", "1 0 ends", "2 0 begins", "2 0 ends"]


def test_the_attempt_in_which_a_run_ends_is_printed(follow: Callable[..., list[str]], tmp_path: Path) -> None:
    run = Run(tmp_path, next_attempts)
    run.begin(0, 0)
    assert follow(run)[-1] == "2 0 begins"


def test_ranks_of_nodes_that_start_later_are_printed(follow: Callable[..., list[str]], tmp_path: Path) -> None:
    run = Run(tmp_path, lambda run: run.begin(0, 1), lambda run: run.begin(1, 0), lambda run: run.begin(1, 1))
    run.begin(0, 0)
    assert follow(run) == ["0 0 begins", "0 1 begins", "1 0 begins", "1 1 begins"]


def test_a_rank_that_the_next_attempt_does_not_have_is_no_error(
    follow: Callable[..., list[str]], tmp_path: Path
) -> None:
    run = Run(tmp_path, lambda run: run.begin(1, 0), lambda run: run.begin(2, 1))
    run.begin(0, 1)
    assert follow(run, (1,)) == ["0 1 begins", "2 1 begins"]
