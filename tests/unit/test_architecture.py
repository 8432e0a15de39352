"""The house: packages import downwards only, no circles, heavy packages stay where they belong, torch loads late."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddplaunch
from ddplaunch.features import FEATURES

PACKAGE = Path(ddplaunch.__file__).parent
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

# The drawing of docs/architecture.md: each package, and the packages and top-level modules that it may import.
# A package within another that is not listed has the rule of the other.
_BASE = {"errors", "late_dataclass", "rows", "text", "threads", "version"}
_SHARED = {*_BASE, "config", "timeouts", "mailbox"}
_LAUNCHER_SIDE = {*_SHARED, "cluster", "protocol", "system"}
MAY_IMPORT = {
    "cli": {*_LAUNCHER_SIDE, "launcher", "transport"},
    "launcher": {*_LAUNCHER_SIDE, "rounds", "transport"},
    "launcher/display": {*_LAUNCHER_SIDE},
    "transport": {*_LAUNCHER_SIDE},
    "agent": {*_SHARED, "protocol", "system"},
    "agent/rendezvous": {*_SHARED, "protocol", "rounds", "system"},
    "rendezvous": {*_SHARED, "protocol", "rounds", "system"},
    "rounds": {*_BASE, "protocol", "cluster"},
    "worker": {*_SHARED, "protocol", "system"},
    "protocol": {*_SHARED, "cluster"},
    "system": {*_BASE, "config"},
    "cluster": _BASE,
    "config": {*_BASE, "cluster", "timeouts"},
    "timeouts": _BASE,
    "mailbox": {"threads"},
    "text": set(),
    "rows": {"errors", "late_dataclass", "text"},
    "errors": {"late_dataclass"},
    "late_dataclass": set(),
    "threads": set(),
    "__main__": {"cli", "protocol"},
    "version": set(),
    "": {"cli", "cluster", "config", "timeouts", "protocol", "worker", *_BASE},
    "features": {*_LAUNCHER_SIDE, "launcher", "transport", "agent", "worker", "cli"},
}

HOMES = {
    "click": {"cli"},
    "jinja2": {"features/page"},
    "markupsafe": {"features/page"},
    "torch": {"rendezvous", "worker", "features"},
    "pynvml": {"system", "features/gpus"},
    "paramiko": {"features/ssh"},
    "cryptography": {"features/ssh"},
}
"""Every package that is not the standard library's or ours, and the only rooms that may import it."""


def is_in_worker(file: Path) -> bool:
    """Whether the module runs in a worker, or in a process that forks workers: it may import torch."""
    feature, name = ("/".join(file.parts[:2]), file.stem) if file.parts[0] == "features" else ("", "")
    of_feature = name.startswith("worker") or feature in ("features/warm", "features/dry_run")
    return of_feature or file.parts[0] in ("rendezvous", "worker")


def room(file: Path) -> str:
    """The package of ``file`` within ddplaunch, or the module itself where it lies loose at the top."""
    return "" if str(file) == "__init__.py" else str(file.parent) if len(file.parts) > 1 else file.stem


def top(package: str) -> str:
    return package.split("/")[0]


def dotted(file: Path) -> str:
    return ".".join(("ddplaunch", *file.with_suffix("").parts)).removesuffix(".__init__")


MODULES = {dotted(file): file for file in FILES}


@functools.cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """All of the syntax tree of ``file``, beginning with its root."""
    return tuple(ast.walk(ast.parse((PACKAGE / file).read_text())))


@functools.cache
def imports(file: Path) -> frozenset[str]:
    """Full names of all that is imported anywhere in ``file``, also in functions and for types only."""
    return frozenset(_imports(file))


def _imports(file: Path) -> Iterator[str]:
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def modules_imported(file: Path) -> frozenset[str]:
    """Those of ddplaunch's modules that ``file`` imports."""
    names = (name if name in MODULES else name.rpartition(".")[0] for name in imports(file))
    return frozenset(name for name in names if name in MODULES) - {dotted(file)}


def is_allowed(file: Path, name: str) -> bool:
    """Whether the place of ``file`` lets it import that module, or that name of a package."""
    own, package = room(file), name.partition(".")[0]
    if name == "ddplaunch.features":  # The list: any package may read it.
        return True
    if name in MODULES:
        other = room(MODULES[name])
        is_within = top(other) == top(own) and (own, other) != ("launcher/display", "launcher")
        return is_within or top(other) in MAY_IMPORT.get(own, MAY_IMPORT[top(own)])
    return package in ("ddplaunch", *sys.stdlib_module_names) or bool({own, top(own)} & HOMES.get(package, set()))


def test_a_file_imports_only_what_its_place_allows() -> None:
    pairs = [(str(file), name) for file in FILES for name in imports(file) | modules_imported(file)]
    assert [pair for pair in pairs if not is_allowed(Path(pair[0]), pair[1])] == []


def test_the_core_imports_no_feature() -> None:
    """It reads the list of features, and loads what that names."""
    core = [file for file in FILES if file.parts[0] != "features"]
    pairs = [(str(file), name) for file in core for name in modules_imported(file)]
    assert [pair for pair in pairs if pair[1].startswith("ddplaunch.features.")] == []


def test_a_feature_says_whether_its_package_declares_something() -> None:
    names = ("rows", "EVENTS", "EVENT_KEYS", "default_environ", "variables")
    for each in FEATURES:
        package = importlib.import_module(f"ddplaunch.features.{each.name}")
        assert each.declares == any(hasattr(package, name) for name in names), each.name


def test_a_feature_names_those_whose_modules_it_imports() -> None:
    needs = {each.name: {each.name, *each.needs} for each in FEATURES}
    for file in FILES:
        if len(file.parts) > 2 and file.parts[0] == "features":
            used = {
                MODULES[name].parts[1]
                for name in modules_imported(file)
                if len(MODULES[name].parts) > 2 and MODULES[name].parts[0] == "features"
            }
            assert used <= needs[file.parts[1]], file


def test_a_module_of_a_feature_belongs_to_one_process() -> None:
    """What runs in the launcher imports nothing that runs in an agent or a worker, and the other way round."""
    of_launcher, of_agent = {"cli", "launcher", "transport"}, {"agent"}
    for file in FILES:
        if file.parts[0] == "features":
            reached = {top(room(MODULES[name])) for name in reached_from(dotted(file))}
            assert not (reached & of_launcher and reached & of_agent), file


def reached_from(name: str) -> set[str]:
    """``name`` and the modules that it imports, directly or through others of the features."""
    reached, waiting = {name}, [name]
    while waiting:
        more = modules_imported(MODULES[waiting.pop()]) - reached
        reached |= more
        waiting += [module for module in more if module.startswith("ddplaunch.features.")]
    return reached


def test_no_module_imports_itself_through_others() -> None:
    """Imports for types only count too: what cannot be read one after the other is not understood."""
    waiting = {name: modules_imported(file) for name, file in MODULES.items()}
    while ready := [name for name, needs in waiting.items() if not needs & waiting.keys()]:
        for name in ready:
            del waiting[name]
    assert not waiting, f"circles among {sorted(waiting)}"


def test_no_dataclass_compiles_its_methods_at_the_start() -> None:
    """The standard one takes 0.3 to 1 ms for each class, and the launcher and the agent load 150 of them each."""
    assert {str(file) for file in FILES if "dataclasses.dataclass" in imports(file)} == {"late_dataclass.py"}


_RAISING_LOOKS = {"exists", "is_dir", "is_file", "is_symlink", "is_fifo", "is_socket"}
_LOOKS = {"os.path.exists", "keeper_files.exists", "entry.is_dir"}
"""They do not raise, or their caller is prepared."""


def test_no_look_at_a_file_raises() -> None:
    """Path.is_dir and its like raise where a file system has died; os.path.isdir answers."""
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and node.attr in _RAISING_LOOKS:
                assert ast.unparse(node) in _LOOKS, f"{file}:{node.lineno}"


@pytest.mark.features
def test_scripts_import_names_that_exist() -> None:
    """No other check runs the benchmarks, and a rename would break them unseen."""
    scripts = sorted((PACKAGE.parent / "scripts").rglob("*.py"))
    names = [(script.name, name) for script in scripts for name in imports(script) if name.startswith("ddplaunch.")]
    assert names
    for script, name in names:
        module, _, attribute = name.rpartition(".")
        defined = name in MODULES or attribute in _top_level_names(MODULES[module])
        assert defined, f"{script} imports {name}"


def _top_level_names(file: Path) -> set[str]:
    tree = nodes(file)[0]
    assert isinstance(tree, ast.Module)
    definitions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return definitions | {node.id for node in nodes(file) if isinstance(node, ast.Name)}


def test_few_modules_lie_loose_at_the_top() -> None:
    assert len([file for file in FILES if len(file.parts) == 1]) <= 11


def test_each_package_says_what_it_is_for() -> None:
    for file in FILES:
        if file.name == "__init__.py" and len(file.parts) > 1:
            text = ast.get_docstring(nodes(file)[0]) or ""  # type: ignore[arg-type]
            assert 3 <= len(text.splitlines()) <= 8, file


def modules_loaded_by(*modules: str) -> set[str]:
    """What is in memory when a fresh interpreter has imported ``modules``."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    return set(done.stdout.split())


def loaded_by(*modules: str) -> set[str]:
    """The top-level packages of ``modules_loaded_by``."""
    return {name.partition(".")[0] for name in modules_loaded_by(*modules)}


def test_launcher_and_agent_load_no_torch() -> None:
    modules = [dotted(file) for file in FILES if not is_in_worker(file) and file.name != "__main__.py"]
    assert {"ddplaunch.launcher.run", "ddplaunch.agent.agent", "ddplaunch.cli.main"} <= set(modules)
    assert not loaded_by(*modules) & {"torch", "numpy"}


def test_a_process_loads_only_what_it_needs() -> None:
    assert not loaded_by("ddplaunch") & {*HOMES, "asyncio", "logging"}
    assert not loaded_by("ddplaunch.launcher.run") & {*HOMES}
    assert not loaded_by("ddplaunch.agent.main") & {"click", "paramiko", "torch"}
    assert not loaded_by("ddplaunch.worker.bootstrap", "ddplaunch.worker.exit") & {*HOMES}
    # click itself may need more: in Python 3.10 its uuid brings subprocess.
    command_line = modules_loaded_by("ddplaunch.cli.main") - modules_loaded_by("click")
    assert not command_line & {"asyncio", "subprocess", "json", "logging", "importlib.metadata"}
    assert not command_line & {*HOMES, "numpy", "ddplaunch.launcher", "ddplaunch.protocol.results"}


@pytest.mark.features
def test_what_features_do_before_a_run_costs_workers_nothing() -> None:
    """The packages of features have functions for the launcher, and each worker loads some of them."""
    parts = [f"ddplaunch.features.{each.name}.worker" for each in FEATURES if "worker" in each.modules]
    assert "ddplaunch.config" not in modules_loaded_by("ddplaunch.worker.bootstrap", *parts)


@pytest.mark.features
def test_a_run_is_started_without_what_only_some_runs_need() -> None:
    """What explains hangs and failures, and queries, is imported on use, or a second after the start."""
    parts = [f"{each.name}.{name}" for each in FEATURES for name in ("launcher", "agent") if name in each.modules]
    core = ("ddplaunch.agent.main", "ddplaunch.cli.main", "ddplaunch.launcher.run")
    loaded = modules_loaded_by(*core, *(f"ddplaunch.features.{part}" for part in parts))
    assert "ddplaunch.features.hangs.launcher" in loaded
    on_use = "ddplaunch.features.ps.queries ddplaunch.features.hangs.evidence"
    not_needed = {*on_use.split(), "hashlib", "pickle", "random"}
    assert not loaded & not_needed
    assert "paramiko" not in modules_loaded_by("ddplaunch.features.ssh.handle")
    prefix = "ddplaunch.features.hangs."
    of_hangs = {name.removeprefix(prefix) for name in loaded if name.startswith(prefix)}
    pure = {"explanation", "flight_record", "waits", "wording"}
    assert not of_hangs & pure


@pytest.mark.features
def test_a_keeper_is_asked_before_the_launcher_loads_the_rest() -> None:
    """Until then only what reads the options and what asks: each module would delay the agent."""
    asking = (
        "cli.main",
        "launcher.launch",
        "features.warm.early_agent",
        "features.warm.keeper_client",
        "features.warm.records",
        "protocol.fd_records",
    )
    loaded = modules_loaded_by(*(f"ddplaunch.{name}" for name in asking))
    late = ("launcher.setup", "launcher.run", "protocol.launcher_agent", "protocol.results", "protocol.specs")
    assert not loaded & {f"ddplaunch.{name}" for name in late}
