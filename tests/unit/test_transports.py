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
from tests.support import golden


@pytest.mark.parametrize("row", transports.TABLE, ids=lambda row: row.name)
def test_a_row_names_a_transport_and_its_command(row: TransportRow) -> None:
    transport = load(row.class_path)
    assert issubclass(transport, Transport)
    assert transport.command(LaunchConfig(script="x.py", hosts=(Host("gpu1"),)), 0)


def test_an_unknown_transport_is_refused() -> None:
    config = LaunchConfig(script="x.py", hosts=(Host("gpu1"),), remote=RemoteConfig(transport="srum"))
    with pytest.raises(UsageError, match="there is no transport srum"):
        setup.transport_for(config, "tag", discard_output, lambda _: None)


def test_the_help_names_the_transports_as_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question is transports, perhaps with where they are chosen."""

    def told(others: str) -> str:
        pairs = [(name, where) for name, _, where in (other.partition(" ") for other in others.split("; "))]
        rows = [TransportRow(name=name, class_path="", way="", keeps_warm=False, where=where) for name, where in pairs]
        monkeypatch.setattr(transports, "TABLE", tuple(rows))
        return transports.choice()

    golden.check_answers("transports_of_help", told)
