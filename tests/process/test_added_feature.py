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

TELLS_ALL = {
    "features/tells_all/__init__.py": '"""What one node finds is told to all launchers."""\n',
    "features/tells_all/records.py": """
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, OneLine
from ddplaunch.protocol.launcher_agent import Order, Report
@dataclass(frozen=True)
class Found(Report):
    attempt: Count
    host: OneLine
    text: OneLine
@dataclass(frozen=True)
class TellLauncher(Order):
    attempt: Count
    found_on: OneLine
    text: OneLine
@dataclass(frozen=True)
class FoundOn:
    found_on: OneLine
    text: OneLine
FROM_AGENT = (Found, FoundOn)
TO_AGENT = (TellLauncher,)
""",
    "features/tells_all/agent.py": """
import os
from ddplaunch.agent.parts import Part
from ddplaunch.features.tells_all.records import Found, FoundOn, TellLauncher
class Finds(Part):
    def on_attempt(self, group, round_):
        self._attempt = round_.attempt
    def on_started(self):
        if "FINDS" in os.environ:
            self._node.report(Found(self._attempt, self._node.spec.host, os.environ["FINDS"]))
    def on_event(self, event):
        if not isinstance(event, TellLauncher):
            return False
        self._node.outbox.send(FoundOn(event.found_on, event.text))
        return True
part = Finds
""",
    "features/tells_all/launcher.py": """
import os, pathlib
from ddplaunch.features.tells_all.records import Found, FoundOn, TellLauncher
from ddplaunch.launcher.watches import Watch
class Tells(Watch):
    def __init__(self, run):
        self._run, self._found = run, {}
    def on_report(self, node_index, participants, report):
        if isinstance(report, Found):
            self._run.send_to_all(TellLauncher(report.attempt, report.host, report.text))
    def on_event(self, index, event):
        if isinstance(event, FoundOn):
            self._found[event.found_on] = event.text
            pathlib.Path(os.environ["TOLD"], str(os.getpid())).touch()
    def page_lines(self, result):
        return [f"found on {host}: {text}" for host, text in self._found.items()]
def watches(run):
    return (Tells(run),)
""",
}
"""The steps of "To the failure page of each launcher" on that page."""

FAILS_WHEN_BOTH_ARE_TOLD = """
import os, sys, time
while len(os.listdir(os.environ["TOLD"])) < 2:
    time.sleep(0.02)
sys.exit("FINDS" not in os.environ)
"""

WAITS_UNTIL_BOTH_NODES_ARE_NOTED = """
import os, pathlib, sys, time
logs = pathlib.Path(sys.argv[1])
noting = ()
while sum(file.read_text().count("old_checkpoint") for file in noting) < 2:
    noting = [*logs.glob("**/events.jsonl")]
    time.sleep(0.02)
# Below the folder of the launcher that gets the reports, so that this launcher shows the failure page.
folder = next(file.parent for file in noting if "old_checkpoint" in file.read_text())
if folder in pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents:
    raise ValueError("enough")
time.sleep(600)
"""


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


def test_a_worker_and_its_agent_talk_for_a_feature_beside_others_that_do(tmp_path: Path) -> None:
    add(tmp_path, 'Feature("greets", ("agent", "worker"), declares=False)', GREETS)
    script = tmp_path / "train.py"
    script.write_text("import os\nif os.environ['RANK'] == '0':\n    breakpoint()\nprint('goes on')\n")
    done = run_copy(tmp_path, "--nproc-per-node", "2", "--log-dir", "/dev/null", script)
    assert sorted(re.findall(r"greeted by rank (\d)", done.stderr)) == ["0", "1"], done.stderr
    assert "there is no terminal" in done.stderr, "the debugger has got its connection"


def job_with_old_checkpoint(folder: Path) -> tuple[Path, Path, Path]:
    """Its script, the checkpoint, and a folder for logs."""
    script, checkpoint, logs = folder / "train.py", folder / "model.pt", folder / "logs"
    script.write_text(WAITS_UNTIL_BOTH_NODES_ARE_NOTED)
    checkpoint.touch()
    os.utime(checkpoint, (0, 1_000_000_000))
    return script, checkpoint, logs


def test_the_feature_of_the_docs_has_its_option_its_parts_its_events_and_its_lines_of_the_page(tmp_path: Path) -> None:
    folder = with_feature(tmp_path)
    script, checkpoint, logs = job_with_old_checkpoint(tmp_path)
    options = ("--dry-run", "--nnodes", "2", "--nproc-per-node", "1", "--log-dir", logs, "--checkpoint", checkpoint)
    done = run_copy(folder, *options, script, logs)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count(f"there is a checkpoint: {checkpoint}") >= 1, "the part in a worker"
    assert len(re.findall(r"^ddplaunch: node[01] sees an old checkpoint, of .+ ago$", done.stderr, re.MULTILINE)) == 2
    page = done.stderr.partition("the job failed")[2]
    assert re.findall(r"^the checkpoint on (\S+) is .+ old$", page, re.MULTILINE) == ["node0", "node1"]
    (written,) = logs.glob("*/events.jsonl")
    events = [json.loads(line) for line in written.read_text().splitlines()]
    assert {event["host"] for event in events if event["event"] == "old_checkpoint"} == {"node0", "node1"}
    assert all(event["age_s"] > 3600 for event in events if event["event"] == "old_checkpoint")
    (report,) = logs.glob("*/report.json")
    assert json.loads(report.read_text())["checkpoint_age_s"] > 3600
    known = run_copy(folder, code="from ddplaunch.features import declarations; print(*declarations('EVENT_KEYS'))")
    assert {key for event in events for key in event} <= {*known.stdout.split()}, known.stderr
    assert "--checkpoint FILE" in run_copy(folder, "--help").stdout


def test_where_each_node_has_a_launcher_the_one_that_watches_the_job_notes_both_nodes(
    port: int, tmp_path: Path
) -> None:
    folder = with_feature(tmp_path)
    script, checkpoint, logs = job_with_old_checkpoint(tmp_path)
    meet = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
    options = (*meet, "--nproc-per-node", "1", "--log-dir", logs, "--checkpoint", checkpoint)
    with ThreadPoolExecutor() as pool:
        launchers = [pool.submit(run_copy, folder, "-v", *options, script, logs) for _ in range(2)]
        shown = [launcher.result().stderr for launcher in launchers]
    all_shown = "\n\n".join(shown)
    assert "is ignored" not in all_shown
    assert sorted(each.count("the checkpoint on ") for each in shown) == [0, 2], all_shown
    assert sorted(each.count("sees an old checkpoint") for each in shown) == [0, 2], all_shown
    events = [json.loads(line) for file in logs.rglob("events.jsonl") for line in file.read_text().splitlines()]
    found = [event for event in events if event["event"] == "old_checkpoint"]
    assert len(found) == 2
    assert all(event["host"] and "node" not in event for event in found)


def test_what_one_node_finds_is_on_the_failure_page_of_another_nodes_launcher(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first node finds it and serves the rendezvous; the worker of the second one fails."""
    add(tmp_path, 'Feature("tells_all", ("launcher", "agent", "records"), declares=False)', TELLS_ALL)
    script, told = tmp_path / "train.py", tmp_path / "told"
    script.write_text(FAILS_WHEN_BOTH_ARE_TOLD)
    told.mkdir()
    monkeypatch.setenv("TOLD", str(told))
    main = "from ddplaunch.__main__ import main; main()"
    codes = (f"import os; os.environ['FINDS'] = 'a fan stands still'; {main}", main)
    meet = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--log-dir", "/dev/null")
    with ThreadPoolExecutor() as pool:
        launchers = [
            pool.submit(run_copy, tmp_path, *meet, "--node-rank", str(rank), script, code=code)
            for rank, code in enumerate(codes)
        ]
        finder, failed = (launcher.result() for launcher in launchers)
    assert (finder.returncode, failed.returncode) == (1, 1), finder.stderr + failed.stderr
    page = failed.stderr.partition("the job failed")[2]
    assert re.findall(r"^found on \S+: a fan stands still$", page, re.MULTILINE), failed.stderr
    assert "a fan stands still" not in finder.stderr
