"""Hosts and what belongs to them: options and environment -> the fields of a LaunchConfig."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddplaunch.cli import main
from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import UsageError


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DDPLAUNCH_HOSTS", "DDPLAUNCH_HOSTFILE", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def config(*argv: str) -> LaunchConfig:
    return main.command.main([*argv, "x.py"], prog_name="ddplaunch", standalone_mode=False)


def names(*argv: str) -> list[str]:
    return [host.name for host in config(*argv).hosts]


def test_all_hosts_that_are_named_run_nodes():
    found = config("--hosts", "gpu[1-3]")
    assert (found.min_nodes, found.max_nodes, found.launcher_assigns_rendezvous) == (3, 3, True)


def test_more_hosts_than_nodes_are_spares():
    found = config("--hosts", "gpu[1-3]", "--nnodes", "2")
    assert (found.max_nodes, len(found.hosts)) == (2, 3)


def test_fewer_hosts_than_nodes_are_an_error():
    with pytest.raises(UsageError, match="--nnodes 4: 3 hosts are named"):
        config("--hosts", "gpu[1-3]", "--nnodes", "4")


def test_one_host_is_a_run_there_and_not_here():
    found = config("--hosts", "gpu1")
    assert (found.hosts, found.max_nodes, found.launcher_assigns_rendezvous) == ((Host("gpu1"),), 1, False)


def test_the_environment_names_hosts_where_no_option_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DDPLAUNCH_HOSTS", "a,b")
    assert names() == ["a", "b"]
    assert names("--hosts", "c") == ["c"]
    assert names("--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1") == []


def test_a_hostfile_and_filters(tmp_path: Path):
    (tmp_path / "hosts").write_text("gpu1 slots=2\ngpu2\n")
    found = config("--hostfile", str(tmp_path / "hosts"), "--include", "gpu1:0").hosts
    assert found == (Host("gpu1", slots=1, devices=("0",)),)


@pytest.mark.parametrize("avoid", ["gpu2", "GPU[2,9]", "gpu2.example.com", "ada@gpu2"])
def test_hosts_to_avoid_are_not_used_also_where_a_scheduler_or_a_file_names_them(
    avoid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "hosts").write_text("gpu1 slots=2\ngpu2\ngpu3\n")
    assert names("--hosts", "gpu[1-3]", "--avoid", avoid) == ["gpu1", "gpu3"]
    assert names("--hostfile", str(tmp_path / "hosts"), "--avoid", avoid, "--nnodes", "1:2") == ["gpu1", "gpu3"]
    monkeypatch.setenv("DDPLAUNCH_HOSTS", "gpu[1-3]")
    assert names("--avoid", avoid) == ["gpu1", "gpu3"]
    monkeypatch.delenv("DDPLAUNCH_HOSTS")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-3]")
    found = config("--avoid", avoid)
    assert ([host.name for host in found.hosts], found.transport) == (["gpu1", "gpu3"], "srun")


def test_a_port_is_avoided_and_not_the_whole_machine():
    assert names("--hosts", "gpu1:2222,gpu1:2223", "--avoid", "gpu1:2222") == ["gpu1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--hosts", "gpu[1-3]", "--nnodes", "3", "--avoid", "gpu2"),
            "leaves only gpu\\[1,3\\] of 3, and --nnodes needs 3",
        ),
        (("--hosts", "gpu[1-3]", "--avoid", "gpu[1-5]"), "--avoid gpu\\[1-5\\]: leaves no host of 3"),
        (("--hosts", "gpu1", "--avoid", ""), "--avoid: names no host"),
        (("--avoid", "gpu1"), "--avoid: no hosts are named to choose from"),
    ],
)
def test_too_few_hosts_after_those_to_avoid_are_an_error(argv: tuple[str, ...], message: str):
    with pytest.raises(UsageError, match=message):
        config(*argv)


def test_a_step_of_slurm_has_no_hosts_to_avoid(monkeypatch: pytest.MonkeyPatch):
    variables = {
        "JOB_ID": "7",
        "STEP_ID": "0",
        "STEP_NODELIST": "gpu[1-2]",
        "STEP_TASKS_PER_NODE": "1(x2)",
        "STEP_NUM_NODES": "2",
        "STEP_NUM_TASKS": "2",
        **dict.fromkeys(("PROCID", "NODEID", "LOCALID"), "0"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(UsageError, match="--avoid: no hosts are named to choose from"):
        config("--avoid", "gpu1")


@pytest.mark.parametrize("place", [("--rdzv-endpoint", "a:1"), ("--master-addr", "a"), ("--standalone",)])
@pytest.mark.parametrize("named_by", ["--hosts", "--hostfile", "--include"])
def test_hosts_and_another_place_to_meet_exclude_each_other(named_by: str, place: tuple[str, ...]):
    with pytest.raises(UsageError, match=f"{named_by} and {place[0]} exclude each other"):
        config(named_by, "a,b", *place)


@pytest.mark.parametrize(
    "argv",
    [
        ("--remote-python", "p"),
        ("--remote-setup", "s"),
        ("--ssh-user", "u"),
        ("--connect-timeout", "30"),
        ("--ssh-port", "1"),
        ("--ssh-accept-new",),
    ],
)
def test_what_is_for_hosts_needs_some(argv: tuple[str, ...]):
    with pytest.raises(UsageError, match=f"{argv[0]} has an effect only (over SSH, )?with --hosts or --hostfile"):
        config(*argv)
    assert config("--dry-run", *argv).dry_run


def test_a_port_that_would_not_be_obeyed_is_refused():
    with pytest.raises(UsageError, match="--master-port has no effect where hosts are named"):
        config("--hosts", "a,b", "--master-port", "29500")
    assert config("--dry-run", "--hosts", "a,b", "--master-port", "29500").dry_run


def test_how_hosts_are_reached():
    found = config("--hosts", "a", "--ssh-user", "u", "--ssh-port", "2222", "--ssh-identity", "k", "--ssh-config", "f")
    assert (found.remote.user, found.remote.port) == ("u", 2222)
    assert (found.remote.identity, found.remote.config, found.remote.accept_new) == ("k", "f", False)
    found = config("--hosts", "a", "--ssh-accept-new", "--connect-timeout", "3", "--remote-python", "/py")
    assert (found.remote.accept_new, found.remote.connect_timeout_s, found.remote.python) == (True, 3.0, "/py")
    assert config("--hosts", "a", "--remote-setup", "module load cuda").remote.setup == "module load cuda"


@pytest.mark.parametrize("timeout_s", ["0", "-1", "soon"])
def test_a_timeout_must_be_one(timeout_s: str):
    with pytest.raises(UsageError, match="--connect-timeout"):
        config("--hosts", "a", "--connect-timeout", timeout_s)


def test_what_workers_are_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    (tmp_path / "env").write_text("A=1\nB=2\n")
    found = config("--hosts", "a", "--env-file", str(tmp_path / "env"), "-x", "B=3", "--export", "C=4").remote.environ
    assert {"NCCL_DEBUG": "INFO", "A": "1", "B": "3", "C": "4"}.items() <= dict(found).items()


def test_an_env_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match=r"--env-file .*: No such file"):
        config("--hosts", "a", "--env-file", str(tmp_path / "missing"))


def test_how_long_a_node_may_be_silent_can_be_said_for_hosts_too():
    conf = "keep_alive_interval=10,keep_alive_max_attempt=3,timeout=90,is_host=1"
    found = config("--hosts", "a,b", "--rdzv-conf", conf)
    assert (found.timeouts.lost_after_s, found.timeouts.join_timeout_s) == (30.0, 90.0)
    assert any("is_host (the launcher starts all nodes" in notice.text for notice in found.notices)
    with pytest.raises(UsageError, match="1 s without an answer are too few"):
        config("--hosts", "a,b", "--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=1")
