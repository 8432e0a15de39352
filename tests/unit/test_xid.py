"""The actions of Xid errors, as NVIDIA's catalogue has them."""

from __future__ import annotations

import pytest

from ddplaunch.health.xid import ACTIONS, XIDS, xid

RESET = (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158)


@pytest.mark.parametrize("number", RESET)
def test_errors_that_only_a_reset_ends_keep_the_gpu_out(number: int) -> None:
    assert (xid(number).action, xid(number).is_fault, xid(number).is_lasting) == ("reset", True, True)


def test_a_gpu_that_has_fallen_off_the_bus_is_kept_out() -> None:
    assert (xid(79).meaning, xid(79).is_fault, xid(79).is_lasting) == ("the GPU has fallen off the bus", True, True)


@pytest.mark.parametrize("number", [13, 31])
def test_errors_of_the_script_are_no_fault_of_the_hardware(number: int) -> None:
    assert (xid(number).is_fault, xid(number).is_lasting) == (False, False)


def test_a_contained_memory_error_ends_one_worker_only() -> None:
    assert (xid(94).action, xid(94).is_fault, xid(94).is_lasting) == ("restart", True, False)


@pytest.mark.parametrize("number", [43, 45, 63, 92, 154])
def test_what_needs_no_attention_is_ignored(number: int) -> None:
    assert xid(number).action == "ignore"


@pytest.mark.parametrize("number", [48, 74, *range(144, 151)])
def test_what_may_be_one_or_the_other_is_to_be_looked_at(number: int) -> None:
    assert (xid(number).action, xid(number).is_fault, xid(number).is_lasting) == ("investigate", True, False)


def test_a_number_that_nobody_knows_is_told() -> None:
    assert (xid(9999).action, xid(9999).is_fault) == ("investigate", False)


def test_each_action_says_what_to_do() -> None:
    assert {known.action for known in XIDS.values()} == set(ACTIONS)
