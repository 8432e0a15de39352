"""What started ddplaunch, how often and where is read from the environment; what disagrees with it is told."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch import features
from ddplaunch.cli import main
from ddplaunch.cli.build_config import transport_of_command
from ddplaunch.cluster.hosts import Host, parse_hosts
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import NODE_NOT_READY, LaunchError, UsageError
from ddplaunch.features.forwarding.rules import rule_of
from ddplaunch.features.schedulers import table as schedulers
from ddplaunch.features.schedulers.checks import lint
from ddplaunch.features.schedulers.info import PORTS, SchedulerInfo, SchedulerRow, candidate_ports
from ddplaunch.features.schedulers.table import TABLE, detect
from ddplaunch.rows import TransportRow, load
from ddplaunch.transport import transports
from tests.support import golden, texts


def step(node_id: str = "1", local_rank: str = "0", tasks: str = "1(x4)") -> dict[str, str]:
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
        "SLURM_NODEID": node_id,
        "SLURM_PROCID": str(sum(per_node[: int(node_id)]) + int(local_rank)),
        "SLURM_LOCALID": local_rank,
        "SLURMD_NODENAME": f"gpu{int(node_id) + 1}",
    }


def batch() -> dict[str, str]:
    zeros = dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"), "0")
    return {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "gpu[1-4]", "SLURMD_NODENAME": "gpu1", **zeros}


def mpi(**counts: str) -> dict[str, str]:
    return {f"OMPI_COMM_WORLD_{name.upper()}": value for name, value in counts.items()}


def mpich() -> dict[str, str]:
    return {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "PMI_FD": "7"}


STARTS = {"step": step, "batch": batch, "mpi": mpi, "mpich": mpich, "none": dict}


def environment(question: str) -> dict[str, str]:
    """``step node_id=1 RANK=3``: what the named launchers set, with these arguments, and further variables."""
    words = shlex.split(question)
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    counts = {name: pairs.pop(name) for name in [*pairs] if name.islower()}
    found: dict[str, str] = {}
    for start in [word for word in words if "=" not in word]:
        found |= STARTS[start](**({} if found else counts))
    return found | pairs


@pytest.fixture
def config_of(monkeypatch: pytest.MonkeyPatch):
    def config_of(environ: dict[str, str], *argv: str) -> LaunchConfig:
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            return main.command.main([*argv, "x.py"], prog_name="ddplaunch", standalone_mode=False)

    return config_of


def told(config: LaunchConfig) -> str:
    """What follows from the scheduler, line by line."""
    meets, task = config.rendezvous, config.task
    lines = [
        f"{config.min_nodes}:{config.max_nodes} nodes, {config.workers.nproc_per_node} workers, run id {config.run_id}",
        config.hosts and f"{config.transport}: {' '.join(map(str, config.hosts))}",
        meets
        and f"agent {meets.node_index} of {meets.min_nodes}:{meets.max_nodes} meets at {meets.server_addresses} "
        f"{(meets.port, *meets.other_ports)} by {meets.token}, serves: {meets.is_server}, for {meets.join_timeout_s} s",
        task and f"task: {task.environ()}",
        config.slurm_job and str(config.slurm_job),
        *(f"notice {notice.min_verbosity}: {notice.text}" for notice in config.notices),
    ]
    return "\n".join(line for line in lines if line)


@pytest.mark.features
@pytest.mark.parametrize("pages", ["schedulers", "other_schedulers", "scheduler_options"])
def test_what_a_scheduler_says_becomes_the_configuration_and_what_the_user_says_wins(
    pages: str, config_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    monkeypatch.setattr("shutil.which", lambda _: "scontrol")
    monkeypatch.setattr("ddplaunch.features.slurm.scontrol.run", lambda *_: (0, "BatchFlag=1 Requeue=1"))
    monkeypatch.chdir(tmp_path)
    Path("nodes").write_text("a1\na1\na2\na2\n")
    Path("nodes_of_jsrun").write_text("batch2\na1\na1\na2\na2\n")

    def page(question: str) -> str:
        words, dashes, options = question.partition(" --")
        argv = f"{dashes}{options}".split()
        return told(features.prepare(config_of(environment(words), *argv)))

    golden.check_pages(pages, page)


@pytest.mark.features
def test_the_list_of_hosts_may_name_this_machine_only(config_of, tmp_path: Path):
    (tmp_path / "nodes").write_text(f"{socket.gethostname()}\n")
    assert config_of({"PBS_JOBID": "7", "PBS_NODEFILE": str(tmp_path / "nodes")}).hosts == ()


@pytest.mark.features
@pytest.mark.usefixtures("no_threads")
def test_tasks_of_mpirun_without_room_for_a_thread_get_a_message(config_of, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ddplaunch.features.other_schedulers.endpoint_exchange._load_pmix", lambda: object())
    environ = mpi(rank="1", size="4", local_rank="0", local_size="1")
    with pytest.raises(LaunchError, match="the launcher cannot start: can't start new thread") as raised:
        config_of({**environ, "PMIX_NAMESPACE": "prterun-a1-4711@1"})
    assert "ulimit -u" in raised.value.hint
    assert raised.value.exit_code == NODE_NOT_READY


# The table.


@pytest.mark.features
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.variables[0])
def test_the_variables_of_a_row_are_not_forwarded_by_a_pattern(row: SchedulerRow):
    assert rule_of(row.variables[0]).when == "named"
    assert all(rule_of(name).when == "named" for name in row.ranks)


def add_row(monkeypatch: pytest.MonkeyPatch, layer: str, variable: str, read: Callable[..., SchedulerInfo]) -> None:
    """A scheduler that has this variable, and this reader."""
    reader = "ddplaunch.features.schedulers.table"
    monkeypatch.setattr(f"{reader}.new", read, raising=False)
    row = SchedulerRow(word="new", layer=layer, variables=(variable,), reader=f"{reader}:new", own_variables=("NEW_*",))
    monkeypatch.setattr(schedulers, "TABLE", (row, *TABLE))


@pytest.fixture
def _new_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that gives ddplaunch an allocation, whose nodes it has to look for, and reaches by a transport of its own."""

    def read(environ: dict[str, str]) -> SchedulerInfo:
        return SchedulerInfo(
            name="New",
            kind="allocation",
            description="New",
            is_server=False,
            find_hosts=partial(parse_hosts, environ["NEW_NODES"]),
            transport="new-exec",
        )

    add_row(monkeypatch, "job", "NEW_NODES", read)
    transport = TransportRow(name="new-exec", class_path="", way="", keeps_warm=False)
    monkeypatch.setattr(transports, "TABLE", (*transports.TABLE, transport))


@pytest.mark.usefixtures("_new_scheduler")
def test_a_row_is_all_that_a_scheduler_needs(config_of):
    found = config_of({"NEW_NODES": "a,b"})
    assert (found.hosts, found.transport, found.max_nodes) == ((Host("a"), Host("b")), "new-exec", 2)


@pytest.fixture
def _new_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts a process on each node, and exports rank and size alone."""

    def read(environ: dict[str, str]) -> SchedulerInfo:
        variables = ("NEW_RANK", "NEW_SIZE")
        rank, size = (int(environ[name]) for name in variables)
        of_process = load("ddplaunch.features.other_schedulers.readers:of_process")
        return of_process("New", variables, (rank, size, 0, 1), ("NEW_ID",), "new -T {}", "new -E", environ)

    add_row(monkeypatch, "mpi", "NEW_RANK", read)


@pytest.mark.features
@pytest.mark.usefixtures("_new_launcher")
def test_a_launcher_that_exports_rank_and_size_alone_is_a_row_and_a_place(config_of):
    endpoint = {"MASTER_ADDR": "a1", "MASTER_PORT": "29500"}
    # The step of srun in which it runs, and of which this is node 0, does not count.
    said = told(config_of({**step("0"), "NEW_RANK": "1", "NEW_SIZE": "2", **endpoint}))
    assert "agent 1 of 2:2 meets at ('a1',) (29500,)" in said
    assert "notice 1: New: rank 1 of 2, local rank 0 of 1" in said
    named = config_of({"NEW_RANK": "1", "NEW_SIZE": "2", "MASTER_ADDR": "a1", "NEW_ID": "start-1"})
    assert named.run_id == "mpi-start-1"
    with pytest.raises(UsageError, match="New's variables contradict each other: NEW_RANK=2, NEW_SIZE=2"):
        config_of({"NEW_RANK": "2", "NEW_SIZE": "2"})


@pytest.mark.parametrize(("name", "first_host"), [("port", "a1"), ("host", None)])
def test_nodes_that_do_not_know_where_they_meet_get_a_message(
    name: str, first_host: str | None, config_of, monkeypatch: pytest.MonkeyPatch
):
    def read(_environ: dict[str, str]) -> SchedulerInfo:
        return SchedulerInfo(
            name="New", kind="node", description="New", is_server=True, index=0, launchers=2, first_host=first_host
        )

    add_row(monkeypatch, "job", "NEW_NODES", read)
    with pytest.raises(UsageError, match=f"New started ddplaunch on several nodes without the {name} of their") as told:
        config_of({"NEW_NODES": "a1,a2"})
    assert told.value.hint.startswith("Give --rdzv-endpoint HOST:PORT, or export MASTER_ADDR and MASTER_PORT to all")


@pytest.mark.usefixtures("_new_scheduler")
@pytest.mark.parametrize(("host", "transport"), [("a", "new-exec"), ("c", "ssh"), ("me@a", "ssh")])
def test_a_command_reaches_the_hosts_of_an_allocation_as_a_run_does(host: str, transport: str):
    assert transport_of_command(parse_hosts(host), {"cluster": "auto"}, {"NEW_NODES": "a,b"}) == transport


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


# What only the node knows.


@pytest.mark.features
def test_what_is_likely_not_meant_is_told():
    def said(question: str) -> str:
        words, _, facts = question.partition(" | ")
        environ = environment(words)
        numbers = {name: int(number) for name, number in (fact.split("=") for fact in facts.split())}
        return " | ".join(lint(detect(environ), environ, **numbers))

    golden.check_answers("scheduler_lint", said)
