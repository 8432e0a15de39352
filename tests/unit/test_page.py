"""The page of a run: what it says, that no file of a run folder can break it, and that no text of a worker gets out."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import stat
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddplaunch.features.page import charts, reading, render, usage
from ddplaunch.features.page.charts import strip, ticks
from ddplaunch.features.page.make import make
from ddplaunch.features.page.reading import block, line
from ddplaunch.features.page.story import Span, Story, _waited_s, story, time_uses
from tests.support import golden, run_folders

NOW = run_folders.START + 4000
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31mred\x1b[0m\x00\u202e'\"&"


BLOCKS = {"h1", "h2", "h3", "p", "pre", "div", "li", "tr", "summary", "figcaption", "svg"}
"""What begins on a line of its own."""


class Parsed(HTMLParser):
    """A page: its tags with their attributes, and its text outside of style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        self.text.append("\n" if tag in BLOCKS else " ")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & {*self._open}:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(self.lines)

    @property
    def lines(self) -> list[str]:
        return [line for text in "".join(self.text).split("\n") if (line := " ".join(text.split()))]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two nodes that loses one, gets a spare, and fails."""
    return run_folders.write(tmp_path_factory.mktemp("run"), lines=60)


@pytest.fixture(scope="module")
def page(folder: Path) -> Parsed:
    return Parsed(render.page(folder, NOW))


# What it says.


def test_the_page_of_a_run_and_of_folders_where_something_is_missing(folder: Path, tmp_path: Path):
    """The page of a whole run, and what the pages of others have that it has not."""
    empty, older, killed, unsampled = (tmp_path / name for name in ("empty", "older", "killed", "unsampled"))
    for each in (empty, older, killed / "failed" / "rank_3"):
        each.mkdir(parents=True)
    for name in ("report.json", "run.json"):
        shutil.copy(folder / name, older)
    (killed / "failed" / "rank_3" / "last_lines.log").write_text("the last line\n")
    message = {"message": "KeyError: 'lr'", "extraInfo": {"py_callstack": "Traceback"}}
    (killed / "failed" / "rank_3" / "error.json").write_text(json.dumps({"message": message}))
    shutil.copytree(folder, unsampled)
    (unsampled / "samples" / "node_1.jsonl").unlink()
    unseen = run_folders.write(tmp_path / "unseen", lines=60, has_samples=False)
    succeeded = run_folders.write(tmp_path / "succeeded", lines=60, outcome="succeeded")
    whole = lines_of(folder)
    others = {"an empty folder": empty, "a run of an older version": older, "a run whose launcher was killed": killed}
    others |= {"samples of a node are missing": unsampled, "no samples": unseen, "success": succeeded}
    pages = {name: [line for line in lines_of(each) if line not in whole] for name, each in others.items()}
    golden.check("page", {name: "\n".join(lines) for name, lines in {"a run that failed": whole, **pages}.items()})


def lines_of(folder: Path) -> list[str]:
    return [line.replace(str(folder), "<folder>") for line in Parsed(render.page(folder, NOW)).lines]


def test_the_bars_of_ranks_end_as_they_did(folder: Path):
    told = story(reading.read(folder), NOW)
    ends = {(bar.attempt, host): bar.end for host, bars in told.nodes.items() for bar in bars if bar.rank != 3}
    lost = run_folders.START + 0.4 * 3600
    assert ends == {(0, "gpu1"): "stopped", (0, "gpu2"): "lost", (1, "gpu1"): "stopped", (1, "gpu3"): "stopped"}
    assert [bar.end for bars in told.nodes.values() for bar in bars if bar.rank == 3] == ["stopped", "failed"]
    assert told.nodes["gpu2"][0].span.end == pytest.approx(lost + 1)
    assert [round(each.start - run_folders.START) for each in told.attempts] == [45, 1500]


def test_where_the_time_went():
    whole, attempts = Span(0, 100), [Span(30, 60), Span(70, 95)]
    found = time_uses(Story(whole, 10, 15.0, attempts, [Span(40, 45), Span(58, 64)], {}, []))
    assert found == {
        "connect": 10,
        "import": 15,
        "rendezvous": 5,
        "run": 48,
        "silent": 7,
        "between attempts": 10,
        "end": 5,
    }
    assert sum(found.values()) == whole.length


@pytest.mark.parametrize(("taken_s", "ready_s", "found"), [(8.0, 9.0, [8, 1, 1]), (None, None, [10])])
def test_the_wait_for_gpus_is_no_part_of_the_start(taken_s: float | None, ready_s: float | None, found: list[float]):
    events = [{"event": "gpus_awaited", "t": 0.0}, *([{"event": "gpus_taken", "t": taken_s}] if taken_s else [])]
    waited_s = _waited_s(events, 10.0)
    assert [*time_uses(Story(Span(0, 10), ready_s, 0.0, [], [], {}, [], waited_s=waited_s)).values()] == found


def test_a_run_that_never_started_a_worker_was_all_start():
    assert [*time_uses(Story(Span(0, 10), 4.0, 0.0, [], [], {}, []))] == ["connect", "rendezvous"]


def test_ticks_are_round_and_few():
    for length_s in (0.5, 3, 61, 3600, 86400, 30 * 86400, 20000 * 86400):
        found = ticks(Span(1000, 1000 + length_s))
        assert 1 <= len(found) <= 8
        assert found[0]["label"] == "0"
        assert found[-1]["x"] > 50 or length_s < 1


def test_nodes_that_did_the_same_share_a_row(tmp_path: Path):
    told = story(reading.read(run_folders.write(tmp_path, nodes=40, has_samples=False)), NOW)
    assert [row["label"] for row in strip(told)["rows"]] == ["gpu1", "gpu40", "gpu41", "gpu[2-39]"]


def test_a_gpu_that_is_unlike_the_others_is_named(folder: Path):
    files = reading.read(folder)
    found = usage.of_run(files.usage, story(files, NOW).whole, 50)
    curve = next(each for each in found.curves if each.quantity.title == "GPU utilisation")
    assert [(each.name, each.mean // 10, each.usual // 10) for each in curve.outliers] == [("GPU 3 of gpu1", 3, 9)]
    assert found.damaged == 0
    assert {name: sum(map(bool, band)) for name, band in curve.nodes.items()} == {
        "gpu1": 50,
        "gpu2": 21,
        "gpu3": 30,
    }
    chart = charts.chart(curve, has_nodes=True)
    assert [series["name"] for series in chart["series"]] == ["gpu1", "gpu2", "gpu3"]


def test_gpus_with_lowered_clocks_are_counted(folder: Path):
    files = reading.read(folder)
    (lowered,) = usage.of_run(files.usage, story(files, NOW).whole, 10).lowered
    assert lowered.counts == [0] * 5 + [1] * 5


def test_of_many_values_that_differ_by_chance_none_is_an_outlier(tmp_path: Path):
    rng = random.Random(3)
    files = []
    for node in range(64):
        rows = [{"host": f"n{node}"}, {"attempt": 0, "ranks": list(range(64))}]
        rows += [{"t": t, "s": 1, "w": {"rd": [rng.gauss(1e7, 2e6) for _ in range(64)]}} for t in range(4)]
        files.append(tmp_path / f"node_{node}.jsonl")
        files[-1].write_text("\n".join(map(json.dumps, rows)))
    (curve,) = usage.of_run(files, Span(0, 4), 1).curves
    assert curve.outliers == []
    assert curve.low_of[0] != curve.high_of[0]
    assert re.fullmatch(r"rank \d+ on n\d+", curve.low_of[0])


def test_unknown_values_are_gaps(tmp_path: Path):
    file = tmp_path / "node_0.jsonl"
    rows: list[dict[str, Any]] = [{"schema": 1, "node": 0, "host": "a"}, {"attempt": 0, "ranks": [0, 1, 2]}]
    for number, cpu in enumerate(
        ([1, 2, 3], [None, None, None], [None, 5, "x"], 7, {"a": 1}, [1e999, float("nan"), 4])
    ):
        rows.append({"t": number + 1, "s": 1, "w": {"cpu": cpu}})
    file.write_text("\n".join(map(json.dumps, rows)))
    (curve,) = usage.of_run([file], Span(0, 6), 6).curves
    assert [point and point.mid for point in curve.all][::5] == [2, 4]
    assert [point and point.low for point in curve.all][2:4] == [5, 5]


def test_all_is_in_one_file_that_asks_for_nothing(folder: Path):
    text = render.page(folder, NOW)
    policy = next(attrs["content"] for attrs in Parsed(text).all("meta") if "http-equiv" in attrs)
    assert str(policy).startswith("default-src 'none'; style-src 'sha256-")
    assert not re.findall(r"\b(?:src|srcset|action|poster|background)=", text)
    links = {address for address in re.findall(r'href="([^"]*)', text) if not address.startswith("#")}
    assert links == {"report.json", "events.jsonl"}, "relative, in the run folder, and followed only by a click"
    assert not re.findall(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)


def test_the_page_is_the_users_alone_and_replaced_whole(tmp_path: Path):
    run_folders.write(tmp_path, lines=5)
    (tmp_path / "run.html").write_text("old")
    made = make(tmp_path)
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert made.read_text().endswith("</html>\n") or made.read_text().rstrip().endswith("</html>")
    assert not list(tmp_path.glob(".run.html*"))


# Text of workers.


def everywhere(body: Any, evil: str, keep: frozenset[str], key: str = "") -> Any:
    """``body`` of JSON with ``evil`` in place of each text, except those at the keys ``keep``."""
    if isinstance(body, dict):
        return {name: everywhere(value, evil, keep, name) for name, value in body.items()}
    if isinstance(body, list):
        return [everywhere(value, evil, keep, key) for value in body]
    return evil if isinstance(body, str) and key not in keep else body


@pytest.mark.parametrize("evil", ["\"'><img src=x onerror=x>", EVIL], ids=["short", "long"])  # Some texts are cut.
def test_no_text_of_a_run_becomes_markup(evil: str, tmp_path: Path):
    words = frozenset({"outcome", "start", "end", "node_leaves", "severity", "event", "run_id"})  # Or it is not read.
    run_folders.with_logs(tmp_path)
    for name in ("report.json", "run.json", "events.jsonl", "samples/node_0.jsonl"):
        rows = map(json.loads, (tmp_path / name).read_text().splitlines())
        (tmp_path / name).write_text("".join(f"{json.dumps(everywhere(row, evil, words))}\n" for row in rows))
    for name in ("report.txt", "hang.txt", "console.log"):
        (tmp_path / name).write_bytes(evil.encode() * 10_000 + b"\xff\xfe")
    text = render.page(tmp_path, NOW)
    page = Parsed(text)
    assert page.words.count("<img src=x") > 40
    assert "<img" not in text
    assert "cannot be read" not in text
    assert len(page.all("script")) == 2
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    data = re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert "<" in str(json.loads(data[0])["charts"][0]["nodes"]), "the script gets the text as it is"
    assert not {"\x00", "\x1b", "\u202e"} & set(text)
    assert len(text) < render.MAX_BYTES


def test_long_texts_are_cut_until_the_page_is_small_enough(tmp_path: Path):
    run_folders.write(tmp_path, nodes=3, has_samples=False)
    report = json.loads((tmp_path / "report.json").read_text())
    for worker in report["attempts"][1]["exits"]:
        worker.update(returncode=1, stopped=False, tail=["<é>" * 300] * 200, error={"traceback": "<&\n" * 20_000})
    (tmp_path / "report.json").write_text(json.dumps(report))
    with (tmp_path / "events.jsonl").open("a") as file:
        for number in range(2000):
            event = {
                "t": NOW + number,
                "event": "worker_failed",
                "attempt": number,
                "host": "gpu1",
                "text": "<&>" * 700,
            }
            file.write(json.dumps(event) + "\n")
    for name in ("report.txt", "hang.txt", "hang_2.txt", "hang_3.txt"):
        (tmp_path / name).write_text("<&>\n" * 100_000)
    text = render.page(tmp_path, NOW)
    assert 100_000 < len(text.encode()) < render.MAX_BYTES
    assert "are left out" in text


def test_control_sequences_are_taken_out_and_long_texts_are_cut():
    assert block("\x1b[1;31mred\x1b[0m\r\n\tx\x07") == "red\n\tx\\x07"
    assert line("a\nb\tc") == "a b c"
    assert len(block("y" * 10_000_000)) < 3000
    assert "are left out" in block("z\n" * 100_000, 1000)


def test_the_end_of_the_output_and_links_to_the_logs_that_are_here(tmp_path: Path):
    text = render.page(run_folders.with_logs(tmp_path), NOW)
    page = Parsed(text)
    assert page.words.count("epoch 1 epoch 2: 90 %") == 1
    assert "an early line" not in page.words
    addresses = {each["href"] for each in page.all("a")}
    assert {"console.log", "report.txt", "gpu1/attempt_1/3/stdout.log", "gpu1/attempt_1/4/stdout.log"} <= addresses
    assert all((tmp_path / str(address)).is_file() for address in addresses if not str(address).startswith("#"))
    assert re.search(r"<title>✕ train.py - 2", text)


def test_no_sentence_of_the_failure_stands_there_twice(tmp_path: Path):
    page = Parsed(render.page(run_folders.with_logs(tmp_path), NOW))
    table = page.words.index("since start")
    around = page.words[:table] + page.words[page.words.index("Failure", table) :]
    for text in (
        "rank 3 on gpu1 failed: KeyError",
        "Traceback (most",
        "then ranks 4-7 lost a peer",
        "hint Look there.",
    ):
        assert around.count(text) == 1, text
    assert "failed: rank 3" not in page.words, "nor at the end of the run"


def test_after_the_loss_of_a_node_the_ranks_that_missed_it_are_not_the_cause(tmp_path: Path):
    report = json.loads((run_folders.with_logs(tmp_path) / "report.json").read_text())
    attempt = report["attempts"][1]
    attempt.update(exits=attempt["exits"][4:], reason="gpu3 has not answered for 5 s")
    report.update(first_failure=None, reason=attempt["reason"])
    (tmp_path / "report.json").write_text(json.dumps(report))
    page = Parsed(render.page(tmp_path, NOW))
    assert "failed exit code 1 gpu3 has not answered for 5 s traceback" in page.words


def test_of_many_nodes_one_sample_of_each_step_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(usage, "MAX_WHOLE", 2)
    folder = run_folders.write(tmp_path, nodes=3, lines=40)
    files = reading.read(folder)
    found = usage.of_run(files.usage, story(files, NOW).whole, 10)
    assert not found.damaged
    assert len(found.hosts) == 4
    counts = []
    monkeypatch.setattr(usage._Sums, "add", lambda *_, **__: counts.append(1))
    usage.of_run(files.usage, story(files, NOW).whole, 10)
    assert 0 < len(counts) <= len(files.usage) * 11 * len(usage._DRAWN)
    assert "one sample of each" in Parsed(render.page(folder, NOW)).words


def test_a_report_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    read: list[Path] = []
    report = reading.run_json.report
    monkeypatch.setattr(reading.run_json, "report", lambda path: read.append(path) or report(path))
    make(folder)
    assert read == [folder]


def test_the_story_of_thousands_of_failed_ranks_is_told_in_time(tmp_path: Path):
    """CPU time, which a busy machine does not change: below a second, and 20 s if each looks at all others."""
    report = json.loads((run_folders.with_logs(tmp_path) / "report.json").read_text())
    attempt = report["attempts"][1]
    attempt["exits"] = [{**attempt["exits"][4], "rank": rank} for rank in range(3000)]
    (tmp_path / "report.json").write_text(json.dumps(report))
    files, before_s = reading.read(tmp_path), time.thread_time()
    story(files, NOW)
    assert time.thread_time() - before_s < 5


def test_a_rank_that_has_lost_a_peer_is_not_drawn_as_one_that_has_failed(tmp_path: Path):
    files = reading.read(run_folders.with_logs(tmp_path))
    ends = {bar.rank: bar.end for bar in story(files, NOW).nodes["gpu1"] if bar.attempt == 1}
    assert [ends[rank] for rank in range(8)] == ["stopped"] * 3 + ["failed"] + ["victim"] * 4
    assert "lost a peer, as a consequence" in Parsed(render.page(tmp_path, NOW)).words


# Damaged folders.


FILES = ("run.json", "report.json", "events.jsonl", "samples/node_0.jsonl")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_off_anywhere_still_gives_a_page(folder: Path, tmp_path: Path, name: str):
    size = (folder / name).stat().st_size
    rng = random.Random(7)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for offset in sorted({0, 1, size - 1, *(rng.randrange(size) for _ in range(3))}, reverse=True):
        os.truncate(tmp_path / name, offset)
        page = Parsed(render.page(tmp_path, NOW))
        assert page.tags[-1][0] == "script"
        if offset < size - 1 and name in ("run.json", "report.json"):
            assert f"{name} is damaged" in page.words
        elif (folder / name).read_bytes()[offset - 1 : offset + 1].count(b"\n") == 0 and offset not in (0, size - 1):
            assert "cannot be read" in page.words


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted({"t", "event", "rank", "host"})), inner)
    ),
    max_leaves=6,
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_value_of_a_file_can_break_the_page(folder: Path, tmp_path: Path, data: st.DataObject):
    """Any value may stand at any place of the JSON."""
    name = data.draw(st.sampled_from(FILES))
    lines = (folder / name).read_text().splitlines() if name.endswith("l") else [(folder / name).read_text()]
    index = data.draw(st.integers(0, min(len(lines), 40) - 1))
    body = json.loads(lines[index])
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(list(keys)))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            place[key] = data.draw(_JSON)
            break
        place = place[key]
    for other in FILES[:3]:
        shutil.copy(folder / other, tmp_path / other)
    (tmp_path / "samples").mkdir(exist_ok=True)
    (tmp_path / "samples" / "node_0.jsonl").write_text("")
    lines[index] = json.dumps(body)
    (tmp_path / name).write_text("\n".join(lines[:60]))
    assert render.page(tmp_path, NOW).rstrip().endswith("</html>")
