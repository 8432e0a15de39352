"""``--gpus free`` in a SLURM job: SLURM's own allocation is what is chosen from."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.gpu_machine import Machine
from tests.support.runs import command
from tests.support.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("stub_is_installed")]


@pytest.mark.parametrize("options", [(), ("--keep-warm", "5m")], ids=["plain", "warm"])
def test_what_slurm_gives_to_the_job_is_chosen_from(
    slurm: Slurm, tmp_path: Path, nvml_library: Path, options: tuple[str, ...]
) -> None:
    machine = Machine(tmp_path, nvml_library)
    machine.says("2 pid 4242")
    exports = "; ".join(f"export {name}={shlex.quote(value)}" for name, value in machine.environ.items())
    free = [shlex.join(command(*options, "--gpus", f"free:{count}", machine.script)) for count in (1, 2)]
    waits = shlex.join(command(*options, "--gpus", "free:2", "--wait-for-gpus", "1s", machine.script))
    on_node = ("-N1", "--nodelist=node01")
    first = slurm.batch("sleep 600", tmp_path / "first", *on_node, "--gres=gpu:2")
    first.wait_in("RUNNING")
    second = slurm.batch(
        f"{exports}; {'; '.join([*free, waits])}; echo done", tmp_path / "log", *on_node, "--gres=gpu:2"
    )
    second.wait_for("done")
    assert re.findall(r"runs on (\S+) attempt", second.text) == ["3"]
    too_few = "1 of 2 that CUDA_VISIBLE_DEVICES=2,3 leaves visible, and the run needs 2"
    assert second.text.count(too_few) == 2
    assert "it has waited for 1 s" in second.text
