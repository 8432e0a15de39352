"""A rank that stops in a debugger gets the terminal; the job waits, and goes on or ends as the user says."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.debugging import PROMPT, STOP, Debugger
from tests.support.processes import children, is_alive, wait_until
from tests.support.runs import meeting, run, start
from tests.support.screen import CTRL_C

QUIT_S = 10.0
"""Less than the grace period; it takes 0.3 s on an idle machine."""

MEET = """
import os, pathlib, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
def meet():
    (folder / str(rank)).touch()
    while not (folder / str(1 - rank)).exists():
        time.sleep(0.01)
breakpoint()
meet()
print("met", rank)
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "job.py"
        path.write_text(text)
        return path

    return write


def test_one_rank_after_the_other_has_the_terminal(start_method: str, screen: Debugger, script) -> None:
    job = script(STOP)
    running = screen.start("--start-method", start_method, "--nproc-per-node", "3", job, "0", "2")
    assert re.search(rb"rank 0 on \S+ stopped at breakpoint\(\) \(job.py:7\) and has the terminal", screen.prompted())
    assert screen.settings() != screen.before
    assert b"\n7\n" in screen.say("p x")
    assert b"rank 2 on " in screen.say("c")
    assert b"\n27\n" in screen.say("p x")
    screen.enter("c")
    assert running.finish().returncode == 0
    assert screen.settings() == screen.before
    shown = screen.close()
    assert all(b"after %d\n" % rank in shown for rank in range(3))
    assert shown.count(b"torch's own timeouts") == 1


def test_only_chosen_ranks_stop(screen: Debugger, script) -> None:
    running = screen.start("--nproc-per-node", "3", "--debug-ranks", "1", script(STOP), "0", "1", "2")
    assert b"--debug-ranks: only rank 1 can stop in a debugger, the others go on" in screen.prompted()
    screen.enter("c")
    assert running.finish().returncode == 0
    shown = screen.close()
    assert all(b"after %d\n" % rank in shown for rank in range(3))


def test_lines_are_edited_and_remembered(screen: Debugger, script) -> None:
    running = screen.start("--nproc-per-node", "1", script(STOP), "0", env={"TERM": "xterm"})
    screen.prompted()
    assert b"\n42\n" in screen.say("p 4000\x7f\x7f\x7f2")
    screen.type(b"\x1b[A")
    assert b"\n42\n" in screen.say("")
    screen.resize(20, 77)
    wait_until(lambda: b"\n(20, 77)\n" in screen.say("p __import__('os').get_terminal_size()[::-1]"))
    screen.enter("c")
    assert running.finish().returncode == 0
    assert b"(Pdb) c\nafter 0\nddplaunch: succeeded after " in screen.close()


def test_a_step_that_needs_another_rank_lets_it_have_the_terminal(screen: Debugger, script, tmp_path: Path) -> None:
    running = screen.start("--nproc-per-node", "2", script(MEET), tmp_path)
    assert b"rank 0 on " in screen.prompted()
    if sys.version_info >= (3, 13):  # It stops in the line of breakpoint(), not in the next one.
        screen.say("n")
    assert b"rank 1 on " in screen.say("n")
    assert b"rank 0 on " in screen.say("c")
    assert b" has the terminal again" in screen.shown
    screen.enter("c")
    assert running.finish().returncode == 0
    assert screen.close().count(b"met ") == 2


def test_quit_ends_the_job_without_a_restart(screen: Debugger, script) -> None:
    running = screen.start("--nproc-per-node", "2", "--max-restarts", "1", script(STOP), "0", "1")
    screen.prompted()
    screen.enter("q")
    assert running.finish(QUIT_S).returncode == 130
    assert screen.settings() == screen.before
    shown = screen.close()
    assert re.search(rb"the debugger of rank 0 on \S+ was quit: stopping the workers", shown)
    assert b"stopped; every process of this run has ended" in shown
    assert not re.search(rb"BdbQuit|failed|restart", shown)


def test_ctrl_c_interrupts_what_was_typed_and_twice_stops_the_job(screen: Debugger, script) -> None:
    running = screen.start("--nproc-per-node", "2", script(STOP), "1")
    screen.prompted()
    screen.enter("import threading; print('wai' + 'ting', flush=True); threading.Event().wait()")
    screen.wait_for(b"waiting")
    screen.type(CTRL_C)
    assert b"KeyboardInterrupt" in screen.prompted()
    screen.type(CTRL_C + CTRL_C)
    assert running.finish().returncode == 130
    assert screen.settings() == screen.before


@pytest.fixture
def two_launchers() -> tuple[str, ...]:
    """Options of the launchers of two nodes, of one rank each, but for the node's rank."""
    return ("--nnodes", "2", "--nproc-per-node", "1", *meeting())


def test_a_launcher_per_node_lends_its_own_terminal(screen: Debugger, script, two_launchers, tmp_path: Path) -> None:
    running = screen.start(*two_launchers, "--node-rank", "0", script(STOP), "0")
    other = start(*two_launchers, "--node-rank", "1", tmp_path / "job.py", "0")
    assert b"rank 0 on " in screen.prompted()
    screen.enter("c")
    assert (running.finish().returncode, other.finish().returncode) == (0, 0)
    assert screen.settings() == screen.before


def test_python_m_pdb_stops_at_the_first_line(screen: Debugger, script) -> None:
    running = screen.start("--nproc-per-node", "1", "-m", "pdb", script(STOP))
    assert b"job.py(2)<module>()" in screen.prompted()
    assert b"will be restarted" in screen.say("c")
    screen.enter("q")
    assert running.finish(QUIT_S).returncode == 130


SPAWN = """
import multiprocessing
def step(x):
    breakpoint()
    print("after", x)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=step, args=(6,))
    process.start()
    process.join()
"""


def test_a_process_that_a_worker_spawns_has_the_terminal(screen: Debugger, script) -> None:
    running = screen.start("--nproc-per-node", "1", script(SPAWN))
    assert re.search(rb"rank 0 on \S+ stopped at breakpoint\(\) \(job.py:4 in step\), in its child ", screen.prompted())
    assert b"\n7\n" in screen.say("p x + 1")
    screen.enter("c")
    assert running.finish().returncode == 0
    assert b"after 6\n" in screen.close()


THREADS = """
import threading
go = threading.Event()
def step(x):
    breakpoint()
    print("after", x)
def later():
    go.wait()
    step(8)
threads = [threading.Thread(target=later), threading.Thread(target=step, args=(6,))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_have_the_terminal_in_turn(screen: Debugger, script) -> None:
    running = screen.start("--nproc-per-node", "1", script(THREADS))
    screen.prompted()
    screen.say("p go.set()")
    assert b"\n6\n" in screen.say("p go.wait() and x")
    assert screen.shown.count(PROMPT) == 3
    screen.say("c")
    assert b"\n8\n" in screen.say("p x")
    screen.enter("c")
    assert running.finish().returncode == 0


ERROR = """
import os, pathlib, sys, time
def step(options):
    return options["lr"]
if os.environ["RANK"] == "0":
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
step({"rate": 1})
"""


def test_the_first_rank_that_raises_is_debugged_and_the_job_fails_as_ever(
    start_method: str, screen: Debugger, script, tmp_path: Path
) -> None:
    options = ("--start-method", start_method, "--nproc-per-node", "2", "--debug-on-error")
    running = screen.start(*options, script(ERROR), tmp_path / "go")
    shown = screen.prompted()
    assert re.search(rb"rank 1 on \S+ stopped with KeyError: 'lr' \(job.py:4 in step\) and has the terminal", shown)
    assert shown.index(b"KeyError: 'lr'\n") < shown.index(b" has the terminal"), "the traceback comes first"
    screen.say(f"p open({str(tmp_path / 'go')!r}, 'w').close()")
    assert b"{'rate': 1}" in screen.say("p options")
    screen.enter("q")
    assert running.finish(QUIT_S).returncode == 1
    assert screen.settings() == screen.before
    assert re.search(rb"rank 1 on \S+ failed: KeyError: 'lr' \(job.py:4\)", screen.close())


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGTERM"])
def test_a_run_that_is_stopped_while_an_error_is_debugged_was_stopped(
    name: str, screen: Debugger, script, tmp_path: Path
) -> None:
    """The worker that has raised the error ends by the stop, as those that wait for it."""
    running = screen.start("--nproc-per-node", "2", "--debug-on-error", script(ERROR), tmp_path / "never")
    screen.prompted()
    if name == "SIGINT":
        screen.type(CTRL_C + CTRL_C)
    else:
        running.signal(signal.Signals[name])
    assert running.finish(QUIT_S).returncode == 128 + signal.Signals[name]
    assert screen.settings() == screen.before
    shown = screen.close()
    assert f"{name}: stopping the workers".encode() in shown
    assert b"stopped; every process of this run has ended" in shown
    assert b" failed" not in shown


def test_a_script_that_cannot_be_parsed_is_not_debugged(screen: Debugger, script) -> None:
    assert screen.start("--nproc-per-node", "1", "--debug-on-error", script("x = = 1")).finish().returncode == 1
    assert b"post_mortem" not in screen.close()


OTHER_DEBUGGERS = """
import os
def step(options):
    batch_of_rank = 770077
    steps = 0
    steps += 1
    breakpoint()
    return options["lr"]
if os.environ["RANK"] == "0":
    step({"rate": 1})
"""


@pytest.fixture
def with_home(tmp_path: Path) -> dict[str, str]:
    """Environment of somebody who has seen pudb's welcome."""
    (tmp_path / "pudb").mkdir()
    (tmp_path / "pudb" / "pudb.cfg").write_text("[pudb]\nseen_welcome = z\nprompt_on_quit = False\n")
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython")}
    return {**home, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}


def test_ipdb_completes_and_debugs_errors(screen: Debugger, script, with_home: dict[str, str]) -> None:
    env = {**with_home, "PYTHONBREAKPOINT": "ipdb.set_trace"}
    running = screen.start("--nproc-per-node", "2", "--debug-on-error", script(OTHER_DEBUGGERS), env=env)
    screen.wait_for(b"ipdb>")
    screen.type(b"batch_\t")
    screen.wait_for(b"of_rank")
    screen.type(b"\r")
    screen.wait_for(b"770077\n")
    screen.type(b"c\r")
    screen.wait_for(b"stopped with KeyError: 'lr' (job.py:8 in step)")
    screen.type(b"p options\r")
    screen.wait_for(b"{'rate': 1}\n")
    screen.type(b"q\r")
    assert running.finish().returncode == 1
    assert screen.settings() == screen.before


def test_pudb_draws_its_screen_and_debugs_errors(screen: Debugger, script, with_home: dict[str, str]) -> None:
    env = {**with_home, "PYTHONBREAKPOINT": "pudb.set_trace"}
    screen.resize(30, 100)
    running = screen.start("--nproc-per-node", "2", "--debug-on-error", script(OTHER_DEBUGGERS), env=env)
    screen.wait_for(b"batch_of_rank")
    screen.wait_for(b"< Clear")
    drawn = screen.shown.count(b"< Clear")
    screen.type(b"c")
    screen.wait_for(b"stopped with KeyError: 'lr' (job.py:8 in step)")
    wait_until(lambda: screen.shown.count(b"< Clear") > drawn)
    screen.type(b"q")
    assert running.finish().returncode == 1
    assert screen.settings() == screen.before
    assert screen.close().count(b"\x1b[?1049h") == screen.shown.count(b"\x1b[?1049l")


def test_debugging_of_errors_needs_a_terminal(script) -> None:
    done = run("--debug-on-error", script(ERROR))
    assert done.returncode == 2
    assert "--debug-on-error needs a terminal: stdin of ddplaunch is not one" in done.err
    done = run("--no-python", "--debug-on-error", "true")
    assert (done.returncode, "has an effect only without --no-python" in done.err) == (2, True)


def test_without_a_terminal_the_job_fails_at_once(script) -> None:
    done = run("--nproc-per-node", "2", "--max-restarts", "3", script(STOP), "1")
    assert done.returncode == 93
    why = r"stopped at breakpoint\(\) \(job.py:7\), and there is no terminal: stdin of ddplaunch is not one"
    assert re.search(rf"rank 1 on \S+ gave up: {why}", done.err)
    assert len(done.report["attempts"]) == 1


def test_a_breakpoint_that_is_switched_off_stops_nothing(script) -> None:
    done = run("--nproc-per-node", "2", script(STOP), "0", "1", env={"PYTHONBREAKPOINT": "0"})
    assert (done.returncode, done.out.count("after")) == (0, 2)


def test_a_debugger_with_its_own_streams_needs_no_terminal(script) -> None:
    text = """
        import io, pdb
        shown = io.StringIO()
        pdb.Pdb(stdin=io.StringIO("c\\n"), stdout=shown).set_trace()
        print("shown:", "job.py" in shown.getvalue())
        class Remote(pdb.Pdb):  # As that of python -m pdb -p PID.
            _sockfile = None
            def cmdloop(self, intro=None):
                self.set_continue()
        Remote(stdout=None).set_trace()
        print("remote")
    """
    done = run("--nproc-per-node", "1", script(textwrap.dedent(text)))
    assert done.returncode == 0, done.err
    assert done.out.startswith("shown: True\n")
    assert done.out.endswith("remote\n")


@pytest.mark.slow
def test_a_debugged_job_does_not_hang(screen: Debugger, script, two_launchers, tmp_path: Path) -> None:
    """Longer than all limits, in which rank 0 waits for rank 1; the launcher of rank 0 watches the whole job."""
    options = (*two_launchers, "--hang-timeout", "1", "--busy-timeout", "1", "--hang-report", "1")
    wait = f"__import__('time').sleep(3.5) or open({str(tmp_path / 'waited')!r}, 'w').close()"
    job = script(MEET.replace("breakpoint", "rank and breakpoint"))
    watching = start(*options, "--node-rank", "0", job, tmp_path)
    running = screen.start(*options, "--node-rank", "1", job, tmp_path)
    screen.prompted()
    screen.say(f"p {wait}")
    assert (tmp_path / "waited").exists()
    screen.enter("c")
    assert running.finish().returncode == 0
    watched = watching.finish()
    assert (watched.returncode, re.search("hang|moved|collective", watched.err)) == (0, None)


@pytest.fixture
def under_shell() -> tuple[str, ...]:
    """A shell leads the session, so that the terminal outlives the launcher."""
    return (
        "setsid",
        "--ctty",
        "bash",
        "-c",
        'set -m; "$@"; while [ $? = 148 ]; do echo ASLEEP; read x; fg; done; echo ENDED; read x',
        "sh",
    )


@pytest.mark.parametrize("victim", ["worker", "agent", "launcher"])
def test_a_kill_at_the_prompt_leaves_the_terminal_as_it_was(victim: str, screen: Debugger, script, under_shell) -> None:
    running = screen.start("--nproc-per-node", "2", script(STOP), "1", under=under_shell)
    screen.prompted()
    launcher = next(pid for pid in children(running.pid))
    agent = next(pid for pid in children(launcher) if len(children(pid)) > 1)
    pid = int(re.search(rb"\n(\d+)\n", screen.say("p __import__('os').getpid()"))[1])  # type: ignore[index]
    os.kill({"worker": pid, "agent": agent, "launcher": launcher}[victim], signal.SIGKILL)
    screen.wait_for(b"ENDED")
    wait_until(lambda: screen.settings() == screen.before)
    wait_until(lambda: not is_alive(pid))
    screen.enter("")
    running.finish()


def test_ctrl_z_gives_the_shell_its_terminal(screen: Debugger, script, under_shell) -> None:
    running = screen.start("--nproc-per-node", "1", script(STOP), "0", under=under_shell)
    screen.prompted()
    screen.type(b"\x1a")
    screen.wait_for(b"ASLEEP")
    assert screen.settings() == screen.before
    screen.enter("")
    screen.wait_for(b"has the terminal again")
    screen.say("p x")
    screen.enter("c")
    screen.wait_for(b"ENDED")
    assert screen.settings() == screen.before
    screen.enter("")
    running.finish()
