"""A plan says what the run then does, and itself does nothing at all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.protocol import environment
from tests.support.runs import PROGRAMS, ROOT, run

DUMP = PROGRAMS / "dump_environ.py"

# In every process of the command: tells of each step to the outside.
WATCH = """
import os, sys
NAMES = ("subprocess.", "os.fork", "os.posix_spawn", "os.exec", "os.system", "os.mkdir", "os.remove", "os.rename")
ON_NETWORK = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
def watch(event, arguments):
    writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if event.startswith(NAMES + ON_NETWORK) or writes:
        os.write(2, f"did: {event} {arguments}\\n".encode())
sys.addaudithook(watch)
"""


@pytest.mark.parametrize(
    "options",
    [
        ("--hosts", "gpu[1-2].invalid", "--nproc-per-node", "2"),
        ("--dry-run", "--nnodes", "2"),
        ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1.invalid:29400"),
        (),
    ],
    ids=["hosts", "dry run", "every node by itself", "here"],
)
def test_a_plan_starts_nothing_contacts_nobody_and_writes_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    script = tmp_path / "train.py"
    script.touch()
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    finished = run("--plan", *options, script, env=env)
    assert (finished.returncode, finished.err) == (0, "")
    assert finished.out.startswith("plan: ")
    assert not (tmp_path / "state").exists()


def test_the_watch_of_the_last_test_sees_a_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    finished = run("--no-python", "true", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert {"subprocess.Popen", "os.mkdir", "open"} <= set(re.findall(r"did: (\S+)", finished.err))


def _matches(planned: str, found: str) -> bool:
    """``<...>`` stands for what only the run knows."""
    return bool(re.fullmatch(".+".join(map(re.escape, re.split("<[^>]+>", planned))), found))


@pytest.mark.parametrize(
    "options",
    [
        ("--dry-run", "--hosts", "gpu1:slots=1,gpu2:slots=2", "--gpus-per-proc", "2", "--max-restarts", "1"),
        ("--dry-run", "--nproc-per-node", "2", "--gpus", "5,3", "--virtual-local-rank", "--log-dir", "/dev/null"),
        (
            "--nproc-per-node",
            "2",
            "--start-method",
            "spawn",
            "-x",
            "OMP_NUM_THREADS=3",
            "--role",
            "x",
            "--rdzv-id",
            "j",
        ),
    ],
    ids=["pretended nodes", "pretended devices", "here"],
)
def test_workers_get_the_environment_that_was_planned(tmp_path: Path, options: tuple[str, ...]) -> None:
    arguments = (*options, DUMP, tmp_path)
    env = {"CUDA_VISIBLE_DEVICES": ""} if "--dry-run" in options else {}
    plan = json.loads(run("--plan", "--json", *arguments, env=env).out)
    assert run(*arguments, env=env).returncode == 0
    assert plan["world_size"] == len(plan["ranks"]) == len(list(tmp_path.glob("*.json")))
    for rank in plan["ranks"]:
        dumped: dict[str, Any] = json.loads((tmp_path / f"{rank['rank']}.json").read_text())
        planned = plan["environ"] | rank["environ"]
        found = {name: dumped["environ"].get(name, "") for name in planned}
        assert {
            name: (planned[name], found[name]) for name in planned if not _matches(planned[name], found[name])
        } == {}
        assert set(environment.NAMES) & dumped["environ"].keys() <= planned.keys()
