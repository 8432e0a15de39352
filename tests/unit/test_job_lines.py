"""The lines of --sweep FILE."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddplaunch.errors import UsageError
from ddplaunch.features.parameter_sweep import job_lines


def jobs_of(tmp_path: Path, text: bytes) -> list[str]:
    (tmp_path / "jobs").write_bytes(text)
    return [job_lines.text(job) for job in job_lines.read(str(tmp_path / "jobs"))]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--lr 0.1", ["--lr 0.1"]),
        ("--lr {0.1,0.5} --seed 1..2", [f"--lr {lr} --seed {n}" for lr in (0.1, 0.5) for n in (1, 2)]),
        ("--seed=3..1", ["--seed=3", "--seed=2", "--seed=1"]),
        ("-1..1", ["-1", "0", "1"]),
        ("run_{08..10}.pt", ["run_08.pt", "run_09.pt", "run_10.pt"]),
        ("{1..9..4}", ["1", "5", "9"]),
        ("{a,b{1,2}}", ["a", "b1", "b2"]),
        ("x{,-large}", ["x", "x-large"]),
        ("{1..2,7}", ["1", "2", "7"]),
        ("{} {a} ${HOME} {x 1...2 v1..2x ../a..b", ["'{}' '{a}' '${HOME}' '{x' 1...2 v1..2x ../a..b"]),
        ("{x{1,2}}", ["'{x1}'", "'{x2}'"]),
        (r"""'{a,b}' "1..2" \{a,b\} '{"a": 1, "b": 2}'""", [r"""'{a,b}' 1..2 '{a,b}' '{"a": 1, "b": 2}'"""]),
        ("'two words' a#b", ["'two words' 'a#b'"]),
        ("'' a", ["'' a"]),
    ],
)
def test_what_a_line_stands_for(line: str, expected: list[str], tmp_path: Path) -> None:
    assert jobs_of(tmp_path, line.encode()) == expected


def test_blank_lines_and_comments_are_no_jobs_and_any_bytes_are_words(tmp_path: Path) -> None:
    assert jobs_of(tmp_path, b"\n# one\n  --a\n   # two\n--b \xff\r\n") == ["--a", "--b '\udcff'"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no jobs"),
        ("# only\n", "it has no jobs"),
        ("a\n'b", "line 2: no closing quotation: 'b"),
        ("{1..200}{1..200}", "line 1: over 10000 jobs"),
        ("1..99999999999", "line 1: over 10000 jobs"),
    ],
)
def test_what_is_no_file_of_jobs(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        jobs_of(tmp_path, text.encode())


def test_a_file_that_is_missing() -> None:
    with pytest.raises(UsageError, match="--sweep /nowhere: No such file"):
        job_lines.read("/nowhere")
