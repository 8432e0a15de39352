"""One test per name of the workers' environment, for any place a worker may have in a job."""

from __future__ import annotations

import pytest

from ddplaunch import environ
from ddplaunch.config import Streams
from ddplaunch.model import AgentSpec, Program, Round

BY_NETWORK = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
"""Set only where nodes reach each other: tests/ssh/test_job.py."""

SPEC = AgentSpec(
    run_id="job7",
    host="node2",
    program=Program("script", "train.py", (), "python"),
    python_is_ours=True,
    nproc_per_node=2,
    gpus=None,
    gpus_per_proc=0,
    virtual_local_rank=False,
    pass_local_rank=False,
    role="trainer",
    max_restarts=3,
    start_method="forkserver",
    preload=(),
    numa_binding=None,
    master_addr=None,
    master_port=None,
    shutdown_timeout_s=30.0,
    hang_timeout_s=None,
    log_dir=None,
    redirects=Streams(),
    tee=Streams(),
    show_ranks=None,
    show_local_ranks=None,
    duplicate_stdout_filters=(),
    duplicate_stderr_filters=(),
)
ROUND = Round(
    attempt=5,
    restarts=2,
    node_rank=1,
    nnodes=3,
    first_rank=4,
    local_world_size=2,
    world_size=7,
    master_addr="10.0.0.1",
    master_port=4242,
)


@pytest.fixture
def worker() -> dict[str, str]:
    """The second worker on the second of three nodes."""
    shared = environ.shared_environ({"HOME": "/home/u"}, "job7", 2, 16)
    return environ.worker_environ(shared, SPEC, ROUND, 1, "/logs/1/error.json")


VALUES = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "7",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "3",
    "ROLE_NAME": "trainer",
    "ROLE_RANK": "5",
    "ROLE_WORLD_SIZE": "7",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4242",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_ERROR_FILE": "/logs/1/error.json",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "OMP_NUM_THREADS": "8",
    "DDPLAUNCH_RUN_ID": "job7",
}


@pytest.mark.parametrize("name", VALUES)
def test_a_worker_has(name: str, worker: dict[str, str]) -> None:
    assert worker[name] == VALUES[name]


def test_it_has_nothing_else_but_what_was_inherited(worker: dict[str, str]) -> None:
    assert worker.keys() == {*VALUES, "HOME"}


def test_the_table_names_all_there_is(worker: dict[str, str]) -> None:
    # Set by whoever knows the devices.
    assert environ.NAMES.keys() - BY_NETWORK == {*VALUES, "CUDA_VISIBLE_DEVICES"}
    assert all(environ.NAMES.values())


def test_ranks_are_contiguous_on_a_node() -> None:
    """torchrun: agent_api_test 1; local_elastic_agent_test 12."""
    envs = [environ.worker_environ({}, SPEC, ROUND, local_rank, "") for local_rank in range(2)]
    assert [(env["RANK"], env["LOCAL_RANK"]) for env in envs] == [("4", "0"), ("5", "1")]


def test_a_virtual_local_rank_is_always_0() -> None:
    spec = AgentSpec(**{**vars(SPEC), "virtual_local_rank": True})
    envs = [environ.worker_environ({}, spec, ROUND, local_rank, "") for local_rank in range(2)]
    assert [(env["LOCAL_RANK"], env["RANK"]) for env in envs] == [("0", "4"), ("0", "5")]


@pytest.mark.parametrize(
    ("workers", "cpus", "threads"),
    [
        (1, 64, None),
        (2, 64, "32"),
        (3, 64, "21"),
        (8, 64, "8"),
        (64, 64, "1"),
        (65, 64, "1"),
        (2, 1, "1"),
        (4096, 2, "1"),
    ],
)
def test_the_cpus_are_shared_out(workers: int, cpus: int, threads: str | None) -> None:
    assert environ.shared_environ({}, "job", workers, cpus).get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize("value", ["4", "", "1,2", "rubbish"])
def test_what_the_user_has_set_stays(value: str) -> None:
    """torchrun: local_elastic_agent_test 4."""
    given = {"OMP_NUM_THREADS": value, "TORCH_NCCL_ASYNC_ERROR_HANDLING": value, "CUDA_VISIBLE_DEVICES": value}
    shared = environ.shared_environ(given, "job", 4, 16)
    worker = environ.worker_environ(shared, SPEC, ROUND, 0, "")
    assert {name: worker[name] for name in given} == given


def test_what_a_surrounding_job_has_left_does_not(worker: dict[str, str]) -> None:
    stale = dict.fromkeys(environ.NAMES.keys() - {"CUDA_VISIBLE_DEVICES"} - BY_NETWORK, "stale")
    del stale["OMP_NUM_THREADS"], stale["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    shared = environ.shared_environ({**stale, "HOME": "/home/u"}, "job7", 2, 16)
    assert environ.worker_environ(shared, SPEC, ROUND, 1, "/logs/1/error.json") == worker


def test_nothing_given_is_changed() -> None:
    inherited = {"HOME": "/home/u"}
    shared = environ.shared_environ(inherited, "job", 2, 16)
    before = dict(shared)
    environ.worker_environ(shared, SPEC, ROUND, 0, "")
    assert inherited == {"HOME": "/home/u"}
    assert shared == before
