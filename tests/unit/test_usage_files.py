"""The files of usage samples: their format, their size, and disks that take no more."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.features.gpus.records import Gpu
from ddplaunch.features.usage import usage_files
from ddplaunch.features.usage.records import UsageSampled, UsageStarted
from ddplaunch.features.usage.usage_files import NodeFile, Row, UsageFiles, number, row, thinned
from ddplaunch.system.files import kept_files
from tests.support import golden
from tests.support.configs import launch_config
from tests.support.usage import sample
from tests.support.watches import run_services

NOW = 1_800_000_000.0
CONFIG = launch_config(script="x.py")
NODES: Any = SimpleNamespace(all=[None, SimpleNamespace(host="gpu1")])


def test_numbers_are_short_and_json() -> None:
    golden.check_answers("short_numbers", lambda text: number(float(text.split()[0]), int(text.split()[1])))


def test_a_line_has_the_names_of_the_format() -> None:
    line = json.loads(row(0, NOW, sample(gpus=1)).line)
    assert (line["t"], line["s"], line.keys()) == (NOW, 2.0, {"t", "s", "n", "w", "g"})
    assert line["n"].keys() == {"cpu", "mem", "disk", "rx", "tx"}
    assert line["w"].keys() == {"cpu", "rss", "rd", "wr", "quiet", "lines"}
    assert line["g"] == {"util": [1], "mem": [1], "power": [1], "temp": [1], "throttle": [None]}
    assert "g" not in json.loads(row(0, NOW, sample()).line)


@pytest.mark.parametrize(("values", "parts"), [({}, {}), ({"n.cpu": (1.0, 2.0), "n.mem": ()}, {"cpu": 1, "mem": None})])
def test_what_no_agent_of_ours_sends_is_a_line_all_the_same(values: Any, parts: Any) -> None:
    each = row(0, NOW, replace(sample(), values=values))
    assert json.loads(each.line).get("n", {}) == parts
    assert thinned([each, each], NOW + 1e6)


def rows(start: float, count: int, step: float = 2.0, attempt: int = 0) -> list[Row]:
    return [row(attempt, start + step * at, sample(span_s=step)) for at in range(1, count + 1)]


def written(folder: Path) -> NodeFile:
    """A file with one sample."""
    file = NodeFile("node_0.jsonl")
    file.head = '{"schema":1}'
    file.add(rows(NOW, 1))
    file.flush(folder, NOW)
    return file


def test_older_samples_are_fewer_and_cover_the_same_time() -> None:
    found = thinned(rows(NOW - 7200, 3600), NOW)
    assert sum(each.s for each in found) == 7200
    assert {each.s for each in found if each.t > NOW - 170} == {2.0}
    assert all(each.s == 30.0 for each in found if NOW - 2900 < each.t < NOW - 220)
    assert all(each.s == 600.0 for each in found if NOW - 6500 < each.t < NOW - 4300)
    assert thinned(found, NOW) == found
    assert [each.t for each in found] == sorted(each.t for each in found)


def test_attempts_are_not_mixed() -> None:
    both = [*rows(NOW - 610, 2), *rows(NOW - 606, 2, attempt=1)]
    assert [(each.attempt, each.s) for each in thinned(both, NOW)] == [(0, 4.0), (1, 4.0)]


def test_a_reason_stays_when_samples_are_merged() -> None:
    throttled = sample(gpus=1)
    hot = row(0, NOW - 600, replace(throttled, throttle=("x" * 500,)))
    (merged,) = thinned([hot, row(0, NOW - 599, throttled)], NOW)
    assert json.loads(merged.line)["g"]["throttle"] == ["x" * 80]


def test_512_ranks_take_less_than_20_mb_after_a_day() -> None:
    """Of 64 nodes with 8 workers and 8 GPUs each; one stands for all. The last hours of the day are enough."""
    values = random.Random(1)
    file = NodeFile("node_0.jsonl")
    for at in range(0, 7200, 2):
        value = sample(value=values.random() * 1e5, workers=8, gpus=8)
        file.rows.append(row(0, NOW + at, value))
        if at % 120 == 0:
            file.rows = thinned(file.rows, NOW + at)
    rest = 22 * 6 * len(file.rows[0].line)
    assert 64 * (len(file.text()) + rest) < 20e6


def test_a_file_is_appended_to_and_then_whole_again(tmp_path: Path) -> None:
    file = NodeFile("node_3.jsonl")
    file.head = '{"schema":1}'
    file.add([Row(0, NOW, 0.0, '{"attempt":0}')])
    file.flush(tmp_path, NOW)
    file.add(rows(NOW, 3))
    file.flush(tmp_path, NOW + 10)
    path = tmp_path / "samples/node_3.jsonl"
    first = path.read_text().splitlines()
    assert first[:2] == ['{"schema":1}', '{"attempt":0}']
    assert len(first) == 5
    file.flush(tmp_path, NOW + 1000)
    assert len(path.read_text().splitlines()) == 3
    assert oct(path.stat().st_mode & 0o777) == "0o600"


def test_a_full_disk_costs_samples_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path)
    file.add(rows(NOW + 2, 1))
    write = os.write
    monkeypatch.setattr(usage_files.os, "write", lambda fd, data: write(fd, data[:20]))
    file.flush(tmp_path, NOW + 10)
    monkeypatch.undo()
    path = tmp_path / "samples/node_0.jsonl"
    assert not path.read_text().endswith("\n")
    file.flush(tmp_path, NOW + 20)
    assert [json.loads(line).get("t") for line in path.read_text().splitlines()] == [None, NOW + 2, NOW + 4]


def test_a_file_is_thinned_after_the_clock_was_set_back(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.add(rows(NOW - 9999, 100))
    file.flush(tmp_path, NOW - 9000)
    assert len(file.rows) < 12
    assert json.loads(file.text().splitlines()[-1])["t"] == NOW - 9799, "the newest is the last line"


def test_a_run_that_restarts_all_day_keeps_its_newest_attempts(tmp_path: Path) -> None:
    file = NodeFile("node_0.jsonl")
    file.head = '{"schema":1}'
    for attempt in range(3000):
        start = Row(attempt, NOW + attempt, 0.0, f'{{"attempt":{attempt}}}')
        file.add([start, Row(attempt, NOW + attempt + 0.5, 2.0, f'{{"t":{attempt}}}')])
    file.flush(tmp_path, NOW + 3000)
    assert file.text().splitlines()[1:3] == ['{"attempt":1000}', '{"t":1000}']
    assert len(file.rows) == 4000
    file.add([Row(2999, NOW + 3001, 2.0, '{"t":3001}')])
    file.flush(tmp_path, NOW + 9000)
    assert file.text().splitlines()[1:3] == ['{"attempt":1000}', '{"t":1000}']
    assert len(file.rows) == 4001


def test_a_disk_keeps_room_for_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_files, "_KEPT_FREE_BYTES", 1 << 60)
    file = written(tmp_path)
    assert not list(tmp_path.rglob("*.*"))
    monkeypatch.undo()
    file.flush(tmp_path, NOW + 1)
    assert len((tmp_path / "samples/node_0.jsonl").read_text().splitlines()) == 2


def test_a_folder_that_moves_gets_a_whole_file(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.add(rows(NOW + 2, 1))
    (tmp_path / "moved").mkdir()
    file.flush(tmp_path / "moved", NOW + 10)
    assert len((tmp_path / "moved/samples/node_0.jsonl").read_text().splitlines()) == 3


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    files = UsageFiles(run_services(CONFIG, folder=tmp_path / "none", nodes=NODES))
    files.on_event(1, UsageStarted(attempt=0, at_s=1.0, ranks=(8,)))
    files.close()
    assert not any(tmp_path.iterdir())


def test_records_of_agents_become_lines(tmp_path: Path) -> None:
    watch = UsageFiles(run_services(CONFIG, folder=tmp_path, nodes=NODES))
    gpu = Gpu(index=6, uuid="GPU-6", name="H100", memory_bytes=80)
    watch.on_event(1, UsageSampled(0, (sample(),)))
    watch.on_event(1, UsageStarted(attempt=0, at_s=1.0, ranks=(8,), gpus=(gpu,), gpu_of_worker=(0,), cpus=4))
    watch.on_event(1, UsageSampled(1, (sample(),)))
    watch.on_event(1, UsageSampled(0, (sample(2.0, workers=1, gpus=1),)))
    watch.close()
    head, start, only = map(json.loads, (tmp_path / "samples/node_1.jsonl").read_text().splitlines())
    assert head == {
        "schema": 1,
        "node": 1,
        "host": "gpu1",
        "cpus": 4,
        "memory": 0,
        "gpus": [{"index": 6, "uuid": "GPU-6", "name": "H100", "memory": 80}],
    }
    assert (start["attempt"], start["ranks"], start["gpu"]) == (0, [8], [0])
    assert only["w"]["cpu"] == [1]
