"""Where NCCL's RAS of a run listens: an address of its own, where the driver's library is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import fake_nvml
from tests.support.runs import run


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver that knows of no GPU: what is tested must not depend on their number."""
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


def addresses(library: Path, *options: str, **env: str) -> list[str]:
    """NCCL_RAS_ADDR of each of two workers."""
    environ = {"LD_LIBRARY_PATH": str(library), **env}
    finished = run("--no-python", "--nproc-per-node", "2", *options, "printenv", "NCCL_RAS_ADDR", env=environ)
    return [line.rpartition(" ")[2] for line in finished.out.splitlines()]


def test_the_workers_of_a_node_share_an_address_and_two_runs_do_not(library: Path) -> None:
    first, second = addresses(library), addresses(library)
    assert [len(found) for found in (first, second)] == [2, 2]
    assert len({*first, *second}) == 2
    assert all(address.startswith("127.0.0.1:") for address in (*first, *second))


def test_what_the_user_has_set_stays(library: Path) -> None:
    assert addresses(library, NCCL_RAS_ADDR="localhost:28030") == ["localhost:28030"] * 2
    assert addresses(library, NCCL_RAS_ENABLE="0") == []


def test_the_plan_shows_that_a_port_is_chosen(library: Path) -> None:
    planned = run("--plan", "--no-python", "--nproc-per-node", "2", "true", env={"LD_LIBRARY_PATH": str(library)})
    assert "NCCL_RAS_ADDR=127.0.0.1:<a free port>" in planned.out
