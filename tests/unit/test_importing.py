"""The collector rests while modules are imported, and works again as it did."""

from __future__ import annotations

import gc

import pytest

from ddplaunch.worker import importing


@pytest.fixture(autouse=True)
def collector():
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_nothing_is_collected_in_the_block_and_what_is_made_there_is_frozen():
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    with importing.frozen():
        assert gc.get_threshold()[0] == 0
        made = [[] for _ in range(1000)]
    assert gc.get_freeze_count() >= frozen + len(made)
    assert gc.get_threshold() == thresholds
    assert gc.isenabled()


def test_what_a_module_sets_is_kept():
    with importing.frozen():
        gc.set_threshold(12345)
    assert gc.get_threshold()[0] == 12345


def test_a_module_that_cannot_be_imported_is_told_with_its_last_lines():
    assert importing.error_of("json") == ""
    assert "No module named 'no_such_module'" in importing.error_of("no_such_module")
