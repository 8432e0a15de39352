"""What is imported before the fork is what the script will import from torch, unless that would be too early."""

from __future__ import annotations

import ast
import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddplaunch.worker.preload import (
    ALWAYS,
    describe,
    early_variable,
    hiding_file,
    modules_for,
    try_import,
    without_collection,
)
from tests.support.runs import PROGRAMS


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ("", ()),
        ("import torch\nimport numpy, pandas\nfrom sklearn import svm", ()),
        ("import torch.nn.functional as F", ("torch.nn.functional",)),
        ("from torch.utils.data import DataLoader\nimport torch.fft", ("torch.fft", "torch.utils.data")),
        ("from torch.nn.parallel import DistributedDataParallel as X", ("torch._dynamo", "torch.nn.parallel")),
        ("import torch\nmodel = torch.nn.parallel.DistributedDataParallel(m)", ("torch._dynamo",)),
        ("import torch\no = torch.optim.SGD(p)", ("torch._dynamo",)),
        ("import torch.optim as o", ("torch._dynamo", "torch.optim")),
        ("from torch import optim", ("torch._dynamo",)),
        ("import torch\nf = torch.compile(f)", ("torch._dynamo",)),
        ("def main():\n    import torch.onnx", ()),
        ("try:\n    import torch.no_such\nexcept ImportError: ...", ()),
        ("from . import torch\nfrom .torch import x", ()),
        ("from torch import nn", ()),
        ("import torchvision.models", ()),
        ("print('import torch.fft')", ()),
    ],
)
def test_modules_are_read_from_the_text(source: str, more: tuple[str, ...]) -> None:
    # "torch" itself counts for ``from torch import ...``.
    assert modules_for(source.encode()) == (*ALWAYS, *more)


@pytest.mark.parametrize(
    "source", [b"def f(:", b"\x00", b"x = '\xff'", b"# coding: klingon\nx", b"(" * 5000, b"\xff\xfe"]
)
def test_what_cannot_be_parsed_is_left_to_the_worker(source: bytes) -> None:
    assert modules_for(source) == ALWAYS
    assert early_variable(source, {}) == ""


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch", "OMP_NUM_THREADS"),
        ("from os import environ\nenviron['MKL_NUM_THREADS'] = '4'\nimport torch", "MKL_NUM_THREADS"),
        ("import os\nif True:\n    os.environ['TORCH_LOGS'] = '+all'", "TORCH_LOGS"),
        ("import os\nos.environ.update(A='1', OMP_WAIT_POLICY='active')", "OMP_WAIT_POLICY"),
        ("import os\nos.environ.update({'KMP_BLOCKTIME': '1'})", "KMP_BLOCKTIME"),
        ("import os\nos.putenv('GOMP_SPINCOUNT', '0')", "GOMP_SPINCOUNT"),
        ("import os\ndel os.environ['OMP_NUM_THREADS']", "OMP_NUM_THREADS"),
        ("import os\nos.environ.pop('OMP_NUM_THREADS', None)", "OMP_NUM_THREADS"),
        ("import os\nos.environ.setdefault('OMP_PROC_BIND', 'true')", "OMP_PROC_BIND"),
        ("import os\nos.environ.setdefault('OMP_NUM_THREADS', '1')", ""),
        ("import os\nimport torch\nos.environ['OMP_NUM_THREADS'] = '4'", ""),
        ("import os\nfrom torch import nn\nos.environ['OMP_NUM_THREADS'] = '4'", ""),
        ("import os\ndef main():\n    os.environ['OMP_NUM_THREADS'] = '4'", ""),
        ("import os\nn = os.environ['OMP_NUM_THREADS']\nos.environ.get('TORCH_LOGS')", ""),
        ("import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'", ""),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'", ""),
        ("import os\nos.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'\nos.environ['TORCH_HOME'] = '/x'", ""),
        ("import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'x'", ""),
        ("import os\nos.environ[key] = '1'\nos.environ.update(settings)\nsettings['OMP_NUM_THREADS'] = 1", ""),
    ],
)
def test_a_variable_set_for_torchs_import_is_found(source: str, name: str) -> None:
    assert early_variable(source.encode(), {"OMP_NUM_THREADS": "1"}) == name


def test_the_test_programs_are_parsed() -> None:
    for script in PROGRAMS.rglob("*.py"):
        assert modules_for(script.read_bytes())[:2] == ALWAYS


@settings(deadline=None)
@given(st.binary())
def test_no_text_is_too_strange(source: bytes) -> None:
    assert modules_for(source)[:2] == ALWAYS
    early_variable(source, {})


NAMES = st.sampled_from(["os", "environ", "torch", "OMP_NUM_THREADS", "update", "pop", "setdefault", "x"])
EXPRESSIONS = st.recursive(
    NAMES | NAMES.map(repr),
    lambda inner: st.one_of(
        st.tuples(inner, NAMES).map(lambda pair: f"({pair[0]}).{pair[1]}"),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]})[{pair[1]}]"),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]})(*a, {pair[1]}, k={pair[1]}, **{{'k': 1, **b}})"),
        st.tuples(inner, inner).map(lambda pair: f"{{{pair[0]}: {pair[1]}, **z}}"),
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(EXPRESSIONS, st.sampled_from(["{}", "import torch\n{}", "{} = 1", "del {}", "with {}: pass", "import {}"]))
def test_no_statement_is_too_strange(expression: str, statement: str) -> None:
    source = statement.format(expression).encode()
    try:
        ast.parse(source)
    except SyntaxError:
        assert modules_for(source) == ALWAYS
    assert early_variable(source, {}) in ("", "OMP_NUM_THREADS")


@pytest.fixture
def collector():
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_nothing_is_collected_in_the_block_and_what_is_made_there_is_frozen(collector):
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    with without_collection():
        assert gc.get_threshold()[0] == 0
        made = [[] for _ in range(1000)]
    assert gc.get_freeze_count() >= frozen + len(made)
    assert gc.get_threshold() == thresholds
    assert gc.isenabled()


def test_what_a_module_sets_is_kept(collector):
    with without_collection():
        gc.set_threshold(12345)
    assert gc.get_threshold()[0] == 12345


def test_a_module_that_cannot_be_imported_is_told_with_its_last_lines():
    assert try_import("json") is None
    error = try_import("no_such_module")
    assert error
    assert describe(error) == "ModuleNotFoundError: No module named 'no_such_module'\n"


def test_a_file_beside_the_script_that_hides_a_module_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hidden_package.py").write_text("")
    (tmp_path / "needs_it.py").write_text("import hidden_package.part")
    error = try_import("hidden_package.part")
    assert error
    assert hiding_file(error, str(tmp_path)) == str(tmp_path / "hidden_package.py")
    error = try_import("needs_it")
    assert error
    assert hiding_file(error, str(tmp_path)) == str(tmp_path / "needs_it.py")
    assert hiding_file(error, str(tmp_path / "other")) == ""
