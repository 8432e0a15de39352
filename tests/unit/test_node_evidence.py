"""What a node tells about a job that stands still: from NCCL and the GPU driver, in time, as a record.

NCCL's RAS is a server on loopback.
"""

from __future__ import annotations

import socket
import threading
import time

import pytest

from ddplaunch.features.gpus import reader
from ddplaunch.features.gpus.records import GpuReading, GpusRead
from ddplaunch.features.hangs import node_evidence
from ddplaunch.features.hangs.node_evidence import ask_ras, gather, own_address
from ddplaunch.features.hangs.records import NodeEvidence
from ddplaunch.protocol import wire
from ddplaunch.system import devices
from tests.support.fake_ras import JSON, TEXT, Behaviour, fake_ras

GPU = GpuReading(index=3, name="H100", utilization=100, memory_utilization=0, power_w=120.5, power_limit_w=700.0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_nvml", lambda: True)
    monkeypatch.setattr(reader, "read_once", lambda question, limit_s: GpusRead(question=question, gpus=(GPU,)))


@pytest.mark.usefixtures("gpus")
def test_both_sources_are_in_one_record_that_arrives() -> None:
    with fake_ras() as server:
        found = gather("node1", server.address, None, 6.0)
    assert found == NodeEvidence(host="node1", ras=JSON, gpus=(GPU,))
    assert wire.decode(wire.encode(found), (NodeEvidence,)) == found


def test_a_node_without_gpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_nvml", lambda: False)
    found = gather("node1", "", None, 6.0)
    assert found.ras_missing == "NCCL was not asked: this node has no GPU of NVIDIA, or NCCL's RAS is turned off"
    assert found.gpus_missing == "this node has no GPU of NVIDIA"


def test_sources_that_block_for_ever_are_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(node_evidence, "ask_ras", lambda *_: ("", str(ended.wait())))
    monkeypatch.setattr(devices, "has_nvml", lambda: not ended.wait())
    started = time.monotonic()
    found = gather("node1", "127.0.0.1:1", None, 0.2)
    assert time.monotonic() - started < 2
    assert (found.ras_missing, found.gpus_missing) == ("no answer within 0.2 s, or no room for a thread that asks",) * 2
    ended.set()


def test_what_is_cut_is_marked() -> None:
    with fake_ras(behaviour="huge") as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_evidence, "MAX_RAS_CHARS", 1000)
        found = gather("node1", server.address, None, 6.0)
    assert (len(found.ras), found.ras_missing) == (1000, "the answer of NCCL's RAS is cut")


# NCCL's RAS.


def test_a_new_version_answers_in_json() -> None:
    with fake_ras() as server:
        assert ask_ras(server.address, 10.0) == (JSON, "")
        assert server.commands == ["CLIENT PROTOCOL 2", "TIMEOUT 3", "SET FORMAT json", "VERBOSE STATUS"]


def test_an_old_version_answers_in_text() -> None:
    with fake_ras(knows_json=False) as server:
        assert ask_ras(server.address, 10.0) == (TEXT, "")


def test_where_nobody_listens_the_reason_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answer, missing = ask_ras(f"127.0.0.1:{port}", 10.0)
    assert answer == ""
    assert missing.startswith(f"nobody listens at 127.0.0.1:{port}: no worker here has a communicator")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("silent", "does not answer: its process may be suspended"),
        ("rubbish", "is not NCCL's RAS"),
        ("mute", "sent no answer"),
    ],
)
def test_a_server_without_an_answer_is_a_reason_in_time(behaviour: Behaviour, reason: str) -> None:
    started = time.monotonic()
    with fake_ras(behaviour=behaviour) as server:
        answer, missing = ask_ras(server.address, limit_s=1.0)
    assert answer == ""
    assert reason in missing
    assert time.monotonic() - started < 5


def test_a_suspended_process_is_passed_over() -> None:
    with fake_ras(silent_connections=2) as server:
        assert ask_ras(server.address, 10.0) == (JSON, "")


def test_an_answer_that_is_cut_is_kept_and_marked() -> None:
    with fake_ras(behaviour="cut") as server:
        assert ask_ras(server.address, 10.0) == (JSON[: len(JSON) // 2], "")


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", "localhost:x", ":1", "h:0", "h:65536", "\x1b:1"])
def test_an_address_that_is_none_is_a_reason(address: str) -> None:
    answer, missing = ask_ras(address, limit_s=1.0)
    assert answer == ""
    assert missing.isprintable()
    assert missing


# The address of a run; tests/process/test_ras_address.py has those of real runs.


@pytest.mark.parametrize(
    ("environ", "is_chosen"),
    [({"NCCL_RAS_ADDR": ""}, False), *(({"NCCL_RAS_ENABLE": value}, True) for value in ("1", "", "yes", "2"))],
)
def test_an_address_that_is_set_stays_and_only_zero_turns_it_off(
    environ: dict[str, str], is_chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_evidence.devices, "has_nvml", lambda: True)
    assert bool(own_address(environ)) is is_chosen


def test_without_gpus_there_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_evidence.devices, "has_nvml", lambda: False)
    monkeypatch.setattr(node_evidence, "_NVIDIA_DEVICE", "/nonexistent")
    assert own_address({}) == {}


def test_the_device_of_the_driver_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_evidence.devices, "has_nvml", lambda: False)
    monkeypatch.setattr(node_evidence, "_NVIDIA_DEVICE", "/dev/null")
    assert own_address({})
