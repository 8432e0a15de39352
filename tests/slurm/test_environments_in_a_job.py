"""--env in a SLURM job: a launcher on each node or one for all; of the nodes that share a folder one makes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import wheels
from tests.support.runs import ROOT, command
from tests.support.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

TRAIN = "import os, sys, demo, torch; print('runs', os.environ['RANK'], demo.VERSION, torch.__version__, sys.prefix)"


@pytest.mark.parametrize(
    "starter", [("srun", "-N3", "--ntasks-per-node=1"), ("salloc", "-N3"), ("srun", "-N3", "--ntasks-per-node=2")]
)
def test_each_node_has_the_environment_which_is_made_once(slurm: Slurm, tmp_path: Path, starter: tuple[str, ...]):
    wheels.torch_wheel(tmp_path / "wheels")
    wheels.wheel(tmp_path / "wheels", "demo", "1.0", {"demo.py": "VERSION = '1.0'"})
    (tmp_path / "requirements.txt").write_text("torch\ndemo\n")
    (script := tmp_path / "train.py").write_text(TRAIN)
    env = {
        "PYTHONPATH": str(ROOT),
        "UV_FIND_LINKS": str(tmp_path / "wheels"),
        "UV_OFFLINE": "1",
        "DDPLAUNCH_ENV_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    is_task = "--ntasks-per-node=2" in starter
    options = () if is_task else ("--nproc-per-node", "2")
    words = command("--env", tmp_path / "requirements.txt", *options, script)
    done = slurm.start([*starter, *words], env=env).finish()
    assert done.returncode == 0, done.err
    found = re.findall(
        rf"runs (\d) 1\.0 stub {tmp_path}/ddplaunch-\d+/environments/requirements-txt-\w+$", done.out, re.M
    )
    assert sorted(found) == [*"012345"], done.out + done.err
    assert done.err.count("made the environment of requirements.txt in ") == 1
