"""What of the launcher's environment goes to other machines: settings do, what is this machine's own does not."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.errors import UsageError
from ddplaunch.features.forwarding.rules import RULES, forwarded, masked_lines, parse_env_file, rule_of
from ddplaunch.protocol.environment import NAMES
from tests.support import golden, texts


def of(*names: str) -> dict[str, str]:
    """An environment in which each of these is set."""
    return {name: f"here: {name}" for name in names}


EVERYTHING = of(*golden.questions("variables"))
SETTINGS = forwarded(EVERYTHING, [])


def test_what_becomes_of_each_variable():
    """Without being asked for, with -x, and on the screen. What ddplaunch sets itself can be given in no way."""

    def fate(name: str) -> str:
        here = of(name)
        if rule_of(name).when == "never":
            for asked, file in ([f"{name}=5"], None), ([], f"{name}=5"):
                with pytest.raises(UsageError, match=f"ddplaunch sets {name}"):
                    forwarded(here, asked, file)
        assert forwarded(here, [name]) == here
        goes = "goes along" if forwarded(here, []) else "is asked for"
        return goes if masked_lines(here) == [f"{name}=here: {name}"] else f"{goes}, and is masked"

    assert NAMES.keys() <= EVERYTHING.keys()
    golden.check_answers("variables", fate)


def test_every_name_falls_under_the_last_rule_if_under_no_other():
    assert RULES[-1].names == ("*",)
    assert rule_of("") is rule_of("something") is RULES[-1]


# -x NAME and -x NAME=VALUE.


@pytest.mark.features
def test_what_is_asked_for_goes_along_beside_the_settings():
    """A question is the words of ``-x``, and after `` | `` the env file."""

    def beside(question: str) -> dict[str, str]:
        asked, _, file = question.partition(" | ")
        given = forwarded({**EVERYTHING, "my_a": "1", "AB": "here"}, asked.split(" ") if asked else [], file)
        return {name: value for name, value in given.items() if (name, value) not in SETTINGS.items()}

    golden.check_answers("forwarded", beside)


@pytest.mark.parametrize("text", ["", "A B=x", "A=\0", "A\n=x"])
def test_what_no_variable_can_be_is_an_error(text: str):
    with pytest.raises(UsageError, match=r"^-x"):
        forwarded({}, [text])


def test_nothing_given_is_changed():
    environ = dict(EVERYTHING)
    forwarded(environ, ["A=1", "*"], "B=2")
    assert environ == EVERYTHING


# The env file.


def test_a_line_of_the_env_file_says_a_value_or_nothing():
    golden.check_answers("env_files", parse_env_file)


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_a_file_may_have_comments_and_empty_lines(ends: str):
    lines = ["\ufeff# settings", "", "   ", "  # A=0", "A=1", "export B='2'", "A=3"]
    assert parse_env_file(ends.join(lines) + ends) == {"A": "3", "B": "2"}


@pytest.mark.parametrize("line", ["A B=hunter2", "A='hunter2", "RANK=hunter2", "A=hunter2\0"])
def test_an_error_never_shows_a_value(line: str):
    with pytest.raises(UsageError) as caught:
        forwarded({}, [], line)
    with pytest.raises(UsageError) as caught_option:
        forwarded({}, [line.replace("A='", "9=")])
    for error in caught.value, caught_option.value:
        assert "hunter2" not in error.message + error.hint


@given(st.text(texts.ENCODABLE))
def test_any_file_is_read_or_refused(text: str):
    with contextlib.suppress(UsageError):
        assert all(name.isidentifier() and "\0" not in value for name, value in parse_env_file(text).items())


@given(st.lists(st.text(texts.ENCODABLE)))
def test_any_option_is_read_or_refused(asked: list[str]):
    with contextlib.suppress(UsageError):
        assert forwarded(EVERYTHING, asked).keys() >= SETTINGS.keys()


# What is shown.


def test_the_list_is_sorted():
    assert masked_lines({"NCCL_DEBUG": "INFO", "A": "", "my_secret": "x"}) == ["A=", "NCCL_DEBUG=INFO", "my_secret=***"]


def test_secrets_are_masked_and_settings_are_not():
    """Also a login in a URL."""

    def masked(question: str) -> str:
        name, _, value = question.partition("=")
        return masked_lines({name: value})[0]

    golden.check_answers("masked_variables", masked)


def test_each_variable_is_one_printable_line_of_bounded_length():
    lines = masked_lines({"A": "two\nlines\x1b[31m", "B": "\udcff", "C": "x" * 100_000, "D\n": "1"})
    assert lines[0] == r"A=two\nlines\x1b[31m"
    assert all(line.isprintable() and len(line) < 1100 for line in lines)
