"""--checkpoint: which of a folder's files and folders is the newest whole checkpoint, whoever wrote them."""

from __future__ import annotations

import json
import os
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.features.checkpoints.agent import CheckpointPart
from ddplaunch.features.checkpoints.records import CheckpointSeen
from ddplaunch.features.checkpoints.search import Search, set_aside
from tests.support.configs import a_round, agent_spec
from tests.support.processes import wait_until

Made = Callable[[Path], object]


def at(path: Path, time_s: float) -> Path:
    """It was changed last at this time."""
    os.utime(path, (time_s, time_s), follow_symlinks=False)
    return path


def file(path: Path, time_s: float, content: bytes = b"weights") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return at(path, time_s)


def archive(path: Path, time_s: float, cut: int = 0) -> Path:
    """As torch.save writes it; ``cut`` bytes of its end are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", os.urandom(500))
    path.write_bytes(path.read_bytes()[: -cut or None])
    return at(path, time_s)


def tensors(path: Path, time_s: float, missing: int = 0) -> Path:
    header = json.dumps({"w": {"dtype": "F32", "shape": [25], "data_offsets": [0, 100]}}).encode()
    return file(path, time_s, struct.pack("<Q", len(header)) + header + bytes(100 - missing))


def newest(pattern: Path | str, looks: int = 1, *, all_ended: bool = True) -> tuple[str, int]:
    """Name and step of what the last of so many looks has found; empty if it has found nothing."""
    search = Search(str(pattern))
    for _ in range(looks):
        found = search.newest(all_ended=all_ended)
    return (os.path.basename(found.path), found.step) if found else ("", 0)


def test_a_folder_of_torch_distributed_is_whole_when_it_has_its_metadata(tmp_path: Path):
    for step, time_s in ((1000, 50), (2000, 60)):
        file(tmp_path / f"step-{step}/__0_0.distcp", time_s)
    file(tmp_path / "step-1000/.metadata", 51)
    assert newest(tmp_path) == ("step-1000", 1000)
    file(tmp_path / "step-2000/.metadata", 61)
    assert newest(tmp_path) == ("step-2000", 2000)
    assert newest(tmp_path / "step-2000") == ("step-2000", 2000)


def test_a_folder_of_trainer_is_whole_when_it_has_its_state(tmp_path: Path):
    """Of Hugging Face's transformers; the files that it writes beside them at its end do not count."""
    for step, time_s in ((500, 50), (1000, 60)):
        tensors(tmp_path / f"checkpoint-{step}/model.safetensors", time_s)
        file(tmp_path / f"checkpoint-{step}/training_args.bin", time_s)
    state = {"best_metric": None, "global_step": 500, "log_history": [{"step": 7}]}
    file(tmp_path / "checkpoint-500/trainer_state.json", 51, json.dumps(state).encode())
    file(tmp_path / "trainer_state.json", 99, b"{}")
    file(tmp_path / "training_args.bin", 99)
    assert newest(tmp_path) == ("checkpoint-500", 500)
    file(tmp_path / "checkpoint-1000/trainer_state.json", 61, b'{"global_step": 1000}')
    assert newest(tmp_path) == ("checkpoint-1000", 1000)


def test_a_file_of_lightning_is_whole_when_its_archive_is(tmp_path: Path):
    archive(tmp_path / "epoch=3-step=4200.ckpt", 50)
    archive(tmp_path / "epoch=4-step=5600.ckpt", 60, cut=100)
    assert newest(tmp_path) == ("epoch=3-step=4200.ckpt", 4200)
    archive(tmp_path / "last.ckpt", 70)
    assert newest(tmp_path) == ("last.ckpt", 0)
    assert newest(tmp_path / "epoch*.ckpt") == ("epoch=3-step=4200.ckpt", 4200)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_file_of_safetensors_is_whole_when_all_its_tensors_are_there(tmp_path: Path, missing: int):
    """As accelerate and diffusers write them, in folders without a mark."""
    tensors(tmp_path / "checkpoint-10/model.safetensors", 50)
    tensors(tmp_path / "checkpoint-20/model.safetensors", 60, missing)
    assert newest(tmp_path) == (("checkpoint-20", 20) if not missing else ("checkpoint-10", 10))


def test_what_is_still_written_is_not_whole(tmp_path: Path):
    """A file of an unknown format has rested when two looks have seen the same."""
    path = file(tmp_path / "model_7.pkl", 50)
    search = Search(str(tmp_path))
    assert search.newest(all_ended=False) is None
    file(path, 60, b"more weights")
    assert search.newest(all_ended=False) is None
    found = search.newest(all_ended=False)
    assert found
    assert found.path == str(path)
    file(path, 70, b"even more")
    assert search.newest(all_ended=False) is None
    ended = search.newest(all_ended=True)
    assert ended
    assert ended.text != found.text


@pytest.mark.parametrize("mark", ["latest", "link", "latest_checkpointed_iteration.txt"])
def test_a_mark_says_which_is_the_newest_whole_one(tmp_path: Path, mark: str):
    for number in (100, 200):
        file(tmp_path / f"iter_{number:07d}/model.pt", number)
    if mark == "link":
        (tmp_path / "latest").symlink_to("iter_0000100")
    else:
        file(tmp_path / mark, 150, b"iter_0000100\n" if mark == "latest" else b"100")
    assert newest(tmp_path) == ("iter_0000100", 100)
    file(tmp_path / mark, 250, b"nothing") if mark != "link" else (tmp_path / "iter_0000100").rename(tmp_path / "old")
    assert newest(tmp_path) == ("iter_0000200", 200)


@pytest.mark.parametrize(
    "made",
    [
        lambda folder: folder,
        lambda folder: file(folder / "notes.txt", 1),
        lambda folder: file(folder / "empty_1.pt", 1, b""),
        lambda folder: file(folder / "step-1.tmp", 1),
        lambda folder: file(folder / "tmp-checkpoint-1/a", 1),
        lambda folder: file(folder / "step-1/weights.part", 1),
        lambda folder: file(folder / "step-1.bad1/weights", 1),
        lambda folder: (folder / "step-1").mkdir(),
        lambda folder: os.mkfifo(folder / "step_1.pt"),
        lambda folder: (folder / "latest").symlink_to("latest"),
        lambda folder: file(folder / "latest", 1, b"\xff" * 300),
        lambda folder: file(folder / "latest", 1, b"../../../../nothing"),
        lambda folder: file(folder / "step_1.safetensors", 1, b"\xff" * 100),
        lambda folder: file(folder / "step_1.safetensors", 1, b"a"),
        lambda folder: file(folder / "step_1.pt", 1, b"PK\x03\x04"),
        lambda folder: (folder / "step_1").symlink_to(folder),
    ],
)
def test_what_is_no_checkpoint_or_no_whole_one_is_passed_over(tmp_path: Path, made: Made):
    made(tmp_path)
    assert newest(tmp_path, looks=2) == ("", 0)


def test_a_pattern_or_a_folder_without_anything_finds_nothing(tmp_path: Path):
    for pattern in (tmp_path / "none", tmp_path / "none/*.pt", f"{tmp_path}/[a"):
        assert newest(pattern) == ("", 0)


def test_a_checkpoint_that_is_set_aside_is_not_found_any_more(tmp_path: Path):
    for number in (1, 2):
        file(tmp_path / f"step_{number}.pt", number)
    for number in (1, 2):
        moved = set_aside(str(tmp_path), str(tmp_path / "step_2.pt"))
        assert os.path.basename(moved) == f"step_2.pt.bad{number}"
        assert newest(tmp_path) == ("step_1.pt", 1)
        file(tmp_path / "step_2.pt", 3)


@pytest.mark.parametrize("mark", ["latest", "latest_checkpointed_iteration.txt", "last.ckpt"])
def test_a_mark_of_one_that_is_set_aside_names_the_one_before_and_then_is_set_aside_too(tmp_path: Path, mark: str):
    """Of DeepSpeed, of Megatron, and the link of Lightning."""
    for number in (100, 200):
        file(tmp_path / f"iter_{number:07d}/model.pt", number)
    marks = {"latest": b"iter_0000200\n", "latest_checkpointed_iteration.txt": b"200"}
    file(tmp_path / mark, 300, marks[mark]) if mark in marks else (tmp_path / mark).symlink_to("iter_0000200")
    (tmp_path / "best").symlink_to("iter_0000200")
    (via := tmp_path / "via").symlink_to(".")  # As a folder of a home, which is a link.
    done = set_aside(str(via), str(tmp_path / "iter_0000200"))
    assert f"{tmp_path}/iter_0000200.bad1, and " in done
    assert f", and {mark} names iter_0000100 now" in done
    now = os.readlink(tmp_path / mark) if mark not in marks else (tmp_path / mark).read_text()
    assert now == ("100" if mark.endswith(".txt") else "iter_0000100")
    assert (tmp_path / "best").readlink() == Path("iter_0000200.bad1")
    assert newest(tmp_path) == ("iter_0000100", 100)
    done = set_aside(f"{tmp_path}/iter*", str(tmp_path / "iter_0000100"))
    assert done == f"{tmp_path}/iter_0000100.bad1, {mark} as {mark}.bad1"
    assert newest(tmp_path) == ("", 0)
    for path in via, tmp_path / "best":
        path.unlink()
    assert sorted(os.listdir(tmp_path)) == ["iter_0000100.bad1", "iter_0000200.bad1", f"{mark}.bad1"]


def test_a_link_beside_a_checkpoint_is_no_other_one(tmp_path: Path):
    """Lightning's ``last.ckpt``: to rename only the link would leave the checkpoint."""
    file(tmp_path / "epoch=1-step=20.ckpt", 20)
    (tmp_path / "last.ckpt").symlink_to("epoch=1-step=20.ckpt")
    assert newest(tmp_path) == newest(f"{tmp_path}/*.ckpt") == ("epoch=1-step=20.ckpt", 20)


# The part of an agent.


class Node:
    """An agent's services; ``hangs``: its file system does not answer."""

    def __init__(self, pattern: Path, *, sets_aside: bool = False) -> None:
        self.spec: Any = agent_spec(texts={"checkpoints": json.dumps([str(pattern), sets_aside])})
        self.told, self.posted = list[Any](), list[Any]()
        self.outbox = SimpleNamespace(send=self.told.append)
        self.report = self.told.append
        self.post = self.posted.append
        self.is_stopping = lambda: False

    def wait(self, done: Callable[[], bool], _deadline: float) -> bool:
        """As the agent's; the deadline comes when nothing is posted any more."""

        def is_done() -> bool:
            while self.posted:
                self.posted.pop(0)()
            return done()

        try:
            wait_until(is_done, 0.5)
        except TimeoutError:
            return False
        return True


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing answers until it is set."""
    event = threading.Event()
    monkeypatch.setattr(Search, "newest", lambda *_, **__: event.wait())
    yield event
    event.set()


def test_a_file_system_that_does_not_answer_delays_a_round_and_is_not_asked_again(
    tmp_path: Path, hangs: threading.Event
):
    part = CheckpointPart(node := Node(tmp_path))  # type: ignore[arg-type]
    count = threading.active_count()
    assert (part.saved(), part.saved()) == (None, None)
    part.on_attempt(None, a_round())  # type: ignore[arg-type]
    assert part.default_environ() == {"DDPLAUNCH_CHECKPOINT": ""}
    part.run_due(1e12)
    part.on_attempt_ended(())
    assert part.evidence(()) == ()
    assert threading.active_count() == count
    (notice,) = node.told
    assert "has not answered for" in notice.text


def test_what_a_file_system_has_said_before_is_not_taken_for_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else an attempt that has saved would count as one that has saved nothing."""
    archive(tmp_path / "step_1.ckpt", 1)
    part = CheckpointPart(node := Node(tmp_path))  # type: ignore[arg-type]
    saved = part.saved()
    part.on_attempt(None, a_round(saved=saved))  # type: ignore[arg-type]
    event, newest_of = threading.Event(), Search.newest
    monkeypatch.setattr(Search, "newest", lambda *_, **all_ended: (event.wait(), newest_of(*_, **all_ended))[1])
    part.on_attempt_ended(())
    assert part.evidence(()) == ()
    assert part.saved() is None
    event.set()
    assert node.wait(lambda: not part._is_looking, 0.0)
    assert part.saved() == saved


def test_what_is_saved_while_a_look_takes_long_is_found_at_the_end_of_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    archive(tmp_path / "step_1.ckpt", 1)
    part = CheckpointPart(Node(tmp_path))  # type: ignore[arg-type]
    part.on_attempt(None, a_round(saved=part.saved()))  # type: ignore[arg-type]
    looked, answer, newest_of = threading.Event(), threading.Event(), Search.newest

    def newest_late(search: Search, *, all_ended: bool) -> object:
        found = newest_of(search, all_ended=all_ended)
        looked.set()
        answer.wait()
        return found

    monkeypatch.setattr(Search, "newest", newest_late)
    part.run_due(1e12)
    looked.wait()
    archive(tmp_path / "step_2.ckpt", 2)
    part.on_attempt_ended(())
    answer.set()
    (seen,) = part.evidence(())
    assert isinstance(seen, CheckpointSeen)
    assert seen.step == 2


def test_all_nodes_name_the_checkpoint_of_the_round(tmp_path: Path):
    file(tmp_path / "step_1.pt", 1)
    part = CheckpointPart(node := Node(tmp_path))  # type: ignore[arg-type]
    saved = part.saved()
    assert saved == f"1000000000:{tmp_path}/step_1.pt"
    file(tmp_path / "step_2.pt", 2)
    part.on_attempt(None, a_round(saved=saved, node_rank=1))  # type: ignore[arg-type]
    assert part.default_environ() == {"DDPLAUNCH_CHECKPOINT": f"{tmp_path}/step_1.pt"}
    assert part.script_args(("--from={checkpoint}", "x")) == (f"--from={tmp_path}/step_1.pt", "x")
    part.on_attempt_ended(())
    assert part.evidence(()) == ()
    assert part.saved() == f"2000000000:{tmp_path}/step_2.pt"
    assert node.told == []


def test_without_the_option_nothing_is_done_or_known():
    node = Node(Path())
    node.spec = agent_spec()
    part = CheckpointPart(node)  # type: ignore[arg-type]
    part.on_attempt(None, a_round())  # type: ignore[arg-type]
    assert (part.saved(), part.default_environ(), part.script_args(("{checkpoint}",))) == (None, {}, ("{checkpoint}",))
    assert part.evidence(part.on_attempt_ended(())) == ()


def test_while_workers_run_the_node_with_rank_0_tells_of_each_new_checkpoint(tmp_path: Path):
    archive(tmp_path / "step_1.ckpt", 1)
    part = CheckpointPart(node := Node(tmp_path))  # type: ignore[arg-type]
    saved = part.saved()
    for rank in (1, 0):
        part.on_attempt(None, a_round(saved=saved, node_rank=rank))  # type: ignore[arg-type]
        part.run_due(0.0)
    part.run_due(0.0)
    assert [seen.path for seen in node.told] == [f"{tmp_path}/step_1.ckpt"]
    archive(tmp_path / "step_2.ckpt", 2)
    for looks in (1, 2):  # It has rested when the second look has seen the same.
        part.run_due(1e12)
        assert node.wait(lambda: not part._is_looking, 0.0)
        part.run_due(0.0)
        assert [seen.step for seen in node.told] == [1, 2][:looks]
    part.on_attempt_ended(())
    (seen,) = part.evidence(())
    assert isinstance(seen, CheckpointSeen)
    assert (seen.name, seen.lost_s >= 0) == ("step 2 (step_2.ckpt)", True)
    assert part.default_environ() == {"DDPLAUNCH_CHECKPOINT": ""}
