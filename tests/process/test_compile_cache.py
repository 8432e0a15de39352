"""--compile-cache: what a run has compiled is there for the next one, in workers that were forked after the import."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ddplaunch.features.compile_cache.environ import VARIABLES
from tests.support.runs import run

SCRIPT = """
import os, torch, torch._dynamo
from torch._dynamo.utils import counters
from torch._inductor import config
multiply = torch.compile(lambda x: x @ x)
assert multiply(torch.ones(8, 8))[0, 0] == 8
print("caches", counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"], end=" ")
print("threads", config.compile_threads, os.environ["TORCHINDUCTOR_COMPILE_THREADS"], flush=True)
"""


@pytest.mark.torch
@pytest.mark.slow
def test_the_second_run_compiles_nothing(tmp_path: Path) -> None:
    """Both ranks write the cache at once. torch reads the number of processes when the forkserver imports it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    said = []
    for _ in range(2):
        finished = run("--nproc-per-node", "2", tmp_path / "train.py", env={"XDG_CACHE_HOME": str(tmp_path)})
        assert finished.returncode == 0, finished.err
        said.append([line.split()[-6:] for line in finished.out.splitlines() if "caches" in line])
    assert [words[3:] for words in said[0]] == [["threads", threads, threads]] * 2
    assert all(words[1:3] == ["1", "0"] for words in said[1]), said
    kept = [
        path for path in (tmp_path / "ddplaunch" / "compile").glob("torch-*/inductor/fxgraph/**/*") if path.is_file()
    ]
    assert kept


def test_the_variables_are_those_of_the_plan_and_none_with_off(tmp_path: Path) -> None:
    """--plan creates nothing; a run creates the folder for this user alone."""
    environ = {"XDG_CACHE_HOME": str(tmp_path)}

    def variables(*options: str) -> list[str]:
        finished = run(*options, "--no-python", "--nproc-per-node", "2", "env", env=environ)
        words = [word for line in finished.out.splitlines() for word in line.split()]
        return sorted({word.partition("=")[0] for word in words if word.startswith(VARIABLES)})

    planned = variables("--plan")
    assert planned == sorted(VARIABLES)
    assert not (tmp_path / "ddplaunch").exists()
    assert variables() == planned
    assert stat.S_IMODE((tmp_path / "ddplaunch" / "compile").stat().st_mode) == 0o700
    assert variables("--compile-cache", "off") == variables("--plan", "--compile-cache", "off") == []
