"""An agent starts whatever the login shell is and says, or it is told what is missing on its node."""

from __future__ import annotations

import shutil
import sys

import pytest

from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.transport.failures import failures_table
from tests.support.connecting import connecting
from tests.support.nodes import NodeOptions
from tests.support.runs import ROOT

pytestmark = pytest.mark.ssh

SHELLS = ("bash", "dash", "fish", "tcsh", "zsh")

NOISE = """
echo "Welcome to `hostname`!" && printf 'no line end'
echo grumble >&2
printf '@ddplaunch-agent@ {"not": "the answer"}\\n\\377\\376'
"""


def test_it_starts_in_every_login_shell_and_through_its_noise(make_lab):
    missing = [shell for shell in SHELLS if not shutil.which(shell)]
    if missing:
        pytest.skip(f"no {', '.join(missing)}")
    home = {".bashrc": NOISE, ".zshenv": NOISE, ".tcshrc": NOISE, ".config/fish/config.fish": "echo Welcome; echo >&2"}
    nodes = {f"node{n}": NodeOptions(shell=shutil.which(shell), home=home) for n, shell in enumerate(SHELLS, 1)}
    value = 'it\'s "$HOME" `id` \\n !1\nand a line'
    with connecting(make_lab(len(SHELLS), **nodes)) as them:
        them.start(env={"VALUE": value, "ECHO_NAMES": "VALUE"})
        _, failures = them.settle()
        assert failures == []
        them.wait_for(Notice, 2 * len(SHELLS))
        assert them.texts().count(f"VALUE={value}") == len(SHELLS)


def test_setup_runs_in_a_login_shell_and_has_the_last_word(make_lab):
    # The profile reads stdin, which must not take the records; `module` is defined there, as on many clusters.
    profile = "module() { export LOADED=$2:$FROM_US; }\ncat\necho Welcome\n"
    dash = NodeOptions(shell=shutil.which("dash"), home={".bash_profile": profile})
    lab = make_lab(2, default=NodeOptions(home={".bash_profile": profile}), node2=dash)
    names = {"FROM_US": "ours", "OVER": "ours", "ECHO_NAMES": "LOADED OVER"}
    with connecting(lab) as them:
        them.start(setup="module load cuda\nsource /dev/null; export OVER='it''s' # done", env=names)
        assert them.settle()[1] == []
        them.wait_for(Notice, 6)
        assert them.texts().count("LOADED=cuda:ours") == 2
        assert them.texts().count("OVER=its") == 2


def test_a_setup_that_fails_is_told(make_lab):
    with connecting(make_lab(2)) as them:
        them.start(setup="echo no such module >&2; (exit 3)")
        _, failures = them.settle()
        told = "  node[1-2]: --remote-setup ended with exit code 3: no such module\n"
        assert failures_table(failures).startswith(told)
    with connecting(make_lab(1)) as them:
        them.start(setup="echo no licence; exit 4")
        _, (failure,) = them.settle()
        told = "--remote-setup ended with exit code 4: no licence"
        assert (failure.cause, failure.message) == ("setup", told)


def test_what_is_missing_on_a_node_is_told_as_such(make_lab, tmp_path):
    lab = make_lab(1)
    old = tmp_path / "old_python"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 8, 2)\n$2"\n')
    bare = tmp_path / "bare_python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    broken = tmp_path / "broken_python"
    broken.write_text("#!/bin/sh\necho cannot open libpython >&2\nexit 5\n")
    for script in (old, bare, broken):
        script.chmod(0o755)
    (tmp_path / "job.py").touch()

    def told(**changes):
        with connecting(lab) as them:
            them.start(**changes)
            _, (failure,) = them.settle()
            return failure.cause, failure.message

    nowhere = str(tmp_path / "nowhere")
    assert told(python=nowhere) == ("python", f"no {nowhere}")
    assert told(python=str(old)) == ("python", f"{old} is Python 3.8.2")
    assert told(python=str(broken)) == (
        "start",
        "the login ended with exit code 5 before the agent started; its last output: cannot open libpython",
    )
    # Without its packages it still finds ddplaunch where the launcher has it, and this checkout has no torch in it.
    assert told(python=str(bare)) == ("torch", f"{bare} has no torch")
    assert told(cwd=nowhere) == ("directory", f"{nowhere}: No such file or directory")
    assert told(cwd=str(tmp_path), script="job2.py") == ("script", f"no job2.py in {tmp_path}")
    with connecting(lab) as them:
        them.start(
            cwd=str(tmp_path), script="job.py", python=str(bare), needs_torch=False, env={"PYTHONPATH": str(ROOT)}
        )
        assert them.settle()[1] == []


def test_a_login_shell_that_lets_nobody_in_is_told_with_its_words(make_lab):
    shell = shutil.which("nologin", path="/usr/sbin:/sbin") or "/bin/false"
    with connecting(make_lab(1, node1=NodeOptions(shell=shell))) as them:
        them.start()
        _, (failure,) = them.settle()
        assert failure.cause == "start"
        assert failure.message.startswith("the login ended with exit code 1 before the agent started")


def test_a_login_that_never_ends_or_never_stops_printing_is_given_up(make_lab):
    waits = NodeOptions(home={".bashrc": "echo hold on\nsleep 1000 & wait"})
    prints = NodeOptions(home={".bashrc": "yes $(printf %01000d)"})  # Half a million short lines take long to read.
    lab = make_lab(2, node1=waits, node2=prints)
    with connecting(lab) as them:
        them.start(timeout_s=3.0)
        told = {failure.host: failure.message for failure in them.settle()[1]}
        assert told["node1"] == "the agent did not start within 3 s; its last output: hold on"
        assert told["node2"].startswith("the login failed: the login scripts print too much")
    # sshd leaves the sleep alone, and so must we: it is the login's, not the run's.
    for pid, line in lab["node1"].pids().items():
        assert "sleep" in line or "bash" in line, (pid, line)
    lab["node1"].crash()


def test_what_an_agent_writes_to_stderr_is_told_with_its_host(make_lab):
    with connecting(make_lab(1)) as them:
        them.start(env={"ECHO_ERRORS": "oops again"})
        them.wait_for(Notice, 3)
        assert {"node1: oops", "node1: again"} <= set(them.texts())
