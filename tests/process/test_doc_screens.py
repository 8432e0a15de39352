"""What README.md and docs/ show as printed is printed today. Where this fails: ``scripts/refresh_docs``, and look."""

from __future__ import annotations

import re

import pytest

from tests.support.docs import CUT, PAGES, SCREEN, commands, masked, printed

COMPARED = ("first-run", "failure", "plan", "inject")
"""The others take longer, or depend on what else runs on this machine."""

VARYING = (
    r"^(stopped|then|waiting): |^ddplaunch: rank 0 lost a peer "
    r"|^ddplaunch: a new rendezvous has begun; starting the workers again$"
)
"""Chance: whether rank 0 is stopped, or first misses rank 1 by itself; and whether a worker fails for want of its peers
before the new rendezvous begins."""


def screens() -> dict[str, str]:
    return {match[2]: match[3] for page in PAGES for match in SCREEN.finditer(page.read_text())}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
def test_a_screen_shows_what_is_printed(name: str):
    text = screens()[name]
    assert commands(text)
    now = {masked(line) for line in printed(name, text).splitlines()}
    shown = [line for line in text.splitlines() if line != CUT and not re.search(VARYING, line)]
    assert [line for line in shown if masked(line) not in now] == []
