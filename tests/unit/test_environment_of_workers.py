"""One test per name of the workers' environment, for any place a worker may have in a job."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ddplaunch.config import WorkerConfig
from ddplaunch.protocol import environment
from tests.support import golden
from tests.support.configs import a_round, agent_spec

BY_NETWORK = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_RAS_ADDR", "RES_OPTIONS"}
"""Set only where nodes reach each other, no name server does, or GPUs are: test_job.py, test_silent_dns.py in
tests/ssh, tests/process/test_ras_address.py."""

SPEC = agent_spec(
    run_id="job7",
    host="node2",
    workers=WorkerConfig(nproc_per_node=2, role="trainer"),
    max_restarts=3,
    signals=("SIGTERM", "SIGUSR2"),
)
ROUND = a_round(
    attempt=5,
    restart_count=2,
    node_rank=1,
    nnodes=3,
    first_rank=4,
    local_world_size=2,
    world_size=7,
    master_addr="10.0.0.2",
)


@pytest.fixture
def worker() -> dict[str, str]:
    """The second worker on the second of three nodes."""
    shared = environment.shared_environ({"HOME": "/home/u"}, "job7", 2, 16)
    return environment.worker_environ(shared, SPEC, ROUND, 1, "/logs/1/error.json", "/logs/1/request.txt")


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
    "MASTER_ADDR": "10.0.0.2",
    "MASTER_PORT": "4242",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_ERROR_FILE": "/logs/1/error.json",
    "DDPLAUNCH_REQUEST_FILE": "/logs/1/request.txt",
    "TORCH_FR_DUMP_TEMP_FILE": "/logs/1/flight_record_rank_",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/logs/1/flight_record_rank_",
    "OMP_NUM_THREADS": "8",
    "DDPLAUNCH_RUN_ID": "job7",
}


def test_a_worker_has_these_and_what_was_inherited(worker: dict[str, str]) -> None:
    """Not TORCH_NCCL_ASYNC_ERROR_HANDLING, whose default writes the flight record; torchrun's 1 aborts before that."""
    assert worker == {**VALUES, "HOME": "/home/u"}


def test_the_table_names_all_there_is(worker: dict[str, str]) -> None:
    # Set by whoever knows the devices.
    assert environment.NAMES.keys() - BY_NETWORK == {*VALUES, "CUDA_VISIBLE_DEVICES"}
    assert all(environment.NAMES.values())


def test_without_a_store_the_only_worker_is_not_told_of_one() -> None:
    inherited = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    env = environment.worker_environ(inherited, SPEC, replace(ROUND, has_store=False), 0, "")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env


def test_it_does_not_get_the_secret_of_the_rendezvous() -> None:
    assert environment.SECRET not in environment.shared_environ({environment.SECRET: "x" * 16}, "job7", 1, 8)


@pytest.mark.parametrize(("is_virtual", "local_ranks"), [(False, ["0", "1"]), (True, ["0", "0"])])
def test_ranks_are_contiguous_on_a_node_and_a_virtual_local_rank_is_0(is_virtual: bool, local_ranks: list[str]) -> None:
    """torchrun: agent_api_test 1; local_elastic_agent_test 12."""
    spec = replace(SPEC, workers=WorkerConfig(virtual_local_rank=is_virtual))
    envs = [environment.worker_environ({}, spec, ROUND, local_rank, "") for local_rank in range(2)]
    assert [env["RANK"] for env in envs] == ["4", "5"]
    assert [env["LOCAL_RANK"] for env in envs] == local_ranks


def test_the_cpus_are_shared_out() -> None:
    def threads(question: str) -> str | None:
        workers, cpus = map(int, re.findall(r"\d+", question))
        return environment.shared_environ({}, "job", workers, cpus).get("OMP_NUM_THREADS")

    golden.check_answers("threads_of_workers", threads)


@pytest.mark.parametrize("value", ["4", "", "1,2", "rubbish"])
def test_what_the_user_has_set_stays(value: str) -> None:
    """torchrun: local_elastic_agent_test 4."""
    given = {"OMP_NUM_THREADS": value, "TORCH_NCCL_ASYNC_ERROR_HANDLING": value, "CUDA_VISIBLE_DEVICES": value}
    shared = environment.shared_environ(given, "job", 4, 16)
    worker = environment.worker_environ(shared, SPEC, ROUND, 0, "")
    assert {name: worker[name] for name in given} == given


@pytest.mark.parametrize("name", environment.FLIGHT_RECORD_NAMES)
def test_the_flight_record_goes_where_the_user_wants_it(name: str) -> None:
    worker = environment.worker_environ({name: "/mine/trace_"}, SPEC, ROUND, 1, "/logs/1/error.json")
    assert {key: worker.get(key) for key in environment.FLIGHT_RECORD_NAMES} == {
        **dict.fromkeys(environment.FLIGHT_RECORD_NAMES),
        name: "/mine/trace_",
    }


def test_without_a_log_folder_torch_chooses_where_the_flight_record_goes() -> None:
    worker = environment.worker_environ({}, SPEC, ROUND, 1, "")
    assert not worker.keys() & set(environment.FLIGHT_RECORD_NAMES)


def test_what_a_surrounding_job_has_left_does_not(worker: dict[str, str]) -> None:
    stale = dict.fromkeys(environment.NAMES.keys() - {"CUDA_VISIBLE_DEVICES"} - BY_NETWORK, "stale")
    for name in ("OMP_NUM_THREADS", *environment.FLIGHT_RECORD_NAMES):
        del stale[name]
    shared = environment.shared_environ({**stale, "HOME": "/home/u"}, "job7", 2, 16)
    again = environment.worker_environ(shared, SPEC, ROUND, 1, "/logs/1/error.json", "/logs/1/request.txt")
    assert again == worker


def test_nothing_given_is_changed() -> None:
    inherited = {"HOME": "/home/u"}
    shared = environment.shared_environ(inherited, "job", 2, 16)
    before = dict(shared)
    environment.worker_environ(shared, SPEC, ROUND, 0, "")
    assert inherited == {"HOME": "/home/u"}
    assert shared == before
