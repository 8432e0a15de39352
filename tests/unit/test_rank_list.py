"""Ranks as a text: every list of ranks comes back, large regular groups are short, and hostile texts are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.features.hangs.rank_list import MAX_RANKS, fold, unfold
from ddplaunch.features.hangs.records import ProcessGroup
from ddplaunch.protocol import wire


@given(st.lists(st.integers(0, 40)) | st.lists(st.integers(0, 1 << 24), unique=True).map(sorted))
def test_every_list_of_ranks_comes_back_in_its_order(ranks: list[int]) -> None:
    assert unfold(fold(ranks)) == tuple(ranks)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([0, 1], "0,1"),
        (range(2048), "0-2047"),
        (range(3, 2048, 8), "3-2043/8"),
        ([3, 2, 1], "3,2,1"),
        ([0, 1, 2, 9, 10, 20], "0-2,9,10,20"),
    ],
)
def test_groups_of_a_large_job_are_short(ranks: list[int], text: str) -> None:
    assert fold(ranks) == text


@pytest.mark.parametrize(
    "text",
    ["x", "1,", "-1", "3-1", "0-9/0", " 1", "1-2-3", "\u0661", "99999999", "9" * 5000, f"0-{MAX_RANKS}", "0-9,0-65535"],
)
def test_another_text_is_no_record(text: str) -> None:
    line = wire.encode(ProcessGroup("0", "", text))
    with pytest.raises(wire.ProtocolError, match="is not at most 65536 ranks"):
        wire.decode(line, (ProcessGroup,))
