"""--metrics-file: what a real parser reads of it, when it is written, and files that cannot be."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ddplaunch.errors import USAGE, OptionError
from ddplaunch.features.gpus.records import Gpu
from ddplaunch.features.metrics import launcher as metrics
from ddplaunch.features.metrics import prepare
from ddplaunch.features.metrics.launcher import METRICS, PERIOD_S, MetricsWatch, NodeMetrics, of_run, text
from ddplaunch.features.usage.records import (
    UsageSampled,
    UsageStarted,
)
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted
from ddplaunch.protocol.results import AttemptResult
from ddplaunch.protocol.run_result import RunResult
from ddplaunch.system.files import kept_files
from tests.support import golden
from tests.support.configs import launch_config
from tests.support.usage import sample

STARTED = UsageStarted(
    attempt=0,
    at_s=0.0,
    ranks=(8, 9),
    gpus=(Gpu(index=0, uuid="GPU-a", name="H100", memory_bytes=85_000_000_000),),
    gpu_of_worker=(0, None),
    cpus=4,
    memory_bytes=1 << 40,
)
RUN = {"run_id": "job7"}
NODE = {**RUN, "host": "gpu1", "node": "1"}
RANK_8, RANK_9 = ({**NODE, "rank": str(rank), "local_rank": str(rank - 8)} for rank in (8, 9))
GPU = {**NODE, "gpu": "0", "uuid": "GPU-a", "name": "H100", "rank": "8"}


def parsed(content: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name; checks that each family has a type, a text, and only samples of its own."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(content):
        assert family.documentation
        assert family.type in ("gauge", "counter"), family.name
        for each in family.samples:
            assert each.name == family.name + ("_total" if family.type == "counter" else "")
            assert each.name not in found or family.name.endswith(each.name.removesuffix("_total"))
            found.setdefault(each.name, []).append((each.labels, each.value))
    return found


def test_a_parser_reads_all_values_of_a_run() -> None:
    node = NodeMetrics(1, "gpu1", STARTED)
    node.add([sample(value=50.0, gpus=1), sample(value=50.0, gpus=1)])
    numbers = {"start_time_seconds": 1000.0, "update_time_seconds": 1010.5, "attempt": 2}
    run = of_run("running", {**numbers, "restarts_total": 1, "nodes": 0, "workers": 16}, "0.1")
    written = text("job7", [*run, *node.values()])
    golden.check("metrics", {"a run of one node": written})
    absent = {f"ddplaunch_run_{name}" for name in ("exit_code", "end_time_seconds", "limit_time_seconds")}
    absent |= {f"ddplaunch_run_{name}" for name in ("checkpoint_time_seconds", "checkpoint_step", "goodput_ratio")}
    absent |= {"ddplaunch_run_lost_work_seconds_total"}
    known = {each.name for each in METRICS} - absent
    assert parsed(written).keys() == known


def test_what_is_not_known_is_left_out() -> None:
    node = NodeMetrics(1, "gpu1", STARTED)
    ended = {"w.cpu": (1.0, None), "w.rss": (5.0, None), "w.quiet": (None, None), "g.util": (None,)}
    node.add([replace(sample(), values=ended, throttle=(None,))])
    found = parsed(text("job7", node.values()))
    assert found["ddplaunch_worker_running"] == [(RANK_8, 1), (RANK_9, 0)]
    assert found["ddplaunch_worker_resident_memory_bytes"] == [(RANK_8, 5)]
    assert not {name for name in found if "output" in name or "gpu_throttled" in name or "gpu_util" in name}


def test_labels_are_escaped() -> None:
    name = 'a "b"\\n\n c\\'
    node = NodeMetrics(0, name, STARTED)
    found = parsed(text(name, node.values()))
    ((labels, _),) = found["ddplaunch_node_memory_bytes"]
    assert (labels["run_id"], labels["host"]) == (name, name)


class Watched:
    """A MetricsWatch of one node, at a time that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.now, self.path = time.monotonic(), path
        monkeypatch.setattr(metrics.time, "monotonic", lambda: self.now)
        self.shown: list[str] = []
        nodes = SimpleNamespace(all=[SimpleNamespace(host="gpu0"), SimpleNamespace(host="gpu1")])
        run: Any = SimpleNamespace(
            config=launch_config(script="x.py", metrics_file=str(path)),
            participants=SimpleNamespace(nodes=nodes, indices=[1]),
            messages=SimpleNamespace(run_id="job7", show=lambda line, _: self.shown.append(line)),
        )
        self.watch = MetricsWatch(run)

    def go_on(self) -> None:
        """Until the file has been written, or could not be."""
        self.now = self.watch.run_due(self.now)
        self.watch.run_due(self.now)
        assert self.watch._writer
        self.watch._writer.join()

    def found(self) -> Any:
        return parsed(self.path.read_text())


def test_the_file_follows_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watched = Watched(monkeypatch, tmp_path / "run.prom")
    watched.go_on()
    assert watched.found()["ddplaunch_run_state"][0] == ({**RUN, "state": "starting"}, 1)
    started = AttemptStarted(attempt=0, world_size=16, pids=(5,), node_rank=1, nnodes=2, first_rank=8)
    result = AttemptResult(
        attempt=0, outcome="failed", exits=(), duration_s=1.0, attempt_follows=True, restart_follows=True
    )
    for event in (started, STARTED, UsageSampled(0, (sample(),)), AttemptEnded(result), AttemptEnded(result)):
        watched.watch.on_event(1, event)
    watched.go_on()
    found = watched.found()
    assert found["ddplaunch_run_restarts_total"] == [(RUN, 1)]
    assert found["ddplaunch_run_workers"] == [(RUN, 16)]
    again = UsageStarted(**{**vars(STARTED), "attempt": 1})
    for event in (again, UsageSampled(1, (sample(),)), UsageSampled(0, (sample(),))):
        watched.watch.on_event(1, event)
    watched.watch.on_event(0, replace(started, attempt=1, world_size=8))
    watched.watch.on_event(1, started)  # The other node has overtaken it.
    watched.go_on()
    assert watched.found()["ddplaunch_run_workers"] == [(RUN, 8)]
    assert watched.found()["ddplaunch_worker_output_lines_total"][0] == (RANK_8, 4), "counters go on after a restart"
    watched.watch.add_to_result(RunResult("job7", 7, "succeeded", 1.0))
    found = watched.found()
    assert found["ddplaunch_run_exit_code"] == [(RUN, 7)]
    assert not {name for name in found if not name.startswith("ddplaunch_run_")}
    assert [path.name for path in tmp_path.iterdir()] == ["run.prom"]
    os.umask(umask := os.umask(0))
    assert watched.path.stat().st_mode & 0o777 == 0o666 & ~umask, "others may read it"


def test_a_disk_that_fails_later_is_one_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watched = Watched(monkeypatch, tmp_path / "gone" / "run.prom")
    for _ in range(3):
        watched.go_on()
        watched.now += PERIOD_S
    watched.watch.add_to_result(RunResult("job7", 0, "succeeded", 1.0))
    assert len(watched.shown) == 1
    assert watched.shown[0].endswith("No such file or directory; the job goes on")


def test_a_slow_disk_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watched = Watched(monkeypatch, tmp_path / "run.prom")
    watched.go_on()
    watched.watch._writer = SimpleNamespace(is_alive=lambda: True, join=lambda _: None)  # type: ignore[assignment]
    (tmp_path / "run.prom").unlink()
    watched.now += PERIOD_S
    assert watched.watch.run_due(watched.now) == watched.now + PERIOD_S
    watched.watch.add_to_result(RunResult("job7", 0, "succeeded", 1.0))
    assert not list(tmp_path.iterdir())


def checked(path: Path) -> None:
    prepare(launch_config(script="x.py", metrics_file=str(path)), None)


@pytest.mark.parametrize("name", ["none/run.prom", ".", "pipe"])
def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError) as refused:
        checked(tmp_path / name)
    assert refused.value.exit_code == USAGE
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_link_in_place_of_the_part_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """node_exporter's folder may be writable for others, who would have to guess a random name."""
    mine, link = tmp_path / "mine", tmp_path / f".run.prom.{threading.get_native_id()}.00000000.part"
    mine.write_text("precious")
    monkeypatch.setattr(os, "urandom", bytes)
    link.symlink_to(mine)
    for use in (checked, lambda path: kept_files.write_whole(path, "x")):
        with pytest.raises((OSError, OptionError), match="exists"):
            use(tmp_path / "run.prom")
        assert mine.read_text() == "precious"
    link.unlink()
    checked(tmp_path / "run.prom")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]
