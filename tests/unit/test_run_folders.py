"""A run is found by its id, its tag, the beginning of its id, or as the last one, wherever its folder is."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddplaunch import LaunchConfig, LaunchError, UsageError
from ddplaunch.errors import NO_REPORT
from ddplaunch.features.come_back import attach, launcher_request, logs, past_runs
from ddplaunch.features.come_back.log_follower import LogFollower
from ddplaunch.features.keep_runs.retention import prune
from ddplaunch.features.ps import ps
from ddplaunch.features.runs import run_folders, run_json
from ddplaunch.features.runs.asked_nodes import Queries
from ddplaunch.features.runs.run_folders import find
from ddplaunch.features.usage import live
from ddplaunch.launcher import run_facts
from ddplaunch.launcher.display import report_files
from ddplaunch.protocol.run_result import RunResult
from ddplaunch.system.files import kept_files, run_folder
from tests.support import golden
from tests.support.asked import asked

FIRST = "20261120-193012-aa0001"


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder; other runs of this machine are not seen."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(run_folders, "_live", lambda **_: iter(()))
    return tmp_path / "ddplaunch"


@pytest.fixture(autouse=True)
def locks() -> Iterator[None]:
    yield
    for folder in tuple(run_folder._held):
        with run_folder.released(folder):
            pass


def make(base: Path, run_id: str, made_s: int, *, code: int | None = 0, tag: str = "") -> Path:
    """The folder of a run that was made at this time; without a code it goes on."""
    folder = run_folder.create(base, run_id)
    run_facts.write(run_facts.of_this_process(run_id, tag or run_id, LaunchConfig(script="x.py")), folder)
    os.utime(folder / run_folder.LOCK, (made_s, made_s))
    if code is not None:
        report_files.write_report(RunResult(run_id, code, "failed" if code else "succeeded", 1.0), folder)
        with run_folder.released(folder):
            pass
    return folder


class User:
    """Who looks for runs, of which others of this machine may be live. The methods are the steps of a story."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.folder, self._live = folder, list[tuple[str, str, Path | None]]()
        patch.setenv("XDG_STATE_HOME", str(folder))
        patch.setattr(run_folders, "_live", lambda **_: iter(self._live))

    def made(self, run_id: str, made_s: str, code: str = "0", tag: str = "", folder: str = "ddplaunch") -> Path:
        """A run that was made at this time, and goes on if its code is ``-``."""
        return make(self.folder / folder, run_id, int(made_s), code=None if code == "-" else int(code), tag=tag)

    def live(self, tag: str, run_id: str = "", folder: str = "") -> None:
        """A launcher is seen, with the folder of the run, or without."""
        self._live.append((tag, run_id or tag, self.folder / folder / run_id if folder else None))

    def launcher(self, run_id: str, host: str) -> None:
        """One of several of a run; it goes on."""
        run_folder.move_into_run(self.made(f"{run_id}.{host}", "1", "-"), run_id, "key", [host])

    def damaged(self, run_id: str) -> None:
        folder = self.made(run_id, "1")
        (folder / "run.json").write_text("[1")
        (folder / "report.json").write_text('{"exit_code": 256}')

    def find(self, text: str = "", folder: str = "") -> None:
        try:
            found = find("--wait", text, str(self.folder / folder) if folder else None)
            is_here = found.launcher_pid == os.getpid()
            state = "goes on" + " in this process" * is_here if found.is_running() else f"code {found.exit_code()}"
            of_launchers = f", {found.launchers} launchers" * (found.launchers > 1)
            told = f"{found.name}: {found.run_id}, {state}{of_launchers}"
        except LaunchError as error:
            told = f"error: {error.message} | {error.hint}"
        self.said.append(told.replace(str(self.folder), "<state>"))


def test_which_run_is_found(tmp_path: Path) -> None:
    def story(text: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            return golden.play(User(Path(tempfile.mkdtemp(dir=tmp_path)), patch), text.partition(": ")[2])

    golden.check_pages("found_runs", story)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A --log-dir in which everybody may write."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_no_run_of_mine_where_everybody_may_write(shared: Path, tmp_path: Path) -> None:
    mine = make(shared, FIRST, 1, code=3)
    others = [make(shared, run_id, 9, code=0) for run_id in (f"{FIRST}.2", "job7.gpu1", "none")]
    run_folder.move_into_run(others.pop(1), "job7", "key", ["gpu1"])
    (others[1] / run_folder.LOCK).unlink()
    for path in (*others, shared / "job7"):
        os.chown(path, 65534, 65534)
    (shared / run_folder.NODES).touch()
    for text in ("last", FIRST, FIRST[:4]):
        assert find("--wait", text, str(shared)).exit_code() == 3
    assert [path.resolve() for path in find("--wait", FIRST, str(shared)).of_all_launchers()] == [mine]
    assert run_folders.run_of(mine) == mine
    for text in ("job7", "none"):
        with pytest.raises(UsageError, match=f"--wait {text}: no run of yours with this id"):
            find("--wait", text, str(shared))
    assert [folders for _, folders in past_runs.found(str(shared))] == [(mine,)]
    prune(shared, 1)
    assert mine.is_dir(), "others' runs count for nothing"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_what_another_user_wrote_does_not_steer_the_terminal(base: Path, tmp_path: Path) -> None:
    theirs = make(tmp_path / "theirs", FIRST, 1)
    (theirs / "console.log").write_bytes(b"a\x1b]0;x\x07\n\xff\n")
    for uid, first, next_ in (
        (0, b"a\x1b]0;x\x07\n\xff\n", b"\x1b[2J"),
        (65534, b"a\\x1b]0;x\\x07\n\xef\xbf\xbd\n", b"\\x1b[2J"),
    ):
        os.chown(theirs / "console.log", uid, uid)
        follower = LogFollower(find("--attach", FIRST, str(theirs.parent)).path, "console.log")
        assert follower.last_lines(2) == first
        with (theirs / "console.log").open("ab") as file:
            file.write(b"\x1b[2J")
        assert follower.read() == next_
        follower.close()
        (theirs / "console.log").write_bytes(b"a\x1b]0;x\x07\n\xff\n")


@pytest.mark.parametrize("host", ["", "elsewhere"])
def test_without_a_report_the_code_is_unknown(base: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(base, FIRST, 1, code=None)
    with run_folder.released(folder):
        pass
    if host:
        monkeypatch.setattr(run_folders.socket, "gethostname", lambda: host)
    found = find("--wait", FIRST, None)
    problem = "not on this machine but on" if host else "was killed before it wrote a report"
    with pytest.raises(LaunchError, match=problem) as error:
        found.exit_code()
    assert error.value.exit_code == NO_REPORT


@pytest.mark.parametrize("is_live", [True, False])
def test_a_launcher_on_another_host_is_named_with_what_to_do(
    is_live: bool, base: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On two hosts that share the folder; its lock is seen, or not."""
    folder = make(base, FIRST, 1, code=None)
    (folder / "console.log").write_text("a line\n")
    events = {"event": "attempt_started", "attempt": 0, "workers": 1, "first_rank": 0, "host": "gpu1"}
    (folder / "events.jsonl").write_text(json.dumps(events))
    (folder / "attempt_0" / "0").mkdir(parents=True)
    (folder / "attempt_0" / "0" / "stdout.log").write_text("a line\n")
    run_json = folder / "run.json"
    run_json.write_text(run_json.read_text().replace(f'"{os.uname().nodename}"', '"gpu1.site"'))
    monkeypatch.setattr(os, "nice", lambda _: None)
    monkeypatch.setattr(kept_files, "_KEPT_FREE_BYTES", 1 << 62)
    monkeypatch.setattr(attach._Viewer, "follow_to_the_end", lambda viewer: viewer._run.exit_code())
    if not is_live:
        with run_folder.released(folder):
            pass
    said: list[str] = []
    with pytest.raises(LaunchError) as error:
        attach.attach(asked(FIRST, said.append))
    assert error.value.exit_code == NO_REPORT
    assert f"ssh gpu1.site ddplaunch --wait {FIRST}" in error.value.hint
    way = f"ssh gpu1.site ddplaunch --kill {FIRST}" if is_live else f"ssh -t gpu1.site ddplaunch --attach {FIRST}"
    assert any(way in line for line in said), said
    assert any("is full: lines are missing here" in line for line in said) == is_live
    with pytest.raises(LaunchError) as error:
        launcher_request.leave(asked(FIRST, said.append))
    assert f"ssh gpu1.site ddplaunch --leave {FIRST}" in error.value.hint
    with pytest.raises(UsageError, match=r"its launcher is not on this machine but on gpu1\.site") as error:
        ps.parts_of_run("--kill", FIRST, Queries(), {})
    assert f"ssh gpu1.site ddplaunch --kill {FIRST}. From here: --hosts gpu1.site" in error.value.hint
    if not is_live:
        live.live(asked(FIRST, said.append))
        assert f"ssh -t gpu1.site ddplaunch --ps {FIRST}" in said[-1]
        logs.logs(asked(FIRST, said.append, follow=True))
        assert f"ssh gpu1.site ddplaunch --logs {FIRST} -f" in said[-1]
    assert capfd.readouterr().out.startswith("a line\n")


def test_lines_that_tell_of_millions_of_workers_are_passed_over() -> None:
    event = {"event": "attempt_started", "workers": 65_000, "first_rank": 0}
    told = list(run_json.starts({**event, "attempt": attempt} for attempt in range(1000)))
    assert 1 << 19 < sum(len(ranks) for _, _, ranks in told) <= 1 << 20


def test_a_lock_is_seen_where_it_may_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder.create(tmp_path, "job7")
    open_file = os.open

    def read_only(path: str, flags: int, *more: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EROFS, "read-only")
        return open_file(path, flags, *more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", read_only)
        assert run_json.is_locked(folder)
    with run_folder.released(folder):
        pass
    assert not run_json.is_locked(folder)
