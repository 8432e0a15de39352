"""What holds for every test: a state folder of its own, a stub of torch for its jobs, and no process left behind."""

from __future__ import annotations

import functools
import gc
import os
import resource
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from ddplaunch import features
from ddplaunch.system import devices
from tests.support import fake_nvml, installed_stub, runs, slowest
from tests.support.debugging import Debugger
from tests.support.processes import command_line, has_children, pass_on_no_ignored_signals, pids_with, wait_until
from tests.support.runs import SLOW_IMPORT

if TYPE_CHECKING:
    from tests.support.gpus import Watched  # Of a feature: tests of the core run without it, too.

_CLEARED = (
    "PET_*",
    "TORCHELASTIC_*",
    *(name for row in features.items("SCHEDULERS", "tables") for name in row.own_variables),
)
"""Variables of whatever started the tests."""

_VANISH_S = 15.0
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
"""Audit events of this process that start another one."""

_COLLECT_AFTER = gc.get_threshold()
_started = 0

# Machines are shared and noisy: no example is timed. Each run draws others, so half of the usual number is enough.
hypothesis.settings.register_profile("untimed", deadline=None, max_examples=50)
hypothesis.settings.register_profile("few", deadline=None, max_examples=2)  # Where the same tests run a second time.
hypothesis.settings.load_profile("untimed")


def _count_starts(event: str, _arguments: object) -> None:
    if event in _STARTS:
        global _started
        _started += 1


sys.addaudithook(_count_starts)


@pytest.fixture(scope="session", autouse=True)
def default_signals() -> None:
    """In each process that runs tests, and not in the one that starts those."""
    pass_on_no_ignored_signals()


@pytest.fixture(autouse=True)
def leaves_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Every process of a test carries the test's mark in its environment; at its end none may be alive.

    Only after a test that started a process is /proc searched: that costs more than most unit tests do.
    """
    mark = uuid.uuid4().hex
    monkeypatch.setenv("DDPLAUNCH_TEST_MARK", mark)
    monkeypatch.setenv("DDPLAUNCH_PAGE", "off")  # But where a page is the subject: each costs some tenths of a second.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("DDPLAUNCH_LOCK_DIR", str(tmp_path / "gpu-locks"))  # Fake GPUs of other tests are not these.
    for name in [name for name in os.environ if any(fnmatchcase(name, pattern) for pattern in _CLEARED)]:
        monkeypatch.delenv(name)
    started_before = _started
    yield
    runs.kill_unfinished()
    if _started != started_before or has_children():
        _assert_none_left(f"DDPLAUNCH_TEST_MARK={mark}")


def _assert_none_left(mark: str) -> None:
    try:
        wait_until(lambda: not pids_with(mark), _VANISH_S)
    except TimeoutError:
        left = pids_with(mark)
        names = [f"{pid} {command_line(pid)}" for pid in left]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        pytest.fail(f"left running: {names}")


@pytest.fixture(autouse=True)
def torch_stub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs import the stub, unless the test is marked ``torch`` or pytest runs with --real-torch."""
    mark = request.node.get_closest_marker("torch")
    is_meant = mark and (not mark.args or _start_method(request.node) in mark.args)
    if not is_meant and not request.config.getoption("--real-torch"):
        monkeypatch.setenv("PYTHONPATH", str(installed_stub.STUBS))


def _start_method(node: pytest.Item) -> str:
    """Of a test with that parameter; workers are forked where nothing else is said."""
    parameters = node.callspec.params if isinstance(node, pytest.Function) and hasattr(node, "callspec") else {}
    return str(parameters.get("start_method", "forkserver"))


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can be started, as above ``ulimit -u``."""

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(threading.Timer, "start", start)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where a test writes its script."""
    return tmp_path / "job.py"


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """Lets this process write files up to a size only; Python ignores SIGXFSZ, so that writes fail instead."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times of day are the same everywhere."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def slow_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub of torch takes its time to be imported, so that something can happen meanwhile."""
    for name, value in SLOW_IMPORT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def python_with_stub(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    """An interpreter in whose packages the stub of torch is; this one with --real-torch."""
    if request.config.getoption("--real-torch"):
        return sys.executable
    return str(installed_stub.build(tmp_path_factory.mktemp("python")))


@pytest.fixture
def stub_is_installed(python_with_stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are started by that interpreter, with nothing of the tests on PYTHONPATH."""
    monkeypatch.setattr(sys, "executable", python_with_stub)
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture(params=["forkserver", "spawn"])
def start_method(request: pytest.FixtureRequest) -> str:
    """Both ways to start a worker: for promises about the start of a worker, and what it inherits."""
    return str(request.param)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real-torch", action="store_true", help="no job uses the stub of torch")


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """On CI a test that cannot run is a test that fails."""
    if os.environ.get("CI") == "true" and call.excinfo and call.excinfo.errisinstance(pytest.skip.Exception):
        error = AssertionError(f"skipped on CI: {call.excinfo.value}").with_traceback(call.excinfo.tb)
        call.excinfo = pytest.ExceptionInfo.from_exception(error)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Collecting makes many objects and no garbage: to look for some takes a third of its time, in each process."""
    gc.set_threshold(20_000)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.set_threshold(*_COLLECT_AFTER)
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.support.scheduling import order

    items.sort(key=order)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.scheduling import Scheduling

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    slowest.report(terminalreporter)


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fake libnvidia-ml.so.1."""
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fake_nvml.Says:
    """A driver for the children of this process; says what GPUs it has."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library))
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "says"))
    return functools.partial(fake_nvml.say, tmp_path / "says")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watched]]:
    """Starts a reader of GPUs, as on a machine with NVIDIA's library."""
    from tests.support.gpus import readers

    monkeypatch.setattr(devices, "has_nvml", lambda: True)
    with readers() as start:
        yield start


@pytest.fixture
def screen() -> Iterator[Debugger]:
    """A terminal for a run, on which somebody may also debug."""
    screen = Debugger()
    yield screen
    screen.close()
