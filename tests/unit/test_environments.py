"""--env: which files and settings belong to an environment, where it is, and files that arrive in parts."""

from __future__ import annotations

import base64
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ddplaunch.config import LaunchConfig
from ddplaunch.errors import UsageError
from ddplaunch.features import mounts
from ddplaunch.features.environments import choice, make, places, sent_uv
from ddplaunch.features.environments.queries import MakeEnvironment, OfferedFile, PutFilePart
from ddplaunch.features.snapshot import content
from tests.support import wheels


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/requirements.txt").write_text("torch\n-r ../base.txt\n--constraint=limits.txt\n")
    (tmp_path / "base.txt").write_text("numpy\n-r sub/requirements.txt\n")
    (tmp_path / "sub/limits.txt").write_text("numpy<3\n")
    (tmp_path / "sub/uv.toml").write_text("")
    return tmp_path / "sub/requirements.txt"


def order(file: Path, **options: str) -> MakeEnvironment:
    return choice.order_of(LaunchConfig(script="x.py", env=str(file), **options), "", {}, {})


def test_what_the_file_includes_belongs_to_it(files: Path):
    found = order(files)
    assert found.main == "sub/requirements.txt"
    assert sorted(found.files) == ["base.txt", "sub/limits.txt", "sub/requirements.txt", "sub/uv.toml"]


def test_the_digest_is_that_of_all_that_determines_the_packages(files: Path, monkeypatch: pytest.MonkeyPatch):
    digests = [order(files).digest, order(files, env_args="--pre").digest]
    (files.parent / "limits.txt").write_text("numpy<2\n")
    digests.append(order(files).digest)
    monkeypatch.setenv("UV_TORCH_BACKEND", "cpu")
    digests.append(order(files).digest)
    (files.parent / ".python-version").write_text("# ours\n3.12\n")
    digests.append(order(files).digest)
    assert order(files).python == "3.12"
    assert len(set(digests)) == len(digests)
    for name in ("UV_OFFLINE", "UV_INDEX_OURS_PASSWORD", "UV_HTTP_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    assert order(files).digest == digests[-1]


def test_hosts_get_settings_of_uv_but_no_places_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("UV")]:
        monkeypatch.delenv(name)
    for name in ("UV_INDEX", "UV_OFFLINE", "UV_CACHE_DIR", "UV_PUBLISH_TOKEN", "UV_PYTHON_INSTALL_DIR", "UV"):
        monkeypatch.setenv(name, "1")
    assert sent_uv.variables() == {"UV_INDEX": "1", "UV_OFFLINE": "1"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [("setup.py", "is no file of which environments are made"), ("", "is a folder"), ("no.txt", "No such file")],
)
def test_other_files_are_refused(tmp_path: Path, name: str, problem: str):
    (tmp_path / "setup.py").touch()
    with pytest.raises(UsageError, match=problem):
        order(tmp_path / name)


def test_a_python_is_no_argument_for_uv(files: Path):
    with pytest.raises(UsageError, match="must not name a Python"):
        order(files, env_args="--python=3.12")


def test_a_transfer_that_was_cut_off_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base, file = str(tmp_path), OfferedFile(content.hash_of(b"abcdefg"), 7)

    def put(offset: int, data: bytes) -> None:
        places.keep(base, PutFilePart(file.hash, offset, 7, base64.b64encode(data).decode()))

    assert places.wanted(base, file).offset == 0
    put(0, b"abcd")
    first = dict(places._parts)
    monkeypatch.setattr(places, "_parts", {})  # As in another process while this one has the file.
    assert places.wanted(base, file).offset == 0
    put(0, b"ABC")
    for _, fd in (*first.values(), *places._parts.values()):
        os.close(fd)
    monkeypatch.setattr(places, "_parts", {})
    assert places.wanted(base, file).offset == 4
    put(4, b"efg")
    assert places.wanted(base, file) is None
    assert Path(places.file_path(base, file)).read_bytes() == b"abcdefg"


def test_a_file_that_has_arrived_otherwise_is_not_kept(tmp_path: Path):
    base, file = str(tmp_path), OfferedFile(content.hash_of(b"abc"), 3)
    assert places.wanted(base, file)
    with pytest.raises(ValueError, match="a file has not arrived as it was sent"):
        places.keep(base, PutFilePart(file.hash, 0, 3, base64.b64encode(b"abd").decode()))
    assert places.wanted(base, file).offset == 0


def test_a_file_outside_of_the_folder_is_refused(tmp_path: Path):
    for name in ("../x", "/x", "a/../../x", ""):
        with pytest.raises(ValueError, match="outside"):
            places.write(str(tmp_path), {name: ""})


@pytest.mark.parametrize(
    ("kind", "is_shared"),
    [
        ("nfs4", True),
        ("fuse.sshfs", True),
        ("fuse", True),
        ("ext4", False),
        ("fuse.fuse-overlayfs", False),
        ("", False),
    ],
)
def test_file_systems_that_other_machines_use(kind: str, is_shared: bool):
    assert mounts.is_shared(kind) == is_shared


def test_on_a_shared_home_environments_are_on_the_machines_own_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert places.base_folder("") == f"{tmp_path}/ddplaunch"
    monkeypatch.setattr(mounts, "mount_of", lambda path: ("nfs4", "/"))
    monkeypatch.setattr(places, "LOCAL", str(tmp_path / "var"))
    assert places.base_folder("") == f"{tmp_path}/var/ddplaunch-{os.getuid()}"


def test_a_script_that_chooses_a_uv_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (shim := tmp_path / "uv").write_text("#!/bin/sh\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sent_uv.own_uv() == os.path.realpath(wheels.uv())


def test_a_uv_that_does_not_run_is_named_and_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", wheels.path_without_uv())
    monkeypatch.setenv("HOME", str(tmp_path))
    uv = OfferedFile(content.hash_of(b"\x7fELF"), 4)
    (tmp_path / "r.txt").write_text("torch\n")
    asked = replace(order(tmp_path / "r.txt"), uv=uv, folder=str(tmp_path))
    assert make.make(asked, {}, print).wanted[0].hash == uv.hash
    base = places.base_folder(str(tmp_path))
    places.keep(base, PutFilePart(uv.hash, 0, 4, base64.b64encode(b"\x7fELF").decode()))
    assert "the launcher's uv does not run here: " in make.make(asked, {}, print).problem
    assert make.make(asked, {}, print).wanted[0].hash == uv.hash
