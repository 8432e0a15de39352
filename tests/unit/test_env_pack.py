"""--env pack: what belongs to an environment, which folders are none, and how a copy gets its path."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddplaunch.config import LaunchConfig
from ddplaunch.errors import LaunchError, UsageError
from ddplaunch.features import mounts
from ddplaunch.features.environments import choice, hashes, listing, own, pack
from ddplaunch.features.snapshot import content, copies, placed, receive
from ddplaunch.features.snapshot.records import MARKER


def test_links_lead_to_what_is_copied_too_or_to_the_machine_and_files_of_a_cache_are_taken(tmp_path: Path):
    root, cache, base = tmp_path / "env", tmp_path / "cache", tmp_path / "base"
    for folder in (root / "lib", root / "pkgs", cache, base):
        folder.mkdir(parents=True)
    for file in (root / "lib/a.py", root / "pkgs/left", cache / "c.py", base / "python", root / os.fsdecode(b"\xff\n")):
        file.write_text("x")
    links = {"in": "lib/a.py", "full": root / "lib", "cached": cache / "c.py", "folder": "../cache"}
    links |= {"python": "../base/python", "machine": "/usr/bin/env", "gone": "../none"}
    for name, target in links.items():
        (root / name).symlink_to(target)
    os.mkfifo(root / "pipe")
    found = listing.files_of(str(root), ["pkgs"], str(base))
    targets = {path: file.target for path, file in found.items()}
    assert targets == {
        "lib/a.py": "",
        "cached": "",
        os.fsdecode(b"\xff\n"): "",
        "in": "lib/a.py",
        "full": "lib",
        "machine": "/usr/bin/env",
        "folder": str(cache),
        "python": str(base / "python"),
        "gone": str(tmp_path / "none"),
    }
    assert found["cached"].path == str(cache / "c.py")


def test_equal_environments_have_one_signature_whatever_python_has_compiled(tmp_path: Path):
    signatures = []
    for name, text, compiled in (("a", "x", ""), ("b", "x", "1"), ("c", "xy", "")):
        (tmp_path / name / "lib/__pycache__").mkdir(parents=True)
        (tmp_path / name / "lib/m.py").write_text(text)
        (tmp_path / name / "lib/__pycache__/m.pyc").write_text(compiled)
        signatures.append(listing.signature_of(listing.files_of(str(tmp_path / name), (), "/")))
    assert signatures[0] == signatures[1] != signatures[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_a_file_is_read_again_only_if_it_has_changed_also_by_one_of_the_same_size_and_time(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    path, read = str(cache / "file"), list[str]()
    one, other = content.hash_of(b"one"), content.hash_of(b"two")
    hash_of_file = content.hash_of_file
    monkeypatch.setattr(content, "hash_of_file", lambda root, file: read.append("") or hash_of_file(root, file))
    monkeypatch.setattr(content, "_SAME_MOMENT_NS", 0)
    Path(path).write_bytes(b"one")
    time.sleep(0.02)  # The kernel's clock for files has steps.
    assert [hashes.of_files([path], "n")[path] for _ in range(3)] == [one] * 3
    assert len(read) == 1
    times = os.stat(path)
    Path(f"{path}2").write_bytes(b"two")
    os.utime(f"{path}2", ns=(times.st_atime_ns, times.st_mtime_ns))
    os.replace(f"{path}2", path)
    assert hashes.of_files([path], "n")[path] == other


def test_a_file_that_cannot_be_read_is_named(cache: Path):
    with pytest.raises(LaunchError, match=r"^--env: '.*/none': No such file or directory$"):
        hashes.of_files([str(cache / "none")], "n")


@pytest.mark.parametrize(
    ("prefix", "problem"),
    [
        ("/usr", "--env pack copies a virtual environment, or one of conda: the launcher runs with the Python in /usr"),
        ("/work/env", "torch is in .*, outside of the launcher's environment /work/env"),
    ],
)
def test_a_python_that_is_no_environment_is_refused(monkeypatch: pytest.MonkeyPatch, prefix: str, problem: str):
    monkeypatch.setattr(sys, "prefix", prefix)
    with pytest.raises(UsageError, match=problem):
        own.environment(needs_torch=True)


def test_code_that_the_environment_only_names_is_found(tmp_path: Path):
    packages = tmp_path / "env/lib/python3.12/site-packages"
    for folder in (packages / "a.dist-info", tmp_path / "my project", tmp_path / "other"):
        folder.mkdir(parents=True)
    url = (tmp_path / "my project").as_uri()
    (packages / "a.dist-info/direct_url.json").write_text(f'{{"url": "{url}", "dir_info": {{"editable": true}}}}')
    (packages / "b.pth").write_text(f"import x\n{tmp_path}/other\n{packages}\n/nothing\n")
    assert own.outside(str(tmp_path / "env")) == [str(tmp_path / "my project"), str(tmp_path / "other")]


@pytest.mark.parametrize(("kind", "says"), [("nfs4", "on a network file system"), ("ext4", "is on this machine")])
def test_on_one_machine_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch, kind: str, says: str):
    monkeypatch.setattr(mounts, "mount_of", lambda path: (kind, "/"))
    config = choice.at_start(LaunchConfig(script="x.py", env="pack"))
    assert says in config.notices[0].text
    assert ("--env FILE makes an environment on each host" in config.notices[0].text) == (kind == "nfs4")


def test_versions_that_fit():
    assert pack._is_version(f"{sys.version_info[0]}.{sys.version_info[1]}.99")
    assert not pack._is_version("3.1.0")
    assert pack._numbers("glibc 2.9") < pack._numbers("glibc 2.39")


# A copy at its place.


def copy(place: Path, name: str) -> str:
    folder = Path(placed.begin(str(place)), name)
    folder.mkdir()
    (folder / MARKER).touch()
    return str(folder)


def test_a_path_leads_to_the_newest_copy_and_others_are_deleted(tmp_path: Path):
    place = tmp_path / "env"
    for name in ("one", "two"):
        placed.put(copy(place, name), str(place))
        assert os.path.realpath(place) == f"{tmp_path}/.ddplaunch-env/{name}"
    assert os.listdir(tmp_path / ".ddplaunch-env") == ["two"]


def test_a_copy_that_is_used_stays(tmp_path: Path):
    place = tmp_path / "env"
    placed.put(copy(place, "one"), str(place))
    with open(place / MARKER) as used:
        fcntl.flock(used, fcntl.LOCK_SH)
        with pytest.raises(LaunchError, match=r"a run uses .*/env, and the launcher's differs by now"):
            placed.put(copy(place, "two"), str(place))
    placed.check(str(place), 1)
    with pytest.raises(LaunchError, match=r"env needs .*, and its disk has only .* left"):
        placed.check(str(place), 1 << 60)


@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_what_is_not_ours_is_left(tmp_path: Path, what: str):
    place = tmp_path / "env"
    {"file": place.touch, "folder": place.mkdir, "link": lambda: place.symlink_to("/usr")}[what]()
    with pytest.raises(LaunchError, match="env exists and is not a copy of ours"):
        placed.begin(str(place))
    assert os.listdir(tmp_path) == ["env"]


def test_a_folder_for_copies_in_which_others_can_write_is_refused(tmp_path: Path):
    (tmp_path / ".ddplaunch-env").mkdir()
    (tmp_path / ".ddplaunch-env").chmod(0o777)
    with pytest.raises(LaunchError, match="other users can write there"):
        placed.begin(str(tmp_path / "env"))


def test_a_full_disk_keeps_nothing_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(receive, "_beside", {"p": str(tmp_path)})
    for number, is_left in ((errno.EACCES, True), (errno.ENOSPC, False)):
        (tmp_path / "received").mkdir(exist_ok=True)
        receive._make_room("p", OSError(number, ""))
        assert (tmp_path / "received").exists() == is_left


def test_a_module_that_python_has_compiled_anew_is_no_damage(tmp_path: Path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/m.py").write_text("changed")
    found = SimpleNamespace(files={"lib/__pycache__/m.pyc": [1, 1, "", 0], "lib/m.py": [1, 1, "", 0]})
    assert copies.damaged(str(tmp_path), found) == ["lib/m.py"]  # type: ignore[arg-type]
