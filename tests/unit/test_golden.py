"""Golden files are compared, and written anew only by a developer who asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddplaunch.errors import UsageError
from tests.support import golden


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("REFRESH_GOLDEN", raising=False)
    return tmp_path


def answer(question: str) -> str:
    if question == "bad":
        raise UsageError("no", hint="Do not.")
    return question.upper().replace("\n", "|")


def test_a_file_that_differs_is_refreshed_but_not_on_ci(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "words.txt").write_text("##### Words\na\\nb\nbad  ->  old\n")
    with pytest.raises(AssertionError):
        golden.check_answers("words", answer)
    monkeypatch.setenv("REFRESH_GOLDEN", "1")
    golden.check_answers("words", answer)
    assert (folder / "words.txt").read_text() == "##### Words\na\\nb  ->  A|B\nbad  ->  error: no | Do not.\n"
    monkeypatch.setenv("CI", "true")
    with pytest.raises(AssertionError, match="does not write them"):
        golden.check_answers("words", answer)
    monkeypatch.delenv("REFRESH_GOLDEN")
    golden.check_answers("words", answer)


def test_a_page_stands_below_its_case(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFRESH_GOLDEN", "1")
    golden.check("pages", {"one": "first\npage", "bad": ""})
    golden.check_pages("pages", answer)
    assert (folder / "pages.txt").read_text() == "##### one\nONE\n\n##### bad\nerror: no | Do not.\n"
    monkeypatch.delenv("REFRESH_GOLDEN")
    with pytest.raises(AssertionError):
        golden.check("pages", {"one": "ONE"})
