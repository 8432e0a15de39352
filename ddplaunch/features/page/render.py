"""Run folder to HTML: gathers the parts of the page, and fills the template. The only importer of jinja2.

The page makes no request, and its Content-Security-Policy allows none: style and script are in it, named by their
hashes. ``autoescape`` is on; what is marked as safe below has only numbers, or is a file of this package.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import time
from collections import Counter
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ddplaunch.cluster.hosts import fold
from ddplaunch.features.page import charts, failures, output, usage
from ddplaunch.features.page.reading import RunFiles, line, read
from ddplaunch.features.page.story import USES, Moment, Story, story, time_uses
from ddplaunch.features.runs import run_json
from ddplaunch.features.runs.run_json import integer
from ddplaunch.protocol.run_result import Versions
from ddplaunch.text import duration, local_time, plural

MAX_BYTES = 1 << 20
_TEMPLATES = Path(__file__).parent / "templates"
_STEPS = ((4, 240), (32, 160), (usage.MAX_WHOLE, 120), (2048, 60), (1 << 30, 30))
"""Steps of time of the curves, for up to so many nodes."""

_DATE = "%Y-%m-%d %H:%M:%S"
_SAMPLED_S = 15.0
"""A node whose workers run for so long has usage samples, also over SSH."""

_LOOKS = {
    "succeeded": ("good", "✓"),
    "failed": ("bad", "✕"),
    "stopped": ("stopped", "■"),
    "running": ("running", "▶"),
    "no result": ("unknown", "?"),
}
"""How a run ended -> class and sign of its badge."""

_NO_RESULT = "its launcher was killed, or the report could not be written"

_MAX_MESSAGES = 200
_MAX_MOMENT, _MAX_LABEL = 600, 160
"""Characters of a text in the list of events, and of that of a mark."""

_MARK_PERCENT, _MAX_LANES = 5.5, 6
_LINES, _MAX_LINES = {"failed": "failure", "lost": "failure", "hang": "hang"}, 40
"""Marks that are vertical lines in the charts, too."""


def page(folder: Path, now_s: float | None = None) -> str:
    """The page of the run in this folder; at most about ``MAX_BYTES``."""
    now_s = time.time() if now_s is None else now_s
    files = read(folder)
    told = story(files, now_s)
    steps = next(steps for nodes, steps in _STEPS if len(files.usage) <= nodes)
    used = usage.of_run(files.usage, told.whole, steps)
    if used.damaged:
        files.missing.append(f"samples: {plural(used.damaged, 'line')} cannot be read.")
    if without := _without_samples(told, used):
        (files.missing if used.hosts else files.notes).append(without)
    if len(files.usage) > usage.MAX_WHOLE and used.hosts:
        files.notes.append(f"Of so many nodes, one sample of each {duration(told.whole.length / steps)} is shown.")
    for has_nodes, share in ((True, 1.0), (True, 0.2), (False, 0.2), (False, 0.03)):
        has_nodes = has_nodes and len(files.usage) <= usage.MAX_NODES_WITH_DATA
        drawn = [charts.chart(curve, has_nodes=has_nodes) for curve in used.curves]
        has_bands = any(len(chart["series"]) > 1 for chart in drawn)
        if used.lowered:
            of_gpus = sum(curve.quantity.part == "g" for curve in used.curves)
            drawn.insert(of_gpus, charts.lowered_chart(used.lowered, told.whole))
        used_part = {"charts": drawn, "has_nodes": has_nodes, "has_bands": has_bands, "has_lowered": bool(used.lowered)}
        text = _filled(files, told, used_part, now_s, share)
        if len(text.encode()) <= MAX_BYTES:
            break
    return text


def _without_samples(told: Story, used: usage.Usage) -> str:
    """Which nodes have no usage samples, though they ran for long enough; empty if all have some."""
    long = [host for host, bars in told.nodes.items() if any(bar.span.length >= _SAMPLED_S for bar in bars)]
    without = [host for host in long if host not in used.hosts]
    if not without:
        return ""
    if used.hosts:
        return f"samples of {fold(without)} are missing: what they used is not known."
    return "There are no usage samples: what this run used is not known."


def _filled(files: RunFiles, told: Story, used_part: dict[str, Any], now_s: float, share: float) -> str:
    """The page. ``used_part``: the charts, and what the template says of them; ``share``: of the usual text lengths."""
    style, script = source("page.css"), source("page.js")
    failed, not_shown = failures.of_run(files, share)
    cause, remarks, sentences = _cause(files, failed), failures.remarks(files), failures.sentences(files)
    ranks, ranks_left_out = output.rank_links(files)
    uses = _time_uses(told)
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            run_id=line((files.report or files.started).run_id or files.folder.name, 128),
            badge=badge(files),
            program=_script(files),
            cause=cause,
            command=_command(files),
            facts=_facts(files, told),
            time_uses=uses,
            goodput=_goodput(uses),
            knows_lost=told.lost_s is not None,
            **_time_axis(told, share),
            **used_part,
            failures=failed,
            failures_left_out=not_shown,
            remarks=remarks,
            sentences=[text for text in sentences if text != cause],
            texts=failures.texts(files, share, with_page=not remarks),
            last_lines=output.last_lines(files, share),
            links=output.run_links(files),
            ranks=ranks,
            ranks_left_out=ranks_left_out,
            are_elsewhere=not ranks and any("folder" in event for event in files.events),
            tables=_tables(files),
            environment=_run_environment(files),
            missing=files.missing,
            notes=files.notes,
            clock="the launcher's clock" if len(files.launchers) == 1 else "each launcher's clock",
            is_live=files.is_live and not files.report,
            made=time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(now_s)),
            policy=policy(style, script),
            style=Markup(style),
            script=Markup(script),
            data=_data(told, used_part["charts"]),
        )
    )


def _time_axis(told: Story, share: float) -> dict[str, Any]:
    marks = _marks(told, share)
    rows = [(_row(index, moment, told, share), moment.kind == "message") for index, moment in enumerate(told.moments)]
    return {
        "strip": charts.strip(told),
        "ticks": charts.ticks(told.whole),
        "marks": marks,
        "lanes": max((mark["lane"] for mark in marks), default=0) + 1,
        "times": _marked_times(told),
        "attempts": len(told.attempts),
        "moments": [row for row, is_message in rows if not is_message],
        "messages": [row for row, is_message in rows if is_message][:_MAX_MESSAGES],
        "left_out": told.left_out,
    }


def environment() -> Environment:
    """The templates, with every text escaped."""
    return Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def source(name: str) -> str:
    """The text of a style or script of this package."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def policy(style: str, script: str) -> str:
    """The Content-Security-Policy of a page with this style and script, and no other."""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _data(told: Story, drawn: list[dict[str, Any]]) -> Markup:
    """What the script needs, in a block that is no script. ``<`` could end it."""
    data = {
        "start": told.whole.start,
        "length": told.whole.length,
        "attempts": [[each.start - told.whole.start, each.end - told.whole.start] for each in told.attempts],
        "charts": [chart["data"] for chart in drawn],
    }
    text = json.dumps(data, separators=(",", ":"))
    return Markup(text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026"))


# The head.


def badge(files: RunFiles) -> dict[str, str]:
    """How the run has ended, or that it goes on: a ``word`` and a ``detail``, and how the word looks."""
    ended = next((event for event in reversed(files.events) if event["event"] == "run_ended"), {})
    outcome, code = run_json.text(ended, "outcome"), integer(ended, "exit_code")
    if files.report:
        outcome, code = files.report.outcome, files.report.exit_code
    detail = f"exit code {code}" if code is not None else ""
    if outcome not in ("succeeded", "failed", "stopped"):
        outcome, detail = ("running", "") if files.is_live else ("no result", _NO_RESULT)
    is_bad = outcome == "succeeded" and code != 0  # Workers that succeeded may leave processes behind.
    kind, sign = _LOOKS["failed" if is_bad else outcome]
    return {"word": outcome, "detail": detail, "kind": kind, "sign": sign}


def _cause(files: RunFiles, failed: list[failures.Failure]) -> str:
    if files.report and files.report.outcome == "succeeded":
        return ""
    if failed and not failed[0].is_victim:
        return failed[0].title
    if files.report and files.report.signal:
        return f"stopped by {line(files.report.signal, 20)}"
    ended = next((event for event in reversed(files.events) if event["event"] == "run_ended"), {})
    reasons = [*failures.sentences(files), line(run_json.text(ended, "text")), *(each.title for each in failed)]
    return next(filter(None, reasons), "")


def _script(files: RunFiles) -> str:
    """The name of the script, without its folders; empty if it is not known."""
    return line(files.started.script.rpartition("/")[2], 128)


def _command(files: RunFiles) -> str:
    words = (files.report and files.report.command) or files.started.command
    return line(shlex.join(words) or files.started.script, 4000)


def _facts(files: RunFiles, told: Story) -> list[tuple[str, str]]:
    report = files.report
    length = report.duration_s if report and len(files.launchers) == 1 else told.whole.length
    ranks = {bar.rank for bars in told.nodes.values() for bar in bars}
    restarts = max((attempt.restart_count for attempt in files.attempts), default=0)
    is_live, limit_s = files.is_live and not report, run_json.job_end(files.events)
    saved = run_json.checkpoint(files.events)
    age = f", {duration(max(0.0, told.whole.end - saved[1]))} {'ago' if is_live else 'before the end'}" if saved else ""
    facts = [
        ("duration", duration(length)),
        ("time left", "" if limit_s is None or not is_live else duration(max(0.0, limit_s - told.whole.end))),
        ("time limit", "" if limit_s is None else local_time(limit_s, _DATE)),
        ("checkpoint", f"{line(saved[0], 200)}{age}" if saved else ""),
        ("work lost", duration(told.lost_s) if told.lost_s else ""),
        ("started", local_time(told.whole.start, _DATE)),
        ("ended", "" if is_live else local_time(told.whole.end, _DATE)),
        ("nodes", _node_count(told)),
        ("ranks", str(len(ranks) or "")),
        ("attempts", str(len(told.attempts) or "")),
        ("restarts", str(restarts) if report else ""),
        ("signal", line((report and report.signal) or "", 20)),
    ]
    return [(name, value) for name, value in facts if value]


def _node_count(told: Story) -> str:
    """How many nodes had workers at a time, and how many in all if others took their places."""
    attempts = Counter(attempt for bars in told.nodes.values() for attempt in {bar.attempt for bar in bars})
    most = max(attempts.values(), default=0)
    return f"{most} ({len(told.nodes)} took part)" if most < len(told.nodes) else str(most or "")


def _time_uses(told: Story) -> list[dict[str, Any]]:
    x, rows = 0.0, []
    for name, length_s in time_uses(told).items():
        share = min(1.0, length_s / (told.whole.length or 1.0))
        length = f"{length_s:.1f} s" if length_s < 60 else duration(length_s)
        place = {"x": round(x, 3), "width": round(share * 100, 3)}
        rows.append({"name": name, "meaning": USES[name], "share": share, "length": length, **place})
        x += share * 100
    return rows


def _goodput(rows: list[dict[str, Any]]) -> str:
    share = next((row["share"] for row in rows if row["name"] == "run"), None)
    return "" if share is None else f"{share * 100:.1f} %"


# Moments.


def _marks(told: Story, share: float) -> list[dict[str, Any]]:
    """Marks that are close to each other are one above the other, also 400 pixels wide; the script has more room."""
    ends: list[float] = []
    marks = []
    for index, moment in enumerate(told.moments):
        if moment.mark:
            x = charts.percent(moment.time_s, told.whole)
            free = (lane for lane, end in enumerate(ends) if x - end >= _MARK_PERCENT)
            lane = next(free, min(len(ends), _MAX_LANES - 1))
            ends[lane : lane + 1] = [x]
            text = _cut(moment.text, int(_MAX_LABEL * max(0.3, share)))
            label = f"{moment.kind}{f', {moment.where}' if moment.where else ''}: {text}"
            marks.append({"id": f"e{index}", "x": x, "lane": lane, "sign": moment.mark, "label": label})
    return marks


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ..."


def _marked_times(told: Story) -> dict[str, str]:
    """Vertical lines in the charts, as paths: failures and lost nodes, and hangs."""
    found: dict[str, dict[str, None]] = {}
    for moment in told.moments:
        if kind := _LINES.get(moment.mark):
            x = charts.percent(moment.time_s, told.whole) * 10
            found.setdefault(kind, {})[f"M{x:.0f} 0V100"] = None
    return {kind: "".join(list(paths)[:_MAX_LINES]) for kind, paths in found.items()}


def _row(number_: int, moment: Moment, told: Story, share: float) -> dict[str, str]:
    since = moment.time_s - told.whole.start
    return {
        "id": f"e{number_}",
        "since": f"+{since:.1f} s" if since < 100 else f"+{duration(since)}",
        "clock": local_time(moment.time_s, "%H:%M:%S"),
        "date": local_time(moment.time_s, _DATE),
        "kind": moment.kind,
        "where": moment.where,
        "text": _cut(moment.text, int(_MAX_MOMENT * max(0.1, share))),
        "mark": moment.mark,
    }


# Tables.


def _tables(files: RunFiles) -> list[tuple[str, str, str, failures.Table]]:
    report = files.report
    if not report:
        return []
    found = [
        (
            "slow",
            "Slow ranks",
            "Which ranks the others waited for in collectives, and what that cost the job; from samples.",
            failures.slow_ranks(report),
        ),
        ("health", "Hardware", "What was wrong with the nodes.", failures.health(report)),
        ("nodes", "Nodes", "", failures.hosts(report)),
    ]
    return [each for each in found if each[3].rows]


def _run_environment(files: RunFiles) -> list[tuple[str, str]]:
    report, started = files.report, files.started
    versions = (report and report.versions) or Versions("")
    job = report and report.slurm_job
    code = report and report.code
    facts = [
        ("ddplaunch", f"{versions.ddplaunch} (commit {versions.commit})" if versions.commit else versions.ddplaunch),
        ("Python", versions.python),
        ("torch", versions.torch),
        ("launcher's host", started.host),
        ("working directory", (report and report.cwd) or started.cwd),
        ("run folder", str(files.folder)),
        ("SLURM job", job.id if job else ""),
        ("code", f"snapshot of {code.root}: {code.version}; in {code.folder}, changes in code.diff" if code else ""),
    ]
    return [(name, line(value, 400)) for name, value in facts if value]
