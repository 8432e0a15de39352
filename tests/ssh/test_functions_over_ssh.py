"""What comes to other machines without a file: functions, whose values arrive here, and programs from stdin."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ssh.test_collect_logs import THERE
from tests.support import runs
from tests.support.ssh_jobs import job

pytestmark = pytest.mark.ssh

CODE = """
import os, socket, sys
from ddplaunch import launch

def work(text):
    return int(os.environ["RANK"]), socket.gethostname(), text * 1000

if __name__ == "__main__":
    options = {"hosts": ["node1", "node2"], "ssh_config": sys.argv[1], "nproc_per_node": 2}
    result = launch(work, ["abc" * 100], **options, export=["DDPLAUNCH_TEST_MARK", *sys.argv[2:]])
    result.check()
    print([(rank, *value[:2]) for rank, value in sorted(result.return_values.items())])
    print({len(value[2]) for value in result.return_values.values()})
"""


@pytest.mark.parametrize("folder", [THERE, "XDG_STATE_HOME"], ids=["own", "shared"])
def test_values_of_other_machines_arrive(make_lab, tmp_path: Path, folder: str):
    """Also if the machines share the file system of the run folder."""
    lab = make_lab(2)
    (tmp_path / "job.py").write_text(CODE)
    env = {"OMP_NUM_THREADS": "1"}
    done = runs.python(tmp_path / "job.py", lab.ssh_config, folder, cwd=tmp_path, env=env, under=lab.prefix)
    assert done.returncode == 0, done.err
    values, sizes = done.out.splitlines()[-2:]
    assert [(rank, own) for rank, own, _ in eval(values)] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert sizes == "{300000}"
    assert "logs of" not in done.err


def test_a_program_from_stdin_runs_on_other_machines(make_lab, tmp_path: Path):
    lab = make_lab(2)
    (tmp_path / "program").write_text("import os\nprint('rank', os.environ['RANK'])\n")
    with open(tmp_path / "program") as stdin:
        finished = job(lab, "--nproc-per-node", "1", "-", stdin=stdin).finish()
    assert finished.returncode == 0, finished.err
    assert {*finished.out.splitlines()} == {"[node1:0] rank 0", "[node2:1] rank 1"}
