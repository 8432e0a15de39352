"""What a script imports: torch, with the variables that the script has set before, and modules that features patch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from ddplaunch.worker import late_import


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A small torch in ``sys.modules``, which counts its threads and says how often it was set up."""
    before, path = (
        {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torch"},
        sys.meta_path[:],
    )
    for name in before:
        del sys.modules[name]
    module, child = ModuleType("torch"), ModuleType("torch.nn")
    module.__spec__ = ModuleSpec("torch", None, origin="/site/torch/__init__.py", is_package=True)
    module.__path__ = ["/site/torch"]
    child.__path__ = ["/site/torch/nn"]
    module.nn, module.threads = child, 1  # type: ignore[attr-defined]
    module.set_num_threads = lambda count: setattr(module, "threads", count)  # type: ignore[attr-defined]
    module.distributed = SimpleNamespace()  # type: ignore[attr-defined]
    sys.modules.update({"torch": module, "torch.nn": child, "torchvision": ModuleType("torchvision")})
    for name in ("OMP_NUM_THREADS", "TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "KMP_BLOCKTIME", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKL_VERBOSE", "1")
    late_import.choose_modules()
    yield module
    sys.meta_path[:] = path
    for name in ("torch", "torch.nn", "torchvision"):
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.mark.parametrize("first", ["torch", "torch.nn"])
def test_torch_is_not_loaded_until_it_is_imported(first: str, torch: ModuleType) -> None:
    spec, finders = torch.__spec__, sys.meta_path[:]
    late_import.hide_torch()
    assert not {"torch", "torch.nn"} & sys.modules.keys()
    assert "torchvision" in sys.modules
    found = importlib.util.find_spec("torch")
    assert found
    assert found.origin == "/site/torch/__init__.py"
    assert "torch" not in sys.modules
    assert importlib.import_module(first) is (torch if first == "torch" else torch.nn)
    assert sys.modules["torch"] is torch
    assert sys.modules["torch.nn"] is torch.nn
    assert torch.__spec__ is spec
    assert sys.meta_path == finders


def test_where_torch_is_not_loaded_nothing_changes(torch: ModuleType) -> None:
    del sys.modules["torch"]
    finders = sys.meta_path[:]
    late_import.hide_torch()
    assert sys.meta_path == finders


@pytest.mark.parametrize(("rank", "warnings"), [("0", 1), ("1", 0)])
def test_a_setting_that_is_too_late_is_told_once(
    rank: str, warnings: int, torch: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    late_import.hide_torch()
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    monkeypatch.setenv("KMP_BLOCKTIME", "1")
    monkeypatch.delenv("MKL_VERBOSE")
    importlib.import_module("torch")
    told = capsys.readouterr().err
    assert told.count("KMP_BLOCKTIME, MKL_VERBOSE, OMP_NUM_THREADS before it imported torch") == warnings
    assert told.count("--start-method spawn") == warnings
