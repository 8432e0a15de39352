"""Usage samples of real jobs, in every way of starting that one machine has."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_nvml import gpu, healthy, say
from tests.support.processes import wait_until
from tests.support.runs import Finished, meeting, run, start

WORK = """
import sys, time
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    print("line", flush=True)
    time.sleep(0.1)
"""
ENOUGH_S = "2.6"


def lines(finished: Finished | Path, node: int = 0) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """The file of a node: its head, the starts of attempts, the samples."""
    folder = finished if isinstance(finished, Path) else finished.run_dir
    head, *rest = map(json.loads, (folder / f"samples/node_{node}.jsonl").read_text().splitlines())
    return head, [line for line in rest if "attempt" in line], [line for line in rest if "s" in line]


def job(*options: str | Path, seconds: str = ENOUGH_S, **rest: Any) -> Finished:
    done = run(*options, "--no-python", sys.executable, "-S", "-c", WORK, seconds, **rest)
    assert done.returncode == 0, done.err
    return done


def test_a_node_has_samples_of_its_workers() -> None:
    head, starts, (sample, *_) = lines(job("--nproc-per-node", "2"))
    assert (head["schema"], head["node"], head["gpus"]) == (1, 0, [])
    assert [(start["attempt"], start["ranks"]) for start in starts] == [(0, [0, 1])]
    assert starts[0]["t"] < sample["t"]
    assert sample["s"] == pytest.approx(1, abs=0.9)
    assert all(5 < value < 11 for value in sample["w"]["lines"])
    assert all(value < 1.5 for value in sample["w"]["quiet"])
    assert all(value > 1e6 for value in sample["w"]["rss"])
    assert sample["n"]["disk"] > 0


def test_each_node_of_a_dry_run_has_a_file(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK)
    done = run("--dry-run", "--nnodes", "2", "--nproc-per-node", "2", tmp_path / "work.py", ENOUGH_S)
    found = [lines(done, node) for node in (0, 1)]
    assert [head["host"] for head, _, _ in found] == ["node0", "node1"]
    assert sorted(starts[0]["ranks"] for _, starts, _ in found) == [[0, 1], [2, 3]]
    assert all(samples for _, _, samples in found)


@pytest.mark.parametrize("options", [("--no-samples",), ("--log-dir", "/dev/null")])
def test_no_samples_are_written_if_the_user_wants_none(options: tuple[str, ...], tmp_path: Path) -> None:
    job(*options, env={"XDG_STATE_HOME": str(tmp_path)})
    assert not list(tmp_path.rglob("samples"))


def test_every_launcher_of_self_organised_nodes_has_its_own_and_a_page_shows_all(tmp_path: Path) -> None:
    options = ("--log-dir", tmp_path, "--nnodes", "2", "--rdzv-id", "job7", *meeting())
    words = (*options, "--no-python", sys.executable, "-S", "-c", WORK)
    both = [start(*words, ENOUGH_S) for _ in range(2)]
    assert [each.finish().returncode for each in both] == [0, 0]
    first, second = sorted(path.parent.parent for path in tmp_path.glob("job7/*/samples/node_0.jsonl"))
    found = [lines(folder) for folder in (first, second)]
    assert [starts[0]["ranks"] for _, starts, _ in found] == [[0], [1]]
    assert all(samples[0]["n"]["disk"] > 0 for _, _, samples in found), "of the folder where it is now"

    page = tmp_path / "job7" / "run.html"
    assert run("--page", "job7", "--log-dir", tmp_path).out.strip() == str(page)
    text = page.read_text()
    assert all(f"<b>{name}</b>" in text and f'data-node="{name}"' in text for name in (first.name, second.name))
    assert "ready: 2 nodes, 2 workers" in text
    assert "Not everything could be read" not in text
    (second / "report.json").write_text("{")
    shutil.rmtree(first)
    run("--page", "job7", "--log-dir", tmp_path)
    assert "no folder with the events of rank 0." in page.read_text()
    assert f"{second.name}: report.json is damaged" in page.read_text()


@pytest.mark.slow
def test_a_gpu_has_values_of_its_driver(tmp_path: Path, nvml_library: Path) -> None:
    """How soon the driver has answered depends on what else the machine does: the job goes on until it has."""
    say(tmp_path / "says", "gpus 1", "driver 570.1", *gpu(0, 91, 40, 412_500), *healthy(0), "0 temperature 71")
    environ = {"LD_LIBRARY_PATH": str(nvml_library), "FAKE_NVML": str(tmp_path / "says")}
    words = ("--log-dir", tmp_path, "--rdzv-id", "job7", "--gpus", "0", "--no-python", "sleep", "60")
    running = start(*words, env=environ)
    file = tmp_path / "job7/samples/node_0.jsonl"
    wait_until(lambda: file.exists() and '"temp":[71]' in file.read_text().replace(" ", ""), 30)
    running.signal(signal.SIGTERM)
    head, (begin,), samples = lines(running.finish())
    assert (head["gpus"][0]["uuid"], begin["gpu"]) == ("GPU-0000-0", [0])
    assert {"util": [91], "mem": [4.194e6], "power": [412], "temp": [71], "throttle": [None]} in [
        sample.get("g") for sample in samples
    ]


@pytest.mark.slow
def test_each_attempt_has_its_samples() -> None:
    done = run("--max-restarts", "1", "--no-python", sys.executable, "-S", "-c", f"{WORK}\nsys.exit(3)", ENOUGH_S)
    _, starts, samples = lines(done)
    assert [begin["attempt"] for begin in starts] == [0, 1]
    begins = [begin["t"] for begin in starts]
    last = [max(line["t"] for line in samples if line["t"] <= end) for end in (begins[1], float("inf"))]
    assert all(at - begin > 2.3 for begin, at in zip(begins, last, strict=True)), "at each failure; the first is at 2.0"


def test_metrics_of_a_run_are_written_and_end_with_its_outcome(tmp_path: Path) -> None:
    """Also where no files are kept."""
    path = tmp_path / "run.prom"
    options = ("--metrics-file", path, "--log-dir", "/dev/null", "--nproc-per-node", "2", "--rdzv-id", "job7")
    job(*options, seconds="0.1")
    assert 'ddplaunch_run_exit_code{run_id="job7"} 0\n' in path.read_text()
    refused = run("--metrics-file", tmp_path / "none/run.prom", "x.py")
    assert (refused.returncode, refused.err.splitlines()[0]) == (
        2,
        f"ddplaunch: error: --metrics-file {tmp_path}/none/run.prom: No such file or directory",
    )
