"""A worker cannot tell how it was started: all a script can see is as under ``python -u script.py``.

Each comparison is with a plain run in the worker's own environment; ``ALLOWED`` lists every difference there may be.
Not compared, since it differs from run to run: addresses, pids, random numbers, and ``hash()`` of texts, whose seed all
ranks share when they are forked (PYTHONHASHSEED sets it under both start methods).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.features.hangs import worker_records
from tests.support.programs import endings
from tests.support.runs import PROGRAMS, Finished, environment, run

PROBE = PROGRAMS / "probe.py"
UNUSUAL = (sys.executable, str(PROGRAMS / "unusual.py"))
UNUSUAL_ENVIRON = {
    "LC_ALL": "C",
    "TZ": "Asia/Kathmandu",
    "PYTHONHASHSEED": "7",
    "PYTHONIOENCODING": "latin-1:backslashreplace",
    "PYTHONWARNINGS": "always::UserWarning,error::BytesWarning",
    "PYTHONNOUSERSITE": "1",
    "PYTHONINTMAXSTRDIGITS": "5000",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Allowed:
    """A difference at ``path`` of the probe's report, as long as ``holds(plain, worker)``."""

    path: str
    reason: str
    holds: Callable[[Any, Any], bool]


def _signals(mask: str) -> set[int]:
    return {bit + 1 for bit in range(64) if int(mask, 16) >> bit & 1}


def _before(end: list[Any], whole: list[Any]) -> list[Any]:
    """What stands in ``whole`` before ``end``; "?" if it does not end so."""
    count = len(whole) - len(end)
    return whole[:count] if count >= 0 and whole[count:] == end else ["?"]


STACKS_FILE = "process/descriptors/a high number"
_FATAL = {signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}
_SIGCANCEL, _SIGSETXID = 32, 33

ALLOWED = (
    Allowed(
        "__main__/frames below",
        "the script's module runs below the interpreter's outermost frame, which is ours; tracebacks do not show it",
        lambda plain, worker: _before(plain, worker) == ["<module>"],
    ),
    Allowed(
        "process/dies with its parent",
        "a worker must not outlive its agent (PR_SET_PDEATHSIG); its own children do not inherit this",
        lambda plain, worker: (plain, worker) == (0, signal.SIGKILL),
    ),
    Allowed(
        "process/cgroup",
        "where a cgroup v2 can be made the workers are in one of their own, so that they can be killed together",
        lambda plain, worker: re.search(r"^0::.*/ddplaunch-[^/]+$", worker, re.MULTILINE) is not None,
    ),
    Allowed("sys/faulthandler", "a segfault leaves its Python stack", lambda plain, worker: worker is True),
    Allowed(
        "process/status/SigCgt",
        "faulthandler's signals, one that asks for stacks, and glibc's own from OpenBLAS's threads in the forkserver",
        lambda plain, worker: (
            _signals(plain) <= _signals(worker) <= _signals(plain) | _FATAL | {_SIGSETXID, worker_records.STACKS_SIGNAL}
        ),
    ),
    Allowed(
        "process/status/SigIgn",
        "glibc's posix_spawn, by which Python 3.13 starts the agent, leaves glibc's own signal ignored",
        lambda plain, worker: _signals(worker) - _signals(plain) == {_SIGCANCEL},
    ),
    Allowed(
        "process/status/Threads",
        "OpenBLAS's threads, started when numpy is imported, start again in a fork when they are first needed",
        lambda plain, worker: worker == "1",
    ),
    Allowed(
        "sys/warning filters",
        "torch puts its filters before Python's when it is imported, which may be before the script imports it",
        lambda plain, worker: _before(plain, worker) != ["?"],
    ),
    Allowed(
        "sys/meta path",
        "the import of torch finds the one that is loaded, or is noticed; that of a debugger is noticed",
        lambda plain, worker: _before(plain, worker) in (["_Hidden", "_PatchFinder"], ["_PatchFinder"]),
    ),
    Allowed(
        STACKS_FILE,
        "a file in memory for the stacks of a job that hangs, with a number far from those that a script gets",
        lambda plain, worker: (plain, worker) == (None, "file"),
    ),
    Allowed("sys/gc frozen", "what was imported once stays out of collections", lambda plain, worker: worker is True),
)


def plain(*arguments: str | Path, env: dict[str, str], under: tuple[str, ...] = (), **popen: Any) -> Finished:
    """Run ``python -u`` with these arguments, as the leader of a session."""
    command = [*under, sys.executable, "-u", *map(str, arguments)]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "timeout": 60, "start_new_session": True, **popen}
    done = subprocess.run(command, env=env, capture_output=True, **options)
    return Finished(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of everything in nested dictionaries."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(inner, f"{path}/{name}" if path else name)
    else:
        yield path, value


def differences(expected: dict[str, Any], seen: dict[str, Any]) -> list[str]:
    """What the worker saw otherwise than the plain script, but for what ``ALLOWED`` allows."""
    before = dict(flat(expected))
    after = {STACKS_FILE if _is_high_descriptor(path) else path: value for path, value in flat(seen)}
    allowed = {entry.path: entry for entry in ALLOWED}
    return [
        f"{path}: python {before.get(path)!r}, worker {after.get(path)!r}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
        and not (path in allowed and allowed[path].holds(before.get(path), after.get(path)))
    ]


def _is_high_descriptor(path: str) -> bool:
    number = path.removeprefix("process/descriptors/")
    return number != path and int(number) > 100


def compare(start_method: str, *arguments: str | Path, under: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    """Run the probe as a lone worker and plainly; no difference is left. Returns what the worker saw."""
    module = ("-m",) if arguments[0] == "-m" else ()
    given = ("--start-method", start_method, "--nproc-per-node", "1", *arguments)
    finished = run(*given, under=under, **options)
    assert finished.returncode == 0, finished.err
    worker: dict[str, Any] = json.loads(finished.out)
    options.pop("env", None)
    done = plain(*module, *arguments[len(module) :], env=worker["process"]["environ"], under=under, **options)
    assert done.returncode == 0, done.err
    assert differences(json.loads(done.out), worker) == []
    return worker


@pytest.mark.torch("forkserver")
def test_a_script_sees_the_same_process_and_interpreter(start_method: str) -> None:
    is_forked = start_method == "forkserver"  # An exec'd worker imports torch as python does.
    compare(start_method, PROBE, *(["torch"] if is_forked else []), "two words", "", "--option=\udcff\u20ac", "-x")


def test_it_is_the_same_where_little_is_as_usual(start_method: str) -> None:
    seen = compare(start_method, PROBE, under=UNUSUAL, env=UNUSUAL_ENVIRON)
    assert seen["process"]["status"]["Umask"] == "0027"
    assert seen["process"]["blocked"] == [signal.SIGUSR2, signal.SIGRTMIN + 2]
    assert seen["process"]["signals"][str(int(signal.SIGHUP))] == str(signal.SIG_IGN)


def test_the_users_search_path_is_kept_whole(start_method: str, tmp_path: Path) -> None:
    """Also its first entry, where the script's folder is not to be put before it (``python -P``)."""
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"], "relative"])
    seen = compare(start_method, PROBE, env={"PYTHONSAFEPATH": "1", "PYTHONPATH": path})
    assert seen["sys"]["path"][0] == str(tmp_path if sys.version_info >= (3, 11) else PROGRAMS)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The probe in many places: scripts, a package, a folder and an archive that can be run, links."""
    folder = tmp_path / "tree"
    for name in (
        "scripts/probe.py",
        "pkg/__main__.py",
        "pkg/mod.py",
        "folder/__main__.py",
        "scripts/with space \u20ac.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROBE, folder / name)
    (folder / "pkg/__init__.py").write_text("")
    with zipfile.ZipFile(folder / "app.pyz", "w") as archive:
        archive.write(PROBE, "__main__.py")
    (folder / "link.py").symlink_to("scripts/probe.py")
    (folder / "linked").symlink_to("scripts")
    return folder


NAMES = (
    ("./scripts/..//scripts/./with space \u20ac.py", "an", "argument"),
    ("link.py",),
    ("../tree/linked/probe.py",),
    ("-m", "pkg.mod", "an", "-m", "argument"),
    ("-m", "pkg"),
    ("folder",),
    ("app.pyz",),
)
BY_EXEC = (("link.py",), ("-m", "pkg.mod", "an", "-m", "argument"), ("app.pyz",))
"""The bootstrap is the same under both start methods."""


@pytest.mark.parametrize(
    ("start_method", "given"),
    [*(("forkserver", given) for given in NAMES), *(("spawn", given) for given in BY_EXEC)],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_it_does_not_matter_how_the_script_is_named(start_method: str, given: tuple[str, ...], tree: Path) -> None:
    compare(start_method, *given, cwd=tree)


def test_stdin_of_the_launcher_is_the_lone_workers(start_method: str, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("first\nsecond")
    with lines.open() as file:
        finished = run("--start-method", start_method, "--nproc-per-node", "1", PROBE, "stdin", stdin=file)
    seen = json.loads(finished.out)
    assert seen["stdin"] == "first\nsecond"
    with lines.open() as file:
        done = plain(PROBE, "stdin", env=seen["process"]["environ"], stdin=file)
    assert differences(json.loads(done.out), seen) == []


def test_a_module_that_is_not_there_is_told_of_in_pythons_words(start_method: str, tmp_path: Path) -> None:
    module = "no_such_module" if start_method == "spawn" else "os.path.sub"
    finished = run("--start-method", start_method, "--nproc-per-node", "1", "-m", module)
    done = plain("-m", module, env=dict(os.environ))
    assert finished.report["first_failure"]["returncode"] == done.returncode == 1
    assert log(finished, 0, 0, "stderr") == done.err


SOURCES = {
    "cookie_and_future.py": b'# -*- coding: latin-1 -*-\n"""What it is."""\nfrom __future__ import annotations\n'
    b"x: int\nprint(__doc__, __annotations__, ascii('\xe9\xff'), len(globals()))\nprint(sorted(vars()))",
    "bom_and_crlf.py": b"\xef\xbb\xbfdef f(x: int): ...\r\nprint(f.__annotations__, __annotations__)\r\n"
    b"if __name__ == '__main__':\r\n    print('main', ascii('\xc3\xa9'), len(globals()))\r\n",
}
"""The first ends without a newline; the second has no ``from __future__``, which ours must not pass on to it."""

BAD_SOURCES = {
    "bad_syntax.py": b"import os\n\ndef f(:\n    pass\n",
    "bad_encoding.py": b"print('\xff')\n",
    "unknown_encoding.py": b"# coding: klingon\n",
}


def log(finished: Finished, attempt: int, local_rank: int, stream: str) -> str:
    return (finished.run_dir / f"attempt_{attempt}/{local_rank}/{stream}.log").read_text(errors="replace")


@pytest.mark.parametrize("name", [*SOURCES, *BAD_SOURCES])
def test_a_script_is_read_as_python_reads_it(name: str, tmp_path: Path) -> None:
    script = tmp_path / name
    script.write_bytes({**SOURCES, **BAD_SOURCES}[name])
    # The bootstrap is the same under both start methods.
    finished = run("--nproc-per-node", "1", script)
    done = plain(script, env=dict(os.environ))
    first = finished.report["first_failure"]
    assert (first["returncode"] if first else 0) == done.returncode == (1 if name in BAD_SOURCES else 0)
    assert log(finished, 0, 0, "stdout") == done.out
    # The compiler gets a text, not a file, and has other words for an encoding it cannot read.
    if "encoding" not in name:
        assert log(finished, 0, 0, "stderr") == done.err


# Ends.


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder; of archives, which hold the time, only that they are whole."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = path.read_bytes() if path.is_file() else None
        if name.endswith(".zip"):
            found[name] = b" ".join(name.encode() for name in zipfile.ZipFile(path).namelist())
        if name.endswith(".gz"):
            found[name] = subprocess.run(["gzip", "-dc", path], capture_output=True, check=True).stdout
    return found


@dataclass(frozen=True)
class End:
    """What is left of a script: everything about it that can be compared."""

    returncode: int
    out: list[str]
    err: str
    files: dict[str, bytes | None]


def make_end(name: str, returncode: int, out: str, err: str, folder: Path) -> End:
    lines = out.splitlines()
    # The collector's order among objects that die together is nobody's promise.
    ordered = sorted(lines) if name == "objects_say_goodbye" else lines
    if name == "stdout_cannot_be_flushed":
        # Which object could not be flushed is told in other words by every version of Python.
        err = "\n".join(sorted({line for line in err.splitlines() if line.startswith("OSError")}))
    # Addresses; the folder, which differs; and how deep the recursion went, with a frame of ours below.
    neutral = re.sub(rf"0x[0-9a-f]+|{re.escape(str(folder))}|\d+ more times", "...", err)
    return End(returncode, ordered, neutral, contents(folder))


def ends_plainly(name: str, folder: Path) -> End:
    env = {**os.environ, "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    done = plain(PROGRAMS / "endings.py", name, folder, env=env)
    return make_end(name, done.returncode, done.out, done.err, folder / name)


def ends_as_worker(finished: Finished, name: str, attempt: int, rank: int, folder: Path) -> End:
    exits = finished.report["attempts"][attempt]["exits"]
    out, err = log(finished, attempt, rank, "stdout"), log(finished, attempt, rank, "stderr")
    return make_end(name, exits[rank]["returncode"], out, err, folder / name)


def names(functions: tuple[Callable[[], None], ...]) -> list[str]:
    return [function.__name__ for function in functions]


@pytest.mark.torch
def test_a_script_that_ends_well_ends_in_the_same_way(tmp_path: Path) -> None:
    """torchrun: multiprocessing_api_test 7."""
    well = names(endings.WELL)
    plainly = [ends_plainly(name, tmp_path / "plain") for name in well]
    for start_method in ("forkserver", "spawn"):
        options = ("--start-method", start_method, "--nproc-per-node", str(len(well)))
        finished = run(*options, PROGRAMS / "endings.py", ",".join(well), tmp_path / start_method)
        assert finished.returncode == 0, finished.err
        ends = [ends_as_worker(finished, name, 0, rank, tmp_path / start_method) for rank, name in enumerate(well)]
        assert ends == plainly
        assert not list(finished.run_dir.rglob("error.json"))


@pytest.mark.torch
@pytest.mark.slow
def test_a_script_that_ends_badly_ends_in_the_same_way(tmp_path: Path) -> None:
    badly = names(endings.BADLY)
    plainly = [ends_plainly(name, tmp_path / "plain") for name in badly]
    silent = (
        "exit_3",
        "exit_minus_1",
        "exit_true",
        "exit_huge",
        "exit_is_subclassed",
        "os_exit_",
        "interrupted",
        "raises_keyboard_interrupt",
        "hooked_keyboard",
        "stdout_",
    )
    for start_method in ("forkserver", "spawn"):
        options = ("--start-method", start_method, "--nproc-per-node", "1", "--max-restarts", str(len(badly) - 1))
        finished = run(*options, PROGRAMS / "endings.py", ",".join(badly), tmp_path / start_method)
        assert len(finished.report["attempts"]) == len(badly), finished.err
        ends = [ends_as_worker(finished, name, number, 0, tmp_path / start_method) for number, name in enumerate(badly)]
        assert ends == plainly
        recorded = {int(re.findall(r"attempt_(\d+)", str(path))[0]) for path in finished.run_dir.rglob("error.json")}
        assert recorded == {attempt for attempt, name in enumerate(badly) if not name.startswith(silent)}


@pytest.mark.torch("forkserver")
def test_nothing_of_a_library_is_taken_apart_at_the_end_of_a_fork(start_method: str, tmp_path: Path) -> None:
    """The one thing that is missing there, on purpose: ProcessGroupGloo's destructor may never return.

    Also on rank 1, where all exit functions have run before, as a profiler like viztracer does it.
    """
    script = tmp_path / "destructor.py"
    script.write_text(
        "import atexit, ctypes, os\n"
        "if os.environ['RANK'] == '1':\n    atexit._run_exitfuncs()\n"
        "make = ctypes.pythonapi.PyCapsule_New\n"
        "make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p,) * 3\n"
        "kept = make(1, None, ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p))\n"
    )
    workers = 2 if start_method == "forkserver" else 1
    finished = run("--start-method", start_method, "--nproc-per-node", str(workers), script)
    returncodes = [exit_["returncode"] for exit_ in finished.report["attempts"][0]["exits"]]
    assert returncodes == ([0, 0] if start_method == "forkserver" else [-signal.SIGABRT])


def test_an_exception_with_a_huge_text_is_recorded(tmp_path: Path) -> None:
    script = tmp_path / "huge.py"
    script.write_text("import os\nos.close(2)\nraise ValueError('missing keys: ' + 'key, ' * 2_000_000)\n")
    finished = run("--nproc-per-node", "1", script)
    error = finished.report["first_failure"]["error"]
    assert error["message"].startswith("ValueError: missing keys: key, key")


# More processes.


@pytest.mark.torch("forkserver")
def test_multiprocessing_works_in_every_way(start_method: str) -> None:
    ways = ["others", "pools:fork", "pools:spawn", "pools:forkserver"]
    said = ["subprocess", *(f"multiprocessing {method}" for method in ("fork", "spawn", "forkserver"))]
    if start_method == "forkserver":  # To a DataLoader an exec'd worker, which can do the above, is any process.
        ways += ["data:fork", "data:spawn"]
        said += ["DataLoader fork", "DataLoader spawn"]
    finished = run("--start-method", start_method, "--nproc-per-node", "1", PROGRAMS / "parallel.py", *ways)
    assert finished.returncode == 0, finished.err
    assert finished.out.splitlines() == said


def test_a_module_run_by_name_is_found_by_the_processes_it_spawns(start_method: str, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    shutil.copy(PROGRAMS / "parallel.py", tmp_path / "pkg/parallel.py")
    given = ("--nproc-per-node", "1", "-m", "pkg.parallel", "pools:spawn")
    finished = run("--start-method", start_method, *given, cwd=tmp_path)
    assert finished.out == "multiprocessing spawn\n", finished.err
