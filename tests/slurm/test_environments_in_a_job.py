"""--env in a SLURM job: a launcher on each node or one for all; of the nodes that share a folder one makes it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.ssh.test_environments_over_ssh import hide_python
from tests.support import wheels
from tests.support.nodes import Node
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


@contextlib.contextmanager
def without_python(node: Node) -> Iterator[None]:
    """The nodes of other tests are the same ones."""
    mounts = Path(f"/proc/{node.init_pid}/mounts")
    before = mounts.read_text().splitlines()
    hide_python(node)
    try:
        yield
    finally:
        for line in reversed(mounts.read_text().splitlines()[len(before) :]):
            node.run(["umount", line.split()[1]])


def test_nodes_without_python_get_one_by_uv_through_the_home_that_they_share(slurm: Slurm, tmp_path: Path):
    wheels.torch_wheel(tmp_path / "wheels")
    (tmp_path / "requirements.txt").write_text("torch\n")
    (script := tmp_path / "train.py").write_text("import os, sys; print('runs', os.path.realpath(sys.executable))")
    env = {
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "UV_FIND_LINKS": str(tmp_path / "wheels"),
        "UV_OFFLINE": "1",
        "UV_PYTHON_DOWNLOADS_JSON_URL": str(wheels.python_downloads(tmp_path / "python")),
        "OMP_NUM_THREADS": "1",
    }
    node = slurm.lab.nodes[0]
    words = command("--env", tmp_path / "requirements.txt", "--nproc-per-node", "1", script)
    start = partial(slurm.start, ["salloc", "-N1", "-w", node.name, *words], env=env)
    with without_python(node):
        (tmp_path / ".cache").mkdir()
        node.run(["mount", "-t", "tmpfs", "none", str(tmp_path / ".cache")])
        failed = start().finish()
        assert "installation by uv ended with exit code 1: " in failed.err
        assert "uv is missing, and srun brings it only by a shared home folder" in failed.err
        node.run(["umount", str(tmp_path / ".cache")])
        done = start().finish()
    assert re.search(rf"^runs {tmp_path}/.local/share/uv/python/cpython-", done.out, re.MULTILINE), done.err
