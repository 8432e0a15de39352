"""What ``--check`` finds out about the health of a node is what a start would find; how long a start waits."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ddplaunch.features import mounts
from ddplaunch.features.gpus.reader import read_once
from ddplaunch.features.gpus.records import GpusRead, IbPort
from ddplaunch.features.health import log_folder
from ddplaunch.features.health.gpu_faults import look
from ddplaunch.system import devices
from tests.support import fake_nvml
from tests.support.fake_nvml import Says


@pytest.fixture(autouse=True)
def has_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test without the fixture ``driver`` is on a machine without NVIDIA's library."""
    monkeypatch.setattr(devices, "has_nvml", lambda: "driver" in request.fixturenames)


def rules(log_dir: Path | str, *, has_peers: bool = True, read: GpusRead | None = None) -> list[tuple[str, str]]:
    found = look(read or read_once("health", 60), str(log_dir), has_peers=has_peers).findings
    return [(finding.rule, finding.severity) for finding in found]


def test_all_gpus_are_judged_by_the_rules_of_a_start(driver: Says, tmp_path: Path) -> None:
    driver("gpus 2", "1 rows 0 0 0 1", "1 margin 3", *fake_nvml.healthy(0), *fake_nvml.healthy(1))
    found = look(read_once("health", 60), str(tmp_path), has_peers=True)
    assert [(finding.gpu, finding.severity) for finding in found.findings] == [(1, "refuse"), (1, "warn")]
    assert found.findings[0].rule == "row-remap-failed"
    assert [(gpu.index, gpu.uuid, gpu.power_limit_w) for gpu in found.hardware.gpus] == [
        (0, "GPU-0000-0", 700.0),
        (1, "GPU-0000-1", 700.0),
    ]
    assert found.hardware.memory_bytes > 0
    assert found.hardware.cpus > 0


@pytest.mark.parametrize(
    ("chosen", "environ", "indices"),
    [(("0",), "", [0]), (None, "GPU-0000-1", [1]), (None, "", [0, 1]), (("GPU-7",), "GPU-0000-0", [0, 1])],
)
def test_gpus_that_no_worker_may_use_are_not_judged(
    chosen: tuple[str, ...] | None,
    environ: str,
    indices: list[int],
    driver: Says,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPUs that do not exist: a start tells that."""
    monkeypatch.setattr(devices, "has_driver", lambda root="/": True)
    if environ:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", environ)
    driver("gpus 2", "0 rows 0 0 0 1", "1 rows 0 0 0 1")
    found = look(read_once("health", 60), str(tmp_path), chosen, has_peers=True)
    assert [finding.gpu for finding in found.findings] == [gpu.index for gpu in found.hardware.gpus] == indices


@pytest.mark.parametrize(("has_gpus", "count"), [(True, 1), (False, 0)])
def test_a_driver_that_knows_no_gpu_is_a_finding_where_there_are_some(
    has_gpus: bool, count: int, driver: Says, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images for containers have NVML's library without a GPU."""
    monkeypatch.setattr(devices, "has_driver", lambda root="/": has_gpus)
    driver("gpus 0")
    assert rules(tmp_path) == [("nvml-silent", "warn")] * count


def test_nothing_wrong_leaves_nothing_behind(tmp_path: Path) -> None:
    assert rules(tmp_path / "not" / "made" / "yet") == []
    assert not list(tmp_path.iterdir())
    assert rules("/dev/null") == []


@pytest.mark.parametrize(("has_peers", "severity"), [(True, "refuse"), (False, "warn")])
def test_a_folder_that_cannot_be_written_is_found(has_peers: bool, severity: str) -> None:
    """/proc cannot be written, even by root."""
    assert rules("/proc/self", has_peers=has_peers) == [("folder-not-writable", severity)]
    (found,) = log_folder.look("/proc/missing")
    assert found.text == "nothing can be written to /proc/missing: No such file or directory"
    (found,) = log_folder.look("/sys/missing")
    assert "No such file or directory" not in found.text, "why the folder is missing is told, not that it is"


@pytest.mark.parametrize(("used", "text"), [(0.95, "95% full"), (0.949, ""), (None, "")])
def test_a_disk_that_is_nearly_full_is_found(
    used: float | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "used_share", lambda _folder: used)
    found = [(each.severity, each.text) for each in log_folder.look(str(tmp_path))]
    assert found == ([("warn", f"the disk of {tmp_path} is {text}")] if text else [])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_answer_is_found_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(log_folder, "LIMIT_S", 0.05)
    monkeypatch.setattr(log_folder, "look", lambda _folder: never.wait() and ())
    assert rules("/tmp") == [("folder-silent", "refuse")]
    never.set()


def test_ports_are_judged_by_the_rules_of_a_start() -> None:
    port = IbPort(name="mlx5_0:1", link_layer="InfiniBand", state="INIT", phys_state="LinkUp", rate_gbps=400)
    assert rules("/dev/null", read=GpusRead(ports=(port,))) == [("ib-inactive", "warn")]
