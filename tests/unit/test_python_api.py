"""``ddplaunch.launch``: keyword arguments are options, and what cannot be done is refused before anything starts."""

from __future__ import annotations

import ast
import functools
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ddplaunch
from ddplaunch import LaunchConfig, UsageError, launch
from ddplaunch.cli import python_api
from ddplaunch.cluster.hosts import Host
from ddplaunch.errors import NODE_LOST, JobFailed, LaunchError
from ddplaunch.features.functions import FunctionCall, target
from ddplaunch.features.functions import launcher as values
from ddplaunch.features.functions import worker as function
from ddplaunch.protocol import wire
from ddplaunch.protocol.results import AttemptResult, WorkerExit
from ddplaunch.protocol.run_result import FunctionResult, RunResult
from tests.support import command_lines, golden


def test_all_names_of_the_api_exist():
    assert {name: getattr(ddplaunch, name) for name in ddplaunch.__all__}
    assert dir(ddplaunch) == sorted(ddplaunch.__all__)


def config(monkeypatch: pytest.MonkeyPatch, target: Any, *args: Any, **options: Any) -> LaunchConfig:
    """The configuration with which ``launch`` starts a run."""
    seen = []

    def start(made: LaunchConfig, stdout_fd: int) -> RunResult:
        seen.append(made)
        return RunResult("run", 0, "stopped", 1.0)

    monkeypatch.setattr(python_api.launcher, "launch", start)
    launch(target, *args, **options)
    return seen[0]


def test_keywords_are_the_options_of_the_command(monkeypatch: pytest.MonkeyPatch):
    """A question is a script, its arguments, and keywords. Variables for options do not count."""
    monkeypatch.setenv("PET_MAX_RESTARTS", "9")
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def made(question: str) -> str:
        given = golden.keywords(question)
        return command_lines.changes(config(monkeypatch, Path(given.pop("script")), given.pop("args"), **given))

    golden.check_answers("keywords", made)
    assert dict(config(monkeypatch, "x.py", export={"MY_NAME": "x"}).remote.environ)["MY_NAME"] == "x"


def test_a_scheduler_is_read_only_if_it_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    made = config(monkeypatch, "train.py", cluster="auto")
    assert made.slurm_job


def test_wrong_keywords_are_usage_errors():
    def told(keyword: str) -> RunResult:
        name, _, value = keyword.partition("=")
        return launch("train.py", **{name: ast.literal_eval(value)})

    golden.check_answers("wrong_keywords", told)


def work(*_: object) -> None:
    """A function for workers."""


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        (LaunchConfig(script="x.py"), {"nnodes": 2}, "a LaunchConfig has all settings"),
        ("x.py", {"kwargs": {"a": 1}}, "kwargs are for a function"),
        (work, {"module": True}, "module: not for a function"),
        (work, {"log_dir": "/dev/null"}, "--log-dir /dev/null: what a function returns"),
        (work, {"args": [bytes(17 << 20)]}, "work and its arguments take 17 MB, at most 16 MB"),
    ],
)
def test_what_does_not_fit_together_is_refused(target: Any, arguments: dict[str, Any], message: str):
    with pytest.raises(UsageError) as raised:
        launch(target, **arguments)
    assert raised.value.message.startswith(message)


def test_a_result_is_printed_as_a_line():
    first = WorkerExit(1, 1, "node1", 7, 1, False, 1.0, 1.0, tail=("a",) * 100)
    failed = RunResult("job7", 1, "failed", 1.0, first_failure=first, run_dir="/runs/job7")
    assert repr(failed) == (
        "<RunResult run_id='job7', outcome='failed', exit_code=1, attempts=0, first_failure='rank 1 on node1', "
        "run_dir='/runs/job7'>"
    )
    assert repr(FunctionResult("job8", 0, "succeeded", 1.0, return_values={0: "x" * 1000})) == (
        "<FunctionResult run_id='job8', outcome='succeeded', exit_code=0, attempts=0, run_dir=None>"
    )


def test_a_traceback_shows_the_hint():
    with pytest.raises(UsageError) as raised:
        launch(work, hang_timeot=60)
    assert str(raised.value) == "launch has no option hang_timeot\n  hint: Did you mean hang_timeout?"
    assert str(LaunchError("no hint")) == "no hint"


def test_a_function_runs_with_our_interpreter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHON_EXEC", "/usr/bin/python3")
    with pytest.raises(UsageError, match="PYTHON_EXEC"):
        launch(work)


def test_the_call_of_a_function(monkeypatch: pytest.MonkeyPatch):
    """The file of the function tells the forkserver what to import; sys.path has what is not the interpreter's."""
    monkeypatch.setattr(sys, "path", [*sys.path, "/opt/own", ""])
    made = config(monkeypatch, functools.partial(work, 1), nproc_per_node=2)
    call = wire.decode(made.text.encode(), (FunctionCall,))
    assert (made.script, made.entry) == (__file__, "function")
    assert call.argv == tuple(sys.argv)
    assert call.search_path[-2:] == ("/opt/own", os.getcwd())
    assert not {path for path in call.search_path if path.endswith("site-packages")}
    assert len(repr(made)) < 4000


def test_functions_without_a_file_have_their_name():
    assert target.source_file(len) == "len"
    assert target.source_file(eval("lambda: 0")) == "<lambda>"


def test_another_python_cannot_load_a_function_by_value():
    call = FunctionCall(pickled="", by_value=True, python="3.99", main_path="", main_module="", search_path=(), argv=())
    with pytest.raises(RuntimeError, match=r"Python 3.99 has pickled this function by value, and Python 3\.\d+ cannot"):
        function._pickler(call)


EXIT = WorkerExit(0, 0, "../gpu1", 9, 0, stopped=False, time_s=1.0, duration_s=1.0)


def test_values_are_read_only_from_nodes_of_the_run(tmp_path: Path):
    """A node on another machine reports its name."""
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    (tmp_path / "attempt_0" / "0" / "return.pkl").write_bytes(b"no pickle")
    result = RunResult(
        "run", 0, "succeeded", 1.0, (AttemptResult(0, "succeeded", (EXIT,), 1.0),), run_dir=str(tmp_path)
    )
    assert target.with_values(result, LaunchConfig(script="x.py")).return_values == {}


def succeeded(world_size: int, *ranks: int) -> AttemptResult:
    exits = tuple(replace(EXIT, rank=rank, host=f"gpu{rank}") for rank in ranks)
    return AttemptResult(2, "succeeded", exits, 1.0, world_size=world_size)


def test_values_that_have_not_arrived_are_an_error_that_names_their_ranks(tmp_path: Path):
    config = LaunchConfig(script="x.py", entry="function", hosts=tuple(map(Host, ("gpu0", "gpu1", "gpu2"))))
    (tmp_path / "gpu0" / "attempt_2" / "0").mkdir(parents=True)
    (tmp_path / "gpu0" / "attempt_2" / "0" / "return.pkl").touch()
    cut_off = {"gpu0": "the connection was closed", "gpu1": "the connection was closed", "gpu7": "gpu7 was lost"}

    def error(incomplete: dict[str, str], *attempts: AttemptResult) -> str:
        run = SimpleNamespace(config=config, folder=lambda: tmp_path)
        found = values.ReturnValues(run, incomplete).failure(attempts[-1])  # type: ignore[arg-type]
        assert found is None or found.exit_code == NODE_LOST
        return found.message if found else ""

    all_here = succeeded(3, 0, 1, 2)
    assert error({}, all_here) == "", "rank 1 may have ended itself"
    text = "the job has succeeded, but what rank 1 returned has not arrived: the connection was closed"
    assert error(cut_off, all_here) == text
    text = (
        "the job has succeeded, but what ranks 1-2 returned has not arrived: their node was lost before it had reported"
    )
    assert error({}, succeeded(3, 0)) == text
    assert error(cut_off, replace(all_here, outcome="failed")) == ""


def test_a_value_that_cannot_be_read_is_an_error(tmp_path: Path):
    (tmp_path / "return.pkl").mkdir()
    with pytest.raises(LaunchError, match=r"what rank 3 returned cannot be read: .*: Is a directory"):
        target._read(tmp_path / "return.pkl", 3)


def test_a_value_that_cannot_be_unpickled_is_an_error():
    with pytest.raises(LaunchError, match=r"what rank 0 on ../gpu1 returned cannot be unpickled here: UnpicklingError"):
        target._unpickled(b"no pickle", EXIT)


def test_check_raises_unless_the_job_has_succeeded():
    attempt = AttemptResult(0, "succeeded", (EXIT,), 1.0)
    RunResult("run", 0, "succeeded", 1.0, (attempt,)).check()
    FunctionResult("run", 0, "succeeded", 1.0, (attempt,), return_values={0: None}).check()
    with pytest.raises(JobFailed, match=r"no return value of rank 0") as missing:
        FunctionResult("run", 0, "succeeded", 1.0, (attempt,)).check()
    with pytest.raises(JobFailed, match=r"the job was stopped \(SIGTERM\)") as raised:
        RunResult("run", 143, "stopped", 1.0, signal="SIGTERM").check()
    assert (missing.value.exit_code, raised.value.exit_code) == (1, 143)
    with pytest.raises(JobFailed, match=r"the workers have succeeded, but processes are left: 7"):
        RunResult("run", 86, "succeeded", 1.0, (attempt,), unkillable_pids=(7,)).check()
