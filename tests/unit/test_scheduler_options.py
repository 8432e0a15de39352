"""What a scheduler says becomes the run's configuration, and what the user says wins."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from ddplaunch.cli import main
from ddplaunch.cli.options import OPTIONS
from ddplaunch.cli.scheduler_options import PREFIXES
from ddplaunch.cluster import mpi_exchange
from ddplaunch.cluster.schedulers import TABLE, WORDS, candidate_ports
from ddplaunch.cluster.slurm import SlurmJob
from ddplaunch.config import LaunchConfig, RendezvousConfig
from ddplaunch.errors import NODE_NOT_READY, LaunchError, UsageError
from ddplaunch.protocol.env_forwarding import rule_of
from tests.unit.test_schedulers import BATCH, MPICH, open_mpi, step


@pytest.fixture
def config_of(monkeypatch: pytest.MonkeyPatch):
    def config_of(environ: dict[str, str], *argv: str) -> LaunchConfig:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return main.command.main([*argv, "x.py"], prog_name="ddplaunch", standalone_mode=False)

    return config_of


def meeting(config: LaunchConfig) -> RendezvousConfig:
    assert config.rendezvous is not None
    return config.rendezvous


def told(config: LaunchConfig, verbosity: int) -> str:
    return "\n".join(notice.text for notice in config.notices if notice.min_verbosity == verbosity)


def test_a_step_with_a_task_per_node_meets_where_slurm_says(config_of):
    config = config_of(step(node_id=1))
    found = meeting(config)
    ports = candidate_ports("slurm-77.0.0")
    assert (found.server_addresses, found.port, found.other_ports) == (("gpu1",), ports[0], ports[1:])
    assert (found.node_index, found.min_nodes, found.max_nodes, found.is_server) == (1, 4, 4, False)
    assert (found.token, config.run_id, config.task) == ("slurm-77.0.0", "slurm-77.0.0", None)
    assert (config.max_nodes, config.workers.nproc_per_node, config.launcher_assigns_rendezvous) == (4, None, False)
    assert "SLURM job 77, step 0: node 1 of 4" in told(config, 1)
    assert meeting(config_of(step(node_id=0))).is_server


def test_a_step_may_be_elastic_and_have_settings_of_its_own(config_of):
    config = config_of(step(), "--nnodes", "2:4", "--rdzv-conf", "join_timeout=7", "--rdzv-id", "mine")
    found = meeting(config)
    assert (found.min_nodes, found.max_nodes, found.join_timeout_s, found.is_server) == (2, 4, 7, False)
    assert (config.run_id, found.token) == ("mine", "slurm-77.0.0")


def test_tasks_of_mpirun_without_room_for_a_thread_get_a_message(config_of, monkeypatch: pytest.MonkeyPatch):
    def start(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(mpi_exchange, "_load_pmix", lambda: object())
    with pytest.raises(LaunchError, match="the launcher cannot start: can't start new thread") as raised:
        config_of(open_mpi(1, 4, 0, 1, PMIX_NAMESPACE="prterun-a1-4711@1"))
    assert "ulimit -u" in raised.value.hint
    assert raised.value.exit_code == NODE_NOT_READY


def test_a_port_that_the_user_fixes_is_the_only_one(config_of):
    found = meeting(config_of(step(), "--master-port", "29400"))
    assert (found.port, found.other_ports) == (29400, ())


def test_a_step_of_one_task_meets_nobody(config_of):
    config = config_of(step(node_id=0, tasks="1"))
    assert (config.rendezvous, config.max_nodes, config.task) == (None, 1, None)
    assert config_of(step(node_id=0, tasks="1"), "--cluster", "slurm").rendezvous is None


def test_a_task_per_worker_is_that_worker(config_of):
    config = config_of(step(node_id=1, local_rank=2, tasks="4(x3)"), "--nproc-per-node", "4", "--nnodes", "3")
    found = meeting(config)
    assert config.task is not None
    assert (config.task.rank, config.task.local_rank, config.workers.nproc_per_node) == (6, 2, 1)
    assert (found.node_index, found.min_nodes, found.max_nodes, found.is_server) == (6, 12, 12, False)


def test_tasks_that_cannot_be_the_workers_asked_for_are_refused(config_of):
    with pytest.raises(UsageError, match="started 4 tasks on this node"):
        config_of(step(tasks="4(x3)"), "--nproc-per-node", "8")
    with pytest.raises(UsageError, match="--numa-binding"):
        config_of(step(tasks="4(x3)"), "--numa-binding", "node")
    with pytest.raises(UsageError, match="started ddplaunch on 4 nodes"):
        config_of(step(tasks="1(x4)"), "--nnodes", "2")


@pytest.mark.parametrize(
    "argv",
    [
        ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1"),
        ("--nnodes", "2", "--master-addr", "a", "--master-port", "1", "--node-rank", "0"),
        ("--nnodes", "2", "--rdzv-endpoint", "a:1", "--cluster", "slurm"),
    ],
)
def test_who_says_where_to_meet_is_obeyed(config_of, argv: tuple[str, ...]):
    found = meeting(config_of(step(), *argv))
    assert (found.server_addresses, found.port, found.max_nodes, found.other_ports) == (("a",), 1, 2, ())


C10D = ("--nnodes", "4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "gpu1.invalid:29500")


def test_a_node_rank_that_the_shell_of_the_batch_script_has_replaced_is_that_of_the_step(config_of):
    """``srun torchrun --node_rank=$SLURM_NODEID``: 0 on every node."""
    configs = [config_of(step(node_id=node), *C10D, "--node_rank=0") for node in range(4)]
    assert [meeting(config).node_index for config in configs] == [0, 1, 2, 3]
    warned = [told(config, 0) for config in configs]
    assert [bool(text) for text in warned] == [False, True, False, False]
    assert "--node-rank is 0 on a node that is 1 by SLURM" in warned[1]


def test_a_node_that_has_the_endpoints_address_is_node_0_if_the_user_says_so(config_of):
    argv = ("--nnodes", "4", "--master-addr", "127.0.0.1", "--master-port", "29500", "--node-rank", "0")
    found = meeting(config_of(step(node_id=2), *argv))
    assert (found.node_index, found.is_server) == (0, True)


@pytest.mark.parametrize(
    ("argv", "node_index"),
    [
        ((*C10D, "--node-rank", "3"), 3),
        (C10D, None),
        ((*C10D, "--nnodes", "8", "--node-rank", "0"), 0),
        ((*C10D, "--nnodes", "2:8", "--node-rank", "0"), 0),
    ],
)
def test_a_node_rank_that_may_be_meant_is_the_users(config_of, argv: tuple[str, ...], node_index: int | None):
    """Others than 0, and those of a job of which the step is a part."""
    config = config_of(step(node_id=1), *argv)
    assert (meeting(config).node_index, told(config, 0)) == (node_index, "")


def test_a_step_that_has_lost_variables_is_told_so_only_if_they_are_needed(config_of, monkeypatch):
    lost = step(node_id=0, tasks="1", SLURM_STEP_TASKS_PER_NODE="", SLURM_LOCALID="")
    assert config_of(lost).max_nodes == 1
    with pytest.raises(UsageError, match="SLURM_STEP_TASKS_PER_NODE is not"):
        config_of(step(tasks="2(x4)", SLURM_STEP_TASKS_PER_NODE=""))


@pytest.mark.parametrize("argv", [("--standalone",), ("--dry-run",), ("--cluster", "none"), ("--hosts", "b1")])
def test_other_ways_to_start_switch_detection_off(config_of, argv: tuple[str, ...]):
    config = config_of(step(tasks="4(x3)"), *argv)
    assert (config.rendezvous, config.task, config.run_id, config.workers.nproc_per_node) == (None, None, None, None)


def test_what_cannot_be_read_matters_only_to_who_relies_on_it(config_of):
    broken = step(SLURM_PROCID="x")
    with pytest.raises(UsageError, match="SLURM_PROCID"):
        config_of(broken)
    assert config_of(broken, "--standalone").rendezvous is None
    with pytest.raises(UsageError, match="SLURM_PROCID"):
        config_of(broken, "--standalone", "--cluster", "slurm")


def test_only_the_first_node_warns(config_of):
    stale = {"MASTER_ADDR": "image"}
    assert "MASTER_ADDR=image" in told(config_of(step(node_id=0) | stale), 0)
    assert told(config_of(step(node_id=1) | stale), 0) == ""


def test_a_place_to_meet_in_a_batch_script_is_warned_of(config_of):
    config = config_of(BATCH, "--nnodes", "4", "--rdzv-endpoint", "gpu1:1", "--node-rank", "0")
    assert "not a step of srun" in told(config, 0)
    assert meeting(config).max_nodes == 4


def test_mpi_needs_a_place_where_it_says_none(config_of):
    with pytest.raises(UsageError, match="without the host of their rendezvous"):
        config_of(MPICH)
    found = meeting(config_of(MPICH | {"MASTER_ADDR": "fd00::1", "MASTER_PORT": "29500"}))
    assert (found.server_addresses, found.port, found.token) == (("fd00::1",), 29500, "none")


def test_mpi_on_one_node_needs_none(config_of):
    config = config_of(open_mpi(1, 4, 1, 4, PMIX_NAMESPACE="a@1"))
    assert (meeting(config).server_addresses, config.run_id) == (("127.0.0.1",), "mpi-a@1")


def test_kubernetes_counts_only_with_nnodes(config_of):
    pod = {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "job-0.job", "MASTER_PORT": "29500"}
    assert config_of(pod).rendezvous is None
    found = meeting(config_of(pod, "--nnodes", "2"))
    assert (found.server_addresses, found.port, found.node_index, found.is_server) == (("job-0.job",), 29500, 1, False)


def test_the_hosts_of_pbs_and_lsf_are_reached_over_ssh(config_of, tmp_path: Path):
    nodes = tmp_path / "nodes"
    nodes.write_text("a1\na1\na2\n")
    pbs = {"PBS_JOBID": "7", "PBS_NODEFILE": str(nodes)}
    assert [host.name for host in config_of(pbs).hosts] == ["a1", "a2"]
    assert [host.name for host in config_of(pbs, "--exclude", "a1").hosts] == ["a2"]
    assert config_of(pbs, "--standalone").hosts == ()
    nodes.write_text(f"{socket.gethostname()}\n")
    assert config_of(pbs).hosts == ()


@pytest.mark.parametrize("option", ["--connect-timeout", "--ssh-port"])
def test_options_of_ssh_are_refused_where_srun_reaches_the_nodes(config_of, option: str):
    with pytest.raises(UsageError, match=f"{option} has an effect only over SSH"):
        config_of(BATCH, option, "30")
    assert config_of(BATCH, option, "30", "--hosts", "b1").transport == "ssh"


def test_the_nodes_of_an_allocation_are_reached_through_srun(config_of):
    config = config_of(BATCH)
    assert [host.name for host in config.hosts] == ["gpu1", "gpu2", "gpu3", "gpu4"]
    assert (config.remote.transport, config.launcher_assigns_rendezvous, config.max_nodes) == ("srun", True, 4)
    assert config_of(BATCH, "--nnodes", "2:3").min_nodes == 2
    assert config_of(BATCH, "--hosts", "b1").remote.transport == "ssh"
    alone = config_of(BATCH | {"SLURM_JOB_NODELIST": "gpu1"})
    assert (alone.hosts, alone.transport) == ((), "local")
    elsewhere = config_of(BATCH | {"SLURM_JOB_NODELIST": "gpu2"})
    assert elsewhere.remote.transport == "srun"


def job(config: LaunchConfig) -> SlurmJob:
    assert config.slurm_job is not None
    return config.slurm_job


def test_a_job_of_slurm_is_known_however_it_was_started(config_of):
    assert config_of({}).slurm_job is None
    assert job(config_of(BATCH)) == job(config_of(step())) == SlurmJob("77")
    assert job(config_of(BATCH, "--standalone")) == SlurmJob("77")
    assert config_of(BATCH, "--cluster", "none").slurm_job is None
    # Its own number may be that of the whole array.
    array = BATCH | {"SLURM_ARRAY_JOB_ID": "76", "SLURM_ARRAY_TASK_ID": "3"}
    assert job(config_of(array)).id == "76_3"


def test_the_first_node_tells_that_slurm_has_requeued_the_job(config_of):
    again = {"SLURM_RESTART_COUNT": "2"}
    assert "SLURM has requeued this job 2 times (77)" in told(config_of(BATCH | again), 0)
    assert "SLURM has requeued this job 2 times (77)" in told(config_of(step(node_id=0) | again), 0)
    assert told(config_of(step(node_id=1) | again), 0) == ""


def test_one_launcher_of_all_asks_for_the_requeue(config_of):
    option = ("--requeue-on", "USR1, sigterm")
    names = ("SIGUSR1", "SIGTERM")
    assert job(config_of(BATCH, *option)) == SlurmJob("77", 0, names, requests_requeue=True)
    assert job(config_of(step(node_id=0), *option)) == SlurmJob("77", 0, names, requests_requeue=True)
    assert job(config_of(step(node_id=1), *option)) == SlurmJob("77", 0, names)
    meets = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1")
    assert not job(config_of(step(node_id=1), *option, *meets)).requests_requeue
    assert not job(config_of(open_mpi(1, 4, 1, 4, PMIX_NAMESPACE="a@1"), *option)).requests_requeue
    assert set(names) <= set(config_of(BATCH, *option, "--signals-to-handle", "SIGINT").signals)


@pytest.mark.parametrize(
    ("environ", "argv", "why"),
    [
        ({}, ("USR1",), "not a job of SLURM"),
        (BATCH, ("USR1", "--cluster", "none"), "not a job of SLURM"),
        (BATCH, ("KILL",), "KILL must be one of USR1, USR2, TERM"),
        (BATCH, ("10",), "10 must be one of"),
    ],
)
def test_what_cannot_be_requeued_is_refused(config_of, environ: dict[str, str], argv: tuple[str, ...], why: str):
    with pytest.raises(UsageError, match=f"--requeue-on .*{why}"):
        config_of(environ, "--requeue-on", *argv)


def test_every_mark_of_a_scheduler_is_looked_for():
    assert all(row.variables[0].startswith(PREFIXES) for row in TABLE)


def test_no_mark_of_a_scheduler_is_forwarded_by_a_pattern():
    assert {rule_of(row.variables[0]).when for row in TABLE} == {"named"}


def test_the_help_names_every_word():
    [option] = [option for option in OPTIONS["Nodes and rendezvous"] if option.long_name == "--cluster"]
    assert all(word in option.text for word in WORDS)
