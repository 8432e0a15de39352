"""A feature is a folder, a line, and a field of the configuration: one that is added reaches all that a run shows."""

from __future__ import annotations

import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.process.test_removed_features import PACKAGE, run_copy
from tests.support.runs import ROOT

PAGE = ROOT / "docs" / "adding-a-feature.md"
BEFORE = {
    "features/__init__.py": '    Feature("run_events"',
    "config.py": "    on_exit: str | None = None\n",
    "protocol/run_result.py": "    collectives: tuple[RankLateness, ...] = ()\n",
}
"""Lines of files that there are; what the page adds comes before them."""

GREETS = {
    "features/greets/__init__.py": '"""A worker says to the agent who it is, before the script."""\n',
    "features/greets/agent.py": """
from ddplaunch.agent.parts import Part
from ddplaunch.protocol.launcher_agent import Notice
class Greeted(Part):
    def for_worker(self, worker):
        return {"greets": f"{self._node.worker_socket.open()} {worker.rank}"}
    def on_connection(self, connection):
        with connection.socket:
            self._node.outbox.send(Notice("greeted by rank " + connection.socket.recv(10).decode(), 0))
        return True
part = Greeted
""",
    "features/greets/worker.py": """
from ddplaunch.worker.parts import WorkerPart, connect
class Greeter(WorkerPart):
    def __init__(self, text):
        self.name, self.rank = text.split()
    def before_script(self):
        with connect(self.name, "greets") as agent:
            agent.sendall(self.rank.encode())
            agent.recv(1)
part = Greeter
""",
}
"""A feature whose row stands before those of all others that use the agent's socket for workers."""

WRITES_WHAT_IT_IS_TOLD = """
import os, pathlib
def on_event(self, index, event, original=CheckpointWatch.on_event):
    original(self, index, event)
    for host in self._ages:
        pathlib.Path(os.environ["TOLD"], f"{os.getpid()}.{host}").touch()
CheckpointWatch.on_event = on_event
"""
"""At the end of the template's module ``launcher``: a file for each launcher and each host of which it is told."""

FAILS_WHEN_ALL_ARE_TOLD = """
import os, sys, time
while len(os.listdir(os.environ["TOLD"])) < int(sys.argv[2]):
    time.sleep(0.02)
if os.environ["RANK"] == sys.argv[1]:
    raise ValueError("enough")
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package with the template, and beside it a script, an old checkpoint, and a folder for logs."""
    with (with_feature(tmp_path) / "ddplaunch" / "features" / "checkpoint_age" / "launcher.py").open("a") as watch:
        watch.write(WRITES_WHAT_IT_IS_TOLD)
    (tmp_path / "train.py").write_text(FAILS_WHEN_ALL_ARE_TOLD)
    (tmp_path / "model.pt").touch()
    os.utime(tmp_path / "model.pt", (0, 1_000_000_000))
    (tmp_path / "told").mkdir()
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    return tmp_path


def with_feature(folder: Path) -> Path:
    """The package with what stands on the page, in ``folder``."""
    package = shutil.copytree(PACKAGE, folder / "ddplaunch", copy_function=os.link)
    for name, text in re.findall(r"^```py\n# (\S+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        file = package / name
        if file.exists():
            before = file.read_text()
            assert before.count(BEFORE[name]) == 1
            file.unlink()  # A link to the original.
            text = before.replace(BEFORE[name], text + BEFORE[name])
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return folder


def add(folder: Path, row: str, files: dict[str, str]) -> None:
    """Make a copy of the package with these files and this row, before all others, in ``folder``."""
    package = shutil.copytree(PACKAGE, folder / "ddplaunch", copy_function=os.link)
    listed = package / "features" / "__init__.py"
    before = listed.read_text()
    listed.unlink()  # A link to the original.
    listed.write_text(before.replace("FEATURES = (\n", f"FEATURES = (\n    {row},\n"))
    for name, text in files.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text)


STOPS_AFTER_RANK_1 = """import os, pathlib, time
greeted = pathlib.Path(__file__).with_name("rank_1")
if os.environ["RANK"] == "1":
    greeted.touch()
else:
    deadline = time.monotonic() + 60
    while not greeted.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    breakpoint()
"""


def test_a_worker_and_its_agent_talk_for_a_feature_beside_others_that_do(tmp_path: Path) -> None:
    add(tmp_path, 'Feature("greets", ("agent", "worker"), declares=False)', GREETS)
    script = tmp_path / "train.py"
    script.write_text(STOPS_AFTER_RANK_1)
    done = run_copy(tmp_path, "--nproc-per-node", "2", "--log-dir", "/dev/null", script)
    assert sorted(re.findall(r"greeted by rank (\d)", done.stderr)) == ["0", "1"], done.stderr
    assert "there is no terminal" in done.stderr, "the debugger has got its connection"


def test_the_feature_of_the_docs_has_its_option_its_parts_its_events_and_its_lines_of_the_page(folder: Path) -> None:
    script, checkpoint, logs = folder / "train.py", folder / "model.pt", folder / "logs"
    options = ("--dry-run", "--nnodes", "2", "--nproc-per-node", "1", "--log-dir", logs, "--checkpoint-age", checkpoint)
    done = run_copy(folder, *options, script, "1", "1")
    assert done.returncode == 1, done.stderr
    assert done.stderr.count(f"there is a checkpoint: {checkpoint}") >= 1, "the part in a worker"
    (host,) = re.findall(r"^ddplaunch: (node[01]) sees an old checkpoint, of .+ ago$", done.stderr, re.MULTILINE)
    page = done.stderr.partition("the job failed")[2]
    assert re.findall(r"^the checkpoint on (\S+) was .+ old$", page, re.MULTILINE) == [host]
    (written,) = logs.glob("*/events.jsonl")
    events = [json.loads(line) for line in written.read_text().splitlines()]
    assert [event["host"] for event in events if event["event"] == "old_checkpoint"] == [host]
    assert all(event["age_s"] > 3600 for event in events if event["event"] == "old_checkpoint")
    (report,) = logs.glob("*/report.json")
    assert json.loads(report.read_text())["checkpoint_age_s"] > 3600
    known = run_copy(folder, code="from ddplaunch.features import declarations; print(*declarations('EVENT_KEYS'))")
    assert {key for event in events for key in event} <= {*known.stdout.split()}, known.stderr
    assert "--checkpoint-age FILE" in run_copy(folder, "--help").stdout


@pytest.mark.parametrize(("checkpoints", "fails"), [(("model.pt", "none"), 1), (("none", "model.pt"), 0)])
def test_what_one_node_finds_is_on_the_failure_page_of_another_nodes_launcher(
    checkpoints: tuple[str, str], fails: int, port: int, folder: Path
) -> None:
    """The checkpoint of one node is old, the worker of the other one fails. The first serves the rendezvous."""
    logs = folder / "logs"
    meet = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--log-dir", logs)
    with ThreadPoolExecutor() as pool:
        launchers = [
            pool.submit(
                run_copy, folder, *meet, "--node-rank", rank, "--checkpoint-age", file, "train.py", str(fails), "2"
            )
            for rank, file in zip("01", checkpoints, strict=True)
        ]
        shown = [launcher.result().stderr for launcher in launchers]
    all_shown = "\n\n".join(shown)
    assert "is ignored" not in all_shown
    page = shown[fails].partition("the job failed")[2]
    assert re.findall(r"^the checkpoint on \S+ was .+ old$", page, re.MULTILINE), all_shown
    assert "the checkpoint on" not in shown[1 - fails]
    assert [each.count("sees an old checkpoint") for each in shown] == [1, 0], "the launcher that watches the job"
    events = [json.loads(line) for file in logs.rglob("events.jsonl") for line in file.read_text().splitlines()]
    (found,) = (event for event in events if event["event"] == "old_checkpoint")
    assert found["host"]
    assert "node" not in found
    reports = [json.loads(file.read_text()) for file in logs.rglob("report.json")]
    assert [report["checkpoint_age_s"] > 3600 for report in reports] == [True, True]
