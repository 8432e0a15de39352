"""After a failure all workers start again, as often as allowed, with a fresh store; nothing of an attempt stays."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.processes import wait_until
from tests.support.runs import PROGRAMS, Finished, run, start

EXIT_WITH = PROGRAMS / "exit_with.py"
ALLREDUCE = PROGRAMS / "allreduce.py"


def assert_recovered(finished: Finished, *deaths: tuple[int, int]) -> None:
    """In each attempt but the last, one of three ranks died of a signal, and is named, not those that lost it."""
    assert finished.returncode == 0, finished.err
    *failed, last = finished.report["attempts"]
    assert [(attempt["outcome"], attempt["attempt_follows"]) for attempt in failed] == [("failed", True)] * len(deaths)
    assert (last["outcome"], last["attempt_follows"]) == ("succeeded", False)
    for number, (attempt, (victim, signum)) in enumerate(zip(failed, deaths, strict=True), start=1):
        assert [exit_["rank"] for exit_ in attempt["exits"] if exit_["returncode"] == -signum] == [victim]
        name = signal.Signals(signum).name
        assert re.search(rf"rank {victim} on \S+ failed: {name}.*; restart {number} of", finished.err), finished.err
    assert finished.out.count(f"sum 6 in attempt {len(deaths)}") == 3


@pytest.mark.torch
def test_a_gloo_job_recovers_each_time_that_a_rank_dies_at_the_given_port(port: int) -> None:
    """torchrun: local_elastic_agent_test 2, 19."""
    deaths = [*enumerate(map(int, (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)))]
    options = ("--nproc-per-node", "3", "--max-restarts", str(len(deaths)), "--master-port", str(port))
    finished = run(*options, ALLREDUCE, "40", ",".join(f"{victim}:{signum}" for victim, signum in deaths))
    assert_recovered(finished, *deaths)
    assert finished.out.count(f"port {port}\n") == 3 * (len(deaths) + 1)


def test_each_attempt_has_its_number_its_store_and_its_logs() -> None:
    """torchrun: agent_api_test 3."""
    options = ("--nproc-per-node", "2", "--max-restarts", "2")
    finished = run(*options, EXIT_WITH, "1=code:3,raise:again,code:0", "0=wait,wait,code:0")
    assert finished.returncode == 0, finished.err
    texts = [(finished.run_dir / f"attempt_{attempt}" / "1" / "stdout.log").read_text() for attempt in range(3)]
    found = [re.search(r"attempt (\d) of (\d), port (\d+)\n", text) for text in texts]
    assert [match[1] for match in found if match] == ["0", "1", "2"]
    assert [match[2] for match in found if match] == ["2", "2", "2"]
    assert len({match[3] for match in found if match}) == 3, "the port of a store that is gone may be taken by now"
    assert (finished.run_dir / "attempt_1/1/error.json").stat().st_mode & 0o777 == 0o600
    assert not (finished.run_dir / "attempt_2/1/error.json").exists()
    assert re.search(r"rank 1 on \S+ failed: exit code 3; restart 1 of 2\n", finished.err)
    assert re.search(r"rank 1 on \S+ failed: RuntimeError: again \(\S+\); restart 2 of 2\n", finished.err)


def test_the_budget_is_used_up_exactly_and_the_last_end_is_the_runs() -> None:
    """torchrun: agent_api_test 6; local_elastic_agent_test 11; errors_api_test 6."""
    options = ("--nproc-per-node", "2", "--max-restarts", "2")
    finished = run(*options, EXIT_WITH, "0=code:3,code:4,code:5,code:0")
    assert finished.returncode == 5
    assert not list(finished.run_dir.rglob("error.json")), "sys.exit is no exception"
    attempts = finished.report["attempts"]
    assert [attempt["exits"][0]["returncode"] for attempt in attempts] == [3, 4, 5]
    assert [attempt["attempt_follows"] for attempt in attempts] == [True, True, False]
    for number, code in enumerate((3, 4, 5)):
        assert re.search(rf"attempt {number}: rank 0 on \S+ failed: exit code {code}\n", finished.err)


def test_a_job_that_succeeds_is_not_started_again() -> None:
    """torchrun: agent_api_test 4."""
    finished = run("--max-restarts", "3", EXIT_WITH, "0=code:0")
    assert (finished.returncode, len(finished.report["attempts"])) == (0, 1)


MANY = ("--max-restarts", "10")
GIVEN_UP = (
    r"not restarted again: 3 attempts in a row ended by the same exception at the same place, "
    r"each within \d+\.\d s of its start"
)


def assert_given_up(finished: Finished, attempts: int) -> None:
    assert finished.returncode == 1, finished.err
    assert len(finished.report["attempts"]) == attempts
    notes = [attempt["decision"] for attempt in finished.report["attempts"]]
    assert notes[:-1] == [f"restart {number} of {MANY[1]}" for number in range(1, attempts)]
    assert re.fullmatch(GIVEN_UP, notes[-1])
    assert finished.err.count(f"\n{notes[-1]}\n") == 1
    assert len(re.findall(rf"; restart \d of {MANY[1]}\n", finished.err)) == attempts - 1


def test_a_job_that_fails_alike_three_times_in_a_row_is_not_started_again() -> None:
    """resilience 3.2 #22."""
    ends = "raise:other,raise:again,raise:again,raise:again,code:0"
    finished = run("--nproc-per-node", "2", *MANY, EXIT_WITH, f"1={ends}")
    assert_given_up(finished, 4)
    assert "RuntimeError: again" in finished.err


def test_as_few_as_two_restarts_are_used_whatever_the_failure_is() -> None:
    finished = run("--max-restarts", "2", EXIT_WITH, "0=raise:a,raise:a,raise:a")
    assert len(finished.report["attempts"]) == 3
    assert "\nnot restarted: 2 of 2 restarts used\n" in finished.err


def test_who_wants_no_restarts_hears_nothing_of_them() -> None:
    finished = run(EXIT_WITH, "0=code:3")
    assert "not restarted" not in finished.err
    assert finished.report["attempts"][0]["decision"] == "not restarted: --max-restarts is 0"


def test_nodes_that_fail_alike_all_give_up_whichever_is_the_first(tmp_path: Path) -> None:
    """resilience 3.2 #22. Both fail at once, so that now one and now the other stops the job."""
    script = tmp_path / "wrong.py"
    script.write_text("settings = {}\nsettings['depth']\n")
    finished = run("--dry-run", "--nnodes", "2", "--nproc-per-node", "2", *MANY, script)
    assert_given_up(finished, 3)
    assert "  | KeyError: 'depth'\n" in finished.err


LOSES_PEER = """
import atexit, os, pathlib, sys, time
failed = pathlib.Path(sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ["RANK"] == "1":
    atexit.register(failed.touch)  # As a socket, which closes only after the exception: a stop may come any time then.
    {}["depth"]
while not failed.exists():
    time.sleep(0.01)
raise RuntimeError("[1] Connection closed by peer [127.0.0.1]:12345")
"""


def test_a_node_that_only_lost_its_peer_does_not_hide_the_failure_of_the_other(tmp_path: Path) -> None:
    """resilience 3.2 #22."""
    (script := tmp_path / "wrong.py").write_text(LOSES_PEER)
    finished = run("--dry-run", "--nnodes", "2", "--nproc-per-node", "1", *MANY, script, tmp_path)
    assert_given_up(finished, 3)
    assert finished.report["first_failure"]["rank"] == 1


def test_a_stop_between_two_attempts_is_not_lost() -> None:
    codes = ",".join(["code:1"] * 400)
    for _ in range(2):
        running = start("--max-restarts", "399", EXIT_WITH, f"0={codes}")
        running.wait_for("restart 4 of 399")
        running.signal(signal.SIGINT)
        finished = running.finish()
        assert finished.returncode == 130, finished.err
        assert finished.report["attempts"][-1]["outcome"] in ("stopped", "failed")


def test_many_attempts_leak_neither_files_nor_threads(start_method: str, tmp_path: Path) -> None:
    """Compared at the same point of an early and of the last attempt: all workers up."""
    go_on, last = tmp_path / "go-on", 15 if start_method == "forkserver" else 8  # To start an interpreter takes longer.
    ends = ["code:1"] * 3 + [f"+{go_on}+code:1"] + ["code:1"] * (last - 4) + ["wait"]
    options = ("--start-method", start_method, "--nproc-per-node", "2", "--max-restarts", str(last))
    running = start(*options, EXIT_WITH, f"0={','.join(ends)}", f"1={','.join(['wait'] * (last + 1))}")
    running.wait_for(f"attempt 3 of {last}", 2)
    watched = (running.pid, running.agent_pid(), running.forkserver_pid())
    early = [settled_use(pid) for pid in watched]
    go_on.touch()
    running.wait_for(f"attempt {last} of {last}", 2)
    wait_until(lambda: all(use(pid) <= before + 1 for pid, before in zip(watched, early, strict=True)), 20)
    running.signal(signal.SIGTERM)
    assert running.finish().returncode == 143


def use(pid: int) -> int:
    """Open files and threads of a process together."""
    return len(os.listdir(f"/proc/{pid}/fd")) + len(os.listdir(f"/proc/{pid}/task"))


def settled_use(pid: int) -> int:
    """Once it has stayed the same for a while: what an attempt's start needs for a moment is gone by then."""
    same: list[int] = []

    def settled() -> bool:
        same.append(use(pid))
        return len(same) > 20 and len(set(same[-20:])) == 1

    wait_until(settled)
    return same[-1]


DELETES = """
import os, shutil, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    shutil.rmtree(os.getcwd())
    sys.exit(1)
"""


@pytest.mark.parametrize("how", [("train.py",), ("-m", "train")])
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_restart_in_a_folder_that_was_deleted_is_one_message(
    how: tuple[str, ...], start_method: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "folder").mkdir()
    (folder / "train.py").write_text(DELETES)
    options = ("--max-restarts", "1", "--start-method", start_method, "--log-dir", tmp_path / "logs")
    finished = run(*options, *how, cwd=folder)
    assert finished.returncode == 1
    assert f"failed: SystemExit: the working directory was deleted, and {how[-1]} with it\n" in finished.err
    assert "Traceback" not in finished.err
