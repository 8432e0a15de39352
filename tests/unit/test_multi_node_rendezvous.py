"""Where every node has a launcher, its folder is moved into that of the run when the first round is formed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddplaunch.agent.rendezvous.multi_node import MultiNodeRendezvous
from ddplaunch.agent.rendezvous.single_node import AgentCallbacks
from ddplaunch.protocol.launcher_agent import FirstRoundFormed, Notice
from ddplaunch.protocol.rendezvous import MemberReady, RoundFormed
from ddplaunch.protocol.results import Round
from ddplaunch.protocol.specs import AgentSpec, Program
from ddplaunch.system.files import run_folder

ROUND = Round(
    attempt=0,
    restart_count=0,
    node_rank=3,
    nnodes=4,
    first_rank=3,
    local_world_size=1,
    world_size=4,
    master_addr="10.0.0.1",
    master_port=1,
)


@pytest.fixture
def spec(tmp_path: Path) -> AgentSpec:
    folder = run_folder.create(tmp_path, "mine.gpu1")
    program = Program("script", "x.py", (), "python")
    return AgentSpec(run_id="mine", host="gpu1", program=program, same_python=True, node_dir=str(folder))


def joined(spec: AgentSpec, sent: list[object], *, shares_host: bool = False) -> MultiNodeRendezvous:
    """A node that has joined the run ``theirs``, and takes part in its first round."""
    callbacks = AgentCallbacks(
        lambda *_: True, lambda: False, lambda: False, lambda _: None, sent.append, lambda _: None
    )
    rendezvous = MultiNodeRendezvous(spec, 1, callbacks)
    client = SimpleNamespace(ready=MemberReady(3, "10.0.0.1", 1, "theirs", "key"), is_spare=False)
    rendezvous._client = client  # type: ignore[assignment]
    rendezvous._handle_record(client, RoundFormed(ROUND, shares_host))  # type: ignore[arg-type]
    return rendezvous


@pytest.mark.parametrize(("shares_host", "name"), [(False, "gpu1"), (True, "gpu1.3")])
def test_the_folder_is_moved_once_and_named_after_the_host(
    spec: AgentSpec, tmp_path: Path, shares_host: bool, name: str
) -> None:
    sent: list[object] = []
    rendezvous = joined(spec, sent, shares_host=shares_host)
    folder = str(tmp_path / "theirs" / name)
    completed = rendezvous.complete(spec)
    assert completed == replace(spec, run_id="theirs", node_dir=folder)
    assert rendezvous.complete(completed) is completed
    assert sent == [FirstRoundFormed(("theirs", name))]
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_without_files_the_nodes_agree_on_the_run_id_only(spec: AgentSpec) -> None:
    sent: list[object] = []
    without = replace(spec, node_dir=None)
    assert joined(without, sent).complete(without) == replace(without, run_id="theirs")
    assert sent == [FirstRoundFormed()]


def test_a_folder_that_cannot_be_moved_is_used_where_it_is(spec: AgentSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    sent: list[object] = []
    monkeypatch.setattr(run_folder, "move_into_run", fail)
    assert joined(spec, sent).complete(spec) == replace(spec, run_id="theirs")
    text = f"the logs of gpu1 are in {spec.node_dir}, not in the folder of theirs: No space left on device"
    assert sent == [Notice(text, -1), FirstRoundFormed()]


def test_one_launcher_of_all_nodes_has_named_the_folders_already(spec: AgentSpec) -> None:
    spec = replace(spec, launcher_assigns_rendezvous=True)
    assert joined(spec, []).complete(spec) is spec
