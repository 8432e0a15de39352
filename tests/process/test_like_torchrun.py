"""Beside torchrun itself: workers have its environment, but for ``DIFFERS``, and a seeded training its losses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddplaunch.features.compile_cache import environ
from ddplaunch.protocol import environment as worker_environment
from tests.process.test_environment import DUMP, changed, dumped
from tests.support.runs import PROGRAMS, environment, run

FORMATS = {
    "RANK": "[01]",
    "LOCAL_RANK": "[01]",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_NAME": "default",
    "ROLE_RANK": "[01]",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": r"[\w.]+",
    "MASTER_PORT": r"\d{4,5}",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": r"[\w-]+",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_ERROR_FILE": r"/.*/attempt_0/[01]/error\.json",
    "OMP_NUM_THREADS": r"\d+",
}
"""Of what both launchers set."""

DIFFERS = {
    worker_environment.RUN_ID: "ours alone: a sweep finds what is left of a run by it",
    "DDPLAUNCH_REQUEST_FILE": "ours alone: what the script asks for",
    **dict.fromkeys(worker_environment.FLIGHT_RECORD_NAMES, "ours alone: the record goes to the worker's log folder"),
    **dict.fromkeys(environ.VARIABLES, "ours alone: caches on the node's disk, and as many compilers as CPUs"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "torchrun's alone: its 1 hides the flight record, torch's default is 3",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "torchrun's alone: leaks from its own settings, read by its agent only",
}


@pytest.mark.torch
@pytest.mark.slow
def test_variables_and_losses_are_torchruns(tmp_path: Path) -> None:
    """torchrun: test_run 1; local_elastic_agent_test 3."""
    given = {"SENTINEL": "in\u00e9rited \udcff", "EMPTY": "", "PET_NPROC_PER_NODE": "7"}
    folders = {name: tmp_path / name for name in ("theirs", "forkserver", "spawn")}
    for folder in folders.values():
        folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--log-dir", str(tmp_path), PROGRAMS / "train_tiny.py", folders["theirs"]]
    subprocess.run(command, env=environment(given), capture_output=True, check=True, timeout=100)
    # torchrun's workers are new interpreters, as with spawn: forked ones are to have the same losses.
    for start_method, program in (("forkserver", PROGRAMS / "train_tiny.py"), ("spawn", DUMP)):
        options = ("--start-method", start_method, "--nproc-per-node", "2")
        assert run(*options, program, folders[start_method], env=given).returncode == 0
        for us, them in zip(dumped(folders[start_method]), dumped(folders["theirs"]), strict=True):
            compare(changed(environment(given), us["environ"]), changed(environment(given), them["environ"]))
    ours, theirs = ((folders[name] / "losses").read_text().split() for name in ("forkserver", "theirs"))
    assert ours == theirs
    assert float.fromhex(ours[-1]) < float.fromhex(ours[0])


def compare(ours: dict[str, str | None], theirs: dict[str, str | None]) -> None:
    """What ddplaunch and torchrun have set for one rank."""
    assert (ours.keys() ^ theirs.keys()) <= DIFFERS.keys()
    assert FORMATS.keys() == ours.keys() & theirs.keys()
    for name, pattern in FORMATS.items():
        assert re.fullmatch(pattern, str(ours[name])), name
        assert re.fullmatch(pattern, str(theirs[name])), name
    for name in ("RANK", "LOCAL_RANK", "ROLE_RANK"):
        assert ours[name] == theirs[name]
