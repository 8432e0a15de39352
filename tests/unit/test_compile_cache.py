"""The caches of torch.compile and Triton: which variables are set, which folder is safe, what is deleted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ddplaunch.config import WorkerConfig
from ddplaunch.features.compile_cache import environ, folder
from ddplaunch.features.compile_cache.environ import THREADS, TORCH, TRITON
from ddplaunch.system import procfs
from tests.support.configs import agent_spec

DAY_S = 86400.0


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and two folders for temporary files, all on a local disk; the first is on the disk of /home."""
    for name in ("tmp1", "tmp2"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o1777)
    monkeypatch.setattr(folder, "_TEMPORARY", (str(tmp_path / "tmp1"), str(tmp_path / "tmp2")))
    mounted(monkeypatch, {"/": "ext4"})
    return tmp_path


def mounted(monkeypatch: pytest.MonkeyPatch, kinds: dict[str, str]) -> None:
    """The machine has these file systems; a space in a mount point is written as the kernel writes it."""
    lines = [f"dev {point.replace(' ', chr(92) + '040')} {kind} rw 0 0" for point, kind in kinds.items()]
    monkeypatch.setattr(procfs, "read", lambda path: "\n".join(lines).encode() if path.endswith("mounts") else b"")


def mine(path: Path) -> str:
    return str(path / f"ddplaunch-{os.geteuid()}" / "compile")


# Which folder.


def test_the_folder_is_at_home_on_a_local_disk(disks: Path):
    assert folder.chosen({"XDG_CACHE_HOME": f"{disks}/cache"}, create=True) == f"{disks}/cache/ddplaunch/compile"
    assert oct(os.stat(f"{disks}/cache/ddplaunch/compile").st_mode & 0o777) == "0o700"


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs", "autofs", "tmpfs", "9p", "some new one"])
def test_a_file_system_that_is_not_a_disk_of_the_machine_is_not_even_touched(
    kind: str, disks: Path, monkeypatch: pytest.MonkeyPatch
):
    """An NFS server that does not answer would block the start."""
    mounted(monkeypatch, {"/": "ext4", f"{disks}/my home": kind})
    assert folder.chosen({"XDG_CACHE_HOME": f"{disks}/my home/cache"}, create=True) == mine(disks / "tmp1")
    assert not (disks / "my home").exists()


def test_a_link_to_another_file_system_is_not_followed(disks: Path, monkeypatch: pytest.MonkeyPatch):
    (disks / "nfs").mkdir()
    (disks / "cache").symlink_to(disks / "nfs")
    mounted(monkeypatch, {"/": "ext4", f"{disks}/nfs": "nfs"})
    assert folder.chosen({"XDG_CACHE_HOME": f"{disks}/cache"}, create=True) == mine(disks / "tmp1")
    assert not [*(disks / "nfs").iterdir()]


def foreign_folder(path: Path) -> None:
    path.mkdir(mode=0o777)
    os.chown(path, 4711, 4711)


def own_folder_of_another_mode(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def link_to_foreign_folder(path: Path) -> None:
    foreign_folder(path.with_name("trap"))
    path.symlink_to(path.with_name("trap"))


def link_to_own_folder(path: Path) -> None:
    """Another user may send what this user writes to any folder of this user."""
    path.with_name("own").mkdir(mode=0o700)
    path.symlink_to(path.with_name("own"))
    os.chown(path, 4711, 4711, follow_symlinks=False)


def file(path: Path) -> None:
    path.touch()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of another user")
@pytest.mark.parametrize(
    "trap", [foreign_folder, own_folder_of_another_mode, link_to_foreign_folder, link_to_own_folder, file]
)
def test_what_another_user_may_have_laid_in_tmp_is_not_used(trap, disks: Path):
    """torch unpickles what it finds in its cache."""
    trap(Path(mine(disks / "tmp1")).parent)
    before = sorted(str(path) for path in (disks / "tmp1").rglob("*"))
    assert folder.chosen({"HOME": ""}, create=True) == mine(disks / "tmp2")
    assert sorted(str(path) for path in (disks / "tmp1").rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of another user")
def test_a_folder_above_that_others_may_change_is_not_used(disks: Path):
    (disks / "open").mkdir()
    (disks / "open").chmod(0o777)
    foreign_folder(disks / "foreign")
    (disks / "tmp1").chmod(0o777)  # Without the sticky bit, others may rename what is in it.
    for cache in ("open/cache", "foreign/cache"):
        assert folder.chosen({"XDG_CACHE_HOME": f"{disks}/{cache}"}, create=True) == mine(disks / "tmp2")


def test_without_a_safe_folder_with_space_torch_and_triton_choose(disks: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder, "_MIN_FREE_BYTES", 1 << 60)
    assert environ.of_machine({"XDG_CACHE_HOME": f"{disks}/cache"}, 1, create=True) == {}


def test_a_user_without_a_home_has_a_folder(disks: Path):
    assert folder.chosen({"HOME": ""}) == mine(disks / "tmp1")
    assert not (disks / "tmp1" / f"ddplaunch-{os.geteuid()}").exists()  # Only looked at, as by --plan.


# Which variables.


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, {TORCH, TRITON}),
        ({TRITON: "/mine"}, {TORCH}),
        ({"TRITON_HOME": "/mine"}, {TORCH}),
        ({TORCH: "/mine"}, set()),  # Triton's is in it, as torch wants it.
        ({TORCH: "", TRITON: ""}, set()),
    ],
)
def test_what_the_user_has_chosen_stays(given: dict[str, str], names: set[str], disks: Path):
    found = environ.of_machine({"XDG_CACHE_HOME": f"{disks}/cache", **given}, 1)
    assert found.keys() == names
    assert all(value.startswith(f"{disks}/cache/ddplaunch/compile/torch-") for value in found.values())
    assert environ.of_other_machine(given, 1).keys() == names


@pytest.mark.parametrize(
    ("workers", "cpus", "threads"), [(1, 8, None), (2, 8, "4"), (8, 128, "16"), (2, 128, "32"), (8, 4, "1")]
)
def test_the_workers_of_a_node_share_its_cpus_when_they_compile(workers: int, cpus: int, threads: str | None):
    """torch takes one process for each CPU, up to 32, in every worker."""
    assert environ.threads({}, workers, cpus).get(THREADS) == threads
    assert environ.threads({THREADS: "3"}, workers, cpus) == {}


@pytest.mark.parametrize("settings", [{"dry_run": True}, {"workers": WorkerConfig(compile_cache="off")}])
def test_nothing_is_set_in_a_dry_run_and_where_the_user_wants_it(settings, disks: Path):
    """A dry run simulates GPUs: what it compiles is of no use to a real run."""
    assert environ.shared_environ(agent_spec(**settings), {"XDG_CACHE_HOME": f"{disks}/cache"}, 4) == {}
    assert not (disks / "cache").exists()


@pytest.mark.parametrize(
    ("given", "sets", "folders"),
    [
        ({TORCH: "/a"}, True, ("/a", "/a/triton")),
        ({TORCH: "/a", TRITON: "/b"}, True, ("/a", "/b")),
        ({"HOME": "/root"}, False, ("/tmp/torchinductor_", "/root/.triton/cache")),
        ({"TMPDIR": "/t", "TRITON_HOME": "/h"}, False, ("/t/torchinductor_", "/h/.triton/cache")),
    ],
)
def test_the_check_knows_which_folders_a_run_uses(given, sets, folders, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/root")
    assert tuple(environ.in_use(given, sets=sets).values()) == folders


# What is deleted.


def kept(base: Path, name: str, used_days_ago: float, size: int = 1) -> Path:
    path = base / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    used_at = time.time() - used_days_ago * DAY_S
    os.utime(path, (used_at, used_at))
    return path


def names(base: Path) -> set[str]:
    return {str(path.relative_to(base)) for path in base.rglob("*") if path.is_file()} - {".cleaned"}


def test_what_was_not_used_for_thirty_days_is_deleted_whole(tmp_path: Path):
    """A folder of Triton has files that name each other: one that is used keeps the others."""
    kept(tmp_path, "old/inductor/fxgraph/ab/key/entry", 31)
    kept(tmp_path, "new/triton/KEY/kernel.json", 40)
    kept(tmp_path, "new/triton/KEY/kernel.cubin", 1)
    (tmp_path / "empty").mkdir()
    outside = kept(tmp_path.parent, "outside", 99)
    (tmp_path / "new" / "link").symlink_to(outside.parent)
    folder.clean(str(tmp_path), time.time())
    assert names(tmp_path) == {"new/triton/KEY/kernel.json", "new/triton/KEY/kernel.cubin"}
    assert not (tmp_path / "old").exists()
    assert outside.exists()


def test_above_the_limit_the_longest_unused_goes_but_nothing_that_may_be_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(folder, "_MAX_BYTES", 20_000)
    for name, days in (("a/f", 9), ("b/f", 5), ("c/f", 1), ("d/f", 0)):
        kept(tmp_path, name, days, size=8192)
    folder.clean(str(tmp_path), time.time())
    assert names(tmp_path) == {"c/f", "d/f"}
    monkeypatch.setattr(folder, "_MAX_BYTES", 0)
    folder.clean(str(tmp_path), time.time() + DAY_S / 2)  # Not yet: once a day.
    assert names(tmp_path) == {"c/f", "d/f"}
    folder.clean(str(tmp_path), time.time() + 1.2 * DAY_S)
    assert names(tmp_path) == {"d/f"}


def test_a_folder_that_does_not_exist_or_may_not_be_written_is_left_alone(tmp_path: Path):
    folder.clean(str(tmp_path / "none"), time.time())
    assert not (tmp_path / "none").exists()
    (tmp_path / ".cleaned").symlink_to(tmp_path / "elsewhere")
    folder.clean(str(tmp_path), time.time())
    assert not (tmp_path / "elsewhere").exists()
