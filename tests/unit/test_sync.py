"""What a host asks for, keeps and makes of a snapshot that is sent to it; without a network between the two sides."""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddplaunch.features.runs.asked_nodes import QueriedNode
from ddplaunch.features.snapshot import choice, code_files, content, copies, hosts, queries, receive
from ddplaunch.features.snapshot.queries import CopyAnswer, MakeCopy, PutPart, Wanted
from ddplaunch.features.snapshot.records import MARKER
from ddplaunch.protocol import wire
from tests.support.repositories import repository


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return repository(tmp_path / "project", {"train.py": "print(1)\n", "lib/a.py": "A = 1\n", "lib/b.py": "B = 1\n"})


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(receive, "HOME_BASE", str(tmp_path / "host"))
    monkeypatch.setattr(receive, "_problems", [])
    monkeypatch.setattr(receive, "_lock", held := [])
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


@pytest.mark.parametrize("wanted", [[("0" * 64, 0, 10)], [("", 0, queries.ROUND_BYTES), ("", 0, 1)]])
def test_a_host_that_asks_for_other_files_or_more_fails_alone(root: Path, wanted: list[tuple[str, int, int]]):
    sender = Sender(root)
    asked = tuple(Wanted(digest or sender.order.marker, *numbers) for digest, *numbers in wanted)
    node = QueriedNode("node1", SimpleNamespace(send=sender.sent.append), 0.0)  # type: ignore[arg-type]
    node.answers[CopyAnswer] = CopyAnswer(asked)
    assert hosts._send_wanted(node, sender.order, sender.files) == 0
    assert node.failure
    assert node.failure.message == "asks for files that are not in the snapshot"
    assert sender.sent == []


class Damaging:
    """In place of Queries: one host, on which nothing ever arrives as it was."""

    def __init__(self, wanted: Wanted) -> None:
        self.parts: list[object] = []
        self.nodes = [QueriedNode("node1", SimpleNamespace(send=self.parts.append), 0.0)]  # type: ignore[arg-type]
        self._answer = CopyAnswer((wanted,))

    def wait(self, nodes: list[QueriedNode], answer: type) -> None:
        for node in nodes:
            node.answers[answer] = self._answer

    def ask(self, nodes: list[QueriedNode], _query: object, answer: type, _timeout_s: float) -> None:
        self.wait([node for node in nodes if not node.failure], answer)


def test_a_host_on_which_everything_arrives_damaged_is_given_up(root: Path):
    sender = Sender(root)
    asked = Damaging(Wanted(sender.order.marker, 0, sender.order.marker_bytes))
    hosts._serve(asked, sender.order, sender.files)  # type: ignore[arg-type]
    assert asked.nodes[0].failure
    assert asked.nodes[0].failure.message == "what is sent arrives damaged, again and again"
    assert 3 <= len(asked.parts) <= 5


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
