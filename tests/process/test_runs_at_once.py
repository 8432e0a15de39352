"""Twenty runs of one user on one machine at once: ports, stores, files and caches of one are not those of another."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.processes import wait_until
from tests.support.runs import Finished, Running, meeting, run, start

pytestmark = pytest.mark.usefixtures("stub_is_installed")

TWO = ("--nproc-per-node", "2")
KINDS = {
    "plain": (8, TWO),
    "simulated": (6, ("--dry-run", "--nnodes", "2", "--nproc-per-node", "1")),
    "warm": (4, ("--keep-warm", "5m", *TWO)),
    "met": (2, ("--nnodes", "2")),
}
SCRIPT = """
import os, pathlib, sys, time
name, folder, ranks = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
print("port", os.environ["MASTER_PORT"], "of", name, flush=True)
(folder / f"{name}.{os.environ['RANK']}").touch()
while len(list(folder.iterdir())) < ranks:
    time.sleep(0.05)
print("ends", name)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_runs_at_once_start_and_end_right(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "ranks"
    script.write_text(SCRIPT)
    folder.mkdir()
    started: dict[str, list[Running]] = {}
    for kind, (count, options) in KINDS.items():
        for number in range(count):
            name, endpoint = f"{kind}{number}", meeting()
            of_nodes = (
                [(*options, *endpoint, "--node-rank", str(node)) for node in (0, 1)] if kind == "met" else [options]
            )
            started[name] = [start(*each, script, name, folder, "40") for each in of_nodes]
    ended = {name: [job.finish(180) for job in jobs] for name, jobs in started.items()}
    end_keeper(Path(os.environ["XDG_STATE_HOME"], "ddplaunch"))
    assert len(ended) == 20
    ports, folders = set(), set()
    for name, commands in ended.items():
        assert {each.returncode for each in commands} == {0}, (name, [each.err for each in commands])
        told = [port for each in commands for port in re.findall(rf"port (\d+) of {name}\n", each.out)]
        assert (len(told), len(set(told))) == (2, 1)
        assert [word for each in commands for word in re.findall(r"(?:of|ends) (\w+)\n", each.out)] == [name] * 4
        ports.add(told[0])
        folders |= {each.run_dir for each in commands}
        assert files_of(commands) == {name}
    assert (len(ports), len(folders)) == (20, 22)


def files_of(commands: list[Finished]) -> set[str]:
    """The runs whose output is in the log files."""
    texts = (path.read_text() for each in commands for path in each.run_dir.rglob("stdout.log"))
    return {word for text in texts for word in re.findall(r"ends (\w+)\n", text)}


def end_keeper(base: Path) -> None:
    """Of the four runs, the last one to end has left it."""
    assert run("--kill", "warm").returncode == 0
    wait_until(lambda: not list(base.glob("warm-*.sock")), 10)
