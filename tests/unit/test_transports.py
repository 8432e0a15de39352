"""The table of transports names what exists, and an unknown transport is refused."""

from __future__ import annotations

import pytest

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig, RemoteConfig
from ddplaunch.errors import UsageError
from ddplaunch.launcher import setup
from ddplaunch.rows import TransportRow, load
from ddplaunch.transport import transports
from ddplaunch.transport.handle import Transport, discard_output


@pytest.mark.parametrize("row", transports.TABLE, ids=lambda row: row.name)
def test_a_row_names_a_transport_and_its_command(row: TransportRow) -> None:
    transport = load(row.code)
    assert issubclass(transport, Transport)
    assert transport.command(LaunchConfig(script="x.py", hosts=(Host("gpu1"),)), 0)


def test_an_unknown_transport_is_refused() -> None:
    config = LaunchConfig(script="x.py", hosts=(Host("gpu1"),), remote=RemoteConfig(transport="srum"))
    with pytest.raises(UsageError, match="there is no transport srum"):
        setup.transport_for(config, "tag", discard_output, lambda _: None)


@pytest.mark.features
def test_the_help_names_three_transports_as_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transports.choice() == "ssh, or srun in a SLURM job"
    pods = TransportRow(name="pods", code="", way="", keeps_warm=False, where="to pods")
    monkeypatch.setattr(transports, "TABLE", (*transports.TABLE[:2], pods, *transports.TABLE[2:]))
    assert transports.choice() == "ssh, pods to pods, or srun in a SLURM job"
