"""A script for GPUs runs unmodified in a dry run; a call that fake CUDA does not support stops it with one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.programs.cuda.tables import SUPPORTED, UNSUPPORTED
from tests.support.runs import PROGRAMS, Finished, run

pytestmark = pytest.mark.torch

CUDA = PROGRAMS / "cuda"

# What the scripts import when they are first used; that other scripts run them hides it from the forkserver.
IN_TURN = ("--preload", "torch._dynamo")


def dry_run(script: str, *arguments: str | Path, workers: int = 2, options: tuple[str, ...] = ()) -> Finished:
    return run("--dry-run", "--nproc-per-node", str(workers), *options, CUDA / script, *arguments)


def succeed(script: str, *arguments: str | Path, workers: int = 2, options: tuple[str, ...] = ()) -> str:
    """Run it, expect success, and return what the workers printed, sorted and without their prefixes."""
    finished = dry_run(script, *arguments, workers=workers, options=options)
    assert finished.returncode == 0, finished.err
    return "".join(sorted(re.sub(r"^\[\S+\] ", "", line) + "\n" for line in finished.out.splitlines()))


@pytest.mark.slow
def test_every_row_of_the_table_is_supported() -> None:
    out = succeed("answers.py", workers=2, options=("--gpus", "2,5"))
    for row in SUPPORTED:
        assert out.count(f"supported: {row}\n") == 2, row


def test_every_unsupported_call_stops_with_one_line_and_85(tmp_path: Path) -> None:
    out = succeed("refused.py", "all", tmp_path, workers=1)
    for row in (name for name, line in UNSUPPORTED.items() if line.startswith("stops")):
        assert f"refused: {row}" in out


def test_a_refused_call_ends_the_job_with_its_line_and_no_traceback() -> None:
    """In an exec'd worker, which fake CUDA enters by itself; below, a forked one."""
    options = ("--start-method", "spawn")
    finished = dry_run("refused.py", "torch.cuda.CUDAGraph", workers=1, options=options)
    assert finished.returncode == 85
    assert re.search(r"ddplaunch: \S*cuda/refused.py:\d+: torch.cuda.CUDAGraph needs a real GPU", finished.err)
    assert "Traceback" not in finished.out + finished.err


def test_an_error_for_want_of_a_gpu_ends_the_job_likewise_after_its_traceback() -> None:
    finished = dry_run("refused.py", "other calls into CUDA")
    assert finished.returncode == 85
    # A build of torch for CUDA has the function, which raises an AcceleratorError.
    line = r"ddplaunch: \S*cuda/refused.py:\d+: .*_cuda_getCurrentRawStream.* needs a real GPU .*\(A\w+Error: .*\)"
    on_page = finished.err.partition("its last lines:")[2]
    assert re.search(line, on_page)
    assert "Traceback (most recent call last)" in on_page


@pytest.mark.slow
def test_more_workers_than_gpus_fail_as_on_gpus() -> None:
    finished = dry_run("elastic_ddp.py", options=("--gpus", "0"))
    assert finished.returncode == 1
    assert "CUDA error: invalid device ordinal" in finished.err
    assert "This dry run gives this worker 1 GPU (see" in finished.err


@pytest.mark.slow
def test_the_usual_small_scripts_run_and_a_gpt_learns(tmp_path: Path) -> None:
    scripts = ["ddp_basic.py", "ddp_checkpoint.py", str(tmp_path / "model.pt"), "ddp_model_parallel.py"]
    scripts += ["elastic_ddp.py", "forks.py", "iterable.py", "mnist.py", "gpt.py", "bfloat16", "gpt.py", "float16"]
    scripts += ["local_rank_argument.py", "LOCAL", "--sync-bn"]
    separated = [part for each in scripts for part in (("+", each) if each.endswith(".py") else (each,))]
    out = succeed("in_turn.py", *separated, options=(*IN_TURN, "--pass-local-rank", "--gpus", "0,1,2,3"))
    assert "rank 0 with nccl" in out
    for rank in (0, 1):
        assert f"rank {rank}: same weights\n" in out
        assert f"rank {rank} loaded weights of 0.25\n" in out
        assert f"rank {rank}: layers on GPUs {(2 * rank, 2 * rank + 1)} of 4\n" in out
        assert f"Finished running basic DDP example on rank {rank} with GPU {rank}.\n" in out
        assert f"rank {rank}: all children ran\n" in out
    assert "seen 64 of 64, 64 in all\n" in out
    assert float(re.findall(r"accuracy (\S+)", out)[0]) > 0.9
    endings = re.findall(r"loss (\S+) to (\S+) in .*keys of (.*)", out)
    assert len(endings) == 2
    for first, last, keys in endings:
        assert float(last) < float(first) / 2
        assert keys == "{'_orig_mod'}", "the names are a compiled model's"
    assert "epoch 1 loss" in out, "by a script of torch.distributed.launch"
    assert re.search("trained on .*simulated", out)


@pytest.mark.slow
def test_a_trainer_finds_everything_on_its_gpu_also_in_spawned_loaders(tmp_path: Path) -> None:
    assert re.search(r"loss fell on .*simulated", succeed("trainer.py", tmp_path, workers=1, options=("--gpus", "0,1")))


@pytest.mark.slow
def test_an_fsdp2_script_trains_and_restores_its_checkpoint(tmp_path: Path) -> None:
    assert "loss fell, checkpoint same, 4 GPUs\n" in succeed("fsdp2.py", tmp_path / "checkpoint", workers=4)


@pytest.mark.slow
def test_compiled_code_compiles_where_that_is_asked_for() -> None:
    out = succeed("compile.py", workers=1, options=("--rehearse-compile", "--gpus", "0,1"))
    assert "compiled without a break\n" in out


@pytest.mark.slow
def test_processes_of_multiprocessing_see_the_fake_gpus_too() -> None:
    out = succeed("children.py", workers=1, options=("--gpus-per-proc", "2"))
    for method in ("fork", "spawn", "forkserver"):
        assert f"{method}: 2 GPUs\n" in out


def test_a_normal_workers_torch_is_untouched() -> None:
    finished = run("--nproc-per-node", "1", CUDA / "untouched.py")
    assert finished.returncode == 0, finished.err
    assert "untouched\n" in finished.out
    assert "many changes by install\n" in finished.out
