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
    transport = load(row.class_path)
    assert issubclass(transport, Transport)
    assert transport.command(LaunchConfig(script="x.py", hosts=(Host("gpu1"),)), 0)


def test_an_unknown_transport_is_refused() -> None:
    config = LaunchConfig(script="x.py", hosts=(Host("gpu1"),), remote=RemoteConfig(transport="srum"))
    with pytest.raises(UsageError, match="there is no transport srum"):
        setup.transport_for(config, "tag", discard_output, lambda _: None)


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([], "none"),
        (["ssh"], "ssh"),
        (["ssh", "srun in a SLURM job"], "ssh, or srun in a SLURM job"),
        (["ssh", "pods to pods", "srun in a SLURM job"], "ssh, pods to pods, or srun in a SLURM job"),
    ],
)
def test_the_help_names_the_transports_as_a_list(others: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(name, where) for name, _, where in (other.partition(" ") for other in ["local", *others])]
    rows = [TransportRow(name=name, class_path="", way="", keeps_warm=False, where=where) for name, where in pairs]
    monkeypatch.setattr(transports, "TABLE", tuple(rows))
    assert transports.choice() == text
