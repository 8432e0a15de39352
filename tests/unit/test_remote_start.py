"""What is sent to start an agent, and what is made of its answer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

import ddplaunch
from ddplaunch.features.remote import remote_start
from ddplaunch.features.remote.remote_start import RemoteStart
from ddplaunch.transport.failures import HostFailure, check_torch_versions, failures_table
from ddplaunch.transport.handle import NodeFacts
from tests.support import golden

START = RemoteStart(python="/opt/python", cwd="/job", script="train.py")
GOOD = NodeFacts(pid=1, python="3.12.1", ddplaunch=ddplaunch.__version__, torch="2.9.0")


def test_the_command_is_the_same_for_all_and_plain_enough_for_every_shell():
    inside = remote_start.COMMAND.removeprefix("exec /bin/sh -c '").removesuffix("'")
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
    done = subprocess.run(
        [*words, "-c", remote_start.COMMAND], input=remote_start.first_input(start), capture_output=True
    )
    assert done.stdout.endswith(value.encode("utf-8", "surrogateescape") + (b"set" if setup else b"")), done


def test_an_agent_without_a_first_record_ends_by_itself(tmp_path):
    (tmp_path / "entry.py").write_text("def main():\n    import signal\n    print(signal.alarm(0))\n")
    start = RemoteStart(python=sys.executable, cwd="/", env={"PYTHONPATH": str(tmp_path)}, entry="entry")
    done = subprocess.run(
        ["sh", "-c", remote_start.COMMAND], input=remote_start.first_input(start), capture_output=True, check=True
    )
    assert 0 < int(done.stdout.splitlines()[-1]) <= remote_start._FIRST_RECORD_S


def test_a_folder_and_a_script_of_any_name_are_found(tmp_path):
    folder = tmp_path / "\U0001f600 'é' \udcff"
    folder.mkdir()
    (folder / "\U0001f680.py").touch()
    start = RemoteStart(python=sys.executable, cwd=str(folder), script="\U0001f680.py", entry="no_such_module")
    command = ["sh", "-c", remote_start.COMMAND]
    done = subprocess.run(command, input=remote_start.first_input(start), capture_output=True)
    facts = [remote_start.read_facts(line) for line in done.stdout.splitlines(keepends=True)][-1]
    assert facts, done.stderr
    assert (facts.directory, facts.has_script) == ("", True)


def test_only_a_line_with_all_marks_of_an_answer_is_one():
    line = remote_start.FACTS_PREFIX + b'{"pid": 7, "python": "3.12.1"}\n'
    assert remote_start.read_facts(line) == NodeFacts(pid=7, python="3.12.1")
    for other in (
        b"",
        line[1:],
        remote_start.FACTS_PREFIX + b"{",
        remote_start.FACTS_PREFIX + b"[]",
        line.replace(b"7", b'"7"'),
        b"\xff" + line,
    ):
        assert remote_start.read_facts(other) is None
    assert remote_start.read_facts(line.replace(b"pid", b"more")) is None


@pytest.mark.parametrize("pid", [-(10**30), -2, -1, 0, 1, (1 << 22) + 1, 10**30])
def test_a_pid_that_must_not_be_signalled_is_none(pid):
    line = remote_start.FACTS_PREFIX + b'{"pid": %d, "python": "3.12.1"}\n' % pid
    assert remote_start.read_facts(line) == NodeFacts(pid=0, python="3.12.1")


@pytest.mark.parametrize("tag", ["job7.0a1b2c.1", "it's \\1 [a].*"])
def test_only_a_process_with_the_run_tag_is_signalled(tag):
    def start(env):
        return subprocess.Popen(["sleep", "60"], env={**os.environ, **env})

    foreign = [
        {},
        {"DDPLAUNCH_RUN_ID": f"{tag}2"},
        {"DDPLAUNCH_RUN_ID": tag[:-1]},
        {"OTHER": f"DDPLAUNCH_RUN_ID={tag}"},
    ]
    with start({"DDPLAUNCH_RUN_ID": tag, "TEXT": "\udcff\n"}) as process:
        others = [start(env) for env in foreign]
        for each in (*others, process):
            text = remote_start.signal_input("KILL", each.pid, tag)
            subprocess.run(["sh", "-c", remote_start.COMMAND], input=text, timeout=10)
        assert process.wait(10) == -signal.SIGKILL
    for other in others:
        assert other.poll() is None
        other.kill()
        other.wait()


def test_what_is_wrong_with_a_node_is_told_by_its_cause():
    """A question is what is unlike a good node."""

    def told(question):
        failure = remote_start.check_facts("gpu1", replace(GOOD, **golden.keywords(question)), START)
        text = f"{failure.cause}: {failure.message} | {failure.hint}"
        return text.replace(ddplaunch.__version__, "<version>")

    golden.check_answers("node_facts", told)


def test_nodes_with_another_torch_than_most_are_told():
    facts = {"a1": GOOD, "a2": replace(GOOD, torch="2.8.0"), "a3": GOOD}
    assert [(f.host, f.message) for f in check_torch_versions(facts)] == [
        ("a2", "torch 2.8.0, and 2.9.0 on most hosts")
    ]
    assert check_torch_versions({"a1": GOOD}) == ()


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
