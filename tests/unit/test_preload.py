"""What is imported before the fork is what the script will import from torch, unless that would be too early."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.protocol.agent_entry import MAX_MESSAGE_CHARS
from ddplaunch.worker.preload import (
    ALWAYS,
    describe,
    early_variable,
    hiding_file,
    module_file,
    modules_for,
    try_import,
    without_collection,
)
from tests.support import golden


def test_modules_are_read_from_the_text() -> None:
    golden.check_answers("preloaded_modules", lambda source: " ".join(modules_for(source.encode())[len(ALWAYS) :]))


@pytest.mark.parametrize(
    "source", [b"def f(:", b"\x00", b"x = '\xff'", b"# coding: klingon\nx", b"(" * 5000, b"\xff\xfe"]
)
def test_what_cannot_be_parsed_is_left_to_the_worker(source: bytes) -> None:
    assert modules_for(source) == ALWAYS
    assert early_variable(source, {}) == ""


def test_a_variable_set_for_torchs_import_is_found() -> None:
    golden.check_answers("early_variables", lambda source: early_variable(source.encode(), {"OMP_NUM_THREADS": "1"}))


def test_the_file_of_a_module_is_found_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in (
        "hidden.py",
        "hidden_pkg/__init__.py",
        "hidden_pkg/__main__.py",
        "hidden_pkg/space/run.py",
        "hidden_space/run.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise AssertionError")

    def found(name: str) -> str | None:
        path = module_file(name)
        return path and path.removeprefix(f"{tmp_path}/")

    assert found("hidden") == "hidden.py"
    assert found("hidden_pkg") == "hidden_pkg/__main__.py"
    assert found("hidden_space.run") == "hidden_space/run.py"
    for missing in ("hiddn", "hidden_pkg.typo", "hidden_space", "hidden.x", "hidden_pkg..x", "a b"):
        assert found(missing) is None
    assert found("sys") == found("hidden_pkg.space.run") == ""


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


def test_a_huge_error_of_an_import_is_cut() -> None:
    assert describe(ValueError("x" * 1_000_000))[-10:] == "xxxx…[cut]"
    assert len(describe(ValueError("x" * 1_000_000))) == MAX_MESSAGE_CHARS


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
    assert hiding_file(error, "") == "", "<frozen importlib._bootstrap> is in no folder"
