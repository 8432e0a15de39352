"""A copy of ddplaunch on a node is whole, the user's own, and the one that was sent; or there is none."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddplaunch.features.remote import package, receiver, start_limit
from ddplaunch.protocol.agent_entry import PACKAGE_ROOT
from tests.support.installed_stub import other_pythons

FILES = {"ddplaunch/__init__.py": "a = 1\n", "ddplaunch/features/b.py": "é = 2\n", "pynvml.py": ""}
OLD_S = 40 * 86400


def wanted(files: dict[str, str]) -> dict[str, str]:
    as_bytes = {path: text.encode() for path, text in files.items()}
    own = receiver.digest((path, data) for path, data in as_bytes.items() if path.startswith("ddplaunch/"))
    return {"content": own, "name": receiver.digest(as_bytes.items())}


def packed(files: dict[str, str]) -> bytes:
    return zlib.compress(json.dumps(files).encode())


def receive(base: Path, files: dict[str, str] = FILES, needed: Callable[[], bytes] | None = None) -> Path:
    return Path(receiver.receive(wanted(files), [], [str(base)], needed or (lambda: packed(files))))


def not_needed() -> bytes:
    raise AssertionError("it is here already")


def test_a_copy_is_whole_and_is_used_again(tmp_path: Path) -> None:
    base = tmp_path / "packages"
    copy = receive(base)
    assert {path: (copy / path).read_text() for path in FILES} == FILES
    assert (base.stat().st_mode & 0o777, copy.parent) == (0o700, base)
    assert receive(base, needed=not_needed) == copy
    installed = str(shutil.copytree(copy, tmp_path / "installed"))
    assert receiver.receive(wanted(FILES), [installed], [], not_needed) == installed
    assert receiver.receive(wanted(FILES), [installed], [str(base)], not_needed) == str(copy)


@pytest.mark.parametrize("damage", ["missing", "empty", "more"])
def test_a_copy_that_a_crash_of_the_machine_has_damaged_is_sent_again(tmp_path: Path, damage: str) -> None:
    copy = receive(tmp_path / "packages")
    for mark in copy.glob(".checked-*"):  # As after a boot.
        mark.unlink()
    assert receive(tmp_path / "packages", needed=not_needed) == copy
    for mark in copy.glob(".checked-*"):
        mark.unlink()
    file = copy / ("ddplaunch/c.py" if damage == "more" else "ddplaunch/__init__.py")
    file.unlink(missing_ok=True)
    if damage != "missing":
        file.touch()
    assert receive(tmp_path / "packages") == copy
    assert {path: (copy / path).read_text() for path in FILES} == FILES
    assert sorted(path.name for path in copy.parent.iterdir()) == [".lock", copy.name]


@pytest.mark.parametrize(
    "path", ["../x.py", "/x.py", "ddplaunch/../../x.py", "ddplaunch/x.so", ".hidden/x.py", "a//x.py"]
)
def test_nothing_is_written_outside_of_a_copy(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="not arrived as it was sent"):
        receive(tmp_path / "packages", {**FILES, path: ""})
    assert [each.name for each in (tmp_path / "packages").iterdir()] == [".lock"]
    assert [each.name for each in tmp_path.iterdir()] == ["packages"]


@pytest.mark.parametrize("data", [b"", b"x", packed({}), packed({**FILES, "pynvml.py": "changed"})])
def test_what_has_arrived_otherwise_is_not_used(tmp_path: Path, data: bytes) -> None:
    with pytest.raises((ValueError, zlib.error)):
        receive(tmp_path / "packages", needed=lambda: data)
    assert [each.name for each in (tmp_path / "packages").iterdir()] == [".lock"]


def test_a_folder_in_which_another_user_may_write_is_not_used(tmp_path: Path) -> None:
    (public := tmp_path / "public").mkdir()
    public.chmod(0o770)
    (link := tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "file").touch()
    foreign = tmp_path / "foreign"
    if os.geteuid() == 0:
        foreign.mkdir(mode=0o700)
        os.chown(foreign, 12345, 12345)
    for base in (public, link, tmp_path / "file", *([foreign] if os.geteuid() == 0 else [])):
        with pytest.raises(OSError, match=str(base)):
            receive(base)
    assert not list(public.iterdir())


def test_a_full_disk_leaves_nothing_and_the_next_folder_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_source: str, target: str) -> None:
        if "first" in target:
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(_source, target)

    rename = os.rename
    monkeypatch.setattr(os, "rename", full)
    bases, asked = [str(tmp_path / "first"), str(tmp_path / "second")], []
    copy = receiver.receive(wanted(FILES), [], bases, lambda: (asked.append(1), packed(FILES))[1])
    assert (copy.startswith(bases[1]), asked) == (True, [1])
    assert [each.name for each in (tmp_path / "first").iterdir()] == [".lock"]
    with pytest.raises(OSError, match="first: No space left on device"):
        receiver.receive(wanted(FILES), [], bases[:1], lambda: packed(FILES))


def test_of_many_at_once_one_receives(tmp_path: Path) -> None:
    asked, found = [], set[Path]()

    def needed() -> bytes:
        asked.append(1)
        return packed(FILES)

    threads = [threading.Thread(target=lambda: found.add(receive(tmp_path / "p", needed=needed))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(asked), len(found)) == (1, 1)


def test_one_that_hangs_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "_OTHERS_S", 0.1)
    (tmp_path / "packages").mkdir(mode=0o700)
    with receiver._alone(str(tmp_path / "packages")):
        assert receive(tmp_path / "packages").is_dir()


def test_old_copies_are_deleted_but_not_those_in_use(tmp_path: Path) -> None:
    base = tmp_path / "packages"
    in_use = receive(base, {"ddplaunch/a.py": ""})
    unused = shutil.copytree(in_use, base / "sent-0")
    part = base / ".part-0"
    part.mkdir()
    for each in (in_use, unused, part):
        os.utime(each, (time.time() - OLD_S,) * 2)
    fresh = shutil.copytree(in_use, base / "sent-1")
    os.utime(fresh)
    copy = receive(base)
    assert {each.name for each in base.iterdir()} == {".lock", in_use.name, "sent-1", copy.name}


def test_of_many_copies_as_of_a_clone_that_is_edited_only_the_newest_are_kept_for_long(tmp_path: Path) -> None:
    base, days = tmp_path / "packages", range(1, 10)
    first = receive(base, {"ddplaunch/a.py": ""})
    for age in days:
        each = shutil.copytree(first, base / f"of-day-{age}")
        os.utime(each, (time.time() - age * 86400 - 60,) * 2)
    copy = receive(base)
    kept = {f"of-day-{age}" for age in (1, 2, 3)}
    assert {each.name for each in base.iterdir()} == {".lock", first.name, copy.name, *kept}


def test_the_package_of_this_process_can_be_received_and_imported(tmp_path: Path) -> None:
    """In each version of Python that is here: it has no other package."""
    answered: set[str] = set()
    length, _, text = package.answer(package.PREFIX + b"receiver\n", answered).partition(b"\n")
    body = json.loads(text)
    assert (int(length), body["text"]) == (len(text), Path(receiver.__file__).read_text())
    data = package.answer(package.PREFIX + b"package\n", answered).partition(b"\n")[2]
    copy = receiver.receive(body["wanted"], [], [str(tmp_path / "packages")], lambda: data)
    assert len(data) < 1 << 20
    own = {str(path.relative_to(PACKAGE_ROOT)) for path in Path(PACKAGE_ROOT, "ddplaunch").rglob("*.py")}
    assert {str(path.relative_to(copy)) for path in Path(copy, "ddplaunch").rglob("*.py")} == own
    told = f"import sys; sys.path.append({copy!r}); import ddplaunch.agent.main, pynvml; print(ddplaunch.__file__)"
    for python in (sys.executable, *other_pythons()):
        done = subprocess.run([python, "-I", "-S", "-c", told], capture_output=True, text=True, cwd="/")
        assert done.stdout.strip() == f"{copy}/ddplaunch/__init__.py", (python, done.stderr)


def test_only_a_request_is_answered_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: set[str] = set()
    for line in (b"", b"receiver\n", package.PREFIX + b"\n", package.PREFIX + b"secrets\n", package.PREFIX + b"\xff\n"):
        assert package.answer(line, answered) == b""
    assert package.answer(package.PREFIX + b"receiver\n", answered) != b""
    assert package.answer(package.PREFIX + b"receiver\n", answered) == b""


def test_each_piece_that_a_node_has_got_begins_the_limit_of_its_start_anew_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, now = list[bytes](), [0.0]
    monkeypatch.setitem(package.ANSWERS, "large", lambda: bytes(100_000))
    assert package.give(package.PREFIX + b"large\n", set(), sent.append)
    assert [len(each) for each in sent] == [64 << 10, 100_007 - (64 << 10)]
    assert package.give(package.PREFIX + b"\n", set(), sent.append)
    assert sent[2:] == [b""]
    assert not package.give(b"Welcome\n", set(), sent.append)
    monkeypatch.setattr(start_limit, "time", SimpleNamespace(monotonic=lambda: now[0]))
    limit = start_limit.StartLimit(60.0)
    for now[0] in (50.0, 100.0, 3590.0, 3700.0):
        limit.restart()
        assert limit.due == min(now[0] + 60.0, 3600.0)


def test_a_launcher_whose_files_are_gone_says_so_to_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> dict[str, bytes]:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "a.py")

    package._receiver.cache_clear()
    monkeypatch.setattr(package, "_files", gone)
    try:
        text = json.loads(package.answer(package.PREFIX + b"receiver\n", set()).partition(b"\n")[2])["text"]
    finally:
        package._receiver.cache_clear()
    with pytest.raises(OSError, match=r"the launcher cannot read its own files: .*a\.py"):
        exec(text)


def test_the_same_file_or_the_same_wheel_is_the_package(tmp_path: Path) -> None:
    scope: dict[str, object] = {"os": os}
    exec(package.HAS_PACKAGE, scope)
    has_package: Callable[[str, object], bool] = scope["has_package"]  # type: ignore[assignment]
    own = dict(package.identity())
    (tmp_path / "link").symlink_to(PACKAGE_ROOT)
    assert has_package(PACKAGE_ROOT, own)
    assert has_package(str(tmp_path / "link"), own)
    copy = tmp_path / "copy" / "ddplaunch"
    copy.mkdir(parents=True)
    os.link(Path(PACKAGE_ROOT, "ddplaunch", "version.py"), copy / "version.py")
    assert not has_package(str(copy.parent), own)  # Of a copy by hard links, other files may have changed.
    record = copy.parent / f"ddplaunch-{own['version']}.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("ddplaunch/b.py,sha256=x,1\nddplaunch/a.py,sha256=x,1\n../../bin/ddplaunch,sha256=y,2\n")
    wheel = scope["wheel_of"](str(copy.parent), own["version"])  # type: ignore[operator]
    assert has_package(str(copy.parent), {**own, "wheel": wheel})
    record.write_text("ddplaunch/a.py,sha256=x,1\nddplaunch/b.py,sha256=x,1\n../../bin/ddplaunch,sha256=z,2\n")
    assert has_package(str(copy.parent), {**own, "wheel": wheel})
    record.write_text("ddplaunch/a.py,sha256=x,1\nddplaunch/b.py,sha256=z,1\n")
    assert not has_package(str(copy.parent), {**own, "wheel": wheel})
    record.write_text("ddplaunch/docs/a.md,sha256=x,1\n")  # A clone.
    assert not has_package(str(copy.parent), {**own, "wheel": ""})
