"""Settings for tests that set single fields: of a run, by flat names as the options have them, of an agent, a round."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ddplaunch.config import LaunchConfig, OutputConfig, RendezvousConfig, WorkerConfig
from ddplaunch.protocol.results import Round
from ddplaunch.protocol.specs import AgentSpec, Program
from ddplaunch.timeouts import TimeoutConfig

GROUPS: dict[str, type] = {"workers": WorkerConfig, "output": OutputConfig, "timeouts": TimeoutConfig}
NOT_ALWAYS_SET = {"DDPLAUNCH_CHECKPOINT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_RAS_ADDR", "RES_OPTIONS"}
"""Of ``environment.NAMES``: set only where nodes reach each other, no name server does, or GPUs are: test_job.py,
test_silent_dns.py in tests/ssh, tests/process/test_ras_address.py, test_checkpoints.py."""

GROUP_OF = {field.name: group for group, cls in GROUPS.items() for field in fields(cls)}


def launch_config(**settings: Any) -> LaunchConfig:
    """``settings`` by field name, in whatever group the field is."""
    grouped: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name in GROUP_OF.keys() & settings.keys():
        grouped[GROUP_OF[name]][name] = settings.pop(name)
    return LaunchConfig(**settings, **{group: cls(**grouped[group]) for group, cls in GROUPS.items()})


def rendezvous_config(**settings: Any) -> RendezvousConfig:
    """A rendezvous of two nodes, with torchrun's times where ``settings`` have no others."""
    nodes: dict[str, Any] = {"token": "job7", "min_nodes": 2, "max_nodes": 2, "node_index": None}
    places = {"server_addresses": ("node1",), "port": 29400, "is_server": None, "local_addr": None, "interface": None}
    times = {"join_timeout_s": 600.0, "last_call_timeout_s": 30.0, "silent_after_s": 5.0}
    return RendezvousConfig(**{**nodes, **places, **times, **settings})


def agent_spec(**settings: Any) -> AgentSpec:
    """A node of a run, which executes a script; ``settings`` by field name."""
    program = Program("script", "train.py", (), "python")
    return AgentSpec(**{"run_id": "run", "host": "gpu3", "program": program, "same_python": True, **settings})


def a_round(**settings: Any) -> Round:
    """The first attempt of a job with one worker; ``settings`` by field name."""
    ranks = {"node_rank": 0, "nnodes": 1, "first_rank": 0, "local_world_size": 1, "world_size": 1}
    store = {"master_addr": "10.0.0.1", "master_port": 4242}
    return Round(**{"attempt": 0, "restart_count": 0, **ranks, **store, **settings})
