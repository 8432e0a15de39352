"""Which nodes SLURM takes out of service, as 22.05 prints it, and the command that an administrator could paste."""

from __future__ import annotations

import shlex
import subprocess
import time
from pathlib import Path

import pytest

from ddplaunch.cluster.hosts import Host
from ddplaunch.cluster.scheduled import SlurmJob
from ddplaunch.features.health.node_memory import drain_command
from ddplaunch.features.slurm import launcher, scontrol
from ddplaunch.features.slurm.launcher import INTERVAL_S, NodeWatch
from ddplaunch.features.slurm.scontrol import SOON_S, leaving
from ddplaunch.protocol.launcher_agent import AttemptStarted
from tests.support import golden
from tests.support.configs import launch_config, rendezvous_config
from tests.support.fake_agents import participants_of
from tests.support.processes import wait_until
from tests.support.watches import call, run_services

NOW_S = 1_795_373_076.0

NODE = (
    "NodeName={} Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPULoad=14.58 Gres=(null) NodeAddr=10.99.1.2 NodeHostName={} "
    "OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=1 State={} ThreadsPerCore=1 Owner=N/A Partitions=all  "
    "BootTime=1795358430 CfgTRES=cpu=8,mem=1M,billing=8 ExtSensorsTemp=n/s {}\n"
)
RESERVATION = (
    "ReservationName={} StartTime={} EndTime={} Duration=01:00:00 Nodes={} NodeCnt=1 CoreCnt=8 Features=(null) "
    "PartitionName=(null) Flags={} TRES=cpu=8 Users=root Accounts=(null) State=INACTIVE MaxStartDelay=(null)\n"
)


def node(name: str, state: str, reason: str = "") -> str:
    return NODE.format(name, name, state, reason)


def reservation(start_s: float, *, nodes: str = "n[2-3]", flags: str = "MAINT,SPEC_NODES", name: str = "m1") -> str:
    start = int(NOW_S + start_s)
    return RESERVATION.format(name, start, start + 3600, nodes, flags)


def test_a_node_that_gets_no_further_jobs_is_left():
    """A question is the state of a node and its reason."""

    def told(question: str) -> str:
        state, _, reason = question.partition(" ")
        found = leaving(node("n1", "IDLE") + node("n2", state, reason), "No reservations in the system\n", NOW_S)
        assert found.keys() <= {"n2"}
        return found.get("n2", "stays")

    golden.check_answers("slurm_states", told)


def test_a_reason_cannot_steer_the_terminal():
    found = leaving(node("n1", "DOWN", "Reason=a\x1b[31mb" + "x" * 1000), "", NOW_S)
    assert found["n1"].startswith("SLURM has set it down: a\\x1b[31mb")
    assert len(found["n1"]) < 250


@pytest.mark.parametrize(("start_s", "is_soon"), [(SOON_S + 1, False), (SOON_S - 1, True), (-60, True), (-3601, False)])
def test_a_maintenance_that_is_about_to_begin_counts(start_s: float, is_soon: bool):
    found = leaving(node("n2", "IDLE"), reservation(start_s), NOW_S)
    assert found.keys() == ({"n2", "n3"} if is_soon else set())
    begins = "its maintenance has begun" if start_s < 0 else "its maintenance begins at "
    assert all(reason.startswith(begins) and "(reservation m1)" in reason for reason in found.values())


def test_other_reservations_do_not():
    others = reservation(60, flags="SPEC_NODES") + reservation(60, nodes="(null)") + "garbage\nNodes=n9 Flags=MAINT\n"
    assert leaving("", others, NOW_S) == {}
    assert leaving("", reservation(60), NOW_S, own_reservation="m1") == {}


@pytest.mark.parametrize("reason", ["Xid 79", 'it\'s $(reboot) `x`; "y"\n\x1b!! \\ a=b', "ä" * 500])
def test_the_command_is_safe_to_paste_whatever_the_reason_is(reason: str):
    command = drain_command("gpu-3.x", reason)
    echoed = subprocess.run(["bash", "-ic", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True)
    words = echoed.stdout.splitlines()
    assert words == shlex.split(command)
    assert words[:4] == ["scontrol", "update", "nodename=gpu-3.x", "state=drain"]
    assert words[4].startswith("reason=ddplaunch:")
    assert (len(words), len(words[4]) < 220, words[4].isprintable()) == (5, True, True)


@pytest.mark.parametrize("name", ["", "-x", "a b", "a;b", "a,b", "ALL'", "fd00::1", "n[1-2]"])
def test_there_is_no_command_for_what_is_no_node_of_slurm(name: str):
    assert drain_command(name, "x") == ""


# The launcher's questions.


@pytest.fixture
def fake_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "scontrol"
    program.write_text(
        f'#!/bin/sh\necho "$SLURM_TIME_FORMAT $*" >> {tmp_path}/asked\n'
        f'if [ "$2" = node ]; then cat <<EOF\n{node("b", "MIXED+DRAIN", "Reason=disk [root@1]")}\nEOF\nfi\n'
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return program


def watch_of(answers: list[object], **config: object) -> NodeWatch:
    participants = participants_of((2, 2), "a", "b", rendezvous=rendezvous_config())
    settings = {"script": "x.py", "min_nodes": 2, "max_nodes": 2, "slurm_job": SlurmJob("7"), **config}
    config = launch_config(hosts=(Host("a"), Host("b")), **settings)
    watch = NodeWatch(run_services(config, post=call, nodes=participants.nodes, participants=participants))
    watch.on_answer = answers.append  # type: ignore[method-assign]
    return watch


STARTED = AttemptStarted(0, (7,), 0, 0, 2, 2)


def test_slurm_is_asked_in_a_thread_once_workers_run_and_then_every_minute(fake_scontrol: Path):
    answers: list[object] = []
    watch = watch_of(answers)
    assert watch.run_due(time.monotonic()) == float("inf")
    watch.on_event(0, STARTED)
    now = time.monotonic()
    assert watch.run_due(now) == now + INTERVAL_S
    watch.on_event(1, STARTED)
    assert watch.run_due(now + 1) == now + INTERVAL_S
    wait_until(lambda: answers, 10)
    assert answers == [{"b": "SLURM drains it: disk"}]
    asked = (fake_scontrol.parent / "asked").read_text().splitlines()
    assert asked == ["%s show node a,b --oneliner", "%s show reservation --oneliner"]


def test_a_slurm_that_does_not_answer_is_left_alone_after_two_seconds(
    fake_scontrol: Path, monkeypatch: pytest.MonkeyPatch
):
    fake_scontrol.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(launcher, "_LIMIT_S", 0.2)
    answers: list[object] = []
    watch = watch_of(answers)
    watch.on_event(0, STARTED)
    began = time.monotonic()
    watch.run_due(began)
    watch.run_due(began + INTERVAL_S)  # The first question is still open.
    assert time.monotonic() - began < 0.1, "the loop does not wait"
    wait_until(lambda: answers, 10)
    assert answers == [None]


@pytest.mark.parametrize("config", [{"slurm_job": None}, {"dry_run": True}])
def test_elsewhere_nobody_is_asked(fake_scontrol: Path, config: dict[str, object]):
    watch = watch_of([], **config)
    watch.on_event(0, STARTED)
    assert watch.run_due(time.monotonic()) == float("inf")


def test_without_scontrol_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    watch = watch_of([])
    watch.on_event(0, STARTED)
    assert watch.run_due(time.monotonic()) == float("inf")
    assert scontrol.run(1.0, "show") == (1, "scontrol: No such file or directory")
