"""However a worker ends, the launcher's exit code, the page and the report say exactly that, and name the culprit."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.cgroups import alone, inside, limited_memory
from tests.support.runs import PROGRAMS, Finished, run, start

EXIT_WITH = PROGRAMS / "exit_with.py"

CODES = (1, 2, 3, 7, 42, 64, 80, 84, 99, 100, 126, 127, 128, 129, 130, 137, 139, 143, 200, 254, 255)

_HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}
_STOPPING = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
_REAL_TIME = {int(signal.SIGRTMIN), int(signal.SIGRTMIN) + 7, int(signal.SIGRTMAX)}
DEADLY = tuple(
    number
    for number in sorted(signal.valid_signals() - _HARMLESS - _STOPPING)
    if number < signal.SIGRTMIN or number in _REAL_TIME
)
"""All that end a process, and three real-time signals, one of which has no name in Python."""


def failure(finished: Finished) -> dict[str, Any]:
    """The report's first failure."""
    first = finished.report["first_failure"]
    assert isinstance(first, dict), finished.err
    return first


def test_the_report_has_every_exit_code_and_signal_exactly(start_method: str) -> None:
    # An exec'd worker ends as any program does: some of the codes and signals are enough.
    codes, signals = (CODES, DEADLY) if start_method == "forkserver" else (CODES[::6], DEADLY[-4:])
    ends = [*(f"code:{code}" for code in codes), *(f"signal:{int(number)}" for number in signals)]
    options = ("--start-method", start_method, "--nproc-per-node", "1", "--max-restarts", str(len(ends) - 1))
    finished = run(*options, EXIT_WITH, "0=" + ",".join(ends), timeout_s=120)
    returncodes = [attempt["exits"][0]["returncode"] for attempt in finished.report["attempts"]]
    assert returncodes == [*codes, *(-int(number) for number in signals)]
    assert finished.returncode == 128 + signals[-1]


def test_half_a_character_in_an_exception_leaves_restart_and_page_as_they_are(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(r"""raise ValueError("bad token \ud83d, \udcff \0 \u00fc")""" + "\n")
    finished = run("--nproc-per-node", "2", "--max-restarts", "1", script)
    assert finished.returncode == 1
    assert len(finished.report["attempts"]) == 2
    message = failure(finished)["error"]["message"]
    assert message.endswith(r"bad token \ud83d, " + "\udcff \0 \u00fc")
    assert r"ValueError: bad token \ud83d, \udcff \x00 \u00fc".replace(r"\u00fc", "\u00fc") in finished.err


ENDS = (
    ("code:7", 7, r"failed: exit code 7\nat .*: exit code 7; it ran for"),
    (
        "raise:wrong shape",
        1,
        r"exit code 1; it ran for .*\n\n  \| Trace(?s:.*)exit_with.py(?s:.*)RuntimeError: wrong shape",
    ),
    ("text:no data in /data", 1, r"failed: SystemExit: no data in /data \(exit_with.py:\d+\)\n"),
    (
        "segfault",
        139,
        r"failed: SIGSEGV \(exit_with.py:\d+\)\n(?s:.*)Fatal Python error: Segmentation fault(?s:.*)exit_with.py",
    ),
)


@pytest.mark.parametrize(
    ("start_method", "end", "code", "page"),
    # Of an exec'd worker, what Python itself prints.
    [*(("forkserver", *end) for end in ENDS), *(("spawn", *end) for end in ENDS[1:])],
)
def test_the_launcher_ends_as_the_worker_did_and_the_page_says_how(
    start_method: str, end: str, code: int, page: str
) -> None:
    """torchrun: test_run 9; multiprocessing_api_test 6, 8, 13; errors_api_test 3."""
    finished = run("--start-method", start_method, "--nproc-per-node", "2", EXIT_WITH, f"1={end}")
    assert finished.returncode == code
    assert re.search(r"^rank 1 on \S+ failed: ", finished.err, re.MULTILINE)
    assert re.search(r" \(local_rank 1, pid \d+\)$", finished.err, re.MULTILINE)
    assert re.search(page, finished.err)
    assert "stopped:  rank 0" in finished.err
    if end != "segfault":  # There faulthandler prints the whole stack.
        assert "ddplaunch/worker" not in finished.err + finished.out, "our own frames are not the user's business"
    assert (failure(finished)["rank"], finished.report["exit_code"]) == (1, code)


@pytest.mark.parametrize(
    ("module", "said"), [("pkg.typo", "No module named pkg.typo"), ("pkg", "No module named pkg.__main__; .*")]
)
def test_a_module_that_does_not_exist_is_named_before_torch_is_imported(module: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").touch()
    finished = run("-m", module, cwd=tmp_path, env={"TORCH_STUB_IMPORT_S": "600"})
    assert finished.returncode == 1
    assert re.search(rf"failed: SystemExit: \S+: {said}\n", finished.err)
    assert "hint:     -m takes a module" in finished.err


@pytest.mark.torch
def test_an_exception_that_the_record_decorator_recorded_is_the_same(tmp_path: Path) -> None:
    """torchrun: errors_api_test 5."""
    script = tmp_path / "recorded.py"
    script.write_text(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise RuntimeError('wrong shape')\nmain()\n"
    )
    error = failure(run("--nproc-per-node", "1", script))["error"]
    assert error["message"] == "RuntimeError: wrong shape"
    assert re.search(r"Traceback(?s:.*)recorded.py(?s:.*)RuntimeError: wrong shape", error["traceback"])


def test_two_ranks_that_fail_together_are_both_told_of(tmp_path: Path) -> None:
    go = tmp_path / "go"
    running = start(
        *("--nproc-per-node", "4", EXIT_WITH),
        *(f"1=+{go}+raise:one", f"3=+{go}+code:9"),
    )
    running.wait_for(r"ready \(pid", 4)
    go.touch()
    finished = running.finish()
    first, code = failure(finished), finished.returncode
    assert (first["rank"], code) in ((1, 1), (3, 9))
    ends = {exit_["rank"]: exit_ for exit_ in finished.report["attempts"][0]["exits"]}
    assert [rank for rank, exit_ in ends.items() if exit_["stopped"]] in ([0, 2], [0, 1, 2], [0, 2, 3])
    assert len(re.findall(r"^rank [0-3] on \S+ failed: ", finished.err, re.MULTILINE)) == 1


def test_a_rank_that_had_raised_when_it_was_stopped_is_not_said_to_have_failed_by_our_signal(tmp_path: Path) -> None:
    go = tmp_path / "go"
    finished = run("--nproc-per-node", "2", EXIT_WITH, f"0=linger:{go}", f"1=+{go}+code:9")
    assert re.search(r"^rank 0 on \S+ failed: RuntimeError: lingers \(exit_with.py:\d+\)\n", finished.err, re.MULTILINE)
    first = failure(finished)
    assert (first["returncode"], first["ended_by_stop"], finished.returncode) == (-15, True, 1)


def test_a_worker_that_fails_while_others_still_start_ends_the_job(start_method: str) -> None:
    finished = run("--start-method", start_method, "--nproc-per-node", "12", EXIT_WITH, "0=code:5")
    assert finished.returncode == 5
    assert failure(finished)["rank"] == 0
    ends = finished.report["attempts"][0]["exits"]
    assert len(ends) == 12
    assert all(exit_["stopped"] for exit_ in ends[1:])


def ended_one_after_the_other(folder: Path, nproc: int, first: str, told: str) -> Finished:
    """Rank 0 ends as ``first`` says, and then, when it is stopped, the rank of ``told``."""
    go = folder / "go"
    options = ("--nproc-per-node", str(nproc))
    running = start(*options, EXIT_WITH, f"0=+{go}+{first}", told)
    running.wait_for("waits to be told")
    go.touch()
    return running.finish()


@pytest.mark.parametrize("kind", ["raise", "throw"])
def test_a_rank_whose_death_is_seen_after_its_peers_complaint_is_the_culprit(kind: str, tmp_path: Path) -> None:
    finished = ended_one_after_the_other(tmp_path, 3, f"{kind}:Connection reset by peer", "2=when-told:9")
    assert (failure(finished)["rank"], finished.returncode) == (2, 137)
    assert "then:     rank 0 lost a peer or did not reach it, as a consequence\n" in finished.err
    assert "stopped:  rank 1 (" in finished.err


def test_an_exception_in_cpp_that_tells_of_no_peer_is_a_failure_of_its_own(tmp_path: Path) -> None:
    finished = ended_one_after_the_other(tmp_path, 2, "throw:vector::_M_range_check", "1=when-told:9")
    assert (failure(finished)["rank"], finished.returncode) == (0, 134)
    assert re.search(r"^rank 0 on \S+ failed: SIGABRT: vector::_M_range_check\b", finished.err, re.MULTILINE)


def test_a_rank_that_dies_of_another_signal_when_the_user_stops_the_run_has_not_failed() -> None:
    running = start("--nproc-per-node", "2", EXIT_WITH, "1=when-told:11")
    running.wait_for("waits to be told")
    running.wait_for(r"ready \(pid", 2)
    running.signal(signal.SIGTERM)
    finished = running.finish()
    assert (finished.returncode, finished.report["outcome"]) == (143, "stopped")


def test_a_script_that_cannot_be_parsed_is_not_tried_again(tmp_path: Path) -> None:
    script = tmp_path / "typo.py"
    script.write_text("def train(:\n    pass\n")
    finished = run("--nproc-per-node", "2", "--max-restarts", "3", script)
    assert finished.returncode == 1
    assert len(finished.report["attempts"]) == 1
    assert "not restarted: the script cannot be parsed" in finished.err
    assert re.search(r'File ".*typo.py", line 1\n', finished.err)


def test_a_worker_killed_for_memory_is_named_as_such() -> None:
    with limited_memory(600 << 20) as folder:
        options = ("--nproc-per-node", "2")
        finished = run(*options, PROGRAMS / "eat_memory.py", under=inside(folder))
    assert finished.returncode == 137, finished.err
    assert (failure(finished)["rank"], failure(finished)["out_of_memory"]) == (1, "yes")
    assert "SIGKILL, killed by the kernel for memory (out of memory)" in finished.err
    assert "hint:     Use less memory per worker" in finished.err


def test_a_worker_killed_by_somebody_is_not_said_to_have_eaten_all_memory() -> None:
    with alone("memory"):
        finished = run("--nproc-per-node", "2", EXIT_WITH, "1=signal:9")
    assert failure(finished)["out_of_memory"] == "no"
    assert "hint:     SIGKILL came from outside" in finished.err
