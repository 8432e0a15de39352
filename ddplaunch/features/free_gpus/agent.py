"""Tells all runs of this machine which GPUs this node uses, and has free ones chosen. Runs in the agent."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.system import devices
from ddplaunch.text import free_gpus

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.features.free_gpus.records import GpuUser
    from ddplaunch.features.free_gpus.register import OwnFile
    from ddplaunch.protocol.specs import AgentSpec

_LOCK_S = 0.2
"""A run that takes GPUs as they are waits so long for the register, while torch is imported."""


class InRegister:
    """What the register has of this node; ``own`` is None before it has anything, or if it cannot be used."""

    def __init__(self) -> None:
        self.own: OwnFile | None = None


def begin(_spec: AgentSpec, _post: Callable[[object], None]) -> InRegister:
    """The place for what ``with_devices`` finds; the part writes there, too."""
    return InRegister()


def with_devices(spec: AgentSpec, node: NodeServices) -> AgentSpec:
    """``spec`` with free GPUs, if the user wants those; may wait for them. Raises LaunchError if there are too few."""
    if free_gpus(spec.workers.gpus) is None:
        return spec
    from ddplaunch.features.free_gpus import choice, waiting  # A run without the option does not read GPUs.

    limit = spec.texts.get("free_gpus")
    spec, own = waiting.chosen(spec, node, float(limit)) if limit else choice.chosen(spec)
    node.begun["free_gpus"].own = own
    return spec


class GpusInRegister(Part):
    """The entry of this node, from before the first attempt until no worker is left."""

    def __init__(self, node: NodeServices) -> None:
        super().__init__(node)
        self._in: InRegister = node.begun["free_gpus"]
        self._run: GpuUser | None = None

    def may_take_part(self) -> bool:
        """Tell others which GPUs this node uses, and the user who else uses them. The run goes on in any case."""
        from ddplaunch.features.free_gpus import choice, register

        keys = self._keys()
        if keys:
            self._run = choice.this_run(self._node.spec, keys)
        if self._run and not self._in.own:
            try:
                with register.locked(_LOCK_S) as opened:
                    others = register.users(opened)
                    self._in.own = register.OwnFile(opened, self._run)
            except OSError as error:
                text = f"other runs do not learn which GPUs this run uses: {register.folder()}: {error.strerror}"
                self._node.outbox.send(Notice(text, 1))
            else:
                self._warn(others)
        return True

    def _keys(self) -> tuple[str, ...]:
        """The GPUs that the workers probably use; none if CUDA numbers them in another way than the driver."""
        from ddplaunch.features.free_gpus import choice

        place, task = self._node.placement, self._node.spec.task
        names = [name for rank in range(place.local_world_size) for name in place.devices_of(rank)]
        if task and not place.devices:
            names = list(place.visible[task.local_rank : task.local_rank + 1] or place.visible)
        is_all = len(names) == len(devices.gpu_pci_addresses())
        is_known = is_all or not any(map(str.isdigit, names)) or choice.knows_order(os.environ)
        is_hidden = "ROCR_VISIBLE_DEVICES" in os.environ and devices.is_amd()
        return tuple(dict.fromkeys(map(choice.key_of, names))) if is_known and not is_hidden else ()

    def _warn(self, others: list[GpuUser]) -> None:
        from ddplaunch.features.free_gpus import choice

        own = set(self._run.gpus) if self._run else set()
        for other in others:
            if shared := [key for key in other.gpus if key in own]:
                gpus, host = choice.named(shared), self._node.spec.host
                text = f"another run uses {gpus} on {host}: {choice.describe(other)}; --gpus free chooses others"
                self._node.outbox.send(Notice(f"warning: {text}"))

    def on_started(self) -> None:
        """The GPUs are not free before the workers have ended, even if this process has been killed."""
        from ddplaunch.features.free_gpus import register

        if self._in.own and self._run and self._group:
            pids = (os.getpid(), *(worker.pid for worker in self._group.workers if worker.pid))
            self._run = replace(self._run, processes=tuple(map(register.started, pids)))
            with contextlib.suppress(OSError), register.locked(_LOCK_S):
                self._in.own.write(self._run)

    def close(self) -> None:
        """No worker is left."""
        if self._in.own:
            self._in.own.remove()


def part(node: NodeServices) -> Part:
    """A node without GPUs does not load the rest."""
    is_on_gpus = bool(devices.gpu_pci_addresses()) and not node.spec.dry_run
    return GpusInRegister(node) if is_on_gpus else Part(node)
