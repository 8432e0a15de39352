"""--sweep: many jobs, each a run of its own, as many at a time as the GPUs or CPUs suffice for."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu_machine import Machine
from tests.support.processes import pids_with, wait_until
from tests.support.runs import Finished, Running, environment, python, run, start
from tests.support.terminal import CTRL_C, Terminal

GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
SHOW = ("--no-python", "sh", "-c", 'echo $DDPLAUNCH_SWEEP_JOB $CUDA_VISIBLE_DEVICES "$@"; [ "$1" != bad ]', "sh")
UNTIL = ("--no-python", "sh", "-c", 'trap "exit 7" TERM; touch begun.$1; until [ -e go ]; do sleep 0.05; done', "sh")


class Sweep:
    """A folder with the file of jobs, in which sweeps are started; their state is there, too."""

    def __init__(self, folder: Path, *lines: str) -> None:
        self.folder = folder
        self.environ = {**GPUS, "XDG_STATE_HOME": str(folder / "state")}
        self.write(*lines)

    def write(self, *lines: str) -> None:
        (self.folder / "jobs.txt").write_text("".join(f"{line}\n" for line in lines))

    def run(self, *words: str | Path, **options: Any) -> Finished:
        return run("--sweep", "jobs.txt", *words, env=self.environ, cwd=self.folder, **options)

    def start(self, *words: str | Path) -> Running:
        return start("--sweep", "jobs.txt", *words, env=self.environ, cwd=self.folder)

    def other(self, *words: str) -> Finished:
        return run(*words, env=self.environ, cwd=self.folder)

    def sweeps(self) -> list[Path]:
        """The folders of all sweeps, in the order of their starts."""
        return sorted((self.folder / "state/ddplaunch").glob("2*"), key=lambda folder: folder.stat().st_ctime)

    def jobs(self) -> list[dict[str, Any]]:
        """What the last one says of its jobs."""
        return list(json.loads((self.sweeps()[-1] / "results.json").read_text())["jobs"])

    def states(self) -> list[str]:
        return [job["state"] for job in self.jobs()]

    def begun(self) -> int:
        return len(list(self.folder.glob("begun.*")))


def test_each_job_has_gpus_arguments_and_a_run_of_its_own_and_a_failure_stops_no_other(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "{good,bad} --seed 1..2", "'two words'")
    finished = sweep.run("--nproc-per-node", "2", *SHOW)
    assert finished.returncode == 1, finished.err
    head, *rows = finished.out.splitlines()
    assert head.split() == ["job", "state", "exit", "time", "arguments", "failure"]
    assert [row.split()[1] for row in rows] == sweep.states() == ["succeeded"] * 2 + ["failed"] * 2 + ["succeeded"]
    assert re.search(r"^3 +failed +1 +\d+s +bad --seed 1 +rank [01] on \S+: exit code 1$", rows[2]), rows[2]
    assert "5 jobs, 2 at a time" in finished.err
    ended = [
        job for job in sweep.jobs() if job["state"] == "succeeded"
    ]  # A rank of the others may not have come so far.
    printed = [(Path(job["folder"]) / "attempt_0/0/stdout.log").read_text() for job in ended]
    assert {line.split()[1] for line in printed} == {"0,1", "2,3"}
    assert [line.split()[0] for line in printed] == ["1", "2", "5"]
    assert printed[2].endswith(" two words\n")
    with (sweep.sweeps()[-1] / "results.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["state"], line["arguments"]) for line in lines][-1] == ("succeeded", "'two words'")
    shown = re.search(r"ddplaunch (--logs \S+)$", finished.err, re.MULTILINE)
    assert shown
    assert re.search("[34] .*bad --seed", sweep.other(*shown[1].split()).out)
    assert sweep.other("--wait", sweep.jobs()[3]["run_id"]).returncode == 1
    assert sweep.other("--wait", "last").returncode == 1


@pytest.mark.slow
def test_retry_failed_runs_what_has_not_succeeded_and_lines_that_are_new(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "good", "bad")
    assert "no sweep of jobs.txt" in sweep.run("--retry-failed", *SHOW).err
    assert sweep.run(*SHOW).returncode == 1
    sweep.write("new", "good", "bad")
    finished = sweep.run("--retry-failed", *SHOW)
    assert (finished.returncode, sweep.states()) == (1, ["succeeded", "done before", "failed"])
    sweep.run("--retry-failed", *SHOW)
    assert sweep.states() == ["done before", "done before", "failed"]


def test_a_failure_stops_the_others_if_the_user_asks_for_it(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "slow", "good", "bad", "last")
    script = '[ "$1" = bad ] && exit 3; [ "$1" = slow ] && exec sleep 1000; :'
    finished = sweep.run("--jobs", "2", "--stop-on-failure", "--no-python", "sh", "-c", script, "sh")
    assert (finished.returncode, sweep.states()) == (1, ["stopped", "succeeded", "failed", "waiting"])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all_in_order(signum: int, tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "1..6")
    running = sweep.start(*UNTIL)
    wait_until(lambda: sweep.begun() == 4, 30)
    running.signal(signum)
    assert running.finish().returncode == 128 + signum
    assert (sweep.begun(), sweep.states()) == (4, ["stopped"] * 4 + ["waiting"] * 2)
    exits = [json.loads((Path(job["folder"]) / "report.json").read_text()) for job in sweep.jobs()[:4]]
    assert [report["attempts"][0]["exits"][0]["returncode"] for report in exits] == [7] * 4


def test_jobs_of_a_sweep_that_is_killed_end_in_order_and_the_next_one_goes_on(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "1..6")
    running = sweep.start(*UNTIL)
    wait_until(lambda: sweep.begun() == 4, 30)
    other = sweep.run("--retry-failed", *UNTIL)
    assert (other.returncode, "has not ended" in other.err) == (2, True), other.err
    running.signal(signal.SIGKILL)
    running.finish()
    mark = f"XDG_STATE_HOME={sweep.environ['XDG_STATE_HOME']}"
    wait_until(lambda: not pids_with(mark), 30, "processes are left")
    (tmp_path / "go").touch()
    assert sweep.run("--retry-failed", *UNTIL).returncode == 0
    assert sweep.states() == ["succeeded"] * 6


def test_a_job_whose_launcher_is_killed_has_failed_and_the_others_go_on(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "1..5")
    running = sweep.start(*UNTIL)
    wait_until(lambda: sweep.begun() == 4, 30)
    wait_until(lambda: sweep.jobs()[1]["folder"], 30)
    os.kill(json.loads((Path(sweep.jobs()[1]["folder"]) / "run.json").read_text())["pid"], signal.SIGKILL)
    wait_until(lambda: sweep.begun() == 5, 30)
    (tmp_path / "go").touch()
    assert running.finish().returncode == 1
    assert [(job["exit_code"], job["failure"]) for job in sweep.jobs()][:2] == [
        (0, ""),
        (137, "its launcher was killed by SIGKILL"),
    ]
    assert sweep.states() == ["succeeded", "failed", *["succeeded"] * 3]


@pytest.mark.slow
@pytest.mark.usefixtures("stub_is_installed")
def test_all_jobs_have_torch_from_one_process_which_ends_with_them(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "1..6")
    (tmp_path / "train.py").write_text("import torch\n")
    assert sweep.run("-v", "--jobs", "3", "train.py").returncode == 0
    consoles = [(Path(job["folder"]) / "console.log").read_text() for job in sweep.jobs()]
    assert ["torch was imported by an earlier run" in console for console in consoles] == [True] * 6, consoles[0]
    wait_until(lambda: not pids_with(f"XDG_STATE_HOME={sweep.environ['XDG_STATE_HOME']}"), 30)


@pytest.mark.slow
def test_a_detached_sweep_and_its_jobs_are_listed_and_ended(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "1..6")
    started = sweep.run("--detach", *UNTIL)
    assert started.returncode == 0, started.err
    sweep_id = started.out.strip()
    wait_until(lambda: sweep.begun() == 4, 30)
    listed = sweep.other("--ps").out
    assert re.findall(rf"^{sweep_id}(\S*) ", listed, re.MULTILINE) == ["", "-1", "-2", "-3", "-4"]
    assert sweep.other("--kill", f"{sweep_id}-2").returncode == 0
    wait_until(lambda: sweep.begun() == 5, 30)
    assert sweep.other("--kill", sweep_id).returncode == 0
    assert sweep.other("--wait", sweep_id).returncode == 128 + signal.SIGTERM
    assert sweep.states() == ["stopped", "failed", "stopped", "stopped", "stopped", "waiting"]


def test_the_table_follows_the_jobs_on_a_terminal(tmp_path: Path) -> None:
    sweep, terminal = Sweep(tmp_path, "1..6"), Terminal()
    words = ("--sweep", "jobs.txt", *UNTIL)
    running = terminal.start(*words, env=sweep.environ, cwd=tmp_path)
    running.wait_for("6 jobs: 4 running, 2 waiting")
    wait_until(lambda: sweep.begun() == 4, 30)
    terminal.type(CTRL_C)
    assert running.finish().returncode == 128 + signal.SIGINT
    terminal.close()
    assert running.lines[-6].split()[:3] == ["1", "stopped", "143"], running.lines[-8:]


def test_a_job_that_cannot_start_says_why_and_jobs_without_gpus_share_the_cpus(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "1..3")
    sweep.environ["CUDA_VISIBLE_DEVICES"] = ""
    (tmp_path / "show.py").write_text("import os; print(os.environ['OMP_NUM_THREADS'])\n")
    assert sweep.run("--jobs", "2", "show.py").returncode == 0
    threads = {(Path(job["folder"]) / "attempt_0/0/stdout.log").read_text().strip() for job in sweep.jobs()}
    assert threads == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
    assert sweep.run("missing.py").returncode == 1
    assert "missing.py" in sweep.jobs()[0]["failure"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sweep", "none.txt"), "--sweep none.txt: No such file or directory"),
        (("--sweep", "jobs.txt", "--hosts", "a,b"), "--sweep runs jobs of one machine"),
        (("--sweep", "jobs.txt", "--metrics-file", "m"), "--sweep cannot be combined with --metrics-file"),
        (("--sweep", "jobs.txt", "--jobs", "0"), "--jobs 0: must be above 0"),
        (("--sweep", "jobs.txt", "--nproc-per-node", "5"), "a job needs 5 GPUs, and 4 can be used"),
        (("--jobs", "2"), "--jobs has an effect only with --sweep"),
    ],
)
def test_what_is_no_sweep_is_refused_before_anything_starts(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "1..3")
    refused = sweep.other(*words, "train.py")
    assert (refused.returncode, said in refused.err) == (2, True), refused.err
    assert not sweep.sweeps()


@pytest.mark.slow
def test_jobs_wait_for_gpus_that_another_run_uses(tmp_path: Path, nvml_library: Path) -> None:
    machine = Machine(tmp_path, nvml_library)
    sweep = Sweep(tmp_path, "1..5")
    first = machine.start("--gpus", "0", waits=True)
    first.wait_for("runs on 0")
    state = {"XDG_STATE_HOME": sweep.environ["XDG_STATE_HOME"], "BEGUN": str(tmp_path)}
    running = machine.start("--sweep", str(tmp_path / "jobs.txt"), "--gpus", "free", waits=True, **state)

    def consoles() -> list[str]:
        return [console.read_text() for console in tmp_path.glob("state/ddplaunch/*/jobs/*/console.log")]

    wait_until(lambda: sorted("runs on" in text for text in consoles()) == [False, True, True, True], 60)
    wait_until(lambda: any("waiting for" in text for text in consoles()), 30)
    ended = machine.end(first, running)
    assert [each.returncode for each in ended] == [0, 0], ended[1].err
    used = [re.findall(r"runs on (\d)", text) for text in consoles()]
    assert {gpu for (gpu,) in used} <= {"0", "1", "2", "3"}


def test_the_plan_of_a_sweep_lists_the_jobs(tmp_path: Path) -> None:
    planned = Sweep(tmp_path, "--lr {1,2}").other("--plan", "--sweep", "jobs.txt", "train.py", "--all").out
    assert "2 jobs of --sweep, 2 at a time" in planned
    assert "job 2: --lr 2" in planned
    assert "train.py --all --lr 1" in planned


PROGRAM = """
import os, sys, threading
from ddplaunch import LaunchConfig, WorkerConfig, launch

config = LaunchConfig(script="sh", entry="program", script_args={words!r}, sweep_jobs=(("good",), ("bad",)))
if sys.argv[1:] == ["thread"]:
    found = []
    thread = threading.Thread(target=lambda: found.append(launch(config)))
    thread.start()
    thread.join()
    result = found[0]
else:
    result = launch(config)
print(result.outcome, result.exit_code, [(job.state, job.arguments, job.exit_code) for job in result.jobs])
"""


@pytest.mark.parametrize("words", [(), ("thread",)])
def test_a_program_gets_the_results(words: tuple[str, ...], tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM.format(words=SHOW[2:]))
    done = python("program.py", *words, env=sweep.environ, cwd=tmp_path)
    expected = "failed 1 [('succeeded', ('good',), 0), ('failed', ('bad',), 1)]"
    assert (done.returncode, done.out.splitlines()[-1]) == (0, expected), done.err


def test_a_signal_to_a_program_stops_its_jobs(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM.format(words=UNTIL[2:]))
    words = [sys.executable, "program.py"]
    running = Running(subprocess.Popen(words, env=environment(sweep.environ), cwd=tmp_path, stdout=subprocess.PIPE))
    wait_until(lambda: sweep.begun() == 2, 30)
    running.signal(signal.SIGINT)
    finished = running.finish()
    assert "stopped 130 [('stopped', ('good',), 143), ('stopped', ('bad',), 143)]" in finished.out
