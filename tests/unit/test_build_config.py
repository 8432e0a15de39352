"""Where several nodes meet: torchrun's options for it -> ``LaunchConfig.rendezvous``."""

from __future__ import annotations

import re

import pytest

from ddplaunch.cli import main, rendezvous_options
from ddplaunch.config import LaunchConfig, RendezvousConfig
from ddplaunch.errors import UsageError


def config(*argv: str) -> LaunchConfig:
    return main.command.main([*argv, "x.py"], prog_name="ddplaunch", standalone_mode=False)


def meeting(*argv: str) -> RendezvousConfig:
    found = config(*argv).rendezvous
    assert found is not None
    return found


def test_one_node_meets_nobody():
    assert config("--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29400").rendezvous is None


def test_c10d_meets_at_the_endpoint_whoever_owns_it():
    """torchrun: rendezvous 6."""
    found = meeting("--nnodes", "1:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1", "--rdzv-id", "job")
    assert (found.server_addresses, found.port, found.is_server, found.node_index) == (("node1",), 29400, None, None)
    assert (found.min_nodes, found.max_nodes, found.token) == (1, 3, "job")


def test_static_meets_at_node_rank_0_with_all_nodes():
    argv = ("--nnodes", "1:2", "--master-addr", "node1", "--master-port", "1234")
    first, second = meeting(*argv), meeting(*argv, "--node-rank", "1")
    assert (first.server_addresses, first.port, first.is_server, first.node_index) == (("node1",), 1234, True, 0)
    assert (second.is_server, second.node_index) == (False, 1)
    assert (first.min_nodes, first.max_nodes) == (2, 2)


def test_static_takes_an_endpoint_as_well_and_torchruns_port():
    assert meeting("--nnodes", "2", "--rdzv-endpoint", "[fd00::1]:77").port == 77
    assert meeting("--nnodes", "2", "--master-addr", "node1").port == 29500


def test_the_settings_of_the_rendezvous_count():
    """torchrun: rendezvous 1, 5."""
    conf = "timeout=9,last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=4,is_host=true"
    found = meeting("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1", "--rdzv-conf", conf)
    assert (found.join_timeout_s, found.last_call_timeout_s, found.lost_after_s, found.is_server) == (9, 3, 8, True)


C10D = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1")


def test_a_node_may_be_silent_for_longer_than_a_heartbeat_takes():
    assert meeting(*C10D, "--rdzv-conf", "keep_alive_interval=0.5").lost_after_s == 1.5
    with pytest.raises(UsageError, match=r"0\.3 s without an answer are too few .*least: 1\.5 s"):
        meeting(*C10D, "--rdzv-conf", "keep_alive_interval=0.1")


def test_the_secret_is_read_from_the_environment_and_not_shown(monkeypatch: pytest.MonkeyPatch):
    assert meeting(*C10D).secret == ""
    monkeypatch.setenv("DDPLAUNCH_SECRET", "sixteen letters!")
    assert meeting(*C10D).secret == "sixteen letters!"
    assert "sixteen" not in repr(config(*C10D))


@pytest.mark.parametrize("secret", ["", "fifteen letters"])
def test_a_secret_that_could_be_found_by_trial_is_refused(monkeypatch: pytest.MonkeyPatch, secret: str):
    monkeypatch.setenv("DDPLAUNCH_SECRET", secret)
    with pytest.raises(UsageError, match=f"DDPLAUNCH_SECRET has {len(secret)} characters, and at least 16 are needed"):
        config(*C10D)
    assert config().rendezvous is None


@pytest.mark.parametrize(
    ("argv", "search_timeout_s"),
    [
        (C10D, 60),
        ((*C10D, "--rdzv-conf", "read_timeout=7"), 7),
        ((*C10D, "--rdzv-conf", "is_host=no"), None),
        (("--nnodes", "2", "--master-addr", "a", "--node-rank", "1"), None),
    ],
)
def test_an_endpoint_where_nobody_may_serve_is_tried_as_long_as_torchrun_tries_it(
    argv: tuple[str, ...], search_timeout_s: float | None
):
    """torchrun: rendezvous 6."""
    assert meeting(*argv).search_timeout_s == search_timeout_s


def test_every_key_of_torchruns_backends_counts_or_is_named_with_the_reason():
    keys = (*rendezvous_options.EFFECTIVE, *rendezvous_options.IGNORED)
    fit = {"store_type": "tcp", "is_host": "true"}
    said = config(*C10D, "--rdzv-conf", ",".join(f"{key}={fit.get(key, 5)}" for key in keys)).notices
    [notice] = said
    assert (notice.kind, notice.min_verbosity) == ("warning", 0)
    named = notice.text.split(": without effect: ")[1]
    assert set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", named))) == set(rendezvous_options.IGNORED)
    assert "close_timeout (ddplaunch ends all nodes without a timeout)" in named
    assert config(*C10D, "--rdzv-conf", "timeout=5,store_type=tcp").notices == ()


def test_a_key_that_nobody_knows_is_named_and_passed_over_as_by_torchrun():
    [notice] = config(*C10D, "--rdzv-conf", "join_timeot=5").notices
    assert "join_timeot (unknown). Known are join_timeout, " in notice.text


def test_settings_that_only_nodes_without_a_launcher_need_are_named_as_such():
    assert config("--rdzv-conf", "join_timeout=5").notices == ()
    for argv in (("--hosts", "a,b"), ("--dry-run", "--nnodes", "2")):
        assert "assigns their endpoint" in config(*argv, "--rdzv-conf", "is_host=1").notices[0].text
    static = ("--nnodes", "2", "--master-addr", "a", "--rdzv-conf", "is_host=true")
    assert "is_host (node rank 0 is the host)" in config(*static).notices[0].text


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
    """torchrun: rendezvous 8."""
    with pytest.raises(UsageError, match="neither hosts nor a rendezvous endpoint is given"):
        config(*argv)


def test_an_empty_run_id_is_none():
    """As from ``--rdzv-id=$SLURM_JOB_ID`` outside of SLURM."""
    assert config("--rdzv-id=") == config()
    assert meeting(*C10D, "--rdzv-id=").token == meeting(*C10D).token


def test_standalone_is_one_node_of_as_many_as_may_come():
    assert config("--standalone", "--nnodes=1:4", "--rdzv-backend=c10d") == config()
    with pytest.raises(UsageError, match="--standalone means one node, and --nnodes is 2:4"):
        config("--standalone", "--nnodes=2:4")


def test_a_node_rank_without_nodes_is_passed_over_with_a_warning():
    [notice] = config("--node-rank=1").notices
    assert (notice.kind, notice.text) == (
        "warning",
        "--node-rank 1 has no effect: the job has one node (--nnodes N makes it larger)",
    )
    assert config("--node-rank=0") == config("--node-rank=1", "--standalone") == config()


def test_c10d_takes_any_node_rank():
    found = config(*C10D, "--node-rank", "7")
    assert found.rendezvous is not None
    assert found.rendezvous.node_index is None
    assert "--node-rank 7 has no effect" in found.notices[0].text
    assert meeting(*C10D, "--node-rank", "1").node_index == 1
    assert meeting(*C10D, "--node-rank=").node_index is None


def test_a_static_node_rank_beyond_the_nodes_is_refused():
    with pytest.raises(UsageError, match="--node-rank 2"):
        config("--nnodes", "2", "--rdzv-endpoint", "a:1", "--node-rank", "2")


def test_an_interface_without_effect_is_named():
    (notice,) = config("--interface", "nope").notices
    assert str(notice) == "warning: --interface has an effect only with several nodes"
    assert config("--interface", "nope", "--hosts", "a,b").notices == ()


def test_an_address_without_effect_is_checked_too():
    with pytest.raises(UsageError, match="--master-addr a b: must be a host name"):
        config("--master-addr", "a b")
