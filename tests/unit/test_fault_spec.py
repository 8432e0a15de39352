"""The grammar of ``--inject``: what can be rehearsed, how it is told, and that anything else shows the grammar."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddplaunch.errors import USAGE, UsageError
from ddplaunch.features.faults.fault_spec import GRAMMAR, FaultSpec, check, describe, parse
from tests.support import texts

TABLE = [
    (
        "kill rank=3 after=5s",
        FaultSpec(kind="kill", rank=3, after_s=5.0),
        "kill rank 3, 5 s after the start of attempt 0",
    ),
    (
        "exit rank=1 code=7 attempt=0 after=2s",
        FaultSpec(kind="exit", rank=1, code=7, after_s=2.0),
        "exit rank 1 with code 7, 2 s after the start of attempt 0",
    ),
    (
        "hang rank=2 after=3s",
        FaultSpec(kind="hang", rank=2, after_s=3.0),
        "hang rank 2, 3 s after the start of attempt 0",
    ),
    (
        "lose node=1 after=4s",
        FaultSpec(kind="lose", node=1, after_s=4.0),
        "lose node 1, 4 s after the start of attempt 0",
    ),
    (
        "partition node=1 after=4s for=3s",
        FaultSpec(kind="partition", node=1, after_s=4.0, for_s=3.0),
        "partition node 1 for 3 s, 4 s after the start of attempt 0",
    ),
    (
        "partition node=1",
        FaultSpec(kind="partition", node=1),
        "partition node 1 until the end of the run, at the start of attempt 0",
    ),
    ("slow rank=0 by=10x", FaultSpec(kind="slow", rank=0, by=10.0), "slow rank 0 by 10x, at the start of attempt 0"),
    (
        "crash agent node=0",
        FaultSpec(kind="crash agent", node=0),
        "crash the agent of node 0, at the start of attempt 0",
    ),
    (
        "crash agent node=0 after=500ms attempt=2",
        FaultSpec(kind="crash agent", node=0, attempt=2, after_s=0.5),
        "crash the agent of node 0, 0.5 s after the start of attempt 2",
    ),
    (
        "kill rank=3 after-line='epoch 1' attempt=1",
        FaultSpec(kind="kill", rank=3, attempt=1, after_line="epoch 1"),
        "kill rank 3, when rank 3 prints 'epoch 1' in attempt 1",
    ),
    (
        'lose node=1 after-line="it\'s done"',
        FaultSpec(kind="lose", node=1, after_line="it's done"),
        'lose node 1, when a rank of node 1 prints "it\'s done" in attempt 0',
    ),
]


@pytest.mark.parametrize(("text", "injection", "sentence"), TABLE)
def test_an_injection_is_read_and_told(text: str, injection: FaultSpec, sentence: str):
    assert parse(text) == injection
    assert describe(injection) == sentence


def test_the_order_of_the_words_after_the_kind_is_free():
    for words in permutations(["code=7", "rank=1", "after=2s", "attempt=3"]):
        assert parse(f"exit {' '.join(words)}") == FaultSpec(kind="exit", rank=1, code=7, after_s=2.0, attempt=3)


@pytest.mark.parametrize(
    ("text", "after_s"),
    [("5s", 5.0), ("500ms", 0.5), ("2m", 120.0), ("1.5s", 1.5), ("0s", 0.0), ("0ms", 0.0), ("0.25m", 15.0)],
)
def test_a_time_has_a_unit(text: str, after_s: float):
    assert parse(f"kill rank=0 after={text}").after_s == after_s


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("after-line='epoch 1'", "epoch 1"),
        ("'after-line=epoch 1'", "epoch 1"),
        (r"after-line=epoch\ 1", "epoch 1"),
        ("after_line=loss=0", "loss=0"),
        ("""after-line='"x"'""", '"x"'),
        ("after-line='# 1'", "# 1"),
        ("after-line=#1", "#1"),
        ("after-line=Fertig!ä", "Fertig!ä"),
    ],
)
def test_the_text_of_a_line_is_quoted_as_in_a_shell(text: str, line: str):
    assert parse(f"kill rank=0 {text}").after_line == line


def test_the_report_has_the_fault_as_it_was_given():
    """With other white space in ``after-line``, a copy of it from the report would match no line."""
    text = "kill  rank=0 after-line='epoch  2/8'"
    assert parse(text).text == text


def test_an_exit_is_a_failure_unless_it_says_otherwise():
    assert parse("exit rank=0").code == 1
    assert parse("exit rank=0 code=0").code == 0
    assert parse("exit rank=0 code=255").code == 255


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no fault"),
        ("   ", "names no fault"),
        ("help", "names no fault"),
        ("kil rank=1", "there is no fault kil"),
        ("rank=1", "there is no fault rank=1"),
        ("Kill rank=1", "there is no fault Kill"),
        ("crash node=0", "only an agent can"),
        ("crash node=0 agent", "only an agent can"),
        ("kill", "kill needs rank=R"),
        ("kill after=5s", "kill needs rank=R"),
        ("slow rank=0", "slow needs by=10x"),
        ("crash agent", "crash agent needs node=N"),
        ("kill node=1", "kill has no node="),
        ("lose rank=1", "lose has no rank="),
        ("kill rank=1 code=3", "kill has no code="),
        ("hang rank=1 for=3s", "hang has no for="),
        ("kill rank=1 whenever=3", "kill has no whenever="),
        ("kill rank=1 now", "now is not NAME=VALUE"),
        ("kill 3", "3 is not NAME=VALUE"),
        ("kill rank=1 rank=2", "rank= is given twice"),
        ("kill rank=1 after-line=a after_line=b", "after-line= is given twice"),
        ("kill rank=1 after=1s after-line=a", "after and after-line cannot be combined"),
        ("kill rank=", "rank= must be a whole number"),
        ("kill rank=-1", "rank=-1 must be a whole number"),
        ("kill rank=1.5", "rank=1.5 must be a whole number"),
        ("kill rank=1,2", "rank=1,2 must be a whole number"),
        ("kill rank=1234567890", "rank=1234567890 must be a whole number"),
        ("kill rank=\u0663", "must be a whole number"),
        ("kill rank=0 attempt=x", "attempt=x must be a whole number"),
        ("exit rank=0 code=256", "code=256 must be an exit code"),
        ("exit rank=0 code=-1", "code=-1 must be a whole number"),
        ("kill rank=0 after=5", "after=5 must be a time"),
        ("kill rank=0 after=s", "after=s must be a time"),
        ("kill rank=0 after=-1s", "after=-1s must be a time"),
        ("kill rank=0 after=1e3s", "after=1e3s must be a time"),
        ("kill rank=0 after=infs", "after=infs must be a time"),
        ("kill rank=0 after=5x", "after=5x must be a time"),
        ("kill rank=0 after=999999999m", "at most 7 days"),
        ("partition node=0 for=0s", "for=0s must be longer"),
        ("slow rank=0 by=10", "by=10 must be like 10x"),
        ("slow rank=0 by=1x", "by=1x must be like 10x"),
        ("slow rank=0 by=0x", "by=0x must be like 10x"),
        ("slow rank=0 by=1001x", "by=1001x must be like 10x"),
        ("kill rank=0 after-line=", "after-line= must be text"),
        ("kill rank=0 after-line='a\nb'", "must be text without line breaks"),
        ("kill rank=0 after-line='epoch 1", "No closing quotation"),
    ],
)
def test_anything_else_is_an_error_that_says_what_is_wrong_and_shows_the_grammar(text: str, problem: str):
    with pytest.raises(UsageError) as caught:
        parse(text)
    error = caught.value
    assert error.exit_code == USAGE
    assert error.message.startswith("--inject ")
    assert problem.lower() in error.message.lower()
    assert error.message.isprintable()
    assert all(line in error.hint for line in GRAMMAR.splitlines())


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


@settings(deadline=None)
@given(st.text(texts.ENCODABLE))
def test_any_text_is_read_or_refused(text: str):
    for words in text, f"kill rank=0 {text}", f"kill rank=0 after={text}", f"slow rank=0 by={text}":
        try:
            sentence = describe(parse(words))
        except UsageError as error:
            sentence = error.message
        assert sentence.isprintable()


# Who it happens to.


def test_all_that_exist_can_be_named():
    check([parse("kill rank=7"), parse("lose node=1"), parse("crash agent node=0"), parse("hang rank=0")], 8, 2)
    check([], 1, 1)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("kill rank=8", "there is no rank 8", "This run has only ranks 0 to 7."),
        ("slow rank=100 by=2x", "there is no rank 100", "This run has only ranks 0 to 7."),
        ("crash agent node=2", "'crash agent node=2': there is no node 2", "This run has only nodes 0 to 1."),
    ],
)
def test_a_rank_or_node_that_does_not_exist_is_an_error(text: str, message: str, hint: str):
    with pytest.raises(UsageError, match=message) as caught:
        check([parse("kill rank=0"), parse(text)], 8, 2)
    assert caught.value.hint == hint


def test_a_job_of_one_has_only_rank_and_node_0():
    for text, hint in ("kill rank=1", "This run has only rank 0."), ("lose node=1", "This run has only node 0."):
        with pytest.raises(UsageError) as caught:
            check([parse(text)], 1, 1)
        assert caught.value.hint == hint
