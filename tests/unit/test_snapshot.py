"""What a snapshot of the code has, and what is left when it cannot be taken."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from ddplaunch.cluster.hosts import Host
from ddplaunch.cluster.scheduled import SlurmJob
from ddplaunch.config import LaunchConfig, OutputConfig
from ddplaunch.errors import LaunchError, UsageError
from ddplaunch.features.plan.plan import plan
from ddplaunch.features.snapshot import agent, choice, code_files, content, copies, old_copies, worker
from ddplaunch.features.snapshot.records import DIFF, MARKER
from ddplaunch.system.files import kept_files
from tests.support.configs import agent_spec
from tests.support.repositories import git, repository
from tests.support.runs import environment


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {"train.py": "print(1)\n", "lib/a.py": "A = 1\n", ".gitignore": "data\n*.log\n", "run.sh": "#!/bin/sh\n"}
    folder = repository(tmp_path / "project", files)
    (folder / "data").mkdir()
    (folder / "data/x").write_text("x")
    os.chmod(folder / "run.sh", 0o755)
    return folder


@pytest.fixture
def take(root: Path, tmp_path: Path) -> Callable[..., Path]:
    def taken(*include: Path, of: Path = root) -> Path:
        repository = code_files.repository_of(str(of))
        return Path(copies.take(repository, tuple(map(str, include)), str(tmp_path / "base")))

    return taken


def tree(folder: Path) -> dict[str, str]:
    """The files of a snapshot by path, with their text or, of a link, its target; without what is ours."""
    paths = (Path(parent, name) for parent, folders, names in os.walk(folder) for name in (*folders, *names))
    shown = (path for path in paths if path.is_symlink() or (path.is_file() and not path.name.startswith(".ddpl")))
    return {
        os.fsencode(path.relative_to(folder)).decode("utf-8", "backslashreplace"): f"-> {os.readlink(path)}"
        if path.is_symlink()
        else path.read_text()
        for path in shown
    }


def test_files_of_git_are_copied_and_all_others_are_linked(root: Path, take: Callable[..., Path]):
    (root / "lib/new.py").write_text("new")
    (root / "a.log").write_text("log")
    (root / "lib/__pycache__").mkdir()
    found = take()
    assert tree(found) == {
        **{path: (root / path).read_text() for path in ("train.py", "lib/a.py", "lib/new.py", ".gitignore", "run.sh")},
        **{path: f"-> {root / path}" for path in ("data", "a.log")},
    }
    assert os.access(found / "run.sh", os.X_OK)
    assert not os.access(found / "train.py", os.X_OK)
    said = copies.facts(str(found))
    assert (said.root, said.commit, said.branch) == (str(root), git(root, "rev-parse", "HEAD"), "main")
    assert (said.modified, said.untracked) == (1, 1)  # The mode of run.sh.


def test_equal_code_is_one_snapshot_and_changed_code_shares_its_other_files(root: Path, take: Callable[..., Path]):
    first = take()
    assert take() == first
    (root / "train.py").write_text("print(2)\n")
    (root / "b.log").write_text("a link appears, also in a snapshot that is there")
    second = take()
    assert second != first
    assert (first / "train.py").read_text() == "print(1)\n"
    assert os.path.samefile(first / "lib/a.py", second / "lib/a.py")
    assert (second / "b.log").is_symlink()
    assert "+print(2)" in (second / DIFF).read_text()
    git(root, "commit", "--quiet", "--all", "--message=second")
    third = take()
    assert copies.facts(str(third)).modified == 0
    (root / "b.log").unlink()
    assert take() == third
    assert not os.path.lexists(third / "b.log")


def test_files_that_have_not_changed_are_not_read_again(
    root: Path, take: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(content, "_SAME_MOMENT_NS", 0)
    found = take()
    monkeypatch.setattr(content, "hash_of_file", None)
    monkeypatch.setattr(copies, "copy_of", None)
    assert take() == found
    git(root, "commit", "--quiet", "--all", "--message=second")
    assert take() != found


def test_what_was_changed_in_a_snapshot_is_told_and_mended(root: Path, take: Callable[..., Path]):
    found = take()
    (found / "train.py").write_text("changed by a worker")
    (found / "lib/out").mkdir()
    assert copies.written(str(found)) == ["train.py", "lib/out/"]
    assert take() == found
    assert (found / "train.py").read_text() == "print(1)\n"
    assert copies.written(str(found)) == ["lib/out/"]


def test_what_has_become_another_kind_of_file_in_a_snapshot_is_made_again_or_refused(
    root: Path, take: Callable[..., Path]
):
    (root / "link").symlink_to("lib")
    found = take()
    (found / "link").unlink()
    assert take() == found
    assert os.readlink(found / "link") == "lib"
    (found / "train.py").unlink()
    (found / "train.py").mkdir()
    with pytest.raises(LaunchError, match="the snapshot is damaged"):
        take()
    assert not list(found.glob(".part-*"))


def test_what_is_left_of_a_snapshot_is_no_snapshot(
    root: Path, take: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    found = take()
    (found / MARKER).unlink()  # Somebody has deleted it, and was killed.
    assert take() == found
    assert copies.facts(str(found)).root == str(root)
    os.utime(found / MARKER, (0, 0))
    (root / "train.py").write_text("changed")
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # As if it was killed there.
    take()
    assert not found.exists()


def test_a_file_that_was_read_long_before_the_end_may_have_changed_meanwhile(
    root: Path, take: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    """Its time has a resolution of some milliseconds: an edit in the same moment cannot be seen."""
    for path in ("train.py", "lib/a.py", ".gitignore", "run.sh"):
        (root / path).write_text("just now")
    link_others, now_ns = copies._link_others, time.time_ns()

    def link_after_a_while(*found: Any) -> None:
        link_others(*found)
        monkeypatch.setattr(time, "time_ns", lambda: now_ns + 60 * 10**9)

    monkeypatch.setattr(copies, "_link_others", link_after_a_while)
    assert not content.index_of(str(take().parent))["files"]


def test_names_and_links_of_all_kinds(root: Path, take: Callable[..., Path], tmp_path: Path):
    (tmp_path / "outside").write_text("o")
    names = ("with space", "new\nline", os.fsdecode(b"not \xff utf-8"), "-dash", 'quote"', "uml\u00e4ut")
    for name in names:
        (root / name).write_text("n")
    links = {"out": "../outside", "abs": str(root / "lib/a.py"), "in": "lib/a.py", "ignored": "data/x", "up": "lib"}
    links |= {"gone": "nowhere", "self": ".", "deep": "up/a.py", "loop": "loop"}
    for name, target in links.items():
        (root / name).symlink_to(target)
    found = tree(take())
    assert all(found[os.fsencode(name).decode("utf-8", "backslashreplace")] == "n" for name in names)
    expected = {"out": tmp_path / "outside", "ignored": root / "data/x", "gone": root / "nowhere"}
    expected |= {"abs": "lib/a.py", "in": "lib/a.py", "up": "lib", "self": ".", "deep": "lib/a.py", "loop": "loop"}
    assert {name: found[name] for name in links} == {name: f"-> {target}" for name, target in expected.items()}


def test_a_snapshot_is_code_like_any_other_and_the_name_of_a_folder_may_be_long(
    root: Path, take: Callable[..., Path], tmp_path: Path
):
    again = take(of=take())
    assert tree(again)["train.py"] == "print(1)\n"
    (folder := tmp_path / ("\N{SNOWMAN}" * 80)).mkdir()
    (folder / "train.py").write_text("1")
    assert tree(take(of=folder)) == {"train.py": "1"}
    (folder := tmp_path / os.fsdecode(b"new\nline \xff")).mkdir()
    (folder / "train.py").write_text("2")
    found = take(of=folder)
    assert found.parent.name.startswith("new_line _-")
    assert tree(found) == {"train.py": "2"}


def test_variables_with_which_git_starts_a_hook_have_no_effect(
    root: Path, take: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_WORK_TREE"):
        monkeypatch.setenv(name, "/none")
    assert copies.facts(str(take())).commit


def test_submodules_are_copied_and_files_that_git_only_remembers_are_not(root: Path, take: Callable[..., Path]):
    repository(root / "sub", {"s.py": "S", ".gitignore": "*.tmp"})
    (root / "sub/x.tmp").write_text("")
    git(root, "add", "--all")
    (root / "lib/a.py").unlink()
    found = tree(take())
    assert found["sub/s.py"] == "S"
    assert found["sub/x.tmp"] == f"-> {root / 'sub/x.tmp'}"
    assert "lib/a.py" not in found


def test_a_submodule_has_a_ddplaunchignore_of_its_own(root: Path, take: Callable[..., Path]):
    repository(root / "sub", {"s.py": "S", "big.bin": "B", ".ddplaunchignore": "*.bin"})
    found = tree(take())
    assert found["sub/s.py"] == "S"
    assert found["sub/big.bin"] == f"-> {root / 'sub/big.bin'}"


def test_ddplaunchignore_and_include_have_the_last_word(root: Path, take: Callable[..., Path]):
    (root / ".ddplaunchignore").write_text("lib/\n")
    found = tree(take(root / "data"))
    assert found["lib"] == f"-> {root / 'lib'}"
    assert found["data/x"] == "x"
    for path, problem in ((root / "nothing", "no such file or folder"), (root.parent, "is not in the folder")):
        with pytest.raises(UsageError, match=problem):
            take(path)


def test_a_folder_without_git_is_copied_but_for_what_gitignore_names(tmp_path: Path, take: Callable[..., Path]):
    folder = tmp_path / "plain"
    (folder / "sub").mkdir(parents=True)
    for path, text in {"train.py": "1", ".gitignore": "*.bin", "sub/x.bin": "b", "sub/y.py": "y"}.items():
        (folder / path).write_text(text)
    found = take(of=folder)
    assert tree(found) == {
        **{path: (folder / path).read_text() for path in ("train.py", ".gitignore", "sub/y.py")},
        "sub/x.bin": f"-> {folder / 'sub/x.bin'}",
    }
    assert copies.facts(str(found)).commit == ""


def test_logs_in_the_folder_of_the_code_are_no_code(root: Path):
    base = root / "logs"
    (base / "run1").mkdir(parents=True)
    (root / "old/run2").mkdir(parents=True)
    (root / "old/run2/.ddplaunch-run").write_text("")
    (root / "old/run2/stdout.log.txt").write_text("")
    for _ in range(2):
        found = Path(copies.take(code_files.repository_of(str(root / "lib")), (), str(base)))
    assert sorted(tree(found)) == sorted([".gitignore", "lib/a.py", "run.sh", "train.py", "data", "logs", "old"])


def test_logs_that_are_the_folder_of_the_code_are_no_code(root: Path):
    found = [Path(copies.take(code_files.repository_of(str(root)), (), str(root))) for _ in range(2)]
    assert found[0] == found[1]
    assert tree(found[0])["snapshots"] == f"-> {root / 'snapshots'}"


def test_all_modified_files_are_counted_though_the_differences_are_cut(
    root: Path, take: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(copies, "_MAX_DIFF_BYTES", 100)
    for path in ("train.py", "lib/a.py", "run.sh"):
        (root / path).write_text("changed")
    found = take()
    assert (copies.facts(str(found)).modified, (found / DIFF).stat().st_size) == (3, 100)


@pytest.mark.parametrize(
    ("limit", "value", "problem"),
    [("MAX_BYTES", 100, r"mostly 'big' \(1.0 kB"), ("MAX_FILES", 4, "in 5 files")],
)
def test_too_much_code_is_refused_with_what_is_most(
    root: Path, take: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, limit: str, value: int, problem: str
):
    (root / "big").mkdir()
    (root / "big/file").write_text("x" * 1024)
    monkeypatch.setattr(code_files, limit, value)
    with pytest.raises(UsageError, match=problem.replace("'", "")):
        take()


def test_a_home_folder_is_not_taken_for_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match="would be all of"):
        code_files.repository_of(str(tmp_path))


def test_a_repository_that_git_refuses_and_a_missing_git_are_told(
    root: Path, take: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    (root / ".git/config").write_text("[broken")
    with pytest.raises(LaunchError, match=r"git refuses .*bad config"):
        take()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LaunchError, match="git is not installed"):
        take()


def test_a_file_that_changes_while_it_is_copied_is_copied_again_or_told(
    root: Path, take: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    edits = iter((1, 2, 3, 4))
    write = copies.copy_of

    def copy_and_edit(source: BinaryIO, path: str, noted: Sequence[Any], to: str) -> None:
        write(source, path, noted, to)
        if path == "train.py" and (edit := next(edits, None)):
            (root / "lib/a.py").write_text(f"A = 1{'0' * edit}\n")

    monkeypatch.setattr(copies, "copy_of", copy_and_edit)
    with pytest.raises(LaunchError, match=r"lib/a.py changes while it is copied"):
        take()
    assert not [path for path in tmp_path.glob("base/snapshots/*/*") if path.name != "index.json"]
    next(edits)
    assert (take() / "lib/a.py").read_text() == "A = 1000\n"


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("../train.py")


def _replace_parent_by_file(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("")


@pytest.mark.parametrize("change", [_replace_by_folder, _replace_by_link, _replace_parent_by_file, Path.unlink])
@pytest.mark.parametrize("reads_before", [0, 1])  # It is read to be hashed, and again to be copied.
def test_a_file_that_becomes_something_else_before_it_is_read_is_listed_again(
    root: Path,
    take: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    reads_before: int,
):
    opened, edits = kept_files.regular_fd, iter([*[lambda _: None] * reads_before, change])

    def edit_and_open(path: str, flags: int = 0) -> int:
        if path == str(root / "lib/a.py"):
            next(edits, lambda _: None)(root / "lib/a.py")
        return opened(path, flags)

    monkeypatch.setattr(kept_files, "regular_fd", edit_and_open)
    found = take()
    assert next(edits, None) is None
    assert (found / "train.py").read_text() == "print(1)\n"
    assert (found / "lib/a.py").is_symlink() == (change is _replace_by_link)
    assert (found / "lib/a.py").is_symlink() or not (found / "lib/a.py").is_file()


def test_a_file_that_cannot_be_read_is_named_with_what_to_do(
    root: Path, take: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    opened = kept_files.regular_fd

    def refused(path: str, flags: int = 0) -> int:
        if str(path).endswith("a.py"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, flags)

    monkeypatch.setattr(kept_files, "regular_fd", refused)  # root may read all files.
    with pytest.raises(LaunchError, match=r"lib/a\.py: Permission denied") as raised:
        take()
    assert raised.value.hint == "Name it in .ddplaunchignore if it is no code."


@pytest.mark.parametrize("last", ["copy_of", "_write_synced", "_name", "_link_others"])
def test_a_killed_copy_leaves_nothing_that_is_taken_for_a_snapshot(
    root: Path, take: Callable[..., Path], tmp_path: Path, last: str
):
    program = f"""
import os, signal
from ddplaunch.features.snapshot import code_files, copies
copies.{last} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
copies.take(code_files.repository_of({str(root)!r}), (), {str(tmp_path / "base")!r})
"""
    killed = subprocess.run([sys.executable, "-c", program], env=environment(), check=False)
    assert killed.returncode == -signal.SIGKILL
    found = take()
    assert tree(found)["train.py"] == "print(1)\n"
    complete = [path.parent for path in tmp_path.glob(f"base/snapshots/*/*/{MARKER}") if path.parent.name[0] != "."]
    assert complete == [found]


@pytest.mark.parametrize("last", ["copy_of", "_write_synced", "_name"])
def test_ctrl_c_while_the_code_is_copied_leaves_nothing(root: Path, tmp_path: Path, last: str):
    program = f"""
import os, signal
from ddplaunch.features.snapshot import code_files, copies
from ddplaunch.system import signals
pressed = []  # Once, though several threads copy: a second Ctrl-C would end the cleaning up.
copies.{last} = lambda *_: pressed or (pressed.append(True), os.kill(os.getpid(), signal.SIGINT))
with signals.ctrl_c_ends_process():
    copies.take(code_files.repository_of({str(root)!r}), (), {str(tmp_path / "base")!r})
"""
    interrupted = subprocess.run([sys.executable, "-c", program], env=environment(), check=False, capture_output=True)
    assert interrupted.returncode == -signal.SIGINT
    assert not list(tmp_path.glob("base/snapshots/*/*"))


def test_users_who_share_a_log_folder_have_folders_of_their_own(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    base = tmp_path / "new/base"
    taken = lambda: Path(copies.take(code_files.repository_of(str(root)), (), str(base)))  # noqa: E731
    assert taken().parent.parent == base / "snapshots"
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (base, base.parent)] == [0o700] * 2
    base.chmod(0o1777)
    own = taken().parent.parent
    assert (own.name, stat.S_IMODE(own.stat().st_mode)) == (f"snapshots-{os.geteuid()}", 0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # What this process makes is of another user.
    with pytest.raises(LaunchError, match=r"snapshots-12345 belongs to another user"):
        taken()


def test_old_snapshots_go_unless_a_run_folder_names_them(root: Path, take: Callable[..., Path], tmp_path: Path):
    (run := tmp_path / "base/run1").mkdir(parents=True)
    found = []
    for number in range(4):
        (root / "train.py").write_text(f"print({number})\n\n")
        found.append(take())
        os.utime(found[-1] / MARKER, (0, 0))
        if number == 1:
            (run / old_copies.LINK).symlink_to(found[-1])
    assert [path.exists() for path in found] == [False, True, False, True]
    (other := tmp_path / "other").mkdir()
    (other / "train.py").write_text("another project")
    assert take(of=other).exists()
    assert [path.exists() for path in found] == [False, True, False, False]


def test_a_snapshot_to_which_the_link_of_a_job_leads_stays_whole(root: Path, take: Callable[..., Path], tmp_path: Path):
    """That link is beside the projects: what is in the snapshot are no snapshots."""
    found = take()
    (run := tmp_path / "base/run1").mkdir()
    (run / old_copies.LINK).symlink_to(found)
    links = [found.parent.parent / name for name in ("job-1", "job-2")]
    for link, target in zip(links, (found, tmp_path / "deleted"), strict=True):
        link.symlink_to(target)
    for path in (found / MARKER, found / "lib"):
        os.utime(path, (0, 0))
    (root / "train.py").write_text("changed")
    take()
    assert (found / "lib/a.py").exists()
    assert [link.is_symlink() for link in links] == [True, False]


def test_what_a_killed_command_has_left_is_deleted_a_day_later(root: Path, take: Callable[..., Path]):
    left = [take().parent / name for name in (".part-old", ".part-new")]
    for folder, age_s in zip(left, (90000, 80000), strict=True):
        folder.mkdir()
        (folder / MARKER).write_text("the last file before the name")
        os.utime(folder, (time.time() - age_s,) * 2)
    (root / "train.py").write_text("changed")
    take()
    assert [folder.exists() for folder in left] == [False, True]


def test_a_snapshot_that_cannot_be_written_is_one_message(root: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"--snapshot: .*Not a directory"):
        copies.take(code_files.repository_of(str(root)), (), str(tmp_path / "file"))


@pytest.mark.parametrize("text", [None, "[", "{}", '{"root": 1}'])
def test_what_is_no_snapshot_is_refused(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / MARKER).write_text(text)
    with pytest.raises(LaunchError, match="no snapshot of code" if text is None else "damaged"):
        copies.facts(str(tmp_path))


# Which snapshot a run uses.


@pytest.fixture
def config(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchConfig:
    monkeypatch.chdir(root)
    output = OutputConfig(log_dir=str(tmp_path / "base"))
    return LaunchConfig(script="lib/a.py", snapshot=True, output=output)


def test_a_requeued_job_runs_the_snapshot_with_which_it_has_begun(root: Path, config: LaunchConfig):
    job = SlurmJob("7")
    first = choice.at_start(replace(config, slurm_job=job))
    (root / "lib/a.py").write_text("edited while the job waits")
    again = choice.at_start(replace(config, slurm_job=replace(job, requeue_count=1)))
    assert (again.code, again.script) == (first.code, first.script)
    assert Path(again.script).read_text() == "A = 1\n"
    other = choice.at_start(replace(config, slurm_job=replace(job, id="8")))
    new = choice.at_start(replace(config, slurm_job=job))  # Another job 7, of a cluster that counts again.
    assert other.code == new.code != first.code


def test_a_snapshot_of_the_user_is_run_though_the_code_has_changed(root: Path, config: LaunchConfig):
    taken = choice.at_start(config).code
    (root / "lib/a.py").write_text("edited")
    used = choice.at_start(replace(config, snapshot=False, code=taken))
    assert (used.code, used.script) == (taken, f"{taken}/lib/a.py")
    assert json.loads(choice.for_agent(used) or "")["copy"] == taken
    agent.begin(agent_spec(texts={"snapshot": choice.for_agent(used)}), print)
    with pytest.raises(LaunchError, match="gpu1: there is no snapshot /none here"):
        agent.begin(agent_spec(host="gpu1", texts={"snapshot": '{"copy": "/none"}'}), print)


def test_a_snapshot_is_found_by_a_relative_path_and_by_that_of_a_script_in_it(
    root: Path, config: LaunchConfig, monkeypatch: pytest.MonkeyPatch
):
    taken = choice.at_start(config).code
    assert taken
    monkeypatch.chdir(Path(taken).parent)
    link = Path("link")
    link.symlink_to(taken)
    for code in (Path(taken).name, "link"):
        used = choice.at_start(replace(config, snapshot=False, code=code, chdir=str(root)))
        assert (used.code, used.script) == (taken, f"{taken}/lib/a.py")
    used = choice.at_start(replace(config, snapshot=False, code=taken, script=f"{taken}/lib/a.py"))
    assert used.script == f"{taken}/lib/a.py"


def test_a_script_that_is_missing_or_leads_out_of_the_code_is_told(root: Path, config: LaunchConfig, tmp_path: Path):
    for script in ("lib/none.py", "none/a.py"):
        with pytest.raises(LaunchError, match=f"^{script}: no such file on"):
            choice.at_start(replace(config, script=script))
    (tmp_path / "outside.py").write_text("")
    (root / "link.py").symlink_to(tmp_path / "outside.py")
    with pytest.raises(UsageError, match=r"link\.py: is not in the snapshot"):
        choice.at_start(replace(config, script="link.py"))


def test_what_is_not_in_the_snapshot_or_no_python_code_is_refused(root: Path, config: LaunchConfig, tmp_path: Path):
    (root / "data/train.py").write_text("")
    with pytest.raises(UsageError, match="is not in the snapshot"):
        choice.at_start(replace(config, script="data/train.py"))
    with pytest.raises(UsageError, match="not for a program"):
        choice.at_start(replace(config, entry="program", script="true"))
    with pytest.raises(UsageError, match="use-snapshot: not for a program") as raised:
        choice.at_start(replace(config, entry="program", script="true", code=str(tmp_path)))
    assert "DDPLAUNCH_SNAPSHOT" in raised.value.hint
    with pytest.raises(UsageError, match="a module is run by the Python of ddplaunch only"):
        choice.at_start(replace(config, entry="module", script="x", python="/bin/true"))
    with pytest.raises(LaunchError, match="no snapshot of code"):
        choice.at_start(replace(config, code=str(tmp_path)))


# In the worker.


def test_folders_of_the_code_are_replaced_wherever_python_looks(root: Path, take: Callable[..., Path], monkeypatch):
    folder = take()
    monkeypatch.chdir(root / "lib")
    monkeypatch.setattr(sys, "path_hooks", [*sys.path_hooks])
    monkeypatch.setattr(sys, "path", ["", str(root), str(root / "data"), "/usr", str(root / "none")])
    finder = type(sys)("__editable___mine_finder")
    finder.MAPPING = {"lib": str(root / "lib"), "other": str(root / "lib"), "far": "/usr/far"}
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    worker.RunsSnapshot(json.dumps([str(folder), str(root)])).before_script()
    lib = str(folder / "lib")
    assert sys.path == [lib, str(folder), str(root / "data"), "/usr", str(root / "none")]
    assert vars(finder)["MAPPING"] == {"lib": lib, "other": lib, "far": "/usr/far"}


def test_a_plan_says_what_would_be_copied_and_copies_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(root)
    output = OutputConfig(log_dir=str(tmp_path / "logs"))
    config = LaunchConfig(script="train.py", snapshot=True, output=output)
    planned = plan(config)
    assert len(planned.copied) == 1
    folder = copies.project_in(str(tmp_path / "logs"), str(root))
    assert re.fullmatch(rf"the code in {root} is copied to {folder}/<hash>: \d+ files, \d+ B", planned.copied[0])
    assert planned.command[-1] == f"{folder}/<hash>/train.py"
    assert planned.warnings == ()
    hosts = plan(replace(config, snapshot=False, sync=True, hosts=(Host("a"), Host("b")), max_nodes=2, min_nodes=2))
    there = f"~/.local/state/ddplaunch/snapshots/{os.path.basename(folder)}/<hash>"
    assert hosts.copied[1] == f"each host gets what it lacks of them, into {there}"
    assert hosts.command[-1] == f"{there}/train.py"
    assert hosts.nodes[0].directory == f"~/.local/state/ddplaunch/work/{os.path.basename(folder)}"
    assert not (tmp_path / "logs").exists()
    taken = copies.take(code_files.repository_of(str(root)), (), str(tmp_path / "logs"))
    assert plan(replace(config, code=taken)).copied[0].startswith(f"the workers run the snapshot {taken} of {root}: ")
