"""GPUs with faults, of a fake driver under the real binding: before the start, while a job runs, between attempts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support import runs
from tests.support.fake_nvml import healthy, say
from tests.support.runs import Finished, Running, start

HARDWARE = 88
ROW_LOST = "1 rows 0 0 0 1"
SCRIPT = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
print(f"rank {rank} of {os.environ['WORLD_SIZE']} runs", flush=True)
told, failed = pathlib.Path(os.environ["TOLD"]), pathlib.Path(os.environ["FAILED"])
if os.environ.get("FAIL") == rank and not failed.exists():
    while not told.exists():
        time.sleep(0.01)
    failed.touch()
    sys.exit(7)
"""


NAMED = """
import os, socket
if "HOST" in os.environ:
    socket.gethostname = lambda: os.environ["HOST"]
"""


class Machine:
    """A machine with two GPUs. Jobs have one worker for each."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self._script = folder / "train.py"
        self._script.write_text(SCRIPT)
        self._environ = {
            "LD_LIBRARY_PATH": str(library),
            "FAKE_NVML": str(folder / "says"),
            "TOLD": str(folder / "told"),
            "FAILED": str(folder / "failed"),
        }
        self.says()

    def says(self, *instead: str, name: str = "says") -> None:
        """The driver's answers: two GPUs without a fault, but for the lines that are given."""
        keys = {" ".join(line.split()[:2]) for line in instead}
        lines = [line for line in (*healthy(0), *healthy(1)) if " ".join(line.split()[:2]) not in keys]
        say(self.folder / name, "gpus 2", "driver 570.1", *lines, *instead)

    def start(self, *options: str, **environ: str) -> Running:
        return start("--nproc-per-node", "2", *options, self._script, env={**self._environ, **environ})

    def run(self, *options: str, **environ: str) -> Finished:
        return self.start(*options, **environ).finish()

    def fail_after(self, change: str, *options: str, told: str = "rank 1 of 2 runs") -> Finished:
        """A job whose rank 1 fails after this line of the driver, and once ddplaunch has said ``told``."""
        job = self.start(*options, FAIL="1")
        job.wait_for("rank 1 of 2 runs")
        self.says(change)
        job.wait_for(told)
        (self.folder / "told").touch()
        return job.finish()


@pytest.fixture
def machine(tmp_path: Path, nvml_library: Path) -> Machine:
    return Machine(tmp_path, nvml_library)


def said(finished: Finished) -> list[str]:
    return [line for line in finished.err.splitlines() if "GPU" in line or "NVML" in line]


def test_gpus_without_a_fault_are_not_spoken_of(machine: Machine) -> None:
    done = machine.run()
    assert (done.returncode, said(done)) == (0, []), done.err
    assert done.report["health"] == []


def test_a_gpu_with_a_fault_is_refused_before_a_worker_starts(machine: Machine) -> None:
    machine.says(ROW_LOST)
    done = machine.run()
    assert done.returncode == HARDWARE, done.err
    (line,) = said(done)
    assert "GPU 1 (GPU-0000-1), local rank 1: a row of its memory could not be remapped (drain the node" in line
    assert "runs" not in done.out
    assert [(found["rule"], found["gpu"]) for found in done.report["health"]] == [("row-remap-failed", 1)]


@pytest.mark.parametrize(("policy", "lines"), [("warn", 1), ("off", 0)])
def test_with_warn_or_off_the_job_starts(machine: Machine, policy: str, lines: int) -> None:
    machine.says(ROW_LOST)
    done = machine.run("--health", policy)
    assert (done.returncode, len(said(done))) == (0, lines), done.err


def test_a_gpu_that_the_job_does_not_use_may_have_faults(machine: Machine) -> None:
    machine.says(ROW_LOST)
    done = machine.run("--nproc-per-node", "1", "--gpus", "0")
    assert (done.returncode, said(done)) == (0, []), done.err


@pytest.mark.parametrize("function", ["nvmlDeviceGetName", "nvmlInitWithFlags"])
def test_a_driver_that_hangs_is_told_and_delays_the_start_by_its_limit(machine: Machine, function: str) -> None:
    free_s = machine.run().report["duration_s"]
    machine.says(f"block {function}")
    done = machine.run()
    assert done.returncode == 0, done.err
    (line,) = said(done)
    assert "NVML has not answered for 2 s" in line
    assert done.report["duration_s"] < free_s + 3.5, "2 s, and a busy machine"


def test_a_failure_after_an_event_of_its_gpu_is_the_hardwares(machine: Machine) -> None:
    told = "local rank 1, rank 1: Xid 79: the GPU has fallen off the bus"
    done = machine.fail_after("event 1 1 8 79", "--max-restarts", "3", told=told)
    assert done.returncode == HARDWARE, done.err
    assert "rank 1 on " in done.err
    assert " failed: Xid 79, GPU 1 (GPU-0000-1) has fallen off the bus" in done.err
    assert "no further attempt: " in done.err
    assert [(found["rule"], found["ranks"]) for found in done.report["health"]] == [("xid-79", [1])]


def test_a_failure_is_looked_into_at_once(machine: Machine) -> None:
    """The readings are 5 s apart."""
    done = machine.fail_after("1 field230 1")
    assert done.returncode == HARDWARE, done.err
    assert "failed: GPU 1 (GPU-0000-1): the driver asks for a reset of the GPU" in done.err


def test_an_event_of_the_other_gpu_is_no_cause(machine: Machine) -> None:
    done = machine.fail_after("event 1 0 8 94", told="Xid 94")
    assert done.returncode == 7, done.err


def test_the_next_attempt_waits_until_memory_is_free(machine: Machine) -> None:
    job = machine.start("--max-restarts", "1", FAIL="1")
    job.wait_for("rank 1 of 2 runs")
    machine.says(f"1 used {40 << 30}")
    (machine.folder / "told").touch()
    job.wait_for("40 GB of GPU 1 .*on .* is still in use; the workers start when it is free")
    freed_at = time.time()
    machine.says()
    done = job.finish()
    assert done.returncode == 0, done.err
    second = done.report["attempts"][1]
    assert min(exit_["time_s"] - exit_["duration_s"] for exit_ in second["exits"]) >= freed_at


# Each node has a launcher.


@pytest.fixture
def meeting() -> tuple[str, ...]:
    return runs.meeting()


@pytest.fixture
def sick(machine: Machine) -> dict[str, str]:
    """Variables of a node with a GPU that is refused."""
    machine.says(ROW_LOST, name="sick")
    return {"FAKE_NVML": str(machine.folder / "sick")}


@pytest.mark.slow
def test_a_job_of_fixed_size_ends_at_once_without_a_refused_node_that_was_to_serve(
    machine: Machine, meeting: tuple[str, ...], sick: dict[str, str]
) -> None:
    first = machine.start("--nnodes", "2", *meeting, **sick)
    first.wait_for("telling the other nodes that the job does not start")
    second = machine.start("--nnodes", "2", *meeting)
    for done in (second.finish(), first.finish()):
        assert done.returncode == HARDWARE, done.err
        assert "the hardware is not sound: " in done.err
        assert "GPU 1 (GPU-0000-1), local rank 1: a row of its memory could not be remapped" in done.err


@pytest.mark.slow
def test_the_launcher_of_the_node_that_serves_tells_how_the_nodes_differ(
    machine: Machine, meeting: tuple[str, ...]
) -> None:
    (machine.folder / "sitecustomize.py").write_text(NAMED)
    nodes = {}
    for host, limit_mw in (("gpu1", 700_000), ("gpu2", 500_000)):
        machine.says(*(f"{gpu} limit {limit_mw}" for gpu in (0, 1)), name=host)
        environ = {
            "FAKE_NVML": str(machine.folder / host),
            "HOST": host,
            "PYTHONPATH": f"{machine.folder}:{os.environ.get('PYTHONPATH', '')}",
        }
        nodes[host] = machine.start("--nnodes", "2", *meeting, **environ)
        if host == "gpu1":
            nodes[host].wait_for("waiting at .* for 1 more node")
    done = {host: node.finish() for host, node in nodes.items()}
    assert [each.returncode for each in done.values()] == [0, 0], done
    assert "the nodes differ in power limit: 700 W on gpu1, 500 W on gpu2" in done["gpu1"].err
    assert "differ" not in done["gpu2"].err
    assert not any("the clock of" in each.err for each in done.values())


@pytest.mark.slow
def test_where_each_node_has_a_launcher_a_refused_node_does_not_join(
    machine: Machine, meeting: tuple[str, ...], sick: dict[str, str]
) -> None:
    options = ("--nnodes", "1:2", *meeting)
    first = machine.start(*options, "--rdzv-conf", "last_call_timeout=3")
    first.wait_for("1 of up to 2 nodes are here")
    second = machine.run(*options, **sick)
    assert second.returncode == HARDWARE, second.err
    done = first.finish()
    assert done.returncode == 0, done.err
    assert "rank 1 of 2 runs" in done.out
