"""Machines with faulty GPUs, of a fake driver: a spare takes their place, or the job does not start and names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fake_nvml import healthy, say
from tests.support.nodes import Lab
from tests.support.ssh_jobs import job

pytestmark = pytest.mark.ssh

HARDWARE = 88


def gpu_says(folder: Path, host: str, *, is_faulty: bool) -> None:
    """What the driver of ``host`` tells of its only GPU."""
    rows = "0 rows 0 0 0 1"
    lines = [line for line in healthy(0) if not (is_faulty and line.startswith("0 rows "))]
    say(folder / f"says.{host}", "gpus 1", "driver 570.1", *lines, *([rows] if is_faulty else []))


@pytest.mark.slow
def test_a_machine_with_a_faulty_gpu_is_replaced_and_several_are_named(
    make_lab: Callable[..., Lab], tmp_path: Path, nvml_library: Path
) -> None:
    lab = make_lab(3)
    for number in (1, 2, 3):
        gpu_says(tmp_path, f"node{number}", is_faulty=number == 2)
    setup = f"export LD_LIBRARY_PATH={nvml_library} FAKE_NVML={tmp_path}/says.$(hostname)"
    arguments = ("--nnodes", "2", "--nproc-per-node", "1", "--remote-setup", setup, "--no-python", "hostname")
    replaced = job(lab, *arguments).finish()
    assert replaced.returncode == 0, replaced.err
    assert "not used: node2: GPU 0 (GPU-0000-0), local rank 0: a row of its memory could not be" in replaced.err
    assert sorted(line.split()[-1] for line in replaced.out.splitlines()) == ["node1", "node3"]
    gpu_says(tmp_path, "node1", is_faulty=True)
    refused = job(lab, *arguments, hosts="node1,node2").finish()
    assert (refused.returncode, refused.out) == (HARDWARE, ""), refused.err
    lines = [line for line in refused.err.splitlines() if line.startswith("  node")]
    assert [line.split(":")[0].strip() for line in lines] == ["node1", "node2"], refused.err
