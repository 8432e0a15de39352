"""The table of --ps RUN_ID, and what it reads of files that are cut off, damaged or written anew."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.features.runs.run_folders import RunFolder
from ddplaunch.features.usage import live
from ddplaunch.features.usage.live import NodeSamples, files
from ddplaunch.system.files import run_folder
from ddplaunch.system.files.run_folder import RunFacts
from tests.support import golden

NOW = 1_800_000_000.0


def node(host: str, *ranks: int, attempt: int = 0, at: float = NOW - 5, **values: Any) -> NodeSamples:
    """A node whose workers all have these values."""
    workers = {"cpu": 50.0, "rss": 2e9, "quiet": 3.0, "lines": 4.0, **values}
    sample = {"t": at, "w": {key: [value] * len(ranks) for key, value in workers.items()}}
    sample["g"] = {"util": [97.0], "mem": [6e10]}
    rows = [0, *[None] * (len(ranks) - 1)]
    start = {"attempt": attempt, "t": at - 10, "ranks": list(ranks), "gpu": rows}
    found = NodeSamples(Path(host))
    found.head, found.start, found.newest = {"host": host}, start, sample
    return found


def test_each_rank_has_a_line_and_ranks_that_do_not_fit_are_summed_up_for_each_node() -> None:
    """States are those of the newest attempt; the title says how old the values are."""
    two = [node("gpu2", 2, 3), node("gpu1", 0, 1, at=NOW - 12)]
    many = [node("gpu1", *range(8)), node("gpu2", *range(8, 16), quiet=90.0)]
    attempts = [node("gpu1", 0), node("gpu2", 1, attempt=2, rss=None), node("gpu3", 2, attempt=2, at=NOW - 60)]
    pages: dict[str, list[str]] = {"no sample": [live.title("job7", 1, [], [], NOW)]}
    for name, nodes, failed in (
        ("two nodes", two, {1}),
        ("large nodes", many, {9}),
        ("attempts", attempts, set[int]()),
    ):
        ranks = live.ranks(nodes, frozenset(failed), NOW)
        pages[name] = [live.title("job7", 63, nodes, ranks, NOW), *live.rank_table(ranks), *live.node_table(ranks)]
    golden.check("live", {name: "\n".join(lines) for name, lines in pages.items()})


LINES = [
    '{"schema":1,"node":0,"host":"gpu1"}',
    '{"attempt":0,"t":1,"ranks":[0],"gpu":[]}',
    '{"t":2,"w":{"cpu":[1]}}',
    '{"t":3,"w":{"cpu":[2]}}',
]


def test_a_file_is_read_on_and_again_if_it_was_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "samples/node_0.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(LINES[:3]) + "\n" + LINES[3][:9])
    known: dict[Path, NodeSamples] = {}
    (found,) = files([tmp_path], known)
    assert (found.head["host"], found.newest["t"]) == ("gpu1", 2)
    path.write_text("\n".join(LINES) + "\n")
    files([tmp_path, tmp_path / "none"], known)
    assert found.newest["t"] == 3
    new = path.with_suffix(".new")
    new.write_text('{"schema":1,"host":"gpu2"}\n{"attempt":1,"ranks":[0]}\n')
    new.replace(path)
    files([tmp_path], known)
    assert (found.head["host"], found.start["attempt"], found.newest) == ("gpu2", 1, {})


@pytest.mark.parametrize("cut", range(0, len("\n".join(LINES)), 7))
def test_a_file_may_end_anywhere(tmp_path: Path, cut: int) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/node_0.jsonl").write_text("\n".join(LINES)[:cut])
    found = files([tmp_path], {})
    ranks = live.ranks(found, frozenset(), NOW)
    assert live.title("job7", 1, found, ranks, NOW)
    assert live.node_table(ranks)
    assert live.rank_table(ranks)


@pytest.mark.parametrize("value", [None, "x", True, {}, [], 1e999, 10**400, -5, [[]], ["x"]])
@pytest.mark.parametrize("key", ["host", "ranks", "gpu", "t", "w", "g", "attempt"])
def test_values_of_any_kind_do_no_harm(tmp_path: Path, key: str, value: object) -> None:
    lines = [{"schema": 1, "host": "a"}, {"attempt": 0, "t": 1, "ranks": [0], "gpu": [0]}, {"t": 2, "w": {"cpu": [1]}}]
    (tmp_path / "samples").mkdir()
    changed = "".join(json.dumps({**line, **({key: value} if key in line else {})}) + "\n" for line in lines)
    (tmp_path / "samples/node_0.jsonl").write_text(changed + "\xff\n[1]\n")
    found = files([tmp_path], {})
    ranks = live.ranks(found, frozenset(), NOW)
    assert live.title("job7", 1, found, ranks, NOW)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    for path in (tmp_path / "samples/node_0.jsonl", tmp_path / "events.jsonl"):
        os.mkfifo(path)
    assert [found.newest for found in files([tmp_path], {})] == [{}]
    assert live._failed([tmp_path], 0) == set()


def test_a_launcher_that_joins_later_is_shown(tmp_path: Path) -> None:
    (tmp_path / run_folder.NODES).touch()
    for rank in (0, 1):
        folder = tmp_path / f"gpu{rank}"
        (folder / "samples").mkdir(parents=True)
        (folder / run_folder.LOCK).touch()
        start = {"attempt": 0, "ranks": [rank]}
        (folder / "samples/node_0.jsonl").write_text(f'{{"schema":1,"host":"gpu{rank}"}}\n{json.dumps(start)}\n')
        if rank == 0:
            table = live._Table(RunFolder("job7", folder, folder, RunFacts()))
        assert len(table.lines(None, None)) == 3 + rank
