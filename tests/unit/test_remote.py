"""What is sent to start an agent, and what is made of its answer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

import ddplaunch
from ddplaunch.launcher import remote
from ddplaunch.launcher.failures import HostFailure, failures_table
from ddplaunch.launcher.remote import NodeFacts, RemoteStart

START = RemoteStart(python="/opt/python", cwd="/job", script="train.py")
GOOD = NodeFacts(pid=1, host="gpu1", python="3.12.1", ddplaunch=ddplaunch.__version__, torch="2.9.0")


def test_the_command_is_the_same_for_all_and_plain_enough_for_every_shell():
    inside = remote.COMMAND.removeprefix("exec /bin/sh -c '").removesuffix("'")
    assert not set(inside) & set("'!\\\n")


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "busybox"])
@pytest.mark.parametrize("setup", ["", "echo 'it''s'; export B=set"])
def test_what_is_sent_survives_the_shell(shell, setup, tmp_path):
    if not shutil.which(shell):
        shell = "sh"
    value = "'\"\\n\\0101 %s $HOME `id`\n\n !ü\udcff\t"
    code = "import os; os.write(1, os.environb[b'A'] + os.environb.get(b'B', b'')); os._exit(0)"
    (tmp_path / "entry.py").write_text(f"def main():\n    {code}\n")
    env = {"A": value, "PYTHONPATH": str(tmp_path), "not-a-name": "x", "UID": "0"}
    start = RemoteStart(python=sys.executable, cwd="/", env=env, setup=setup, entry="entry")
    words = [shell, "sh"] if shell == "busybox" else [shell]
    done = subprocess.run([*words, "-c", remote.COMMAND], input=remote.first_input(start), capture_output=True)
    assert done.stdout.endswith(value.encode("utf-8", "surrogateescape") + (b"set" if setup else b"")), done


def test_only_a_line_with_all_marks_of_an_answer_is_one():
    line = remote.MARK + b'{"pid": 7, "host": "h", "python": "3.12.1"}\n'
    assert remote.read_facts(line) == NodeFacts(pid=7, host="h", python="3.12.1")
    for other in (b"", line[1:], remote.MARK + b"{", remote.MARK + b"[]", line.replace(b"7", b'"7"'), b"\xff" + line):
        assert remote.read_facts(other) is None
    assert remote.read_facts(line.replace(b"pid", b"more")) is None


@pytest.mark.parametrize(
    ("facts", "cause", "message"),
    [
        (NodeFacts(failed="python"), "python", "no /opt/python"),
        (NodeFacts(failed="setup", status=3), "setup", "--remote-setup ended with exit code 3"),
        (replace(GOOD, python="3.9.18"), "python", "/opt/python is Python 3.9.18"),
        (replace(GOOD, python=""), "python", "/opt/python is Python of unknown version"),
        (replace(GOOD, ddplaunch="", error="x"), "ddplaunch", "ddplaunch is missing (x)"),
        (replace(GOOD, ddplaunch="0"), "ddplaunch", f"ddplaunch 0, and {ddplaunch.__version__} here"),
        (replace(GOOD, torch=""), "torch", "/opt/python has no torch"),
        (replace(GOOD, directory="Permission denied"), "directory", "/job: Permission denied"),
        (replace(GOOD, has_script=False), "script", "no train.py in /job"),
    ],
)
def test_what_is_wrong_with_a_node_is_told_by_its_cause(facts, cause, message):
    failure = remote.judge("gpu1", facts, START)
    assert failure
    assert (failure.host, failure.cause, failure.message) == ("gpu1", cause, message)
    assert failure.hint


def test_a_good_node_is_good():
    assert remote.judge("gpu1", GOOD, START) is None
    assert remote.judge("gpu1", replace(GOOD, torch=""), replace(START, needs_torch=False)) is None


def test_nodes_with_another_torch_than_most_are_told():
    facts = {"a1": GOOD, "a2": replace(GOOD, torch="2.8.0"), "a3": GOOD}
    assert [(f.host, f.message) for f in remote.judge_versions(facts)] == [
        ("a2", "torch 2.8.0, and 2.9.0 on most hosts")
    ]
    assert remote.judge_versions({"a1": GOOD}) == ()


def test_equal_failures_are_one_line_and_equal_hints_too():
    failures = [HostFailure(f"gpu{n:02}", "TCP", "connection refused", "Start sshd.") for n in (3, 4, 5, 11)]
    failures.insert(0, HostFailure("gpu09", "name", "the name does not resolve", "Start sshd."))
    failures.append(HostFailure("gpu10", "timeout", "connection refused", ""))
    assert failures_table(failures).splitlines() == [
        "  gpu[03-05,11]: connection refused",
        "  gpu09: the name does not resolve",
        "  gpu10: connection refused",
        "hint: Start sshd.",
    ]


def test_neither_the_launcher_nor_its_ssh_modules_load_paramiko_by_themselves():
    code = "import sys, ddplaunch.launcher.launcher, ddplaunch.launcher.ssh; sys.exit('paramiko' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
