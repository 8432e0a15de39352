"""What a node finds out about its clock from the answer to its NodeJoined; the times are made up."""

from __future__ import annotations

import pytest

from ddplaunch.features.health import hardware_report
from ddplaunch.features.health.hardware_report import HardwareReport
from ddplaunch.features.health.records import NodeHardware
from ddplaunch.protocol.rendezvous import RoundFormed
from ddplaunch.protocol.results import Round

ROUND = Round(
    attempt=0,
    restart_count=0,
    node_rank=0,
    nnodes=1,
    first_rank=0,
    local_world_size=1,
    world_size=1,
    master_addr="a",
    master_port=1,
)


@pytest.mark.parametrize(
    ("ahead_s", "delay_s", "certain_s"), [(60, 1, 59), (-60, 1, -59), (6, 10, 0), (0, 100, 0), (0, 0, 0)]
)
@pytest.mark.parametrize("waited_s", [0, 300])
def test_a_difference_is_certain_but_for_the_time_on_the_way(
    ahead_s: float, delay_s: float, certain_s: float, waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = HardwareReport()
    report.hardware = NodeHardware(cpus=8)
    times = iter((1000.0 + ahead_s, 1000.0 + ahead_s + delay_s + waited_s + delay_s))
    monkeypatch.setattr(hardware_report.time, "time", lambda: next(times))
    report.on_join()
    report.on_formed(RoundFormed(ROUND, joined_time_s=1000.0 + delay_s, time_s=1000.0 + delay_s + waited_s))
    told = report.of(0, "gpu3")
    assert told
    assert told.clock_ahead_s == certain_s


def test_nothing_is_told_if_the_user_wants_nothing_looked_at() -> None:
    assert HardwareReport().of(0, "gpu3") is None
