"""docs/errors.md has an entry for each error and warning of a run, and for nothing that no run says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddplaunch.features.hints import hints
from ddplaunch.protocol.results import WorkerError, WorkerExit
from tests.support import messages

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
RUNS, _, SCRIPTS = PAGE.partition("\n## Errors of the script")
ENTRY = re.compile(r"^### (`+) ?(.*?) ?\1\n\n(.+?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
EXAMPLES = [(text, " ".join(told.split())) for _, text, told in ENTRY.findall(SCRIPTS)]


def test_each_message_of_a_run_has_an_entry_and_each_entry_is_a_message():
    entries = [text for _, text, _ in ENTRY.findall(RUNS)]
    assert len(entries) == RUNS.count("\n### ")
    assert sorted(entries) == sorted(messages.of_runs())


def test_entries_are_in_alphabetical_order_in_their_groups():
    for group in PAGE.split("\n## ")[1:]:
        words = [re.findall("[a-z0-9]+", text.lower()) for _, text, _ in ENTRY.findall(group)]
        assert words == sorted(words)


def hint_for(message: str) -> str:
    return hints.hint(WorkerExit(0, 0, "node1", 1, 1, False, 0.0, 1.0, error=WorkerError(message, "", 0.0)))


@pytest.mark.parametrize(("message", "told"), EXAMPLES, ids=[text.split(":")[0] for text, _ in EXAMPLES])
def test_an_example_of_an_error_of_the_script_gets_the_hint_that_the_page_has(message: str, told: str):
    assert hint_for(message) == told


def test_each_hint_has_an_example():
    shown = {told for _, told in EXAMPLES}
    assert {words.format("torch") for _, words in hints._HINTS} == shown
