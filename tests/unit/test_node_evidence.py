"""What a node tells about a job that stands still: from NCCL and the GPU driver, in time, as a record."""

from __future__ import annotations

import threading
import time

import pytest

from ddplaunch.agent import gpu_reader
from ddplaunch.features.hangs import nccl_ras
from ddplaunch.features.hangs.node_evidence import gather
from ddplaunch.features.hangs.records import NodeEvidence
from ddplaunch.protocol import wire
from ddplaunch.protocol.gpus import GpuReading, GpusRead
from ddplaunch.system.gpus import devices
from tests.support.fake_ras import as_json, fake_ras, rank

STATUS = as_json([rank(0)])
GPU = GpuReading(index=3, name="H100", utilization=100, memory_utilization=0, power_w=120.5, power_limit_w=700.0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_nvml", lambda: True)
    monkeypatch.setattr(gpu_reader, "read_once", lambda question, limit_s: GpusRead(question=question, gpus=(GPU,)))


@pytest.mark.usefixtures("gpus")
def test_both_sources_are_in_one_record_that_arrives() -> None:
    with fake_ras(json=STATUS) as server:
        found = gather("node1", server.address, None, 6.0)
    assert found == NodeEvidence(host="node1", ras=STATUS, gpus=(GPU,))
    assert wire.decode(wire.encode(found), (NodeEvidence,)) == found


def test_a_node_without_gpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_nvml", lambda: False)
    found = gather("node1", "", None, 6.0)
    assert found.ras_missing == "NCCL was not asked: this node has no GPU of NVIDIA, or NCCL's RAS is turned off"
    assert found.gpus_missing == "this node has no GPU of NVIDIA"


@pytest.mark.usefixtures("gpus")
def test_a_silent_source_leaves_the_other() -> None:
    with fake_ras(behaviour="silent") as server:
        found = gather("node1", server.address, None, 2.0)
    assert (found.ras, len(found.gpus)) == ("", 1)
    assert "does not answer" in found.ras_missing


def test_sources_that_block_for_ever_are_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(nccl_ras, "ask", lambda *_: ("", str(ended.wait())))
    monkeypatch.setattr(devices, "has_nvml", lambda: not ended.wait())
    started = time.monotonic()
    found = gather("node1", "127.0.0.1:1", None, 0.2)
    assert time.monotonic() - started < 2
    assert (found.ras_missing, found.gpus_missing) == ("no answer within 0.2 s, or no room for a thread that asks",) * 2
    ended.set()


def test_what_is_cut_is_marked() -> None:
    with fake_ras(json=STATUS, behaviour="huge") as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl_ras, "MAX_ANSWER_BYTES", 1000)
        found = gather("node1", server.address, None, 6.0)
    assert (len(found.ras), found.ras_missing) == (1000, "the answer of NCCL's RAS is cut")
