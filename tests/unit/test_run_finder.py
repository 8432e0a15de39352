"""Marks are read as they are made, and what was found becomes one table."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddplaunch import LaunchConfig
from ddplaunch.features.ps import ps_page as page
from ddplaunch.features.ps import run_finder
from ddplaunch.launcher.run_files import run_facts
from ddplaunch.protocol.queries import RunOnHost, RunsFound
from ddplaunch.system import run_tags
from ddplaunch.system.files import run_folder, run_json
from ddplaunch.transport.handle import node_tag
from tests.support import golden

FRESH = "20261120-193012-a1b2c3"
GB = 1 << 30


@pytest.mark.parametrize(
    ("run", "run_id"),
    [
        (FRESH, FRESH),
        ("job7.0a1b2c", "job7"),
        ("job7.123456", "job7"),
        ("job7.012345", "job7"),
        ("a.7.0a1b2c", "a.7"),
        ("a.0a1b2c.0a1b2c", "a.0a1b2c"),
    ],
)
@pytest.mark.parametrize("nodes", [1, 2, 12000])
def test_a_mark_leads_back_to_the_run_and_its_id(run: str, run_id: str, nodes: int) -> None:
    mark = node_tag(run, ("host",) * nodes, nodes - 1)
    assert run_tags.ids_of(mark) == (run_id, run)
    assert run_tags.is_tag(mark)


@pytest.mark.parametrize("text", ["", "a b", "a/b", "a\n", "ä", "x" * 200])
def test_what_no_run_can_have_as_its_mark_is_none(text: str) -> None:
    assert not run_tags.is_tag(text)


def test_a_launcher_is_found_by_its_memfd() -> None:
    with run_tags.launcher_memfd("job7.0a1b2c"), run_tags.launcher_memfd(FRESH):
        assert run_tags.launcher_memfds(os.getpid()) == {"job7.0a1b2c": "job7", FRESH: FRESH}
    assert not run_tags.launcher_memfds(os.getpid())
    assert not run_tags.launcher_memfds(1 << 30)


def test_a_launcher_that_has_taken_the_run_id_of_another_is_found_by_that_id() -> None:
    with run_tags.launcher_memfd(FRESH), run_tags.launcher_memfd(FRESH, "20261120-193011-ffffff"):
        assert run_tags.launcher_memfds(os.getpid()) == {FRESH: "20261120-193011-ffffff"}


def test_a_made_run_id_is_recognised() -> None:
    assert run_tags.is_made_id(run_folder.new_run_id())
    assert not any(map(run_tags.is_made_id, ("", "job7", f"{FRESH}.1", "none")))


def test_an_agent_that_a_worker_of_another_run_has_started_has_its_own_run_id() -> None:
    def inspected(pid: int, tag: str, run_id: str, *command: str, **launcher_tags: str) -> run_finder._Inspected:
        process = SimpleNamespace(pid=pid)
        return run_finder._Inspected(process, 1, pid, tag, run_id, launcher_tags, command)  # type: ignore[arg-type]

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


def test_the_script_is_found_in_the_run_folder_of_the_launcher(tmp_path: Path) -> None:
    folder = run_folder.create(tmp_path, "job7")
    with run_folder.released(folder):
        assert list(run_json.of_launcher(os.getpid())) == []
        run_facts.write(run_facts.of_this_process("job7", "job7.0a1b2c", LaunchConfig(script="train.py")), folder)
        assert run_finder._scripts_of_launcher(os.getpid())["job7.0a1b2c"] == "train.py"
    assert list(run_json.of_launcher(os.getpid())) == []
    assert list(run_json.of_launcher(1 << 30)) == []


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


def test_the_table_has_a_row_for_a_run_and_one_for_what_an_earlier_one_of_that_id_left() -> None:
    text = page.run_table(
        found(
            login=[has("job7.0a1b2c", launcher_alive=True, launcher=1, memory_bytes=GB // 8, script="train.py")],
            gpu1=[has("job7.0a1b2c", agent=1, worker=8, age_s=7300), has(FRESH, other=1)],
            gpu2=[has("job7.0a1b2c", agent=1, worker=8, memory_bytes=20 * GB)],
            gpu3=[has("job7.ffffff", other=2, age_s=3 * 86400, memory_bytes=0)],
        )
    )
    assert text.splitlines() == [
        f"{'run':22}  state            script    hosts           processes                         memory",
        f"{FRESH}  left over 1m00s  ?         gpu1            1 other                           1024 MB",
        f"{'job7':22}  left over 3d00h  ?         gpu3            2 others                          0 MB",
        f"{'job7':22}  running 2h01m    train.py  gpu[1-2],login  1 launcher, 2 agents, 16 workers  21 GB",
    ]


def test_the_parts_of_a_run_whose_nodes_agreed_on_a_run_id_are_one_row() -> None:
    other = "20261120-193011-ffffff"
    runs = found(
        gpu1=[has(FRESH, agent=1, launcher_alive=True)],
        gpu2=[has(other, run_id=FRESH, agent=1, worker=2, launcher_alive=True)],
    )
    (row,) = page.run_table(runs).splitlines()[1:]
    assert row.split()[:5] == [FRESH, "running", "1m00s", "?", "gpu[1-2]"]
    for name in (FRESH, other):
        assert page.of_run(name, runs["gpu2"]) == list(runs["gpu2"].runs)


def test_what_was_ended_is_told_by_host_equal_ones_together() -> None:
    before = found(
        login=[],
        gpu1=[has("a.000000", agent=1, worker=2), has("b.000000", other=5)],
        gpu2=[has("a.000000", agent=1, worker=2)],
        gpu3=[has("a.000000", other=1)],
        gpu4=[has("a.000000", other=12)],
    )
    left = {"login": (), "gpu1": (), "gpu2": (), "gpu4": tuple(range(10, 22))}
    assert page.ended("a", before, left) == [
        "gpu[1-2]: ended 1 agent, 2 workers",
        "gpu4: had 12 others; pids 10, 11, 12, 13, 14, 15, 16, 17 and 4 more could not be ended",
    ]


def test_ids_are_told_once_and_hidden_processes_in_short() -> None:
    here = [RunsFound("a", (has("x.000000"), has("x.000001.3")), (5,)), RunsFound("b", (has(FRESH),), (6, 7))]
    assert page.ids(here) == [FRESH, "x"]
    assert page.hidden({"a": here[0], "b": here[1], "c": RunsFound("c", ())}) == [
        "a: a process of yours could not be inspected (pid 5)",
        "b: 2 processes of yours could not be inspected (pid 6, 7)",
    ]
    assert page.hidden({"a1": here[1], "a2": here[1]}) == ["a[1-2]: 2 processes of yours could not be inspected"]
