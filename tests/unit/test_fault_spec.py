"""The grammar of ``--inject``: what can be rehearsed, how it is told, and that anything else shows the grammar."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.errors import USAGE, UsageError
from ddplaunch.features.faults.fault_spec import GRAMMAR, check, describe, parse
from tests.support import golden, texts


def test_a_fault_is_read_and_told_or_shows_the_grammar():
    refused: list[UsageError] = []

    def told(text: str) -> str:
        try:
            return describe(parse(text))
        except UsageError as error:
            refused.append(error)
            return error.message

    golden.check_answers("faults", told)
    assert {error.exit_code for error in refused} == {USAGE}
    assert all(line in error.hint for error in refused for line in GRAMMAR.splitlines())


def test_the_report_has_the_fault_as_it_was_given():
    """With other white space in ``after-line``, a copy of it from the report would match no line."""
    text = "kill  rank=0 after-line='epoch  2/8'"
    assert parse(text).text == text


def test_the_grammar_has_a_short_line_for_each_kind():
    lines = GRAMMAR.splitlines()
    assert [line.split("=")[0].rpartition(" ")[0] for line in lines[:-1]] == [
        *("kill", "exit", "hang", "slow", "lose", "partition", "crash agent")
    ]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("line", GRAMMAR.splitlines()[:-1])
def test_what_the_grammar_shows_can_be_said(line: str):
    form = line.split("  ")[0].translate(str.maketrans("", "", "[]"))
    for placeholder, value in ("=R", "=0"), ("=N", "=0"), ("=C", "=3"), ("=TIME", "=2m"):
        form = form.replace(placeholder, value)
    assert describe(parse(f"{form} attempt=1 after=1s")).endswith("1 s after the start of attempt 1")
    assert describe(parse(f"{form} after-line='TEXT'")).endswith("prints 'TEXT' in attempt 0")


@given(st.text(texts.ENCODABLE))
def test_any_text_is_read_or_refused(text: str):
    for words in text, f"kill rank=0 {text}", f"kill rank=0 after={text}", f"slow rank=0 by={text}":
        try:
            sentence = describe(parse(words))
        except UsageError as error:
            sentence = error.message
        assert sentence.isprintable()


# Who it happens to.


def test_a_rank_or_node_that_does_not_exist_is_an_error():
    """A question begins with the ranks and nodes of the job."""

    def told(question: str) -> str:
        job, _, text = question.partition(": ")
        check([parse("kill rank=0"), parse(text)], *map(int, job.split("x")))
        return "accepted"

    golden.check_answers("faults_of_whom", told)
