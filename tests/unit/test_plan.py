"""What a run would do: LaunchConfig -> Plan -> one screen, or JSON."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.cli import main
from ddplaunch.cluster.hosts import Host, parse_hosts
from ddplaunch.cluster.task import ScheduledTask
from ddplaunch.config import LaunchConfig, RemoteConfig
from ddplaunch.errors import StartNotice, UsageError
from ddplaunch.features.plan.model import Plan
from ddplaunch.features.plan.page import as_json, page
from ddplaunch.features.plan.plan import plan
from ddplaunch.launcher import setup
from ddplaunch.launcher.display.messages import dry_run_banner
from ddplaunch.system.gpus.devices import has_driver
from ddplaunch.transport import agent_process, remote_start
from tests.support.configs import launch_config, rendezvous_config

HOSTS = parse_hosts("gpu[1-2]")
CPUS = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.endswith(("_VISIBLE_DEVICES", "_SOCKET_IFNAME"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def config(**fields: Any) -> LaunchConfig:
    nodes = len(fields["hosts"]) if "hosts" in fields else 1
    return launch_config(**{"script": __file__, "min_nodes": nodes, "max_nodes": nodes, **fields})


def dry_run(nodes: int, **fields: Any) -> LaunchConfig:
    return config(dry_run=True, min_nodes=nodes, max_nodes=nodes, **fields)


def warned(**fields: Any) -> str:
    return "\n".join(plan(config(**fields)).warnings)


def every(found: Plan, name: str) -> list[str]:
    """The variable as each rank gets it."""
    return [{**found.environ, **rank.environ}[name] for rank in found.ranks]


# Nodes, ranks, devices.


def test_hosts_get_ranks_in_their_order_and_the_rest_are_spares():
    hosts = parse_hosts("gpu1:slots=4,ada@gpu2:2222,gpu3")
    found = plan(config(hosts=hosts, max_nodes=2, min_nodes=2, nproc_per_node=2))
    assert [(node.host, node.node_rank, node.ranks) for node in found.nodes] == [
        ("gpu1", 0, (0, 3)),
        ("gpu2", 1, (4, 5)),
        ("gpu3", None, None),
    ]
    assert [node.is_spare for node in found.nodes] == [False, False, True]
    assert [node.reached for node in found.nodes] == ["gpu1", "ada@gpu2:2222", "gpu3"]
    assert (found.world_size, found.starts, found.depends_on) == (6, "over SSH", "")
    assert every(found, "GROUP_RANK") == ["0"] * 4 + ["1"] * 2


def test_what_only_a_node_knows_is_said_to_be_unknown():
    found = plan(config(hosts=HOSTS))
    assert [(node.workers, node.gpus, node.counted) for node in found.nodes] == [(None, None, "one per GPU")] * 2
    assert (found.world_size, found.ranks) == (None, ())
    assert found.depends_on == "the number of GPUs of each node"
    assert not {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"} & found.environ.keys()
    assert "one per GPU" in page(found)


@pytest.mark.parametrize(
    ("fields", "counted"),
    [({"gpus_per_proc": 2}, "one per 2 GPUs"), ({"nproc_per_node": "cpu"}, "one per CPU")],
)
def test_how_a_node_counts_is_said(fields: dict[str, Any], counted: str):
    assert plan(config(hosts=HOSTS, **fields)).nodes[0].counted == counted


def test_named_devices_decide_how_many_workers_there_are():
    found = plan(config(hosts=(Host("gpu1", devices=("0", "2", "3", "5")), Host("gpu2")), gpus=("1", "6")))
    assert [node.workers for node in found.nodes] == [4, 2]
    assert every(found, "CUDA_VISIBLE_DEVICES") == ["0,2,3,5"] * 4 + ["1,6"] * 2
    found = plan(config(hosts=HOSTS, gpus=("0", "1", "2", "3"), gpus_per_proc=2))
    assert every(found, "CUDA_VISIBLE_DEVICES") == ["0,1", "2,3"] * 2


def test_a_worker_per_gpu_is_one_worker_where_no_driver_is():
    assert plan(config()).world_size == (None if has_driver() else 1)
    assert plan(config(nproc_per_node="cpu")).world_size == CPUS


def test_devices_hidden_by_the_environment_are_left_to_the_agent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert plan(config()).nodes[0].gpus is None


def test_a_dry_run_simulates_what_its_workers_need():
    found = plan(dry_run(2, nproc_per_node=3, gpus_per_proc=2))
    assert [(node.host, node.ranks) for node in found.nodes] == [("node0", (0, 2)), ("node1", (3, 5))]
    assert {node.gpus for node in found.nodes} == {tuple("012345")}
    assert every(found, "CUDA_VISIBLE_DEVICES") == ["0,1", "2,3", "4,5"] * 2
    assert every(found, "MASTER_ADDR") == ["127.0.0.1"] * 6


def test_a_dry_run_of_hosts_has_their_slots_and_the_real_runs_command():
    found = plan(dry_run(2, hosts=parse_hosts("gpu1:slots=3,gpu2"), nproc_per_node=1))
    assert [node.workers for node in found.nodes] == [3, 1]
    assert [(node.reached, node.command) for node in found.nodes] == [
        (h, (remote_start.COMMAND,)) for h in ("gpu1", "gpu2")
    ]


def test_nodes_of_an_allocation_are_started_through_srun():
    notices = (StartNotice("detail", "SLURM job 7"), StartNotice("warning", "beware"))
    found = plan(config(hosts=HOSTS, max_nodes=2, min_nodes=2, remote=RemoteConfig(by_srun=True), notices=notices))
    assert (found.starts, found.nodes[0].command[0], found.warnings[0]) == ("through srun", "srun", "beware")
    assert "started through srun" in page(found)


def test_one_of_several_nodes_knows_its_own_ranks_if_it_has_a_number():
    found = plan(config(rendezvous=rendezvous_config(node_index=1), max_nodes=2, min_nodes=2, nproc_per_node=4))
    assert (found.world_size, found.nodes[0].ranks, found.starts) == (8, (4, 7), "this node of several")
    assert every(found, "RANK") == ["4", "5", "6", "7"]


def test_each_launcher_has_a_folder_in_that_of_the_run():
    given = {"max_nodes": 2, "min_nodes": 2, "nproc_per_node": 1, "run_id": "job7", "log_dir": "/logs"}
    here = setup.local_host_name()
    task = ScheduledTask(3, 1, 4, 2, 1, (2, 2))
    found = [plan(config(rendezvous=rendezvous_config(node_index=1), task=of, **given)) for of in (None, task)]
    assert [every(each, "TORCHELASTIC_ERROR_FILE")[0] for each in found] == [
        f"/logs/job7/{here}/attempt_0/0/error.json",
        f"/logs/job7/{here}.3/attempt_0/0/error.json",
    ]


def test_who_comes_first_is_not_known_before():
    found = plan(config(rendezvous=rendezvous_config(), max_nodes=2, min_nodes=2, nproc_per_node=4))
    assert (found.world_size, found.ranks, found.depends_on) == (8, (), "the order in which the nodes arrive")
    assert found.environ["WORLD_SIZE"] == "8"
    assert "by arrival" in page(found)


# Commands.


def test_an_agent_here_is_started_by_the_command_of_the_launcher():
    [node] = plan(config(nproc_per_node=1, chdir="/")).nodes
    assert (node.command, node.reached, node.directory) == (agent_process.COMMAND, "", "/")


def test_nothing_says_yet_how_the_nodes_of_a_dry_run_are_reached():
    found = plan(dry_run(2))
    assert [node.command for node in found.nodes] == [(), ()]
    assert "--hosts names the nodes" in page(found)


def test_a_host_is_reached_as_options_say():
    reach = RemoteConfig(user="ada", port=2222, python="/opt/python", setup="module load cuda")
    node = plan(config(hosts=(Host("gpu1", user="eve"),), remote=reach)).nodes[0]
    assert (node.reached, node.python, node.setup) == ("eve@gpu1:2222", "/opt/python", "module load cuda")


@pytest.mark.parametrize(
    ("fields", "command", "how"),
    [
        ({"script": "x.py", "script_args": ("--lr", "1")}, "py -u x.py --lr 1", "executed"),
        (
            {"script": "x", "entry": "module", "pass_local_rank": True},
            "py -u -m x --local-rank=<LOCAL_RANK>",
            "executed",
        ),
        ({"script": "prog", "entry": "program"}, "prog", "executed"),
    ],
)
def test_the_workers_command_is_what_it_would_be_typed_as(fields: dict[str, Any], command: str, how: str):
    found = plan(config(nproc_per_node=1, python="py", **fields))
    assert (" ".join(found.command), found.how) == (command, how)


def test_the_hosts_have_a_python_of_their_own():
    given = RemoteConfig(python="/opt/python")
    assert plan(config(hosts=HOSTS, nproc_per_node=1, remote=given)).command[0] == "/opt/python"
    assert plan(dry_run(2, hosts=HOSTS, nproc_per_node=1, remote=given)).command[0] == "/opt/python"


def test_workers_are_forked_unless_asked_otherwise():
    assert [plan(config(start_method=method)).how for method in ("forkserver", "spawn")] == ["forked", "executed"]


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_what_cannot_be_forked_is_executed(kind: str, tmp_path: Path):
    script = tmp_path / "x"
    script.mkdir() if kind == "folder" else script.write_bytes(b"PK\3\4\0")
    assert plan(config(script=str(script))).how == "executed"
    assert plan(config(script="x", chdir=str(tmp_path))).how == "executed"


def test_with_a_profiler_workers_are_executed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/opt/profiler.so")
    assert plan(config()).how == "executed"
    assert plan(config(hosts=HOSTS)).how == "forked"
    given = RemoteConfig(environ=(("CUDA_INJECTION64_PATH", "/opt/profiler.so"),))
    assert plan(config(hosts=HOSTS, remote=given)).how == "executed"


# The environment.


def test_what_is_common_is_said_once():
    found = plan(dry_run(2, nproc_per_node=2, run_id="job1", max_restarts=3))
    assert found.environ["WORLD_SIZE"] == "4"
    assert found.environ["TORCHELASTIC_MAX_RESTARTS"] == "3"
    assert found.environ["TORCHELASTIC_RUN_ID"] == "job1"
    assert every(found, "RANK") == ["0", "1", "2", "3"]
    assert not any(found.environ.keys() & rank.environ.keys() for rank in found.ranks)
    assert "LOCAL_RANK" in found.ranks[0].environ


def test_secrets_are_masked_wherever_they_are_shown():
    given = RemoteConfig(environ=(("API_TOKEN", "hunter2"), ("URL", "http://me:hunter2@host/"), ("PLAIN", "1")))
    found = plan(config(hosts=HOSTS, nproc_per_node=1, remote=given))
    assert found.given == ("API_TOKEN=***", "PLAIN=1", "URL=http://***@host/")
    assert "hunter2" not in page(found) + as_json(found)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("--api-key", "hunter2"), ("--api-key", "***")),
        (("--wandb_api_key=hunter2", "--lr", "1"), ("--wandb_api_key=***", "--lr", "1")),
        (("--hf-token", "hunter2", "-x"), ("--hf-token", "***", "-x")),
        (("--db.password", "hunter2"), ("--db.password", "***")),
        (("--use-token", "--lr", "1"), ("--use-token", "--lr", "1")),
        (("--max-tokens", "9", "--key-dim=4", "--compat", "1"), ("--max-tokens", "9", "--key-dim=4", "--compat", "1")),
    ],
    ids=range(6),
)
def test_secrets_among_the_scripts_arguments_are_masked(arguments: tuple[str, ...], shown: tuple[str, ...]):
    found = plan(config(nproc_per_node=1, script_args=arguments))
    assert found.command[-len(shown) :] == shown
    assert "hunter2" not in page(found) + as_json(found)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, {"GLOO_SOCKET_IFNAME": "<the interface between the nodes>"}),
        ({"interface": "ib0"}, {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}),
        (
            {"local_addr": "10.0.0.1"},
            {
                "GLOO_SOCKET_IFNAME": "<the interface between the nodes>",
                "NCCL_SOCKET_IFNAME": "=<the interface between the nodes>",
            },
        ),
    ],
    ids=["detected", "by name", "by address"],
)
def test_the_interface_between_the_nodes_is_shown(given: dict[str, str], names: dict[str, str]):
    for found in (
        plan(config(hosts=HOSTS, nproc_per_node=1, **given)),
        plan(config(rendezvous=rendezvous_config(**given), max_nodes=2, min_nodes=2, nproc_per_node=1, **given)),
    ):
        assert {name: value for name, value in found.environ.items() if name.endswith("_IFNAME")} == names
    for alone in (plan(config(nproc_per_node=1, **given)), plan(dry_run(2, nproc_per_node=1, local_addr="10.0.0.1"))):
        assert not any(name.endswith("_IFNAME") for name in alone.environ)


def test_a_port_that_is_fixed_is_shown():
    assert plan(config(nproc_per_node=1, master_port=29501)).environ["MASTER_PORT"] == "29501"
    assert plan(config(nproc_per_node=1)).environ["MASTER_PORT"] == "<a free port>"


# Warnings.


def test_more_workers_than_cpus():
    assert f"{CPUS + 1} workers on the" in warned(nproc_per_node=CPUS + 1)
    assert "workers on the" not in warned(nproc_per_node=CPUS)
    assert "workers on the" not in warned(hosts=HOSTS, nproc_per_node=CPUS + 1)


@pytest.mark.skipif(has_driver(), reason="this machine may have GPUs")
def test_options_for_gpus_where_there_are_none():
    said = warned(nproc_per_node=1, gpus=("0",), numa_binding="node")
    assert "the run will not start: --gpus: there is no GPU here" in said
    assert "--numa-binding matters only with GPUs, and none was found here" in said
    assert "only with GPUs" not in warned(nproc_per_node=1)
    assert "only with GPUs" not in warned(hosts=HOSTS, gpus=("0",))


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("gpu1,gpu2,eve@gpu1:2222", "gpu1 and eve@gpu1:2222"),
        ("gpu1,GPU1.cluster", "gpu1 and GPU1.cluster"),
        ("localhost,127.0.0.1", "localhost and 127.0.0.1"),
    ],
)
def test_a_host_named_twice(text: str, pair: str):
    assert f"{pair} may be one machine" in warned(hosts=parse_hosts(text))


@pytest.mark.parametrize("text", ["gpu1,gpu2,gpu11", "gpu1.a,gpu1.b", "10.0.0.1,10.0.0.2"])
def test_different_hosts_are_not_said_to_be_one(text: str):
    assert warned(hosts=parse_hosts(text)) == ""


def test_too_few_devices():
    assert "2 workers need 4 GPUs, and 3 can be used" in warned(
        hosts=HOSTS, nproc_per_node=2, gpus_per_proc=2, gpus=("0", "1", "2")
    )
    assert "local rank 2 has no cuda:2" in warned(hosts=HOSTS, nproc_per_node=4, gpus=("0", "1"))


def test_what_will_keep_the_run_from_starting():
    assert "there is no missing.py in" in warned(script="missing.py")
    assert "no missing.py" not in warned(script="missing.py", hosts=HOSTS)
    assert "--chdir /nowhere is not a folder here" in warned(chdir="/nowhere")
    assert "--gpus must name the GPUs" in warned(dry_run=True, nproc_per_node="gpu")
    assert "cannot be simulated in a program" in warned(dry_run=True, entry="program")


def test_what_has_no_effect():
    said = warned(dry_run=True, numa_binding="node", remote=RemoteConfig(setup="x"))
    for option in ("--numa-binding", "--remote-setup"):
        assert f"{option} has an effect only without --dry-run" in said
    assert "--ranks-filter 9: the ranks are 0 to 1" in warned(
        hosts=HOSTS, nproc_per_node=1, show_ranks=frozenset({1, 9})
    )
    assert "--debug-ranks 2: the ranks are 0 to 1" in warned(
        hosts=HOSTS, nproc_per_node=1, debug_ranks=frozenset({0, 2})
    )


def test_spares_and_elastic_nodes_do_not_survive_a_workers_failure():
    for fields in ({"min_nodes": 1}, {"min_nodes": 1, "max_nodes": 1}):
        assert "the failure of any worker ends the job" in warned(hosts=HOSTS, **fields)
        assert "the failure of any worker" not in warned(hosts=HOSTS, max_restarts=1, **fields)
    assert "the failure of any worker" not in warned(hosts=HOSTS)


def test_devices_of_this_shell_stay_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "not forwarded to the hosts: CUDA_VISIBLE_DEVICES" in warned(hosts=HOSTS)
    given = RemoteConfig(environ=(("CUDA_VISIBLE_DEVICES", "0"),))
    assert warned(hosts=HOSTS, remote=given) == ""


# The screen.


@pytest.mark.parametrize(("nodes", "workers"), [(1, 1), (1, 8), (2, 8), (9, 1), (300, 8)])
def test_a_plan_is_one_screen_however_large_the_job(nodes: int, workers: int):
    shown = page(plan(config(hosts=parse_hosts(f"gpu[1-{nodes}],spare1"), max_nodes=nodes, nproc_per_node=workers)))
    assert len(shown.splitlines()) <= 42
    assert all(len(line) <= 130 for line in shown.splitlines())
    assert f"{nodes * workers} worker" in shown
    assert "Nothing has been started" in shown


def test_a_plan_of_many_nodes_looks_at_each_of_them_once(monkeypatch: pytest.MonkeyPatch):
    names, calls = setup.node_names, []
    monkeypatch.setattr(setup, "node_names", lambda given: calls.append(1) or names(given))
    plan(config(hosts=parse_hosts("gpu[1-300]"), max_nodes=300, nproc_per_node=1))
    assert len(calls) < 10


def test_alike_nodes_are_one_row():
    shown = page(plan(config(hosts=parse_hosts("gpu[01-40]"), nproc_per_node=8)))
    assert re.search(r"^0-39 +gpu\[01-40\] +8 each +0-319 ", shown, re.MULTILINE)
    assert re.search(r"^  gpu02 +8-15 +0-7 +1 ", shown, re.MULTILINE)


def test_a_row_per_rank_where_they_are_few():
    shown = page(plan(dry_run(2, nproc_per_node=2)))
    assert re.findall(r"^  (node\d) +(\d) +(\d) +(\d)", shown, re.MULTILINE) == [
        ("node0", "0", "0", "0"),
        ("node0", "1", "1", "0"),
        ("node1", "2", "0", "1"),
        ("node1", "3", "1", "1"),
    ]


def test_nothing_of_the_users_can_move_the_cursor():
    found = plan(config(script="a\x1b[2J\n.py", script_args=("\r",), nproc_per_node=1, chdir="/\x1b"))
    assert set(map(ord, filter(lambda c: not c.isprintable(), page(found)))) == {10}
    assert "\x1b" not in as_json(found)


def test_what_is_injected_is_told():
    found = plan(dry_run(1, nproc_per_node=2, injections=("kill rank=1 after=5s",)))
    assert "  - kill rank 1" in page(found)


def test_json_has_every_rank():
    found = json.loads(as_json(plan(config(hosts=parse_hosts("gpu[1-40]"), nproc_per_node=8))))
    assert [rank["rank"] for rank in found["ranks"]] == list(range(320))
    assert found["nodes"][39]["ranks"] == [312, 319]


def test_the_banner_of_a_dry_run_says_what_it_is():
    assert dry_run_banner(dry_run(1)).startswith("dry run: 1 simulated node on this machine's CPU, gloo")
    assert "2 simulated nodes" in dry_run_banner(dry_run(2, hosts=parse_hosts("gpu[1-3]")))


# The command.


def ask(*argv: str) -> object:
    return main.command.main([*argv, __file__], prog_name="ddplaunch", standalone_mode=False)


def test_the_option_shows_the_plan_in_place_of_a_run(capsys: pytest.CaptureFixture[str]):
    assert ask("--plan", "--nproc-per-node", "2") == 0
    assert capsys.readouterr().out.startswith("plan: 2 workers on 1 node, on this machine")
    assert ask("--plan", "--json", "--dry-run", "--nnodes", "2") == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 2


def test_json_without_a_plan_is_refused():
    with pytest.raises(UsageError, match="--json: needs --plan"):
        ask("--json")


@pytest.mark.parametrize("options", [("--ps",), ("--kill", "job7")])
def test_json_beside_another_command_is_refused(options: tuple[str, ...]):
    with pytest.raises(UsageError, match=f"{options[0]} cannot be combined with --json"):
        main.command.main([*options, "--json"], prog_name="ddplaunch", standalone_mode=False)


def test_a_command_that_would_be_refused_has_no_plan():
    with pytest.raises(UsageError, match="neither hosts nor a rendezvous endpoint is given"):
        ask("--plan", "--nnodes", "2")


def test_a_dry_runs_page_says_how_the_real_run_reaches_its_hosts():
    hosts = (Host("gpu1"), Host("gpu2"))
    found = plan(dry_run(2, hosts=hosts))
    assert "on each node  over SSH: exec /bin/sh -c" in page(found, is_verbose=True)
    assert re.search(r"on each node  over SSH: \S+ as ddplaunch's agent\n", page(found))


def test_the_text_that_starts_the_agent_is_shown_with_v_only():
    assert "import os, sys" not in page(plan(config()))
    assert "import os, sys" in page(plan(config()), is_verbose=True)
