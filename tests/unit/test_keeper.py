"""What a keeper compares before a run may take it over, and when it ends for lack of memory."""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ddplaunch.agent import agent
from ddplaunch.cli.main import command
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import UsageError
from ddplaunch.features.warm import keeper_files, pressure, surroundings
from ddplaunch.features.warm.imports import Imports, forget_folders
from tests.support import golden

ROOT = Path(__file__).parents[2]


def config(*argv: str) -> LaunchConfig:
    return command.main([*argv, "x.py"], prog_name="ddplaunch", standalone_mode=False)


def test_the_option_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config().keep_warm_s is None
    monkeypatch.setenv("DDPLAUNCH_KEEP_WARM", "10m")
    assert config().keep_warm_s == 600
    assert config("--keep-warm", "0").keep_warm_s == 0
    with pytest.raises(UsageError, match="must be between 0 and 7 days"):
        config("--keep-warm", "-1")
    with pytest.raises(UsageError, match="--rdzv-id warm: stands for what --keep-warm has left"):
        config("--rdzv-id", "warm")


# Surroundings.


READ_PARTS = [
    sys.executable,
    "-c",
    "import json, os; from ddplaunch.features.warm import surroundings; "
    "print(json.dumps(surroundings.read(os.environ, os.getcwd())))",
]


def parts_of_child(prepare: Callable[[], object] = lambda: None, **environ: str) -> dict[str, str]:
    done = subprocess.run(
        READ_PARTS,
        env={**os.environ, **environ},
        cwd=ROOT,
        capture_output=True,
        check=True,
        preexec_fn=prepare,
    )
    return dict(json.loads(done.stdout))


PREPARED: list[tuple[str, Callable[[], object]]] = [
    ("priority", lambda: os.nice(1)),
    ("limits", lambda: resource.setrlimit(resource.RLIMIT_CORE, (1, 1))),
    ("blocked and ignored signals", lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)),
    ("blocked and ignored signals", lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})),
    ("oom_score_adj", lambda: Path("/proc/self/oom_score_adj").write_text("500")),
    ("timer slack", lambda: Path("/proc/self/timerslack_ns").write_text("60000")),
]
if len(os.sched_getaffinity(0)) > 1:
    one = {min(os.sched_getaffinity(0))}
    PREPARED.append(("CPUs and memory nodes", lambda: os.sched_setaffinity(0, one)))


def test_what_a_process_inherits_and_cannot_change_is_compared() -> None:
    usual = parts_of_child()
    found = [surroundings.first_difference(usual, parts_of_child(prepare)) for _, prepare in PREPARED]
    assert found == [part for part, _ in PREPARED]


def test_how_a_process_was_started_is_no_difference(tmp_path: Path) -> None:
    """Python 3.13 starts most processes with posix_spawn(3), which lets them ignore two signals of libc."""
    with (tmp_path / "parts").open("w+") as file:
        streams = [(os.POSIX_SPAWN_DUP2, file.fileno(), 1)]
        pid = os.posix_spawn(sys.executable, READ_PARTS, os.environ, file_actions=streams)
        assert os.waitpid(pid, 0)[1] == 0
        file.seek(0)
        assert surroundings.first_difference(parts_of_child(), json.load(file)) == ""


def test_a_relative_folder_of_pythonpath_is_another_in_another_working_directory() -> None:
    for value, is_same in (("/lib:/lib2", True), ("/lib:src", False), (".", False)):
        found = [surroundings.read({"PYTHONPATH": value}, cwd) for cwd in ("/a", "/b")]
        assert surroundings.first_difference(*found) == ("" if is_same else "folders of PYTHONPATH")


def test_an_installed_package_is_a_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(surroundings, "package_folders", lambda: [str(tmp_path)])
    (info := tmp_path / "a-1.dist-info").mkdir()
    for change in (
        lambda: (info / "METADATA").write_text("1"),
        lambda: (info / "METADATA").write_text("22"),
        lambda: (info / "RECORD").write_text(""),
        lambda: (tmp_path / "a.pth").write_text("import a"),
        lambda: os.utime(tmp_path / "a.pth", (1, 1)),
        lambda: (tmp_path / "b-1.dist-info").mkdir(),
    ):
        before = surroundings.read({}, "/")
        assert surroundings.read({}, "/") == before
        change()
        assert surroundings.first_difference(before, surroundings.read({}, "/")) == "packages"


# Imports.


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of installed packages, with the module ``kept_a``; the modules of the tests are none that are kept."""
    installed = [str(tmp_path), *surroundings.package_folders()]
    monkeypatch.setattr(surroundings, "package_folders", lambda: installed)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("READ_BY_A", "1")
    (tmp_path / "kept_a.py").write_text("import os\nA = os.environ.get('READ_BY_A'), 'READ_TOO' in os.environ\n")
    ours = tuple(name for name in sys.modules if name.partition(".")[0] in ("tests", "conftest"))
    monkeypatch.setattr(sys, "modules", {name: sys.modules[name] for name in sys.modules.keys() - set(ours)})
    return tmp_path


def imported(module: str, since: float = math.inf) -> tuple[Imports, str]:
    imports = Imports(surroundings.digests(os.environ), since=since)
    return imports, imports.run([module], [module]) or imports.note()


def test_the_variables_that_imports_read_are_compared(folder: Path) -> None:
    imports, reason = imported("kept_a")
    assert (reason, imports.variables) == ("", {"READ_BY_A", "READ_TOO"})
    for name, value, noticed in (
        ("UNREAD", "1", ""),
        ("READ_BY_A", "2", "READ_BY_A"),
        ("READ_TOO", "", "READ_TOO"),
        ("LD_PRELOAD", "x.so", "LD_PRELOAD"),
    ):
        assert imports.difference(surroundings.digests({**os.environ, name: value})) == noticed
    threads = surroundings.digests({**os.environ, "OMP_NUM_THREADS": "9"})
    assert imports.difference(threads, ("OMP_NUM_THREADS",)) == ""
    assert type(os.environ).__name__ == "_Environ"


def test_an_import_gets_a_hidden_variable_and_nothing_else_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "kept_b.py").write_text("import os\nB = os.environ.get('READ_LATE')\n")
    environ = {**os.environ, "READ_BY_A": "x=\udcff", "READ_LATE": "1", "UNREAD": "1", "MY_READ_BY_A": "no"}
    monkeypatch.delenv("READ_BY_A")
    imports = Imports(surroundings.digests(environ))
    imports.hide(surroundings.environ_file(environ))
    assert imports.run(["kept_a"], ["kept_a"]) == ""
    assert sys.modules["kept_a"].A == ("x=\udcff", False)
    assert (os.environ["READ_BY_A"], "UNREAD" in os.environ) == ("x=\udcff", False)
    (folder / "kept_c.py").write_text("import os\nC = {*os.environ}\n")
    assert imports.run(["kept_c"], ["kept_c"]) == ""
    assert environ.keys() == sys.modules["kept_c"].C
    assert imports.variables == {"READ_BY_A", "READ_TOO"}
    del os.environ["READ_LATE"]
    imports.forget_hidden()
    assert imports.difference(surroundings.digests(environ)) == ""
    assert imports.run(["kept_b"], ["kept_b"]) == ""
    assert (sys.modules["kept_b"].B, imports.difference(surroundings.digests(environ))) == (None, "READ_LATE")


def test_a_keeper_starts_with_the_variables_that_are_read_in_c_and_no_other_one() -> None:
    kept = {"PATH": "/bin", "XDG_STATE_HOME": "/s", "LD_LIBRARY_PATH": "/x", "OMP_NUM_THREADS": "2", "HOME": "/h"}
    assert surroundings.visible({**kept, "HF_TOKEN": "x", "MY_PATH": "x", "A_OMP_": "x"}) == kept


def test_an_environment_in_a_file_is_the_same() -> None:
    for environ in ({}, {"A": "", "B": "x=y\n\udcff", "C": "x" * 3_000_000}):
        assert surroundings.read_environ(surroundings.environ_file(environ)) == environ


def test_an_edited_module_is_noticed(folder: Path) -> None:
    imports, _ = imported("kept_a")
    assert imports.changed_file() == ""
    os.utime(folder / "kept_a.py", (1, 1))
    assert imports.changed_file() == str(folder / "kept_a.py")
    os.utime(folder / "kept_a.py", ns=(1, int(imports.files[str(folder / "kept_a.py")].partition(":")[0])))
    os.link(folder / "kept_a.py", folder / "another_environment.py")
    assert imports.changed_file() == ""


def test_each_file_of_this_package_counts_of_the_core_and_of_the_features() -> None:
    """An upgrade in place may keep the version."""
    known = {line.rpartition(" ")[0] for line in surroundings._own_files()}
    assert {agent.__file__, surroundings.__file__} <= known


def test_a_module_that_changes_during_the_imports_is_not_kept(folder: Path) -> None:
    assert imported("kept_a", since=0)[1].endswith(" has changed while it was imported")


def test_a_library_that_is_replaced_is_noticed(folder: Path) -> None:
    imports, _ = imported("kept_a")
    library = next(path for path in imports.files if "libc.so" in path or "libc-" in path)
    assert os.path.realpath(sys.executable) in imports.files
    imports.files[library] = "another"
    assert imports.changed_file() == library


def test_a_module_that_asks_for_the_working_directory_is_not_kept(folder: Path) -> None:
    """It would get that of the keeper."""
    (folder / "kept_a.py").write_text("import pathlib\nHERE = pathlib.Path('logs').absolute()")
    assert imported("kept_a")[1] == "kept_a asks for the working directory when it is imported"
    (folder / "kept_b.py").write_text("import os\nHERE = os.path.abspath(__file__)")
    assert imported("kept_b")[1] == ""


def test_an_archive_that_was_made_anew_is_read_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "user.zip"
    monkeypatch.syspath_prepend(str(archive))
    for number, names in enumerate((["kept_z"], ["kept_before", "kept_z"])):
        with zipfile.ZipFile(archive, "w") as file:
            for name in names:
                file.writestr(f"{name}.py", f"NUMBER = {number}")
        forget_folders()
        sys.modules.pop("kept_z", None)
        assert number == importlib.import_module("kept_z").NUMBER


def test_a_module_from_another_folder_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mine = tmp_path_factory.mktemp("mine")
    monkeypatch.syspath_prepend(str(mine))
    (mine / "kept_b.py").write_text("")
    (mine / "kept_space").mkdir()
    (folder / "kept_a.py").write_text("import kept_b")
    assert imported("kept_a")[1] == f"kept_b comes from {mine}/kept_b.py, which is not a folder of installed packages"
    del sys.modules["kept_b"]
    assert f"kept_space comes from {mine}/kept_space" in imported("kept_space")[1]
    assert imported("kept_missing")[1].startswith("kept_missing cannot be imported: ModuleNotFoundError")


def test_a_file_that_would_be_imported_instead_is_noticed(folder: Path, tmp_path: Path) -> None:
    (folder / "kept_a.py").write_text("try:\n    import kept_none\nexcept ImportError:\n    pass")
    imports, _ = imported("kept_a")
    (project := tmp_path / "project").mkdir()
    for name in ("other.py", "kept_a.txt", "notes"):
        (project / name).touch()
    (project / "kept_a").mkdir()  # Data, not a package: the module of that name wins.
    (project / "kept_none.org.XYZ").mkdir()  # No name of a module.
    assert imports.hidden_by([str(project), "/nowhere"]) == ""
    (project / "kept_none").mkdir()
    assert imports.hidden_by([str(project)]) == f"{project}/kept_none"
    (project / "kept_none").rmdir()
    (project / "kept_a" / "__init__.py").touch()
    assert imports.hidden_by([str(project)]) == f"{project}/kept_a"


# Memory.

PLENTY = "MemTotal: 1000000 kB\nMemFree: 10 kB\nMemAvailable: 500000 kB\n"
CALM = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n"


def test_a_keeper_ends_where_memory_is_scarce(tmp_path: Path) -> None:
    """A question is the files of a machine that differ from a calm one's."""
    calm = {"proc/meminfo": PLENTY, "proc/pressure/memory": CALM, "proc/self/cgroup": "0::/a/b\n"}

    def found(question: str) -> str:
        others = dict(file.split("=", 1) for file in question.split("; ") if "=" in file)
        with tempfile.TemporaryDirectory(dir=tmp_path) as machine:
            for name, text in {**calm, **others}.items():
                Path(machine, name).parent.mkdir(parents=True, exist_ok=True)
                Path(machine, name).write_text(text)
            return pressure.reason(machine)

    golden.check_answers("scarce_memory", found)


def test_nothing_is_known_without_proc(tmp_path: Path) -> None:
    assert pressure.reason(str(tmp_path)) == ""


# Files and records.


def test_the_reason_is_one_printable_line_of_bounded_length(tmp_path: Path) -> None:
    socket = tmp_path / "warm.sock"
    assert keeper_files.reason(socket) == ""
    keeper_files.write_reason(socket, "a\x1b[31m\nb" + "c" * 1000)
    assert keeper_files.reason(socket).startswith("a[31mbcc")
    assert len(keeper_files.reason(socket)) <= 300
    keeper_files.write_reason(socket, "")
    assert not list(tmp_path.iterdir())


def test_no_file_is_written_where_another_user_could_put_a_link(tmp_path: Path) -> None:
    (victim := tmp_path / "victim").write_text("mine")
    (public := tmp_path / "public").mkdir()
    public.chmod(0o777)
    (public / "warm.why").symlink_to(victim)
    keeper_files.write_reason(public / "warm.sock", "text")
    assert victim.read_text() == "mine"
    assert keeper_files.reason(public / "warm.sock") == f"another user may write in {public}"


def test_a_job_ends_with_the_outermost_process_that_has_its_variable():
    agent = "import os; from ddplaunch.features.warm.agent import processes_of_jobs as f; print(*f(os.environ))"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {agent!r}])"
    environ = {**os.environ, "PBS_JOBID": "7.server"}
    script = ["sh", "-c", 'echo $$; "$0" -c "$1"; true', sys.executable, launcher]
    job, found = subprocess.run(script, env=environ, capture_output=True, text=True, check=True).stdout.split()
    assert found == job
    alone = subprocess.run([sys.executable, "-c", launcher], env=environ, capture_output=True, text=True, check=True)
    assert alone.stdout == "0\n"


@pytest.mark.parametrize("name", ["SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBINDEX"])
def test_a_keeper_serves_no_other_job(name: str):
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "PBS_JOBID": "7", "LSB_JOBID": "7", "LSB_JOBINDEX": "1"}
    own, other = surroundings.read(job, "/"), surroundings.read({**job, name: "8"}, "/")
    assert surroundings.first_difference(own, other) == "scheduler's job"
