"""What the workers of this node use, for the report: CPUs, GPUs, versions.

Runs in the agent, once per run, while the forkserver imports torch. Reads a few small files; must not start a process
or import torch.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ddplaunch.agent import torch_files
from ddplaunch.protocol.launcher_agent import NodeDetails
from ddplaunch.system.gpus import devices
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.protocol.specs import AgentSpec


def read(spec: AgentSpec) -> NodeDetails:
    """The details of this node. In a dry run it has no GPUs, since none is used."""
    gpus = () if spec.fake_gpus else devices.visible_models(devices.visible_devices(os.environ, spec.workers.gpus))
    return NodeDetails(
        cpus=len(os.sched_getaffinity(0)),
        gpus=tuple(map(quote, gpus)),
        python=".".join(map(str, sys.version_info[:3])) if spec.same_python else "",
        torch=quote(torch_files.versions()[0]) if spec.same_python else "",
    )
