"""Launchers started by hand, one per node, meet at an endpoint and run one job: torchrun's own way, on one machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.processes import children, command_line, is_alive, wait_until
from tests.support.runs import MOMENT_S, PROGRAMS, Finished, Running, environment, meeting, run, start
from tests.support.ssh_jobs import frozen

SUM = """
import os, time, torch, torch.distributed as dist
is_stub = torch.__version__ == "stub"
if not is_stub:
    dist.init_process_group("gloo")
if os.environ.get("DIE") == os.environ["RANK"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), 9)
if is_stub:
    size = int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.add("sum", 1)
    while (total := store.add("sum", 0)) < size:
        time.sleep(0.01)
else:
    total = torch.ones(1)
    dist.all_reduce(total)
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE TORCHELASTIC_RESTART_COUNT".split()
print("sum", int(total), *(os.environ[name] for name in names))
print("store at", os.environ["MASTER_ADDR"])
if not is_stub:
    dist.destroy_process_group()
"""
"""Adds up a one of every rank: by gloo, or at the workers' store where torch is the stub."""

WAIT = """
import os, signal, sys, time
print("runs", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if os.environ.get("QUICK") and int(os.environ["GROUP_RANK"]) == 0:
    sys.exit(0)
signal.pause()
"""


def node(
    port: int, script: Path, *options: str, program: Sequence[str] = (), env: dict[str, str] | None = None
) -> Running:
    """One node's launcher; its folder of logs is its own. ``program`` are arguments of the script."""
    return start(*meeting(port), *options, script, *program, env={"OMP_NUM_THREADS": "1", **(env or {})})


def sums(finished: list[Finished]) -> list[str]:
    return sorted(line.split("sum ")[1] for done in finished for line in done.out.splitlines() if "sum " in line)


def test_two_nodes_with_different_worker_counts_are_one_world(port: int, script: Path):
    """torchrun: local_elastic_agent_test 8; rendezvous 5."""
    script.write_text(SUM)
    env = {"DDPLAUNCH_SECRET": "sixteen letters!"}
    nodes = [node(port, script, "--nnodes", "2", "--nproc-per-node", str(count), env=env) for count in (1, 3)]
    finished = [each.finish() for each in nodes]
    assert [done.returncode for done in finished] == [0, 0]
    lines = [line.split() for line in sums(finished)]
    assert [line[1] for line in lines] == ["0", "1", "2", "3"]
    assert {(line[0], line[3], line[6]) for line in lines} == {("4", "4", "2")}
    by_node = {(line[5], line[4]) for line in lines}
    assert by_node in ({("0", "1"), ("1", "3")}, {("0", "3"), ("1", "1")})
    places = sorted(line for done in finished for line in done.err.splitlines() if " in all, " in line)
    first_ranks, last_ranks = ("rank 0", "ranks 1-3") if ("0", "1") in by_node else ("ranks 0-2", "rank 3")
    assert places == [
        f"ddplaunch: node 0 of 2, 4 workers in all, {first_ranks} here",
        f"ddplaunch: node 1 of 2, 4 workers in all, {last_ranks} here",
    ]


def test_the_restarts_of_the_node_that_serves_count(port: int):
    static = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
    ends = (PROGRAMS / "exit_with.py", "0=code:3,code:0", "1=wait,code:0")
    nodes = [start(*static, "--node-rank", str(rank), "--max-restarts", str(1 - rank), *ends) for rank in (0, 1)]
    first, second = (each.finish() for each in nodes)
    assert (first.returncode, second.returncode) == (0, 0), first.err
    assert re.search(r"warning: --max-restarts is 0 on \S+, and 1 on the node that serves .*: 1 counts", second.err)
    assert "warning" not in first.err
    assert "attempt 1 of 1" in second.out
    assert all("restart 1 of 1" in done.err for done in (first, second))


@pytest.mark.torch
def test_a_rank_that_dies_restarts_the_workers_of_all_nodes_with_one_count(port: int, script: Path):
    """torchrun: test_run 2; launcher_api_test 3; agent_api_test 2; local_elastic_agent_test 7; rendezvous 14.

    What torch writes in the processes of the stores is no message of ddplaunch, and kept.
    """
    script.write_text(SUM)
    logs = script.parent / "logs"
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--local-addr", "127.0.0.2", "--log-dir", str(logs))
    static = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
    env = {"OMP_NUM_THREADS": "1", "DIE": "3", "TORCH_CPP_LOG_LEVEL": "INFO"}
    nodes = [start(*options, *static, "--node-rank", rank, script, env=env) for rank in "01"]
    finished = [each.finish() for each in nodes]
    assert [done.returncode for done in finished] == [0, 0], finished[0].err
    assert [line.split()[:2] for line in sums(finished)] == [["4", str(rank)] for rank in range(4)]
    assert {line.split()[-1] for line in sums(finished)} == {"1"}
    assert all("restart 1 of 1" in done.err for done in finished)
    assert all(done.out.count("store at 127.0.0.2") == 2 for done in finished)
    assert not any(
        re.match(r"(ddplaunch: .*)?\[[A-Z]\d{4} ", line) for done in finished for line in done.err.splitlines()
    )
    kept = [path for name in ("rendezvous.log", "store.log") for path in logs.rglob(name)]
    assert sorted(path.parent.name for path in kept if path.name == "store.log") == ["attempt_0", "attempt_1"]
    assert len(kept) == 4
    assert all("[c10d]" in path.read_text() for path in kept)
    of_members = "".join(path.read_text() for path in kept if path.name == "rendezvous.log")
    assert not re.search("recvValueWithTimeout failed|terminate called", of_members)


def test_what_a_rank_asks_for_is_the_verdict_of_all(port: int):
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2")
    nodes = [node(port, PROGRAMS / "ask.py", *options, program=("give_up", "no data")) for _ in range(2)]
    finished = [each.finish() for each in nodes]
    assert [done.returncode for done in finished] == [93, 93], finished[0].err
    assert all(re.search(r"rank 1 on \S+ gave up: no data", done.err) for done in finished)
    assert {len(done.report["attempts"]) for done in finished} == {1}


def test_node_rank_decides_the_order(port: int, script: Path):
    """torchrun: test_run 2."""
    script.write_text(WAIT)
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))
    second = start(*options, "--node-rank", "1", script)
    first = start(*options, "--node-rank", "0", script)
    first.wait_for(r"runs 0 2")
    second.wait_for(r"runs 1 2")
    first.signal(signal.SIGTERM)
    assert first.finish().returncode == 128 + signal.SIGTERM
    other = second.finish()
    assert other.returncode == 84
    assert "was stopped" in other.err


def test_elastic_a_node_leaves_and_another_comes_without_using_up_restarts(port: int, script: Path):
    """torchrun: test_run 7; agent_api_test 7; rendezvous 11."""
    script.write_text(WAIT)
    conf = "last_call_timeout=1,keep_alive_interval=0.5"
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-conf", conf)
    first = node(port, script, *options)
    first.wait_for("1 of up to 2 nodes are here; the workers start within 1 s, or once all have come")
    first.wait_for(r"runs 0 1 0")
    second = node(port, script, *options)
    first.wait_for(r"runs 0 2 0")
    second.wait_for(r"runs 1 2 0")
    os.kill(second.agent_pid(), signal.SIGKILL)
    second.finish()
    first.wait_for(r"runs 0 1 0", count=2)
    first.signal(signal.SIGTERM)
    assert first.finish().returncode == 128 + signal.SIGTERM


def test_a_node_beyond_the_most_waits_for_a_place_to_the_end(port: int, script: Path, tmp_path: Path):
    """torchrun: test_run 8; agent_api_test 12; local_elastic_agent_test 15; rendezvous 13."""
    script.write_text(WAIT.replace("signal.pause()", "while not os.path.exists(os.environ['END']): time.sleep(0.05)"))
    conf = "join_timeout=30,last_call_timeout=1,keep_alive_interval=0.5"
    options, env = ("--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-conf", conf), {"END": str(tmp_path / "end")}
    first = node(port, script, *options, env=env)
    first.wait_for(r"runs 0 1")
    second = node(port, script, *options, env=env)
    second.wait_for(r"runs 1 2")
    spares = [node(port, script, *options, env=env) for _ in range(2)]
    for each in spares:
        each.wait_for("has all nodes that it needs .*waits until a node is lost")
    os.kill(second.agent_pid(), signal.SIGKILL)
    first.wait_for(r"runs 0 2", count=2)
    second.finish()
    (tmp_path / "end").touch()
    finished = [each.finish() for each in (first, *spares)]
    assert [done.returncode for done in finished] == [0, 0, 0], finished[-1].err
    assert sorted("was not needed" in done.err for done in finished) == [False, False, True]
    assert sum("runs 1 2" in done.out for done in finished) == 1


ENDS_EARLY = """
import os, sys, time
from torch.distributed import TCPStore
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    store.set("pid", str(os.getpid()))
    sys.exit(0)
pid = store.get("pid").decode()
while os.path.exists(f"/proc/{pid}"):
    time.sleep(0.01)
for _ in range(30):  # The agent of rank 0 does meanwhile what it does when its workers have ended.
    store.add("calls", 1)
    time.sleep(0.01)
raise ValueError("no")
"""


def test_a_node_that_ends_early_serves_the_store_and_waits_for_the_verdict_of_the_others(port: int, script: Path):
    """torchrun: local_elastic_agent_test 14."""
    script.write_text(ENDS_EARLY)
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "0")
    finished = [each.finish() for each in [node(port, script, *options) for _ in range(2)]]
    assert [done.returncode for done in finished] == [1, 1]
    assert all("rank 1 " in done.err and "ValueError: no" in done.err for done in finished)
    assert {done.report["first_failure"]["rank"] for done in finished} == {1}


def test_nodes_that_do_not_come_are_waited_for_no_longer_than_asked(port: int, script: Path):
    """torchrun: rendezvous 10."""
    script.write_text(WAIT)
    done = node(port, script, "--nnodes", "3", "--nproc-per-node", "1", "--rdzv-conf", "join_timeout=3").finish()
    assert done.returncode == 83
    assert "only these nodes have joined" in done.err
    assert "3 are needed" in done.err


@pytest.mark.slow
def test_two_runs_at_one_endpoint_never_mix(port: int, script: Path):
    script.write_text(WAIT)
    options = ("--nnodes", "2", "--nproc-per-node", "1")
    ours = node(port, script, *options, "--rdzv-id", "ours")
    ours.wait_for("waiting at")
    theirs = node(port, script, *options, "--rdzv-id", "theirs").finish()
    assert theirs.returncode == 83
    assert "another run" in theirs.err
    ours.wait_for(f"cannot join at 127.0.0.1:{port}: it has another --rdzv-id than this node")
    ours.signal(signal.SIGINT)
    assert ours.finish().returncode == 130


SAME_RANK = "have the same --node-rank, 0: nodes with an equal one are numbered in the order of arrival"


def test_nodes_with_one_node_rank_are_numbered_by_arrival_with_one_warning(port: int, script: Path):
    """A batch script's shell makes 0 of $SLURM_NODEID on all nodes; torchrun's c10d ignores the rank."""
    script.write_text(SUM)
    options = ("--nnodes", "3", "--nproc-per-node", "1", "--node_rank=0")
    finished = [each.finish() for each in [node(port, script, *options) for _ in range(3)]]
    assert [done.returncode for done in finished] == [0, 0, 0], finished[0].err
    assert [line.split()[:2] for line in sums(finished)] == [["3", "0"], ["3", "1"], ["3", "2"]]
    assert sum(done.err.count(SAME_RANK) for done in finished) == 1


def test_a_node_rank_that_only_one_node_has_is_kept_where_others_are_equal(port: int, script: Path):
    script.write_text(WAIT)
    options = ("--nnodes", "3", "--nproc-per-node", "1")
    first, equal = (node(port, script, *options, "--node-rank", "0") for _ in range(2))
    for each in (first, equal):
        each.wait_for("waiting at|have the same")
    other = node(port, script, *options, "--node-rank", "1")
    other.wait_for("runs 1 3")
    assert {each.wait_for(r"runs (\d) 3")[0][1] for each in (first, equal)} == {"0", "2"}
    other.signal(signal.SIGINT)
    for each in (first, equal, other):
        each.finish()


def test_a_node_beyond_the_most_with_a_node_rank_of_another_keeps_nobody_waiting(port: int, script: Path):
    script.write_text(WAIT)
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))
    first = start(*options, "--node-rank", "0", script)
    others = [start(*options, "--node-rank", "1", script) for _ in range(2)]
    first.wait_for(r"runs 0 2")
    wait_until(lambda: any("waits until a node is lost" in line for each in others for line in each.error_lines))
    first.signal(signal.SIGINT)
    assert first.finish().returncode == 130
    assert [each.finish().returncode for each in others] == [84, 84]


@pytest.mark.slow
def test_neither_an_import_nor_the_last_call_counts_as_time_to_join(port: int, script: Path, tmp_path: Path):
    (tmp_path / "slow_module.py").write_text("import time; time.sleep(5)")
    script.write_text(WAIT)
    conf = ("--rdzv-conf", "join_timeout=4,last_call_timeout=5")
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--preload", "slow_module", *conf)
    env = {"PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}", "QUICK": "1"}
    alone = node(port, script, *options, env=env).finish()
    assert alone.returncode == 0, alone.err
    assert "runs 0 1 0" in alone.out


def test_an_endpoint_that_nobody_serves_or_knows_is_named(script: Path):
    """torchrun: rendezvous 6."""
    script.write_text(WAIT)
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d")
    unknown = start(*options, "--rdzv-endpoint", "no.such.host.invalid:1", script).finish()
    assert unknown.returncode == 83
    assert "no.such.host.invalid:1" in unknown.err
    conf = ("--rdzv-conf", "is_host=0,join_timeout=2")
    nobody = start(*options, "--rdzv-endpoint", "127.0.0.1:9", *conf, script).finish()
    assert nobody.returncode == 83
    assert "127.0.0.1:9" in nobody.err


def run_ids(finished: list[Finished]) -> set[str]:
    """The run ids that reports, workers and folders have."""
    in_workers = {line.split("in run ")[1] for done in finished for line in done.out.splitlines() if "in run" in line}
    return in_workers | {done.report["run_id"] for done in finished} | {done.run_dir.parent.name for done in finished}


RUN_ID = """
import os, signal
print("in run", os.environ["TORCHELASTIC_RUN_ID"], flush=True)
error_file = os.environ["TORCHELASTIC_ERROR_FILE"]
assert os.path.isdir(os.path.dirname(error_file)), error_file
if os.environ.get("WAIT"):
    signal.pause()
"""


def test_nodes_without_a_run_id_agree_on_one_and_kill_finds_each_of_them_by_it(port: int, script: Path):
    script.write_text(RUN_ID)
    first = node(port, script, "--nnodes", "2", "--nproc-per-node", "1", env={"WAIT": "1"})
    first.wait_for("waiting at")
    second = node(port, script, "--nnodes", "2", "--nproc-per-node", "1", env={"WAIT": "1"})
    (run_id,) = {each.wait_for("in run (.*)")[0][1] for each in (first, second)}
    rows = [line.split() for line in run("--ps").out.splitlines() if line.startswith(run_id)]
    script_and_host = rows[0][3:5]
    assert script_and_host[0] == str(script)
    assert [row[1:7] for row in rows] == [["running", rows[0][2], *script_and_host, "2", "launchers,"]]
    killed = run("--kill", run_id)
    assert killed.returncode == 0, killed.err
    assert "ended 2 launchers, 2 agents" in killed.err
    finished = [each.finish() for each in (first, second)]
    assert run_ids(finished) == {run_id}
    assert [done.run_dir.name.split(".")[1] for done in finished] == ["0", "1"]
    assert [path.name for path in finished[0].run_dir.parents[1].iterdir() if path.is_dir()] == [run_id]


def test_two_runs_of_one_run_id_have_a_folder_each(port: int, script: Path, tmp_path: Path):
    script.write_text(RUN_ID)
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "job7", "--log-dir", tmp_path / "logs")
    for folder in ("job7", "job7.2"):
        finished = [each.finish() for each in [node(port, script, *options) for _ in range(2)]]
        assert [done.returncode for done in finished] == [0, 0], finished[0].err
        assert {done.report["run_id"] for done in finished} == {"job7"}
        assert {done.run_dir.parent for done in finished} == {tmp_path / "logs" / folder}
        assert sorted(done.run_dir.name.rpartition(".")[2] for done in finished) == ["0", "1"]
        assert all(done.report["run_dir"] == str(done.run_dir) for done in finished)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["job7", "job7.2"]


STRANGER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
joined = '{"record":"NodeReady","node_index":1,"host":"evil","local_world_size":8}'
for _ in range(3):
    number = store.add("ddplaunch/none/in/count", 1)
    store.set(f"ddplaunch/none/in/{number}", joined)
"""


def test_a_stranger_who_writes_into_the_rendezvous_is_ignored_and_mentioned_once(port: int, script: Path):
    script.write_text(WAIT)
    secret = {"DDPLAUNCH_SECRET": "sixteen letters!"}
    waiting = node(port, script, "--nnodes", "2", "--nproc-per-node", "1", env=secret)
    waiting.wait_for("waiting at")
    subprocess.run([sys.executable, "-c", STRANGER, str(port)], env=environment(), check=True)
    waiting.wait_for("ignores records that a process outside this run writes into the rendezvous at 127.0.0.1")
    waiting.signal(signal.SIGINT)
    finished = waiting.finish()
    assert finished.returncode == 130
    assert finished.err.count("ignores records") == 1
    # Counted up to the last heartbeat; that all are counted: tests/unit/test_member.py.
    assert re.search("has ignored [1-3] records? from outside this run", finished.err), finished.err
    assert "evil" not in finished.err
    (report,) = Path(os.environ["XDG_STATE_HOME"], "ddplaunch").glob("*/report.json")
    assert secret["DDPLAUNCH_SECRET"] not in finished.err + report.read_text()


SLOW_TO_STOP = """
import os, pathlib, signal, sys, time
go_on, told, release = map(pathlib.Path, sys.argv[1:])
def end(*_):
    told.touch()
    while not release.exists():
        time.sleep(0.01)
    os._exit(0)
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, end)
print("runs", os.getpid(), flush=True)
while os.environ["RANK"] != "0" or not go_on.exists():
    time.sleep(0.01)
raise ValueError("no")
"""


@pytest.mark.slow
def test_a_node_that_is_slow_when_the_outcome_is_known_ends_with_the_code_of_the_others(
    port: int, script: Path, tmp_path: Path
) -> None:
    """When the first launcher has exited, `srun --kill-on-bad-exit` sends SIGTERM to the others."""
    script.write_text(SLOW_TO_STOP)
    files = go_on, told, release = [tmp_path / name for name in ("go on", "told", "release")]
    patience = "keep_alive_interval=5,keep_alive_max_attempt=6"
    options = ("--nnodes", "3", "--nproc-per-node", "1", "--rdzv-conf", patience, "--node-rank")
    started: list[Running] = []
    for rank in "012":
        started.append(node(port, script, *options, rank, program=list(map(str, files))))
        started[0].wait_for("waiting at")  # The first to come serves.
    server, other, slow = started
    pids = [each.wait_for(r"runs (\d+)")[0][1] for each in started]
    member = next(pid for pid in children(slow.agent_pid()) if "member" in command_line(pid))
    go_on.touch()
    wait_until(lambda: told.exists() and not is_alive(int(pids[2])))
    moment_ends_at = time.monotonic() + 2 * MOMENT_S
    wait_until(lambda: time.monotonic() > moment_ends_at)  # Its agent has told its member that no worker runs.
    with frozen(member):
        release.touch()
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: other.process.poll() is not None)
        slow.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: server.process.poll() is not None, 4)
    assert [each.finish().returncode for each in started] == [1, 1, 1]
