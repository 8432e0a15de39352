"""Ranks as a text: every list of ranks comes back, large regular groups are short, and hostile texts are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.features.hangs.rank_list import MAX_RANKS, fold, unfold
from ddplaunch.features.hangs.records import ProcessGroup
from ddplaunch.protocol import wire
from tests.support import golden


@given(st.lists(st.integers(0, 40)) | st.lists(st.integers(0, 1 << 24), unique=True).map(sorted))
def test_every_list_of_ranks_comes_back_in_its_order(ranks: list[int]) -> None:
    assert unfold(fold(ranks)) == tuple(ranks)


def test_groups_of_a_large_job_are_short() -> None:
    """A question is ranks, or a Python range of them."""

    def folded(question: str) -> str:
        numbers = [*map(int, question.removeprefix("range ").split())]
        return fold(range(*numbers) if question.startswith("range") else numbers)

    assert fold([]) == ""
    golden.check_answers("folded_ranks", folded)


OTHERS = ("x", "1,", "-1", "3-1", "0-9/0", " 1", "1-2-3", "\u0661", "99999999", "9" * 5000)


@pytest.mark.parametrize("text", [*OTHERS, f"0-{MAX_RANKS}", "0-9,0-131071"])
def test_another_text_is_no_record(text: str) -> None:
    line = wire.encode(ProcessGroup("0", "", text))
    with pytest.raises(wire.ProtocolError, match="is not at most 131072 ranks"):
        wire.decode(line, (ProcessGroup,))
