"""Marks are read as they are made, and what was found becomes one table."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddplaunch import LaunchConfig
from ddplaunch.features.ps import ps as page
from ddplaunch.features.ps import run_finder
from ddplaunch.features.ps.queries import RunOnHost, RunsFound
from ddplaunch.features.runs import run_json
from ddplaunch.launcher import run_facts
from ddplaunch.system import run_tags
from ddplaunch.system.files import run_folder
from ddplaunch.transport.handle import node_tag
from tests.support import golden

FRESH = "20261120-193012-a1b2c3"
GB = 1 << 30


def test_a_mark_leads_back_to_the_run_and_its_id() -> None:
    """A question is a run tag."""

    def run_id(tag: str) -> str:
        marks = [node_tag(tag, ("host",) * nodes, nodes - 1) for nodes in (1, 2, 12000)]
        assert all(map(run_tags.is_tag, marks))
        ((found, run),) = set(map(run_tags.ids_of, marks))
        assert run == tag
        return found

    golden.check_answers("run_tags", run_id)


@pytest.mark.parametrize("text", ["", "a b", "a/b", "a\n", "ä", "x" * 200])
def test_what_no_run_can_have_as_its_mark_is_none(text: str) -> None:
    assert not run_tags.is_tag(text)


def test_a_launcher_is_found_by_its_memfd() -> None:
    with run_tags.launcher_memfd("job7.0a1b2c"), run_tags.launcher_memfd(FRESH):
        assert run_tags.launcher_memfds(os.getpid()) == {"job7.0a1b2c": "job7", FRESH: FRESH}
    assert not run_tags.launcher_memfds(os.getpid())
    assert not run_tags.launcher_memfds(1 << 30)


def test_a_made_run_id_is_recognised() -> None:
    assert run_tags.is_made_id(run_folder.new_run_id())
    assert not any(map(run_tags.is_made_id, ("", "job7", f"{FRESH}.1", "none")))


def test_an_agent_that_a_worker_of_another_run_has_started_has_its_own_run_id() -> None:
    def inspected(pid: int, tag: str, run_id: str, *command: str, **launcher_tags: str) -> run_finder._Inspected:
        return run_finder._Inspected(pid, b"7", 1, pid, tag, run_id, launcher_tags, command)

    inner, outer, of_all = "20261120-193012-000001", "20261120-193012-000002", "20261120-193012-000003"
    worker_of_outer = inspected(1, outer, of_all, "python", **{inner: inner})
    agent, forkserver = inspected(2, inner, of_all), inspected(3, inner, of_all, "ddplaunch", "forkserver")
    assert run_finder._run_ids([worker_of_outer, agent, forkserver], {2}) == {outer: of_all, inner: inner}
    left = [inspected(4, f"{inner}.1", of_all, "python"), inspected(5, "job7.0a1b2c", of_all, "python")]
    assert run_finder._run_ids(left, set()) == {inner: of_all}


def test_a_fork_of_the_launcher_is_no_launcher() -> None:
    reader, writer = os.pipe()
    with run_tags.launcher_memfd("job7.0a1b2c"):
        pid = os.fork()
        if pid == 0:
            os.write(writer, str(len(run_tags.launcher_memfds(os.getpid()))).encode())
            os._exit(0)
        os.waitpid(pid, 0)
    assert os.read(reader, 9) == b"0"
    os.close(reader)
    os.close(writer)


def test_the_script_is_in_the_command_line_of_a_worker() -> None:
    golden.check_answers("scripts_of_workers", lambda command: run_finder._script_of_worker(tuple(command.split())))


def has(
    mark: str,
    *,
    run_id: str = "",
    launcher_alive: bool = False,
    age_s: float = 60,
    memory_bytes: int = GB,
    script: str = "",
    **counts: int,
) -> RunOnHost:
    return RunOnHost(
        run_tag=mark,
        run_id=run_id or run_tags.run_id_of(mark),
        counts=tuple(counts.items()),
        age_s=age_s,
        memory_bytes=memory_bytes,
        script=script,
        launcher_alive=launcher_alive,  # type: ignore[arg-type]
    )


def found(**runs: list[RunOnHost]) -> dict[str, RunsFound]:
    return {host: RunsFound(host, tuple(its)) for host, its in runs.items()}


OTHER = "20261120-193011-ffffff"
TABLE = found(
    login=[has("job7.0a1b2c", launcher_alive=True, launcher=1, memory_bytes=GB // 8, script="train.py")],
    gpu1=[has("job7.0a1b2c", agent=1, worker=8, age_s=7300), has(FRESH, other=1)],
    gpu2=[has("job7.0a1b2c", agent=1, worker=8, memory_bytes=20 * GB)],
    gpu3=[has("job7.ffffff", other=2, age_s=3 * 86400, memory_bytes=0)],
)
AGREED = found(
    gpu1=[has(FRESH, agent=1, launcher_alive=True)],
    gpu2=[has(OTHER, run_id=FRESH, agent=1, worker=2, launcher_alive=True)],
)
BEFORE = found(
    login=[],
    gpu1=[has("a.000000", agent=1, worker=2), has("b.000000", other=5)],
    gpu2=[has("a.000000", agent=1, worker=2)],
    gpu3=[has("a.000000", other=1)],
    gpu4=[has("a.000000", other=12)],
)
LEFT = {"login": (), "gpu1": (), "gpu2": (), "gpu4": tuple(range(10, 22))}
HERE = [RunsFound("a", (has("x.000000"), has("x.000001.3")), (5,)), RunsFound("b", (has(FRESH),), (6, 7))]


def test_what_was_found_and_ended_is_told() -> None:
    pages = {
        "a run, what an earlier one of that id left, and another": [page.run_table(TABLE)],
        "parts of a run whose nodes agreed on a run id are one row": [page.run_table(AGREED)],
        "what was ended, equal hosts together": page.ended("a", BEFORE, LEFT),
        "ids are told once": page.ids(HERE),
        "hidden processes": page.hidden({"a": HERE[0], "b": HERE[1], "c": RunsFound("c", ())}),
        "hidden processes of equal hosts": page.hidden({"a1": HERE[1], "a2": HERE[1]}),
    }
    golden.check("ps", {name: "\n".join(lines) for name, lines in pages.items()})


def test_a_part_of_a_run_is_found_by_the_id_of_all_and_by_its_own() -> None:
    for name in (FRESH, OTHER):
        assert page.of_run(name, AGREED["gpu2"]) == list(AGREED["gpu2"].runs)


def test_the_script_is_found_in_the_run_folder_of_the_launcher(tmp_path: Path) -> None:
    folder = run_folder.create(tmp_path, "job7")
    with run_folder.released(folder):
        assert list(run_json.of_launcher(os.getpid())) == []
        run_facts.write(run_facts.of_this_process("job7", "job7.0a1b2c", LaunchConfig(script="train.py")), folder)
        assert run_finder._scripts_of_launcher(os.getpid())["job7.0a1b2c"] == "train.py"
    assert list(run_json.of_launcher(os.getpid())) == []
    assert list(run_json.of_launcher(1 << 30)) == []
