"""A module that a feature patches is changed when the script imports it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
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
