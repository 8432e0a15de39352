"""What started ddplaunch, how often and where is read from the environment, and what disagrees with it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.cluster.hosts import Host
from ddplaunch.cluster.scheduler_checks import check_counts, lint, missing_endpoint_error
from ddplaunch.cluster.schedulers import PORTS, TABLE, WORDS, SchedulerInfo, candidate_ports, detect, read_hosts
from ddplaunch.errors import UsageError
from tests.support import texts


def step(node_id: int = 1, local_rank: int = 0, tasks: str = "1(x4)", **more: str) -> dict[str, str]:
    """The environment of one task of a step, block distribution."""
    per_node = [int(count) for count in tasks.split(",")] if "x" not in tasks else [int(tasks[0])] * int(tasks[3])
    nodes = f"gpu[1-{len(per_node)}]"
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(len(per_node)),
        "SLURM_STEP_NUM_TASKS": str(sum(per_node)),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": str(node_id),
        "SLURM_PROCID": str(sum(per_node[:node_id]) + local_rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURMD_NODENAME": f"gpu{node_id + 1}",
        **more,
    }


BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "gpu[1-4]",
    "SLURMD_NODENAME": "gpu1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}


def open_mpi(rank: int, size: int, local_rank: int, local_size: int, **more: str) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (rank, size, local_rank, local_size)
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in zip(names, values, strict=True)} | more


MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "PMI_FD": "7"}


def found(environ: dict[str, str], cluster: str = "auto") -> SchedulerInfo:
    detected = detect(environ, cluster)
    assert detected is not None
    return detected


# Started once per node.


def test_a_step_with_one_task_per_node_is_one_agent_per_node():
    detected = found(step(node_id=1))
    assert (detected.name, detected.kind, detected.task) == ("SLURM", "node", None)
    assert (detected.index, detected.agents, detected.is_server) == (1, 4, False)
    assert detected.hosts == tuple(map(Host, ("gpu1", "gpu2", "gpu3", "gpu4")))
    assert (detected.first_host, detected.token) == ("gpu1", "slurm-77.0.0")
    assert detected.description == "SLURM job 77, step 0: node 1 of 4 (gpu[1-4])"
    assert missing_endpoint_error(detected) is None
    assert found(step(node_id=0)).is_server


def test_all_nodes_of_a_step_agree_where_they_meet():
    places = {(d.first_host, d.ports, d.token, d.agents) for d in (found(step(node_id=n)) for n in range(4))}
    assert len(places) == 1


def test_two_steps_and_a_requeued_job_do_not_agree():
    one, two, again = step(), step(SLURM_STEP_ID="1"), step(SLURM_RESTART_COUNT="1")
    assert len({found(environ).token for environ in (one, two, again)}) == 3
    assert len({found(environ).ports for environ in (one, two, again)}) == 3


def test_ports_that_slurm_has_reserved_come_first():
    ports = found(step(SLURM_STEP_RESV_PORTS="12000-12001")).ports
    assert ports[:2] == (12000, 12001)
    assert ports[2:] == found(step()).ports[:6]
    assert len(found(step(SLURM_STEP_RESV_PORTS="12000-12040")).ports) == 8


def test_one_node_needs_no_name():
    detected = found(step(node_id=0, tasks="1"))
    assert (detected.kind, detected.agents, detected.first_host) == ("node", 1, "127.0.0.1")


def test_the_order_of_arbitrary_distribution_is_the_order_of_ranks():
    detected = found(step(node_id=0) | {"SLURM_PROCID": "2"})
    assert (detected.index, detected.is_server) == (2, True)


def test_open_mpi_with_one_process_per_node():
    detected = found(open_mpi(2, 4, 0, 1, MASTER_ADDR="a1", PMIX_NAMESPACE="prterun-a1-4711@1"))
    assert (detected.kind, detected.index, detected.agents, detected.is_server) == ("node", 2, 4, False)
    assert (detected.first_host, detected.token) == ("a1", "mpi-prterun-a1-4711@1")
    assert detected.ports == candidate_ports("mpi-prterun-a1-4711@1")
    assert missing_endpoint_error(detected) is None


def test_kubernetes_tells_nothing_but_the_number():
    detected = found({"JOB_COMPLETION_INDEX": "3"})
    assert (detected.kind, detected.index, detected.agents, detected.is_server) == ("node", 3, None, False)
    assert missing_endpoint_error(detected) is not None
    check_counts(detected, 8, (16, 16))
    assert (
        missing_endpoint_error(found({"JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "j-0.j", "MASTER_PORT": "29500"}))
        is None
    )


# Started once per worker.


def test_a_task_of_several_per_node_is_one_worker():
    detected = found(step(node_id=1, local_rank=2, tasks="4(x3)"))
    assert (detected.kind, detected.index, detected.agents, detected.is_server) == ("task", 6, 12, False)
    assert detected.description == "SLURM job 77, step 0: node 1 of 3 (gpu[1-3]), rank 6 of 12"
    assert detected.task is not None
    assert detected.task.environ() == {
        "RANK": "6",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "12",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_RANK": "6",
        "ROLE_WORLD_SIZE": "12",
    }


def test_exactly_one_task_serves():
    tasks = [found(step(n, k, "2(x3)")) for n in range(3) for k in range(2)]
    assert [task.is_server for task in tasks] == [True] + [False] * 5
    assert [task.index for task in tasks] == list(range(6))
    assert len({(task.first_host, task.ports) for task in tasks}) == 1


@pytest.mark.parametrize(
    "environ",
    [
        open_mpi(5, 8, 1, 4),
        MPICH,
        {"PALS_RANKID": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PALS_APID": "a-b"},
        {f"JSM_NAMESPACE_{k}": v for k, v in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "5814", strict=True)},
    ],
)
def test_every_mpi_launcher_tells_ranks(environ: dict[str, str]):
    detected = found(environ)
    assert (detected.kind, detected.index, detected.agents) == ("task", 5, 8)
    assert detected.task is not None
    assert (detected.task.local_rank, detected.task.local_world_size) == (1, 4)
    assert (detected.task.node_rank, detected.task.tasks_per_node) == (1, (4, 4))
    check_counts(detected, None, (2, 2))


def test_mpi_says_where_to_meet_only_with_an_address_and_a_run_of_its_own():
    error = missing_endpoint_error(found(MPICH))
    assert error is not None
    assert "without the host" in error.message
    error = missing_endpoint_error(found(MPICH | {"MASTER_ADDR": "a1"}))
    assert error is not None
    assert "without the port" in error.message
    assert missing_endpoint_error(found(MPICH | {"MASTER_ADDR": "a1", "MASTER_PORT": "29500"})) is None
    assert found(MPICH | {"MASTER_ADDR": "a1", "MASTER_PORT": "http"}).ports == ()
    assert found(open_mpi(1, 4, 1, 4)).first_host == "127.0.0.1"


# Which launcher counts.


def test_mpirun_in_a_step_is_the_innermost():
    assert found(step() | open_mpi(0, 2, 0, 1)).name == "Open MPI"
    assert found(step() | MPICH).name == "MPICH, Intel MPI"


def test_pmi_under_srun_is_srun():
    assert found(step(PMI_RANK="1", PMI_SIZE="4")).name == "SLURM"


def test_a_step_comes_before_its_job():
    assert found(BATCH).kind == "allocation"
    assert found(BATCH | step()).kind == "node"


def test_nothing_is_detected_without_a_scheduler_or_when_switched_off():
    assert detect({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "SLURM_CONF": "/etc/slurm.conf"}) is None
    assert detect(step(), "none") is None
    # Not even looked at.
    assert detect(step(SLURM_PROCID="x"), "none") is None


def test_a_named_cluster_is_the_only_one_looked_for():
    environ = step() | open_mpi(0, 2, 0, 1)
    assert found(environ, "slurm").name == "SLURM"
    assert found(BATCH, "slurm").kind == "allocation"
    with pytest.raises(UsageError, match="LSB_JOBID would be set"):
        detect(environ, "lsf")
    with pytest.raises(UsageError, match="must be one of auto, openmpi"):
        detect(environ, "slurmm")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_row_is_documented_and_can_be_asked_for(row):
    assert row.word in WORDS
    assert row.variables


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (open_mpi(8, 8, 0, 4), "contradict"),
        (open_mpi(0, 2, 0, 4), "contradict"),
        (open_mpi(0, 2, 4, 2), "contradict"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({"PALS_RANKID": "0"}, "PMI_SIZE is not set"),
        (open_mpi(0, 1, 0, 1) | {"OMPI_COMM_WORLD_SIZE": "a"}, "OMPI_COMM_WORLD_SIZE=a is not a whole number"),
        ({"JOB_COMPLETION_INDEX": "x"}, "JOB_COMPLETION_INDEX=x"),
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a 4 b"}, "LSB_MCPU_HOSTS=a 4 b"),
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a b"}, "LSB_MCPU_HOSTS=a b"),
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a;b 4"}, "LSB_MCPU_HOSTS a;b"),
    ],
)
def test_variables_that_cannot_be_meant_are_told(environ: dict[str, str], message: str):
    with pytest.raises(UsageError, match=message):
        detect(environ)


# Hosts for srun and ssh.


def test_an_allocation_has_all_its_nodes():
    detected = found(BATCH)
    assert (detected.kind, detected.hosts) == ("allocation", tuple(map(Host, ("gpu1", "gpu2", "gpu3", "gpu4"))))
    assert detected.description == "SLURM job 77: 4 nodes (gpu[1-4]), not in a step of srun"
    assert (detected.index, detected.task, detected.ports) == (None, None, ())


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("hostA 4 hostB 4", ["hostA", "hostB"]),
        ("hostA 1 hostB 4 ", ["hostA", "hostB"]),
        ("batch2 1 h22n07 42 h22n08 42", ["h22n07", "h22n08"]),
        ("batch2 1", ["batch2"]),
    ],
)
def test_lsf_lists_hosts_with_their_slots(text: str, names: list[str]):
    detected = found({"LSB_JOBID": "5", "LSB_MCPU_HOSTS": text, "LSB_DJOB_HOSTFILE": "/gone"})
    assert detected.kind == "hosts"
    assert read_hosts(detected) == tuple(map(Host, names))


def test_lsf_without_a_list_names_a_file():
    assert found({"LSB_JOBID": "5", "LSB_DJOB_HOSTFILE": "/home/ada/hosts"}).hostfile == "/home/ada/hosts"
    # Not a parallel job.
    assert detect({"LSB_JOBID": "5"}) is None


def test_pbs_names_a_file_whose_lines_are_cpus_and_not_workers(tmp_path: Path):
    file = tmp_path / "nodes"
    file.write_text("a1\na1\na2\na2\n")
    detected = found({"PBS_JOBID": "9.head", "PBS_NODEFILE": str(file), "PBS_NODENUM": "0"})
    assert detected.description == f"PBS job 9.head: hosts in {file}, reached over ssh"
    assert read_hosts(detected) == (Host("a1"), Host("a2"))


@pytest.mark.parametrize(
    "environ",
    [
        {"PBS_JOBID": "9.head", "PBS_NODEFILE": "/gone", "PBS_NODENUM": "2"},
        {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "a 1 b 1", "LSF_PM_TASKID": "2"},
    ],
)
def test_a_copy_that_was_started_on_each_node_does_not_start_the_job_again(environ: dict[str, str]):
    detected = found(environ)
    assert (detected.kind, detected.agents, detected.hosts, detected.hostfile) == ("node", None, (), None)
    assert "--rdzv-endpoint" in lint(detected, environ)[0]


# Ports.


@given(st.text(texts.ENCODABLE, max_size=30), st.integers(1, 65535), st.integers(0, 300))
def test_candidates_are_the_same_for_the_same_token_and_in_the_range(token: str, first: int, more: int):
    last = min(65535, first + more)
    ports = candidate_ports(token, first, last)
    assert ports == candidate_ports(token, first, last)
    assert len(set(ports)) == len(ports) == min(8, last - first + 1)
    assert all(first <= port <= last for port in ports)


def test_runs_rarely_share_a_first_candidate():
    firsts = {candidate_ports(f"slurm-{job}.{step}.0")[0] for job in range(1000, 1050) for step in range(4)}
    assert len(firsts) > 190
    assert PORTS[0] <= min(firsts) <= max(firsts) <= PORTS[1]


# Counts that disagree.

FOUR_EACH = found(step(tasks="4(x2)"))
FOUR_NODES = found(step(tasks="1(x4)"))


@pytest.mark.parametrize("nproc", [None, "auto", "gpu", 1, 4])
def test_each_task_is_one_worker_of_its_node(nproc: int | str | None):
    check_counts(FOUR_EACH, nproc, None)


@pytest.mark.parametrize(
    ("detected", "nproc", "nnodes", "message"),
    [
        (FOUR_EACH, 8, None, "--nproc-per-node 8: SLURM started 4 tasks on this node"),
        (FOUR_EACH, None, (8, 8), "--nnodes 8: SLURM started ddplaunch on 2 nodes"),
        (FOUR_EACH, None, (1, 2), "--nnodes 1:2: SLURM started ddplaunch on 2 nodes"),
        (FOUR_NODES, 8, (2, 2), "--nnodes 2: SLURM started ddplaunch on 4 nodes"),
        (FOUR_NODES, 8, (2, 8), "--nnodes 2:8: SLURM started ddplaunch on 4 nodes"),
        (found(step(tasks="8,8,4")), None, None, "different numbers of tasks on its nodes: 8, 8, 4"),
        (found(step(tasks="2,1")), None, None, "different numbers of tasks"),
        (found(open_mpi(0, 6, 0, 4)), None, None, "different numbers of tasks on its nodes: 6 in all, 4 here"),
        (found(open_mpi(1, 4, 0, 2)), None, None, "rank 1 is local rank 0"),
    ],
)
def test_counts_that_disagree_are_refused(detected, nproc, nnodes, message: str):
    with pytest.raises(UsageError, match=message) as caught:
        check_counts(detected, nproc, nnodes)
    assert caught.value.hint


def test_counts_that_agree_or_are_for_others_to_judge_pass():
    check_counts(FOUR_NODES, 8, None)
    check_counts(FOUR_NODES, 8, (4, 4))
    check_counts(FOUR_NODES, "gpu", (2, 4))
    check_counts(FOUR_EACH, 4, (2, 2))
    check_counts(found(BATCH), 8, (2, 4))


# What is likely not meant.


def said(environ: dict[str, str], **facts) -> str:
    return " | ".join(lint(found(environ), environ, **facts))


def test_a_clean_step_is_told_nothing():
    assert said(step(SLURM_CPUS_ON_NODE="64"), workers=8, cpus=64) == ""
    # One thread per core.
    assert said(step(SLURM_CPUS_ON_NODE="64"), workers=8, cpus=32) == ""
    assert said(BATCH, workers=8, cpus=8) == ""
    assert said(step(), workers=None, cpus=1) == ""


def test_too_few_cpus_for_the_workers_are_told():
    assert said(step(), workers=8, cpus=1).startswith("8 workers on 1 CPU, no more are allowed here: srun -c")
    assert said(step(SLURM_CPUS_ON_NODE="64"), workers=2, cpus=2).startswith("2 CPUs of the 64")
    assert "8 workers on 2 CPUs" in said(open_mpi(0, 2, 0, 1), workers=8, cpus=2)


def test_the_batch_script_is_not_where_nodes_meet_by_themselves():
    assert "put srun before ddplaunch" in said(BATCH, has_endpoint=True)
    assert said(BATCH | {"SLURM_JOB_NODELIST": "gpu1"}, has_endpoint=True) == ""
    assert said(step(), has_endpoint=True) == ""


def test_a_shell_in_a_step_of_several_tasks_is_told_that_it_is_alone():
    assert "srun --pty" in said(step(0), terminal=True)
    assert "srun --pty" in said(step(0, 0, "4(x1)"), terminal=True)
    assert said(step(0, 0, "1"), terminal=True) == ""
    assert said(BATCH, terminal=True) == ""


def test_a_leftover_binding_is_told():
    assert "SLURM_CPU_BIND=quiet,mask_cpu:0xF" in said(BATCH | {"SLURM_CPU_BIND": "quiet,mask_cpu:0xF"})


def test_a_task_that_sees_one_gpu_has_no_device_of_its_local_rank():
    assert "--virtual-local-rank" in said(step(1, 2, "4(x2)", CUDA_VISIBLE_DEVICES="0"))
    assert said(step(1, 2, "4(x2)", CUDA_VISIBLE_DEVICES="0,1,2,3")) == ""
    assert said(step(1, 0, "4(x2)", CUDA_VISIBLE_DEVICES="0")) == ""
    assert said(step(CUDA_VISIBLE_DEVICES="0")) == ""


def test_variables_for_workers_that_are_there_already_are_told():
    text = said(step(RANK="1", MASTER_ADDR="gpu1", MASTER_PORT="29500", WORLD_SIZE=""))
    assert text.startswith("the environment has RANK=1, MASTER_ADDR=gpu1, MASTER_PORT=29500 already")
    # pyxis sets what is right for a task.
    assert said(step(1, 2, "4(x2)", RANK="6", LOCAL_RANK="2")) == ""
    assert "LOCAL_RANK=0" in said(step(1, 2, "4(x2)", RANK="6", LOCAL_RANK="0"))
    # mpirun -x passes on where to meet.
    assert said(open_mpi(0, 2, 0, 1, MASTER_ADDR="a1", MASTER_PORT="29500")) == ""
