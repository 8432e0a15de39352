"""Devices: what the node's files say is what is counted, and what the user allowed is what workers get."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddplaunch.system import devices
from tests.support import golden

EIGHT = tuple("01234567")
UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-11111111-2222-3333-4444-555555555555")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def nvidia_node(root: Path, *addresses: str) -> str:
    for minor, address in enumerate(addresses):
        uuid = UUIDS[minor] if minor < len(UUIDS) else "GPU-????????-????-????-????-????????????"
        text = f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
        write(root / "proc/driver/nvidia/gpus" / address / "information", text)
    return str(root)


def amd_node(root: Path, *properties: str) -> str:
    for number, text in enumerate(properties):
        write(root / "sys/class/kfd/kfd/topology/nodes" / str(number) / "properties", text)
    return str(root)


def amd_gpu(location: int, domain: int = 0) -> str:
    return f"cpu_cores_count 0\nsimd_count 304\nlocation_id {location}\ndomain {domain}\nunique_id 9\n"


AMD_CPU = "cpu_cores_count 64\nsimd_count 0\nlocation_id 0\n"


@pytest.fixture
def eight_gpus(tmp_path: Path) -> str:
    return nvidia_node(tmp_path, *(f"0000:{bus:02x}:00.0" for bus in range(16, 24)))


@pytest.fixture
def two_amd_gpus(tmp_path: Path) -> str:
    return amd_node(tmp_path, AMD_CPU, amd_gpu(0x2300), amd_gpu(0x0300, domain=1))


# What is there


def test_the_gpus_of_a_node_are_those_that_its_drivers_show(tmp_path: Path) -> None:
    """A question is the GPUs of a node: addresses of NVIDIA, or kfd nodes of AMD by location and domain."""

    def addresses(question: str) -> str:
        driver, *found = question.split()
        root = tmp_path / str(len([*tmp_path.iterdir()]))
        root.mkdir()
        if driver == "nvidia":
            nvidia_node(root, *found)
        else:
            places = ([int(number, 16) for number in each.split("/")] for each in found if each != "cpu")
            amd_node(root, *(AMD_CPU if each == "cpu" else amd_gpu(*next(places)) for each in found))
        return " ".join(devices.gpu_pci_addresses(str(root))) or "none"

    golden.check_answers("gpus_of_nodes", addresses)


def test_a_gpu_that_the_jobs_device_cgroup_forbids_is_not_counted(
    eight_gpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for minor in range(7):  # the eighth device file is not made before CUDA first runs
        write(Path(eight_gpus, f"dev/nvidia{minor}"), "")
    monkeypatch.setattr(os, "access", lambda path, mode: str(path)[-1] in "23")
    assert devices.gpu_pci_addresses(eight_gpus) == ("0000:12:00.0", "0000:13:00.0", "0000:17:00.0")


def test_a_kfd_node_that_cannot_be_read_is_no_gpu(two_amd_gpus: str) -> None:
    properties = Path(two_amd_gpus, "sys/class/kfd/kfd/topology/nodes/1/properties")
    properties.unlink()
    properties.mkdir()
    assert len(devices.gpu_pci_addresses(two_amd_gpus)) == 1


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """NVML of a node with two GPUs."""
    fake = SimpleNamespace(
        calls=[],
        nvmlInit=lambda: fake.calls.append("init"),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=(0x17, 0xE3).__getitem__,
        nvmlDeviceGetPciInfo=lambda bus: SimpleNamespace(domain=0, bus=bus, device=0),
        nvmlShutdown=lambda: fake.calls.append("shutdown"),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(devices, "has_nvml", lambda: True)
    monkeypatch.setattr(devices, "_nvml_addresses", devices._nvml_addresses.__wrapped__)
    return fake


def test_models_of_the_visible_gpus_are_read_from_the_drivers_files(eight_gpus: str) -> None:
    write(Path(eight_gpus, "proc/driver/nvidia/gpus/0000:11:00.0/information"), "Model: \t\t NVIDIA L40S\n")
    assert devices.visible_models(("1", "2", UUIDS[0], "9"), eight_gpus) == ("NVIDIA L40S", "NVIDIA H100", "", "")
    assert len(devices.visible_models(None, eight_gpus)) == 8
    assert devices.visible_models((), eight_gpus) == ()


def test_a_board_of_amd_may_know_its_name(two_amd_gpus: str) -> None:
    write(Path(two_amd_gpus, "sys/bus/pci/devices/0000:23:00.0/product_name"), "AMD Instinct MI300X\n")
    assert devices.visible_models(None, two_amd_gpus) == ("AMD Instinct MI300X", "")


def test_nvml_is_asked_where_it_is_installed(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.gpu_pci_addresses() == ("0000:17:00.0", "0000:e3:00.0")
    assert nvml.calls == ["init", "shutdown"]
    monkeypatch.setattr(devices, "has_nvml", lambda: False)  # Without the driver's library.
    assert devices._nvml_addresses() == ()
    assert len(nvml.calls) == 2


def test_an_nvml_that_fails_is_as_good_as_none(nvml: SimpleNamespace) -> None:
    del nvml.nvmlInit
    assert devices._nvml_addresses() == ()


# What workers may use


def test_which_devices_are_visible_or_why_a_request_is_refused(eight_gpus: str) -> None:
    def visible(question: str) -> str:
        variables, _, requested = question.partition("--gpus ")
        environ = dict(word.split("=", 1) for word in variables.strip().split(" -") if word)
        return str(devices.visible_devices(environ, tuple(requested.split(";")) if _ else None, eight_gpus))

    golden.check_answers("visible_devices", visible)


def test_what_is_named_is_believed_where_gpus_cannot_be_counted_unless_there_is_no_driver(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no GPU here; without --gpus .* --dry-run"):
        devices.visible_devices({}, ("0", "9"), str(tmp_path))
    named = {"CUDA_VISIBLE_DEVICES": "0,9"}
    assert devices.visible_devices({}, None, str(tmp_path)) is None
    assert devices.visible_devices(named, None, str(tmp_path)) == ("0", "9")
    assert devices.visible_devices(named, ("9",), str(tmp_path)) == ("9",)
    write(tmp_path / "dev/dxg", "")
    assert devices.visible_devices({}, ("0", "9"), str(tmp_path)) == ("0", "9")


def test_amd_nodes_go_by_the_variable_that_hip_and_torch_obey(two_amd_gpus: str) -> None:
    def seen(question: str) -> str:
        environ = dict(word.split("=", 1) for word in question.split() if "=" in word)
        variable = devices.visibility_variable(environ, two_amd_gpus)
        return f"{variable}: {devices.visible_devices(environ, None, two_amd_gpus)}"

    golden.check_answers("visible_amd_devices", seen)


def test_amds_variables_mean_nothing_on_other_nodes(eight_gpus: str) -> None:
    environ = {"HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "1"}
    assert devices.visibility_variable(environ, eight_gpus) == "CUDA_VISIBLE_DEVICES"
    assert devices.visible_devices(environ, None, eight_gpus) == EIGHT


# How many workers, and which devices each gets


def test_the_number_of_workers_follows_the_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun: test_run 6."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 5})

    def count(question: str) -> int:
        """Of the word, the number of visible devices and those per worker."""
        nproc, visible, gpus_per_proc = (None if word == "None" else word for word in question.split())
        devices_ = EIGHT[: int(visible)] if visible else None
        number = int(nproc) if nproc and nproc.isdigit() else nproc
        return devices.resolve_nproc(number, devices_, int(gpus_per_proc or 0), str(tmp_path))

    golden.check_answers("worker_counts", count)


def test_xpus_are_the_render_nodes_with_intels_drivers(tmp_path: Path) -> None:
    for number, driver in enumerate(["i915", "xe", "amdgpu"], start=128):
        write(tmp_path / f"dev/dri/renderD{number}", "")
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        device = tmp_path / f"sys/class/drm/renderD{number}/device"
        device.mkdir(parents=True)
        (device / "driver").symlink_to(tmp_path / "drivers" / driver)
    assert devices.resolve_nproc("xpu", None, 1, str(tmp_path)) == 2
    assert devices.resolve_nproc("auto", None, 1, str(tmp_path)) == len(os.sched_getaffinity(0))


def test_each_worker_gets_its_run_of_neighbouring_devices_or_all_of_them() -> None:
    """A question is the visible devices, those per worker and the number of workers."""

    def shares(question: str) -> str:
        visible, per_worker, nproc = question.split()
        ids = () if visible == "none" else tuple(visible.split(","))
        found = [devices.devices_of(rank, ids, int(per_worker), int(nproc)) for rank in range(int(nproc))]
        return " ".join(map(",".join, found))

    golden.check_answers("devices_of_workers", shares)
