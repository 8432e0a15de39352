"""--logs -f prints every line of every attempt, however quickly one follows another."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ddplaunch.features.come_back import logs
from ddplaunch.features.come_back.log_follower import LogFollower
from ddplaunch.features.come_back.logs import RankLogs
from ddplaunch.rows import parse_ranks
from tests.support import golden
from tests.support.asked import asked


class Run:
    """A run of two ranks; with each look of the command at the run, the steps of the next of ``looks`` happen."""

    run_id = "job7"
    name = Path("job7")
    other_host = ""

    def __init__(self, folder: Path, *looks: str) -> None:
        self._folder, self._looks = folder, [*looks]
        self.found: dict[int, dict[int, RankLogs]] = {}
        self.is_running()

    def is_running(self) -> bool:
        if self._looks:
            for step in self._looks.pop(0).split(", "):
                word, *arguments = step.split()
                getattr(self, word)(*arguments)
        return self.is_on

    @property
    def is_on(self) -> bool:
        return bool(self._looks)

    def unknown(self) -> str:
        return ""

    def begin(self, attempt: str, rank: str) -> None:
        """A rank of an attempt has started."""
        folder = self._folder / f"{attempt}-{rank}"
        folder.mkdir(parents=True)
        self.found.setdefault(int(attempt), {})[int(rank)] = RankLogs(int(rank), "gpu1", (str(folder),), "")
        self.say(attempt, rank, "begins")

    def say(self, attempt: str, rank: str, text: str) -> None:
        with (self._folder / f"{attempt}-{rank}" / "stdout.log").open("a") as file:
            file.write(f"{attempt} {rank} {text}\n")


@pytest.mark.parametrize("follow", [False, True])
def test_a_rank_that_writes_faster_than_it_is_printed_keeps_no_other_from_being_shown(
    follow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, "begin 0 0, begin 0 1", "say 0 1 meanwhile", "say 0 1 ends")
    read, parts = LogFollower.read, iter(range(1000))

    def flooded(follower: LogFollower) -> bytes:
        data = read(follower)
        if b"0 0 " in data and run.is_on:
            next(parts)
            run.say("0", "0", "flood")
        return data

    monkeypatch.setattr(LogFollower, "read", flooded)
    monkeypatch.setattr(logs, "find", lambda *_: run)
    monkeypatch.setattr(logs, "_of_run", lambda run: run.found)
    monkeypatch.setattr(logs, "_AGAIN_S", 0.01)
    logs.logs(asked("job7", follow=follow))
    assert ("0 1 ends" if follow else "0 1 begins") in capfd.readouterr().out


def test_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A story is ``--ranks``, and what has happened at each look of the command at the run."""
    numbers = itertools.count()

    def story(text: str) -> str:
        _, ranks, looks = text.split(": ")
        run = Run(tmp_path / str(next(numbers)), *looks.split(" | "))
        monkeypatch.setattr(logs, "find", lambda *_: run)
        logs.logs(asked("job7", ranks=None if ranks == "all" else parse_ranks(ranks, "--ranks"), follow=True))
        return capfd.readouterr().out

    monkeypatch.setattr(logs, "_of_run", lambda run: run.found)
    monkeypatch.setattr(logs, "_AGAIN_S", 0)
    golden.check_pages("logs_that_follow", story)
