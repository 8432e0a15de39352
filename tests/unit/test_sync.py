"""What a host asks for, keeps and makes of a snapshot that is sent to it; without a network between the two sides."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import io
import json
import os
import shutil
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddplaunch.features.runs.asked_nodes import QueriedNode
from ddplaunch.features.snapshot import choice, code_files, content, copies, hosts, queries, receive
from ddplaunch.features.snapshot.queries import CopyAnswer, CopyProgress, MakeCopy, PutPart, Wanted
from ddplaunch.features.snapshot.records import MARKER
from ddplaunch.protocol import wire
from tests.support.processes import wait_until
from tests.support.repositories import repository


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return repository(tmp_path / "project", {"train.py": "print(1)\n", "lib/a.py": "A = 1\n", "lib/b.py": "B = 1\n"})


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(receive, "HOME_BASE", str(tmp_path / "host"))
    monkeypatch.setattr(receive, "_problems", [])
    monkeypatch.setattr(receive, "_lock", held := [])
    monkeypatch.setattr(receive._Progress, "tell", lambda *_: None)
    yield tmp_path / "host"
    for fd in held:
        os.close(fd)
    return tmp_path / "host"


class Sender:
    """The side of the command, for the code in ``root`` as it is now.

    Attributes:
        sent: hashes of the parts that were sent.
        change: what happens to a part on its way; None: it is lost, with all that would follow.
    """

    def __init__(self, root: Path, cwd: str = "") -> None:
        self.folder = copies.take(code_files.repository_of(str(root)), (), str(root.parent / "base"))
        marker = Path(self.folder, MARKER).read_bytes()
        found = copies.facts(self.folder)
        self.files = {noted[2]: os.path.join(self.folder, path) for path, noted in found.files.items() if noted[1:]}
        self.files[own := content.hash_of(marker)] = os.path.join(self.folder, MARKER)
        project, name = self.folder.split("/")[-2:]
        self.order = MakeCopy(project=project, name=name, marker=own, marker_bytes=len(marker), cwd=cwd)
        self.sent: list[PutPart] = []
        self.change: Callable[[PutPart], PutPart | None] = lambda part: part

    def ask(self) -> CopyAnswer:
        answers: list[CopyAnswer] = []
        receive.serve(self.order, io.BytesIO(), SimpleNamespace(send=answers.append))
        return answers[0]

    def run(self) -> CopyAnswer:
        """The last answer; or, of a transfer that was cut off, the one before."""
        while (answer := self.ask()).wanted:
            for part in self._parts(answer):
                changed = self.change(part)
                if changed is None:
                    return answer
                self.sent.append(part)
                receive.serve(changed, io.BytesIO(), None)
        return answer

    def _parts(self, answer: CopyAnswer) -> Iterator[PutPart]:
        for wanted in answer.wanted:
            yield from hosts._parts(self.order.project, self.files[wanted.hash], wanted)

    @property
    def copy(self) -> Path:
        return Path(receive._project(self.order.project), self.order.name)

    def paths_sent(self) -> list[str]:
        return [os.path.relpath(self.files[part.hash], self.folder) for part in self.sent]


def files(folder: Path) -> dict[str, tuple[str, int]]:
    """Text and mode of the files of the code, by path."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    shown = {name: path for name, path in found.items() if not name.startswith(".")}
    return {name: (path.read_text(), path.stat().st_mode) for name, path in shown.items()}


def test_a_host_gets_only_what_it_does_not_have(root: Path, host: Path):
    os.chmod(root / "train.py", 0o755)
    first = Sender(root)
    assert first.run() == CopyAnswer()
    assert files(first.copy) == files(root)
    assert sorted(first.paths_sent()) == sorted([MARKER, "lib/a.py", "lib/b.py", "train.py"])
    assert not (first.copy.parent / "received").exists()
    (root / "lib/a.py").write_text("A = 2\n")
    second = Sender(root)
    second.run()
    assert second.paths_sent() == [MARKER, "lib/a.py"]
    assert files(second.copy)["lib/a.py"][0] == "A = 2\n"
    assert os.path.samefile(first.copy / "lib/b.py", second.copy / "lib/b.py")
    assert (again := Sender(root)).run() == CopyAnswer()
    assert again.sent == []


def test_a_transfer_that_was_cut_off_goes_on_where_it_was(root: Path, monkeypatch: pytest.MonkeyPatch):
    (root / "big.bin").write_bytes(big := os.urandom(1000))
    monkeypatch.setattr(hosts, "PART_BYTES", 100)
    cut = Sender(root)
    cut.order = replace(cut.order, round_bytes=300)
    cut.change = lambda part: None if part.size == 1000 and part.offset >= 500 else part
    assert cut.run().wanted
    assert not cut.copy.exists()
    rest = Sender(root)
    rest.run()
    assert {part.offset for part in rest.sent if part.size == 1000} == {500, 600, 700, 800, 900}
    assert (rest.copy / "big.bin").read_bytes() == big


def test_what_arrives_damaged_is_asked_for_again(root: Path):
    sender = Sender(root)
    seen: set[str] = set()

    def damage(part: PutPart) -> PutPart:
        is_first = part.hash not in seen
        seen.add(part.hash)
        return replace(part, data=base64.b64encode(zlib.compress(b"x" * part.size)).decode()) if is_first else part

    sender.change = damage
    assert sender.run() == CopyAnswer()
    assert files(sender.copy) == files(root)
    assert len(sender.sent) == 8  # The marker and three files, twice.


def test_a_copy_that_was_changed_on_the_host_is_mended(root: Path):
    (first := Sender(root)).run()
    (first.copy / "lib/a.py").write_text("changed")
    (again := Sender(root)).run()
    assert again.paths_sent() == ["lib/a.py"]
    assert files(again.copy) == files(root)


def test_the_working_directory_shows_the_newest_code_and_keeps_what_workers_write(root: Path, host: Path):
    (root / "gone").mkdir()
    (root / "gone/old.py").write_text("")
    (root / "here").symlink_to("lib")
    (first := Sender(root)).run()
    work = host / "work" / first.order.project
    (work / "lib/out.txt").write_text("written by a worker")
    inode = (work / "lib/a.py").lstat().st_ino
    (root / "lib/b.py").unlink()
    shutil.rmtree(root / "gone")
    (root / "gone").write_text("now a file")
    (second := Sender(root, "lib/ignored")).run()
    shown = {str(path.relative_to(work)): os.path.realpath(path) for path in work.rglob("*") if not path.is_dir()}
    assert shown == {
        "gone": f"{second.copy}/gone",
        "lib/a.py": f"{second.copy}/lib/a.py",
        "lib/out.txt": f"{work}/lib/out.txt",
        "train.py": f"{second.copy}/train.py",
    }
    assert (work / "lib/ignored").is_dir()
    assert os.path.samefile(work / "here", work / "lib")
    assert (work / "lib/a.py").lstat().st_ino == inode  # Thousands of links would take seconds.


def test_folders_of_the_code_that_a_worker_has_written_into_stay(root: Path, host: Path):
    (first := Sender(root, "lib")).run()
    work = host / "work" / first.order.project
    (work / "lib/out.txt").write_text("")
    shutil.rmtree(root / "lib")
    assert Sender(root).run() == CopyAnswer()
    assert [path.name for path in (work / "lib").iterdir()] == ["out.txt"]
    (root / "lib").write_text("")
    assert f"{work}/lib is in the way" in Sender(root).run().problem


@pytest.mark.parametrize("path", ["../x", "/x", "a//b", "a/./b", ""])
def test_a_snapshot_that_names_files_outside_of_it_is_refused(root: Path, path: str, tmp_path: Path):
    sender = Sender(root)
    marker = tmp_path / "marker"
    facts = json.loads(Path(sender.folder, MARKER).read_text())
    marker.write_text(json.dumps({**facts, "files": {path: [0, 0, content.hash_of(b""), 0o644]}}))
    own = content.hash_of(marker.read_bytes())
    sender.files[own] = str(marker)
    sender.order = replace(sender.order, marker=own, marker_bytes=marker.stat().st_size)
    assert "names a file outside of it" in sender.run().problem
    assert not sender.copy.exists()


def test_what_cannot_be_kept_is_told_in_the_next_answer(root: Path, host: Path):
    sender = Sender(root)
    project = Path(receive._project(sender.order.project))
    project.mkdir(parents=True)
    (project / "received").write_text("")
    assert sender.run().problem.endswith("Not a directory")


def test_links_that_lead_to_nothing_there_are_told(root: Path, tmp_path: Path):
    (tmp_path / "elsewhere").write_text("")
    (root / "gone").symlink_to(tmp_path / "elsewhere")
    (root / "there").symlink_to("/etc/passwd")
    (root / "inside").symlink_to("lib/a.py")
    sender = Sender(root)
    (tmp_path / "elsewhere").unlink()
    assert sender.run() == CopyAnswer(links=("gone",))
    assert os.readlink(sender.copy / "inside") == "lib/a.py"


class Nodes:
    """In place of Queries: hosts whose events are ``events``; each is done by calling it with the node."""

    def __init__(self, *events: Callable[[QueriedNode], object], count: int = 1) -> None:
        self.sent: list[object] = []
        handle = SimpleNamespace(send=self.sent.append, kill=lambda: self.sent.append("kill"), heard_at=0.0)
        self.nodes = [QueriedNode(f"node{n}", handle, time.monotonic() + 100) for n in range(count)]  # type: ignore[arg-type]
        self.events, self.is_silent = [*events], False

    def next_event(self, _deadline: float) -> QueriedNode | None:
        if self.events:
            self.events.pop(0)(self.nodes[0])
        return None if self.is_silent and len(self.events) % 600 else self.nodes[0]

    def serve(self, sender: Sender) -> str:
        """What is said of a node that gets no copy."""
        sending = hosts.Sending(self, self.nodes, sender.order, sender.files)  # type: ignore[arg-type]
        sending.run(SimpleNamespace(show=lambda text: text(), end=lambda: None))  # type: ignore[arg-type]
        return self.nodes[0].failure.message if self.nodes[0].failure else ""


def answers(*wanted: Wanted) -> Callable[[QueriedNode], object]:
    return lambda node: node.answers.update({CopyAnswer: CopyAnswer(wanted)})


@pytest.mark.parametrize("wanted", [[("0" * 64, 0, 10)], [("", 0, queries.ROUND_BYTES), ("", 0, 1)]])
def test_a_host_that_asks_for_other_files_or_more_fails_alone(root: Path, wanted: list[tuple[str, int, int]]):
    sender = Sender(root)
    asked = Nodes(answers(*(Wanted(digest or sender.order.marker, *numbers) for digest, *numbers in wanted)))
    assert asked.serve(sender) == "asks for files that are not in the code"
    assert asked.sent == ["kill"]


def test_a_host_on_which_everything_arrives_damaged_is_given_up(root: Path):
    sender = Sender(root)
    asked = Nodes(*[answers(Wanted(sender.order.marker, 0, sender.order.marker_bytes))] * 9)
    assert asked.serve(sender) == "what is sent arrives damaged, again and again"
    assert 3 <= len([each for each in asked.sent if isinstance(each, PutPart)]) <= 5


@pytest.mark.parametrize(
    ("lives", "gets", "told"),
    [
        (True, True, ""),
        (False, False, "has said nothing for 20 s while the code was sent to it"),
        (True, False, "does not get on with the code: it has got nothing for 180 s"),
    ],
)
def test_a_silent_host_and_one_that_gets_nothing_are_given_up(
    root: Path, monkeypatch: pytest.MonkeyPatch, lives: bool, gets: bool, told: str
):
    """Time goes as fast as it is looked at: 0.4 s for each event."""
    now = [time.monotonic()]
    monkeypatch.setattr(hosts.time, "monotonic", lambda: now[0])
    sender = Sender(root)

    def event(node: QueriedNode) -> None:
        now[0] += 0.4
        if lives:
            node.handle.heard_at = now[0]
            node.answers[CopyProgress] = CopyProgress(int(1e6 - now[0]) if gets else 0, 0)

    asked = Nodes(*[event] * 600, answers())
    asked.is_silent = not lives
    assert asked.serve(sender) == told


def test_a_command_that_was_suspended_gives_up_no_host(root: Path, monkeypatch: pytest.MonkeyPatch):
    now = [time.monotonic()]
    monkeypatch.setattr(hosts.time, "monotonic", lambda: now[0])

    def suspend(_node: QueriedNode) -> None:
        now[0] += 1000.0

    assert Nodes(lambda _: None, suspend, lambda _: None, answers()).serve(Sender(root)) == ""


def test_two_commands_copy_code_to_a_host_one_after_the_other(root: Path, monkeypatch: pytest.MonkeyPatch):
    sender = Sender(root)
    project = Path(receive._project(sender.order.project))
    project.mkdir(parents=True)
    monkeypatch.setattr(receive, "_OTHERS_S", 0.0)
    with open(project / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert sender.ask().problem == "another command copies code of this project to this host"
        fcntl.flock(other, fcntl.LOCK_UN)
        monkeypatch.setattr(receive, "_lock", [])
        assert sender.run() == CopyAnswer()


def test_an_agent_that_is_cut_off_from_its_launcher_ends_soon_for_one_that_waits_and_else_later(
    root: Path, host: Path, monkeypatch: pytest.MonkeyPatch
):
    """In a process of its own: it ends at once."""
    sender = Sender(root)
    assert sender.ask().wanted
    lost = receive._Progress()
    lost.idle_since = time.monotonic() - 100
    monkeypatch.setattr(receive, "PROGRESS_S", 0.05)

    def is_ended(within_s: float) -> bool:
        if not (pid := os.fork()):
            lost._tell(SimpleNamespace(send=lambda _: None))
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG), within_s)
            return os.waitpid(pid, 0)[1] == 0
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return False

    os.utime(receive._lock[0], (0, 0))
    assert not is_ended(0.3)
    os.utime(receive._lock[0], (time.time() + 100, time.time() + 100))  # As the one that waits does all the time.
    assert is_ended(10)
    os.utime(receive._lock[0], (0, 0))
    lost.idle_since = time.monotonic() - 400
    assert is_ended(10)


def test_code_from_another_machine_with_the_same_path_is_told(root: Path):
    def sent_by(name: str) -> CopyAnswer:
        sender = Sender(root)
        sender.order = replace(sender.order, sender=name)
        return sender.run()

    assert sent_by("ada@laptop") == sent_by("ada@laptop") == CopyAnswer()
    assert sent_by("bob@desktop") == CopyAnswer(other_sender="ada@laptop")


@pytest.mark.parametrize("cwd", ["..", "/tmp", "a/../../b"])
def test_a_working_directory_outside_of_the_code_is_refused(root: Path, cwd: str):
    assert "outside of it" in Sender(root, cwd).ask().problem


def test_an_answer_that_asks_for_more_than_a_round_is_refused():
    with pytest.raises(wire.ProtocolError, match="a number from 0 to"):
        wire.decode(wire.encode(CopyAnswer((Wanted("0" * 64, 0, 1 << 40),)))[:-1], (CopyAnswer,))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("../data/x", "../data is on this machine, but was not sent to the hosts: --snapshot-include ../data sends it"),
        (
            "./my cache/x",
            "my cache is on this machine, but was not sent to the hosts: --snapshot-include 'my cache' se",
        ),
        ("/home/there/.local/state/ddplaunch/snapshots/PROJECT/NAME/data/x", "../data is on"),
        ("/home/there/.local/state/ddplaunch/work/PROJECT/lib/my cache/x", "my cache is on"),
        ("../../outside", "../../outside is on this machine, but outside of the code: it is not sent"),
        ("a.py", ""),
        ("../lib", ""),
        ("missing", ""),
        ("/etc/passwd", ""),
    ],
)
def test_what_a_worker_has_not_found_is_told_if_it_was_not_sent(
    root: Path, path: str, told: str, monkeypatch: pytest.MonkeyPatch
):
    for name in ("data/x", "lib/my cache/x", "../outside"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("")
    (root / ".gitignore").write_text("data\nmy cache\n")
    sender = Sender(root)
    monkeypatch.chdir(root / "lib")
    named = path.replace("PROJECT", sender.order.project).replace("NAME", sender.order.name)
    found = choice.not_sent(named, sender.folder, copies.facts(sender.folder))
    assert found.startswith(told)
    assert bool(found) == bool(told)
    monkeypatch.chdir(root)
    line = "data is on this machine, but was not sent to the hosts: --snapshot-include data sends it"
    assert choice.not_sent("data/x", sender.folder, copies.facts(sender.folder)) == line


def test_a_project_whose_name_is_not_printable_is_sent(tmp_path: Path):
    sender = Sender(repository(tmp_path / "a\nb\udcff", {"c\nd\udcfe": "", "train.py": ""}))
    assert sender.order.project.startswith("a_b_-")
    assert wire.decode(wire.encode(sender.order)[:-1], (MakeCopy,)) == sender.order
    assert sender.run() == CopyAnswer()
    assert files(sender.copy) == files(Path(copies.facts(sender.folder).root))
