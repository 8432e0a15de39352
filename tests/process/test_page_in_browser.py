"""The page of a run in a real browser: what is where, the keyboard, no error, no request. Needs Chromium."""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.features.page import serve
from ddplaunch.features.page.make import make
from tests.support import chromium, run_folders
from tests.support.chromium import Chromium
from tests.support.processes import wait_until
from tests.support.run_folders import with_logs

DATA = Path(__file__).parent / "data"
EVIL = "</script><script>console.error(1)</script><img src='http://127.0.0.1:9/x' onerror='console.error(2)'>"

OVERLAPS = (DATA / "overlaps.js").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    if chromium.program() is None:
        pytest.skip("there is no Chromium")
    with Chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of pages: of a small run, of one with 40 nodes, of hostile text, and of an empty folder."""
    base = tmp_path_factory.mktemp("pages")
    folders = {
        "small": run_folders.write(base / "small", lines=60),
        "large": run_folders.write(base / "large", nodes=40, hours=24, lines=20),
        "evil": run_folders.write(base / "evil", message=EVIL, lines=5),
    }
    (base / "empty").mkdir()
    folders["empty"] = base / "empty"
    for name in ("hang.txt", "report.txt"):
        (base / "evil" / name).write_text(EVIL)
    folders["launchers"] = base / "launchers"
    for name in ("constructor", "a\"'<img src=x onerror=console.error(3)>"):
        run_folders.write(base / "launchers" / name, lines=5, message=EVIL)
    (base / "launchers" / ".ddplaunch-nodes").touch()
    return {name: f"file://{make(folder)}" for name, folder in folders.items()}


INDEX = [
    (f"{name}/", name, "2026-11-22 08:33", "1h00m", result, f"ddplaunch --hosts 'gpu[1-9]' {script} --lr 1e-3", cause)
    for name, script, result, cause in (
        ("20261122-083320-a1b2c3", "train.py", "running", ""),
        ("20261122-083320-b1b2c3", "eval.py", "exit 0", ""),
        ("x" * 128, "t" * 300, "exit 1", f"rank 3 on gpu1: {'KeyError' * 40}"),
    )
]


@pytest.mark.parametrize("width", [1280, 400])
def test_the_list_of_runs_fits_and_can_be_filtered(browser: Chromium, tmp_path: Path, width: int):
    path = tmp_path / "index.html"
    path.write_text(serve.index(INDEX))
    browser.open(f"file://{path}", width)
    found = browser.evaluate(OVERLAPS)
    assert (found["bad"], found["width"] <= width) == ([], True)
    inside = "[...document.querySelectorAll('.scroll')].every((each) => each.scrollWidth <= each.clientWidth)"
    assert width > 400 or browser.evaluate(inside), "nothing must be scrolled aside"
    shown = "[...document.querySelectorAll('.runs tbody tr')].filter((row) => row.checkVisibility()).length"
    assert browser.evaluate(shown) == 3
    for text, count in (("EVAL", 1), ("hosts running", 1), ("nothing", 0), ("", 3)):
        browser.evaluate(f"document.getElementById('filter').value = '{text}'")
        browser.evaluate("document.getElementById('filter').dispatchEvent(new Event('input'))")
        assert browser.evaluate(shown) == count, text
    assert browser.problems == []


def test_without_a_script_the_list_has_no_filter(browser: Chromium, tmp_path: Path):
    (tmp_path / "index.html").write_text(serve.index(INDEX))
    browser.open(f"file://{tmp_path}/index.html", 400, script=False)
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.evaluate("document.querySelector('.filter').hidden")


def test_a_victim_has_another_colour_than_the_culprit(browser: Chromium, tmp_path: Path):
    browser.open(f"file://{make(with_logs(tmp_path))}")
    colour = "getComputedStyle(document.querySelector('.b-{}')).fill"
    assert browser.evaluate(colour.format("failed")) != browser.evaluate(colour.format("victim"))
    browser.evaluate("document.querySelector('#output a[href$=\"stdout.log\"]').click()")
    wait_until(lambda: browser.evaluate("document.body.innerText").strip() == "x", 30)


@pytest.mark.parametrize("name", ["small", "large", "evil", "launchers", "empty"])
def test_there_is_no_error_and_no_request(browser: Chromium, runs: dict[str, str], name: str):
    browser.open(runs[name])
    choose = "each.selected = true; each.parentElement.dispatchEvent(new Event('change'))"
    browser.evaluate(f"document.querySelectorAll('#node option').forEach((each) => {{ {choose} }})")
    assert browser.evaluate("document.querySelectorAll('h1').length") == 1
    assert browser.problems == []
    assert browser.requests == [runs[name]]


def test_the_policy_of_the_page_forbids_requests(browser: Chromium, runs: dict[str, str]):
    browser.open(runs["small"])
    blocked = """new Promise((resolve) => {
        document.addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
        new Image().src = "http://127.0.0.1:9/x";
    })"""
    assert browser.evaluate(blocked) == "img-src"


@pytest.mark.parametrize(
    ("name", "width", "script"),
    [
        *((name, width, True) for name in ("small", "large", "evil", "empty") for width in (1280, 400)),
        *((name, 400, False) for name in ("large", "evil")),
    ],
)
def test_no_texts_overlap(browser: Chromium, runs: dict[str, str], name: str, width: int, script: bool):
    browser.open(runs[name], width, script=script)
    found = browser.evaluate(OVERLAPS)
    assert found["bad"] == []
    assert found["texts"] > 10
    assert found["width"] <= width


MARKS = """[...document.querySelectorAll(".mark")].map((mark) => {
    const plot = mark.closest(".plot").getBoundingClientRect();
    const box = mark.querySelector(".hit").getBoundingClientRect();
    const x = ((box.left + box.right) / 2 - plot.left) / plot.width;
    return { x, kind: mark.getAttribute("class").split("m-")[1], shown: mark.style.display !== "none" };
})"""


@pytest.mark.parametrize("width", [1280, 400])
def test_the_marks_are_where_the_data_says(browser: Chromium, runs: dict[str, str], width: int):
    browser.open(runs["small"], width)
    marks = {mark["kind"]: mark["x"] for mark in browser.evaluate(MARKS)}
    lost, end = 0.4 * 3600, 3600
    for kind, at in (("failed", end - 2), ("lost", lost + 1), ("health", lost), ("joined", lost + 30), ("end", end)):
        assert marks[kind] == pytest.approx(at / 3600, abs=0.004), kind


def test_after_a_zoom_they_still_are(browser: Chromium, runs: dict[str, str]):
    browser.open(runs["small"])
    browser.evaluate("document.querySelector('[data-zoom=in]').click()")
    marks = {mark["kind"]: mark for mark in browser.evaluate(MARKS)}
    assert marks["lost"]["x"] == pytest.approx(((0.4 * 3600 + 1) / 3600 - 0.25) / 0.5, abs=0.004)
    assert not marks["failed"]["shown"]
    assert browser.evaluate(OVERLAPS)["bad"] == []
    assert view(browser) == [250, 500]
    browser.evaluate("document.querySelector('[data-zoom=all]').click()")
    assert view(browser) == [0, 1000]


def view(browser: Chromium) -> list[float]:
    """What the axis shows, in thousandths of the run."""
    return browser.evaluate("(({ x, width }) => [x, width])(document.querySelector('svg.view').viewBox.baseVal)")


def test_marks_do_not_cover_each_other(browser: Chromium, runs: dict[str, str]):
    for width in (1280, 400):
        browser.open(runs["small"], width)
        boxes = browser.evaluate(
            "[...document.querySelectorAll('.mark .hit')].map((hit) => hit.getBoundingClientRect().toJSON())"
        )
        for index, one in enumerate(boxes):
            for other in boxes[index + 1 :]:
                is_apart = abs(one["x"] - other["x"]) >= 17 or abs(one["y"] - other["y"]) >= 17
                assert is_apart, (one, other)


def test_the_keyboard_goes_from_mark_to_mark_and_to_its_text(browser: Chromium, runs: dict[str, str]):
    browser.open(runs["small"])
    browser.evaluate("document.querySelector('.mark').focus()")
    label = "document.activeElement.getAttribute('aria-label')"
    first = browser.evaluate(label)
    browser.press("ArrowRight")
    second = browser.evaluate(label)
    assert second != first
    browser.press("ArrowLeft")
    assert browser.evaluate(label) == first
    browser.press("Enter")
    text = "new Promise((resolve) => setTimeout(() => resolve([location.hash, document.activeElement.innerText]), 50))"
    anchor, row = browser.evaluate(text)
    assert anchor.startswith("#e")
    assert first.partition(": ")[2] in row


def test_the_keyboard_zooms(browser: Chromium, runs: dict[str, str]):
    browser.open(runs["small"])
    browser.evaluate("document.querySelector('.strip').focus()")
    browser.press("+")
    assert view(browser) == [250, 500]
    browser.press("ArrowRight")
    assert view(browser) == [375, 500]
    labels = browser.evaluate(
        "[...document.querySelectorAll('figure:first-child .axis text')].map((each) => each.textContent)"
    )
    assert labels[0] == "25 min"  # The axes of the charts follow.
    browser.press("-")
    assert view(browser) == [0, 1000]
    browser.press("+")
    browser.press("0")
    assert view(browser) == [0, 1000]


def test_everything_that_can_be_used_can_be_reached_by_tab(browser: Chromium, runs: dict[str, str]):
    browser.open(runs["small"])
    reached = []
    for _ in range(40):
        browser.press("Tab")
        reached.append(browser.evaluate("document.activeElement.tagName + '.' + document.activeElement.className"))
    for name in ("BUTTON", "A.skip", "DIV.strip", "DIV.scroll", "SUMMARY", "PRE", "SELECT"):
        assert any(each.upper().startswith(name.upper()) for each in reached), (name, reached)
    assert sum(each.startswith("a.[object") for each in reached) >= 7, reached  # The marks.


def test_the_pointer_reads_values_and_drags_to_zoom(browser: Chromium, runs: dict[str, str]):
    browser.open(runs["small"])
    box = browser.evaluate("document.querySelector('.rows').getBoundingClientRect().toJSON()")
    y = box["y"] + box["height"] / 2

    def mouse(kind: str, share: float, **more: Any) -> None:
        x = box["x"] + box["width"] * share
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    mouse("mouseMoved", 0.2)
    assert browser.evaluate("document.getElementById('at').textContent").startswith("12 min (")
    assert "attempt 0" in browser.evaluate("document.getElementById('at').textContent")
    read = browser.evaluate("document.querySelector('.read').textContent")
    assert re.search(r" \(3.* GPU 3 of gpu1 to 9", read)  # The smallest value, and whose it is.
    mouse("mousePressed", 0.2, button="left", clickCount=1)
    mouse("mouseMoved", 0.7, button="left")
    mouse("mouseReleased", 0.7, button="left", clickCount=1)
    assert view(browser) == pytest.approx([200, 500], abs=2)


def test_a_node_of_many_can_be_chosen(browser: Chromium, runs: dict[str, str]):
    browser.open(runs["large"])
    options = browser.evaluate("[...document.querySelectorAll('#node option')].map((each) => each.value)")
    assert len(options) == 42
    browser.evaluate("document.getElementById('node').value = 'gpu7'")
    browser.evaluate("document.getElementById('node').dispatchEvent(new Event('change'))")
    drawn = browser.evaluate("document.querySelector('.chosen .line').getAttribute('d')")
    assert drawn.count("L") > 50
    assert "NaN" not in drawn


def test_it_follows_the_light_or_dark_setting(browser: Chromium, runs: dict[str, str]):
    colours = set()
    for dark in (False, True):
        browser.open(runs["small"], dark=dark)
        colours.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2


CONTRAST = (DATA / "contrast.js").read_text()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_has_the_contrast_that_wcag_asks_for(browser: Chromium, runs: dict[str, str], dark: bool):
    browser.open(runs["small"], dark=dark)
    assert browser.evaluate(CONTRAST) == []


def test_a_page_of_a_live_run_keeps_its_zoom_when_it_is_loaded_again(browser: Chromium, runs: dict[str, str]):
    browser.open(runs["small"])
    browser.evaluate("document.querySelector('[data-zoom=all]').click()")
    browser.evaluate("document.querySelector('[data-zoom=in]').click()")
    browser.open(runs["small"])
    assert view(browser) == [250, 500]
    browser.evaluate("document.querySelector('[data-zoom=all]').click()")


def test_the_data_are_those_of_the_run(browser: Chromium, runs: dict[str, str]):
    browser.open(runs["small"])
    data = json.loads(browser.evaluate("document.getElementById('data').textContent"))
    assert data["length"] == pytest.approx(3600, abs=1)
    assert len(data["charts"][0]["mid"]) == 240
    assert Path(runs["small"].removeprefix("file://")).is_file()


def test_links_lead_to_log_files_whatever_their_names_are(browser: Chromium, tmp_path: Path):
    folder = run_folders.write(tmp_path / "evil", message=EVIL, lines=5)
    (folder / "console.log").write_text(f"\x1b]8;;javascript:console.error(4)\x07{EVIL}\n")
    hosts = ["javascript:console.error(5)", "'\"><img src=x onerror=console.error(6)>", "%2e%2e", "#a?b"]
    started = {"t": 1, "event": "attempt_started", "attempt": 9, "workers": 1}
    with (folder / "events.jsonl").open("a") as file:
        for rank, host in enumerate(hosts):
            file.write(json.dumps({**started, "first_rank": rank, "host": host}) + "\n")
            (folder / host / "attempt_9" / "0").mkdir(parents=True)
            (folder / host / "attempt_9" / "0" / "stdout.log").write_text(EVIL)
    links = "[...document.querySelectorAll('#output a[href$=\"stdout.log\"]')]"
    browser.open(f"file://{make(folder)}")
    addresses = browser.evaluate(f"{links}.map((each) => each.href)")
    assert (browser.problems, len(browser.requests)) == ([], 1)
    ticks = browser.evaluate("document.querySelector('.axis').querySelectorAll('text').length")
    assert 2 < ticks < 30, "an event is of 1970"
    paths = [Path(urllib.parse.unquote(urllib.parse.urlsplit(address).path)) for address in addresses]
    assert [path.parent.parent.parent.name for path in paths] == hosts
    assert {path.read_text() for path in paths} == {EVIL}
