"""What workers find at their start: the variables that the docs name, CPUs, devices, arguments, and the store."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.protocol import environment as worker_environment
from tests.support.configs import NOT_ALWAYS_SET
from tests.support.runs import PROGRAMS, Finished, environment, run

DUMP = PROGRAMS / "dump_environ.py"


def dumped(folder: Path) -> list[dict[str, Any]]:
    """What the workers wrote, by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"), key=lambda path: int(path.stem))]


def environs(*options: str, folder: Path, env: dict[str, str] | None = None) -> list[dict[str, str]]:
    """The environments of the workers of one run, by rank."""
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    finished = run(*options, DUMP, folder, env=env)
    assert finished.returncode == 0, finished.err
    return [seen["environ"] for seen in dumped(folder)]


def changed(before: dict[str, str], after: dict[str, str]) -> dict[str, str | None]:
    """What ``after`` has otherwise; None for what it lacks."""
    return {name: after.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def test_every_variable_that_is_set_is_in_the_documented_table(tmp_path: Path) -> None:
    """torchrun: test_run 19. The CPUs and the devices are shared out; how else: tests/unit/test_devices.py."""
    workers = environs("--gpus-per-proc", "2", env=FOUR, folder=tmp_path / "dump")
    for seen in workers:
        assert changed(environment(), seen).keys() == worker_environment.NAMES.keys() - NOT_ALWAYS_SET
        assert seen["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [env["LOCAL_RANK"] for env in workers] == ["0", "1"]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in workers] == ["0,1", "2,3"]


def test_ranks_ids_and_restarts_are_what_the_options_say(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "3", "--rdzv-id", "my.run", "--role", "trainer", "--max-restarts", "4")
    options += ("--signals-to-handle", "SIGTERM,SIGUSR2")
    given = {"OMP_NUM_THREADS": "5"}
    seen = environs(*options, "--log-dir", "/dev/null", folder=tmp_path / "dump", env=given)
    for rank, env in enumerate(seen):
        assert (env["OMP_NUM_THREADS"], env.get("CUDA_VISIBLE_DEVICES")) == ("5", None)
        assert [env[name] for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")] == [str(rank)] * 3
        assert [env[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")] == ["3"] * 3
        assert env["TORCHELASTIC_RUN_ID"] == "my.run"
        assert env["ROLE_NAME"] == "trainer"
        assert env["TORCHELASTIC_MAX_RESTARTS"] == "4"
        assert env["TORCHELASTIC_ERROR_FILE"] == ""
        assert env["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGUSR2"
    assert len({env["MASTER_PORT"] for env in seen}) == 1


# CPUs.


def test_only_the_cpus_the_node_may_use_are_counted(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    options = ("--nproc-per-node", "2")
    finished = run(*options, DUMP, tmp_path, under=("taskset", "-c", str(cpu)))
    assert finished.returncode == 0, finished.err
    assert [(seen["cpus"], seen["environ"]["OMP_NUM_THREADS"]) for seen in dumped(tmp_path)] == [(1, "1")] * 2


# Devices.

FOUR = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


def test_a_forked_worker_sees_its_own_device_and_the_store_on_loopback_before_the_script_runs(tmp_path: Path) -> None:
    finished = run("--virtual-local-rank", DUMP, tmp_path, env={"CUDA_VISIBLE_DEVICES": "6,4"})
    assert finished.returncode == 0, finished.err
    seen = dumped(tmp_path)
    found = [(each["environ"]["LOCAL_RANK"], each["environ"]["CUDA_VISIBLE_DEVICES"]) for each in seen]
    assert found == [("0", "6"), ("0", "4")]
    assert [(each["environ"]["MASTER_ADDR"], each["listeners"]) for each in seen] == [("127.0.0.1", ["0100007F"])] * 2


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--gpus 1,9", "GPU 9 is not among those"),
        ("--virtual-local-rank --nproc-per-node 5", "5 x 1 = 5 GPUs"),
    ],
)
def test_devices_that_are_not_there_are_a_usage_error(options: str, complaint: str, tmp_path: Path) -> None:
    finished = run(*options.split(), DUMP, tmp_path, env=FOUR)
    assert finished.returncode == 2
    assert complaint in finished.err
    assert "Traceback" not in finished.err


def bound_to(binding: str, folder: Path) -> dict[str, str]:
    """The environment of a run whose workers are bound so: this machine may have no GPUs, so the choice is given."""
    choice = f"cpus.of_workers = lambda _spec, _visible, nproc: ({binding!r},) * nproc"
    (folder / "sitecustomize.py").write_text(f"import ddplaunch.features.numa.cpus as cpus\n{choice}")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.features
@pytest.mark.parametrize("how", ["forkserver", "spawn"])
def test_a_worker_binds_itself_before_its_script_runs(how: str, tmp_path: Path) -> None:
    """What is chosen: tests/unit/test_numa.py."""
    env = bound_to("CPUs 0, memory of NUMA node 0", tmp_path)
    (tmp_path / "show.py").write_text(
        "import os\nfrom ddplaunch.features.numa.binding import has_memory_policy as told\n"
        "print('bound', *os.sched_getaffinity(0), told(), flush=True)\n"
    )
    options = ("--start-method", how, "--nproc-per-node", "2", "--numa-binding", "node")
    finished = run(*options, tmp_path / "show.py", env=env)
    assert finished.returncode == 0, finished.err
    assert [line.split()[-3:] for line in finished.out.splitlines()] == [["bound", "0", "True"]] * 2


@pytest.mark.features
def test_a_worker_whose_cpus_have_gone_offline_names_them(tmp_path: Path) -> None:
    finished = run(
        "--nproc-per-node", "1", "--numa-binding", "node", DUMP, tmp_path, env=bound_to("CPUs 1022-1023", tmp_path)
    )
    assert "ddplaunch: cannot set up this process: no binding to CPUs 1022-1023: Invalid argument" in finished.err
    assert finished.returncode == 126


def test_without_python_a_program_gets_the_same_environment() -> None:
    """torchrun: test_run 3; launcher_api_test 1."""
    finished = run("--no-python", "--nproc-per-node", "1", "env", "-0", env={"SENTINEL": "two\nlines"})
    seen = dict(line.split("=", 1) for line in finished.out.rstrip("\n").split("\0") if line)
    expected = worker_environment.NAMES.keys() - NOT_ALWAYS_SET - {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}
    expected -= {"TORCHELASTIC_USE_AGENT_STORE", "TORCHINDUCTOR_COMPILE_THREADS"}  # Not for a job's only worker.
    assert changed(environment({"SENTINEL": "two\nlines"}), seen).keys() == expected


# Arguments, interpreter.


def test_the_old_argument_comes_first_and_is_the_real_local_rank(start_method: str, tmp_path: Path) -> None:
    """torchrun: launch_test 1."""
    options = ("--start-method", start_method, "--gpus", "2,1", "--pass-local-rank", "--virtual-local-rank")
    finished = run(*options, DUMP, tmp_path, "--local-rank=9", "$local_rank", "pa$$word", "${local_rank}", env=FOUR)
    assert finished.returncode == 0, finished.err
    assert [seen["environ"]["CUDA_VISIBLE_DEVICES"] for seen in dumped(tmp_path)] == ["2", "1"]
    given = [str(tmp_path), "--local-rank=9", "$local_rank", "pa$$word", "${local_rank}"]
    assert [seen["argv"] for seen in dumped(tmp_path)] == [["--local-rank=0", *given], ["--local-rank=1", *given]]


def test_another_interpreter_runs_the_script(tmp_path: Path) -> None:
    other = tmp_path / "other-python"
    other.write_text(f'#!/bin/sh\nSEEN_BY="$*" exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    finished = run("-v", "--nproc-per-node", "1", DUMP, tmp_path, "x", env={"PYTHON_EXEC": str(other)})
    assert finished.returncode == 0, finished.err
    assert dumped(tmp_path)[0]["environ"]["SEEN_BY"] == f"-u {DUMP} {tmp_path} x"
    assert re.search(r"started by exec: .*other-python is not the interpreter", finished.err)


# The store.


@pytest.mark.torch
def test_torch_meets_by_an_address_too_and_knows_it_was_launched_and_its_rpc_works() -> None:
    """torchrun: test_run 15, 17; local_elastic_agent_test 16."""
    finished = run("--nproc-per-node", "2", PROGRAMS / "init_groups.py")
    assert finished.returncode == 0, finished.err
    assert said_by_each_rank(finished) == [
        [f"sum 3 of rank {rank}/2", f"elastic True local rank {rank}", "product 42"] for rank in (0, 1)
    ]


SPAWNS = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
def main(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.all_reduce(met := torch.ones(1))
    if rank == 0:
        print(int(met), "met at the store of this process:", "TORCHELASTIC_USE_AGENT_STORE" not in os.environ)
if __name__ == "__main__":
    mp.start_processes(main, nprocs=2, start_method="fork")  # As mp.spawn, and cheap.
"""


@pytest.mark.torch
def test_one_worker_that_starts_its_own_serves_the_store_at_the_port_kept_for_it(tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    finished = run("--nproc-per-node", "1", tmp_path / "spawns.py")
    assert finished.returncode == 0, finished.err
    assert finished.out == "2 met at the store of this process: True\n"


def said_by_each_rank(finished: Finished) -> list[list[str]]:
    files = sorted(finished.run_dir.glob("attempt_0/*/stdout.log"))
    return [file.read_text().splitlines() for file in files]
