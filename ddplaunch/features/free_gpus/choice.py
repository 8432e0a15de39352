"""Chooses GPUs that nobody uses, for ``--gpus free:2``. Runs in the agent, before it has workers.

A GPU is free if no run of ddplaunch has it in the register, the driver knows no process on it and little memory of it
is in use, and its hardware is sound. What a scheduler, a container or the user's environment hides is not chosen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ddplaunch.errors import LaunchError, UsageError
from ddplaunch.features.free_gpus import register
from ddplaunch.features.free_gpus.register import GpuUser, OwnFile
from ddplaunch.features.gpus import reader
from ddplaunch.features.health import rules
from ddplaunch.system import devices
from ddplaunch.text import free_gpus, local_time, plural, quote

if TYPE_CHECKING:
    from ddplaunch.features.gpus.records import GpuReading
    from ddplaunch.protocol.specs import AgentSpec

_READ_S, _LOCK_S = 20.0, 10.0
_HINT = "Choose GPUs with --gpus 2,4, or end what uses them; `ddplaunch --kill RUN_ID` ends a run of yours."


class Candidate(NamedTuple):
    """A GPU, or a MIG instance, that the workers may see.

    Attributes:
        name: as the workers' CUDA_VISIBLE_DEVICES will have it.
        key: the same for all processes of the machine, as in ``GpuUser.gpus``.
        uuid: what a run that knows no PCI address may have there; empty if there is none.
        in_use: what the driver says against it, as ``process 7 uses it already``; empty if it is free for the driver.
    """

    name: str
    key: str
    uuid: str
    in_use: str

    def is_of(self, user: GpuUser) -> bool:
        """Whether the run uses it."""
        return not {self.key, self.uuid}.isdisjoint(user.gpus)


class Wanted(NamedTuple):
    """How many GPUs a node needs, and how many it takes if they are free; they are a multiple of ``step``."""

    least: int
    most: int
    step: int


def chosen(spec: AgentSpec) -> tuple[AgentSpec, OwnFile]:
    """``spec`` with free GPUs, which this process has from now on.

    Raises:
        LaunchError: too few are free, or nobody knows which are.
    """
    found = candidates(spec, os.environ)
    wanted = wanted_by(spec, len(found))
    if wanted.least > len(found):
        raise UsageError(f"--gpus {_given(spec)}: {spec.host} has {plural(len(found), 'GPU')}{_of_environ()}")
    try:
        with register.locked(_LOCK_S) as opened:
            users = register.users(opened)
            free = _free(found, users)
            if len(free) < wanted.least:
                listed = _too_few(wanted, found, users)
                raise LaunchError(f"--gpus {_given(spec)}: too few GPUs of {spec.host} are free: {listed}", _HINT)
            taken = free[: min(len(free), wanted.most) // wanted.step * wanted.step]
            own = OwnFile(opened, this_run(spec, [each.key for each in taken]))
    except OSError as error:
        raise unusable(spec, error) from None
    return replace(spec, workers=replace(spec.workers, gpus=tuple(each.name for each in taken))), own


def unusable(spec: AgentSpec, error: OSError) -> LaunchError:
    """The error for a register that cannot be used."""
    hint = f"All users of a machine need the same folder; {register.FOLDER_VARIABLE} names another one."
    where, reason = f"{register.folder()} on {spec.host}", error.strerror or error
    return LaunchError(f"--gpus {_given(spec)}: the register in {where} cannot be used: {reason}", hint)


def this_run(spec: AgentSpec, keys: Iterable[str]) -> GpuUser:
    """What the register has of this run, which has no workers yet."""
    pid = os.getpid()
    return GpuUser(
        pid=pid, run_id=spec.run_id, since_s=time.time(), gpus=tuple(keys), processes=(register.started(pid),)
    )


def wanted_by(spec: AgentSpec, count: int) -> Wanted:
    """Of a node on which the workers may see ``count`` GPUs."""
    workers, number = spec.workers, free_gpus(spec.workers.gpus)
    step = max(1, workers.gpus_per_proc)
    if number:
        return Wanted(number, number, 1)
    if spec.task:
        return Wanted(step, step, step)
    if isinstance(workers.nproc_per_node, int):
        return Wanted(*(workers.nproc_per_node * step,) * 2, step)
    return Wanted(step, max(step, count), step)


def _given(spec: AgentSpec) -> str:
    return (spec.workers.gpus or ("",))[0]


def _of_environ() -> str:
    """The variable that hides GPUs, and its value: SLURM sets it, too."""
    variable = devices.visibility_variable(os.environ)
    return f" that {variable}={os.environ[variable]} leaves visible" if variable in os.environ else ""


# The GPUs.


def candidates(spec: AgentSpec, environ: Mapping[str, str]) -> list[Candidate]:
    """All GPUs that the workers may use, in the order of their ids.

    Raises:
        LaunchError: there are none, or the driver does not say what they do.
    """
    visible = devices.visible_devices(environ, None)
    if not visible:
        missing = devices.NO_GPU if visible is None else f"--gpus {_given(spec)}: there is no GPU{_of_environ()}"
        raise UsageError(f"{missing} (on {spec.host})")
    read = reader.read_once("health", _READ_S)
    if read.missing or not read.gpus:
        silent = read.missing or "the driver tells of none"
        raise LaunchError(f"--gpus {_given(spec)}: nobody knows which GPUs of {spec.host} are free: {silent}", _HINT)
    is_named = devices.visibility_variable(environ) in environ
    if is_named and not knows_order(environ) and any(name.isdigit() for name in visible):
        hint = "Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the GPUs by their UUIDs."
        unclear = f"{spec.host} has GPUs of several models, and nobody knows which are those{_of_environ()}"
        raise UsageError(f"--gpus {_given(spec)}: {unclear}", hint)
    numbers_are_clear = is_named or (knows_order(environ) and not any(gpu.is_mig for gpu in read.gpus))
    return [_candidate(name, read.gpus, numbers_are_clear) for name in visible]


def _candidate(name: str, gpus: Sequence[GpuReading], numbers_are_clear: bool) -> Candidate:
    gpu = next((gpu for gpu in gpus if gpu.is_named(name)), None)
    if gpu is None:  # A MIG instance: the driver does not say who uses it.
        return Candidate(name, key_of(name), "", "")
    against = [each.text for each in rules.at_start(gpu) if each.severity == "refuse" or each.rule == "in-use"]
    if gpu.is_mig:
        against.append("it is divided into MIG instances, which CUDA_VISIBLE_DEVICES can name")
    is_clear = numbers_are_clear or not gpu.uuid
    return Candidate(name if is_clear else gpu.uuid, key_of(str(gpu.index)), gpu.uuid, "; ".join(against))


def knows_order(environ: Mapping[str, str]) -> bool:
    """Whether CUDA numbers the GPUs as the driver does: it puts the fastest first, unless all are alike."""
    is_by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return is_by_bus or devices.is_amd() or len({*devices.visible_models(None)}) < 2


def key_of(name: str) -> str:
    """The PCI address of a GPU, by its index or UUID; a MIG instance is itself. Partitions of a GPU have numbers."""
    addresses = devices.gpu_pci_addresses()
    try:
        address = devices.pci_address(name)
    except ValueError:
        return name
    return f"{address}/{name}" if addresses.count(address) > 1 else address


# Who uses them.


def _free(found: Sequence[Candidate], users: Sequence[GpuUser]) -> list[Candidate]:
    return [each for each in found if not who_uses(each, users)]


def _too_few(wanted: Wanted, found: Sequence[Candidate], users: Sequence[GpuUser]) -> str:
    count = len(_free(found, users))
    lines = [f"  GPU {each.name}: {who}" for each in found if (who := who_uses(each, users))]
    return "\n".join([f"{count} of {len(found)}{_of_environ()}, and the run needs {wanted.least}", *lines])


def who_uses(gpu: Candidate, users: Iterable[GpuUser]) -> str:
    """The runs that have this GPU; or what else is on it; empty if it is free."""
    return ", ".join(describe(user) for user in users if gpu.is_of(user)) or gpu.in_use


def named(keys: Sequence[str]) -> str:
    """``GPUs 0, 2``, of PCI addresses; or ``GPU MIG-...``."""
    addresses = devices.gpu_pci_addresses()
    names = [str(addresses.index(key)) if key in addresses else key for key in keys]
    return f"{'GPU' if len(names) == 1 else 'GPUs'} {', '.join(names)}"


def describe(user: GpuUser) -> str:
    """``run 20261120-193012-a1b2c3 of alice (pid 4711, since 10:32)``."""
    since = local_time(user.since_s, "%H:%M" if 0 <= time.time() - user.since_s < 43200 else "%Y-%m-%d %H:%M")
    return f"run {quote(user.run_id)} of {quote(user.user)} (pid {user.pid}, since {since or 'an unknown time'})"
