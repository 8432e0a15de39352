"""A module that a feature patches is changed when the script imports it."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from multiprocessing import spawn
from pathlib import Path

import pytest

from ddplaunch.features import worker_patches

NAME = "module_that_a_feature_patches"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield NAME
    sys.meta_path[:] = finders
    sys.modules.pop(NAME, None)


def test_a_module_that_was_only_looked_for_is_changed_when_it_is_imported(module: str) -> None:
    worker_patches.after_import(module, lambda loaded: setattr(loaded, "value", 2))
    spec = importlib.util.find_spec(module)
    assert spec
    assert spec.loader
    assert spec.loader.get_code(module), "as python -m needs it"  # type: ignore[attr-defined]
    loaded = importlib.import_module(module)
    assert loaded.value == 2
    assert isinstance(loaded.__loader__, SourceFileLoader)


def test_a_module_that_is_loaded_is_changed_at_once(module: str) -> None:
    loaded = importlib.import_module(module)
    worker_patches.after_import(module, lambda each: setattr(each, "value", 3))
    assert loaded.value == 3


def test_two_features_may_change_one_module(module: str) -> None:
    worker_patches.after_import(module, lambda loaded: setattr(loaded, "a", 1))
    worker_patches.after_import(module, lambda loaded: setattr(loaded, "b", 1))
    loaded = importlib.import_module(module)
    assert (loaded.a, loaded.b) == (1, 1)


def test_a_spawned_process_does_what_each_feature_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "get_preparation_data", lambda name: {"name": name})
    worker_patches.in_children("of 3", lambda: (int, ("3",)))
    worker_patches.in_children("of 5", lambda: (int, ("5",)))
    unpickled = pickle.loads(pickle.dumps(spawn.get_preparation_data("child")))
    assert unpickled == {"of 3": 3, "of 5": 5, "name": "child"}
