"""What others wrote is shown so that it cannot steer the user's terminal."""

from __future__ import annotations

from ddplaunch.printable import printable, shown

EVIL = "\x1b]0;owned\x07 \x9b31m \u202e \r\n\tend"


def test_control_characters_are_escaped_but_line_ends_and_tabs() -> None:
    assert printable(EVIL) == r"\x1b]0;owned\x07 \x9b31m \u202e \r" + "\n\tend"


def test_what_is_quoted_is_one_line_and_not_endless() -> None:
    assert shown(EVIL) == r"\x1b]0;owned\x07 \x9b31m \u202e \r\n\tend"
    assert shown("x" * 100, 10) == "xxxxxxxxxx..."
