"""--check-first: a run uses only nodes that pass the check, and no worker starts if too few do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import fake_nvml
from tests.support.runs import Finished, meeting, start

NODE_NOT_READY = 82
FEW_FILES = ("prlimit", "--nofile=2000")
FEW = "at most 2000 open files, too few for many workers (raise the hard limit, nofile)"


def run(*arguments: str | Path, under: tuple[str, ...] = (), **environ: str) -> Finished:
    return start("--nproc-per-node", "1", *arguments, "--no-python", "true", env=environ, under=under).finish()


def test_a_node_that_passes_is_told_in_a_line_and_is_in_the_file(tmp_path: Path) -> None:
    done = run("--check-first", "quick", "--passing-hosts-file", tmp_path / "good")
    assert done.returncode == 0, done.err
    (host,) = (tmp_path / "good").read_text().split()
    assert f"ddplaunch: {host} passes the check\n" in done.err


def test_a_node_that_does_not_pass_starts_no_worker_and_the_old_file_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "good").write_text("node1\n")
    done = run("--check-first", "quick", "--passing-hosts-file", tmp_path / "good", under=FEW_FILES)
    assert (done.returncode, done.out) == (NODE_NOT_READY, ""), done.err
    assert f"error: the check was not passed: {done.report['hosts'][0]['host']}: {FEW}" in done.err
    assert (tmp_path / "good").read_text() == ""
    assert done.report["attempts"] == []


@pytest.mark.parametrize(("policy", "passes"), [("refuse", False), ("warn", False), ("off", True)])
def test_a_gpu_that_another_process_uses_is_refused_only_then(
    policy: str, passes: bool, tmp_path: Path, nvml_library: Path
) -> None:
    """With --health off, no GPU is looked at."""
    gpu = [line for line in fake_nvml.healthy(0) if not line.startswith("0 used ")]
    fake_nvml.say(says := tmp_path / "says", "gpus 1", "driver 570.1", *gpu, f"0 used {40 << 30}")
    environ = {"LD_LIBRARY_PATH": str(nvml_library), "FAKE_NVML": str(says)}
    assert run("--health", policy, **environ).returncode == 0
    done = run("--health", policy, "--check-first", "quick", **environ)
    assert done.returncode == (0 if passes else NODE_NOT_READY), done.err
    assert ("the check was not passed: " in done.err) is not passes
    assert ("40 GB of its memory are in use" in done.err) is not passes


@pytest.mark.slow
def test_a_node_that_has_a_launcher_tells_the_others_that_it_does_not_come() -> None:
    place = meeting()
    first = start("--nnodes", "2", *place, "--no-python", "true")
    first.wait_for("waiting at .* for 1 more node")
    second = run("--nnodes", "2", *place, "--check-first", "quick", under=FEW_FILES)
    for done in (second, first.finish()):
        assert done.returncode == NODE_NOT_READY, done.err
        assert FEW in done.err


@pytest.mark.slow
@pytest.mark.torch
def test_a_node_is_measured_before_the_run(tmp_path: Path) -> None:
    done = run("--check-first", "deep", "--passing-hosts-file", tmp_path / "good")
    assert done.returncode == 0, done.err
    assert (tmp_path / "good").read_text().split()[0] in done.err
    assert done.err.count("passes the check") == 1
    refused = run("--check-first", "deep", under=FEW_FILES)
    assert (refused.returncode, refused.out) == (NODE_NOT_READY, "")
    assert "error: the check was not passed; 1 node is needed, and 0 can be used\n" in refused.err
    assert FEW in refused.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--passing-hosts-file", "good"), "has an effect only with --check-first or --check"),
        (("--check-first", "quick", "--passing-hosts-file", "/"), "is no regular file"),
        (("--check-first", "quick", "--passing-hosts-file", "none/good"), "No such file or directory"),
        (("--check-first", "deep", "--nnodes", "2", *meeting()), "one launcher must start agents on all nodes"),
        (
            ("--check-first", "quick", "--passing-hosts-file", "good", "--nnodes", "2", *meeting()),
            "one launcher must start agents on all nodes",
        ),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, message in done.err) == (2, True), done.err
