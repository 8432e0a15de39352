"""--nccl-report and --plan on a real run: workers print what NCCL of several versions has printed on other machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import fake_nvml, golden
from tests.support.runs import Finished, meeting, run, start
from tests.unit.test_nccl import SAMPLES

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

SCRIPT = """
import os, pathlib, sys
stream = open(os.environ["NCCL_DEBUG_FILE"], "w") if "NCCL_DEBUG_FILE" in os.environ else sys.stderr
if os.environ.get("NCCL_DEBUG") == "INFO":
    lines = pathlib.Path(sys.argv[1]).read_text().splitlines(keepends=True)
    is_first = os.environ["RANK"] == "0"  # Only one rank of a communicator tells the version.
    stream.writelines(line for line in lines if is_first or not line.startswith("NCCL version"))
print("loss 2", os.environ.get("NCCL_DEBUG_SUBSYS"), flush=True)
"""
VERSIONS = [name for name in SAMPLES if name[0].isdigit() and "ports" not in name]
ANSWERS = dict(case.split("\n")[:2] for case in (golden.FOLDER / "nccl.txt").read_text().split("##### ")[1:])


def job(folder: Path, name: str, *options: str, **environ: str) -> Finished:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "lines").write_text(SAMPLES[name])
    return run(*options, "--nproc-per-node", "2", folder / "train.py", folder / "lines", env=environ)


@pytest.mark.parametrize("name", VERSIONS)
def test_one_line_stands_for_nccls_lines_which_are_in_the_logs(name: str, tmp_path: Path) -> None:
    done = job(tmp_path, name, "--nccl-report")
    assert done.returncode == 0, done.err
    assert done.err.count(f"ddplaunch: {ANSWERS[name]}\n") == 1
    assert " NCCL INFO " not in done.err + done.out
    assert done.out.count("loss 2 INIT,NET,ENV") == 2
    assert " NCCL INFO " in (done.run_dir / "attempt_0/1/stderr.log").read_text()


def test_with_the_users_own_debug_level_the_line_is_told_beside_nccls(tmp_path: Path) -> None:
    done = job(tmp_path, VERSIONS[0], NCCL_DEBUG="INFO")
    assert f"ddplaunch: {ANSWERS[VERSIONS[0]]}\n" in done.err
    assert " NCCL INFO " in done.err
    assert done.out.count("loss 2 None") == 2


@pytest.mark.parametrize("environ", [{"NCCL_DEBUG_FILE": "nccl.%h"}, {"NCCL_DEBUG": "WARN"}])
def test_a_run_whose_ranks_tell_nothing_says_so(environ: dict[str, str], tmp_path: Path, monkeypatch) -> None:
    """Into a file of the user, NCCL's lines go as they did. With WARN, the report asks for more all the same."""
    monkeypatch.chdir(tmp_path)
    done = job(tmp_path, VERSIONS[0], "--nccl-report", **environ)
    assert done.returncode == 0, done.err
    is_silent = "--nccl-report: no rank has told which network NCCL uses" in done.err
    assert is_silent is ("NCCL_DEBUG_FILE" in environ)
    assert (f"ddplaunch: {ANSWERS[VERSIONS[0]]}\n" in done.err) is not is_silent


@pytest.mark.slow
@needs_root
def test_sockets_beside_active_ports_are_warned_of(tmp_path: Path, nvml_library: Path) -> None:
    """Only jobs of several nodes look at the ports, here those of a folder that is mounted over the kernel's."""
    name = next(name for name in SAMPLES if "no access to the devices" in name)
    for port in range(4):
        folder = tmp_path / f"class/infiniband/mlx5_{port}/ports/1"
        folder.mkdir(parents=True)
        values = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec", "link_layer": "InfiniBand"}
        for file, value in values.items():
            (folder / file).write_text(value)
    fake_nvml.say(tmp_path / "says", "gpus 1", "driver 570.1", *fake_nvml.healthy(0))
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "lines").write_text(SAMPLES[name])
    environ = {"LD_LIBRARY_PATH": str(nvml_library), "FAKE_NVML": str(tmp_path / "says")}
    under = ("unshare", "--mount", "sh", "-c", f'mount --bind {tmp_path}/class /sys/class && exec "$@"', "sh")
    options = ("--nccl-report", "--nnodes", "2", *meeting(), "--nproc-per-node", "1")
    arguments = (*options, tmp_path / "train.py", tmp_path / "lines")
    nodes = [start(*arguments, env=environ, under=under) for _ in range(2)]
    for done in [node.finish() for node in nodes]:
        assert done.returncode == 0, done.err
        assert ": 4 InfiniBand ports are active, NCCL uses sockets (eth0, virbr0): Failed to open libib" in done.err
