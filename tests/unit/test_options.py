"""Where several nodes meet: torchrun's options for it -> ``LaunchConfig.meeting``."""

from __future__ import annotations

import pytest

from ddplaunch import cli
from ddplaunch.config import LaunchConfig, Meeting
from ddplaunch.errors import UsageError


def config(*argv: str) -> LaunchConfig:
    return cli.command.main([*argv, "x.py"], prog_name="ddplaunch", standalone_mode=False)


def meeting(*argv: str) -> Meeting:
    found = config(*argv).meeting
    assert found is not None
    return found


def test_one_node_meets_nobody():
    assert config("--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29400").meeting is None


def test_c10d_meets_at_the_endpoint_whoever_owns_it():
    found = meeting("--nnodes", "1:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1", "--rdzv-id", "job")
    assert (found.hosts, found.port, found.serves, found.node_rank) == (("node1",), 29400, None, None)
    assert (found.min_nodes, found.max_nodes, found.token) == (1, 3, "job")


def test_static_meets_at_node_rank_0_with_all_nodes():
    argv = ("--nnodes", "1:2", "--master-addr", "node1", "--master-port", "1234")
    first, second = meeting(*argv), meeting(*argv, "--node-rank", "1")
    assert (first.hosts, first.port, first.serves, first.node_rank) == (("node1",), 1234, True, 0)
    assert (second.serves, second.node_rank) == (False, 1)
    assert (first.min_nodes, first.max_nodes) == (2, 2)


def test_static_takes_an_endpoint_as_well_and_torchruns_port():
    assert meeting("--nnodes", "2", "--rdzv-endpoint", "[fd00::1]:77").port == 77
    assert meeting("--nnodes", "2", "--master-addr", "node1").port == 29500


def test_the_settings_of_the_rendezvous_count():
    conf = "timeout=9,last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=4,is_host=true"
    found = meeting("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1", "--rdzv-conf", conf)
    assert (found.join_timeout_s, found.last_call_s, found.lost_after_s, found.serves) == (9, 3, 8, True)


def test_join_timeout_is_more_exact_than_timeout():
    argv = ("--nnodes", "2", "--rdzv-endpoint", "a:1", "--rdzv-conf", "timeout=9,join_timeout=4")
    assert meeting(*argv).join_timeout_s == 4


@pytest.mark.parametrize(
    "argv",
    [
        ("--nnodes", "2"),
        ("--nnodes", "2", "--rdzv-backend", "c10d"),
        ("--nnodes", "2", "--rdzv-backend", "c10d", "--master-addr", "node1"),
    ],
)
def test_several_nodes_without_a_place_to_meet_are_an_error_never_a_local_run(argv: tuple[str, ...]):
    with pytest.raises(UsageError, match="nothing says where the nodes meet"):
        config(*argv)


def test_a_node_rank_beyond_the_nodes_is_refused():
    with pytest.raises(UsageError, match="--node-rank 2"):
        config("--nnodes", "2", "--rdzv-endpoint", "a:1", "--node-rank", "2")
