"""Chooses GPUs that nobody uses, for ``--gpus free:2``. Runs in the agent, before it has workers.

A GPU is free if no run of ddplaunch has it in the register, the driver knows no process on it and little memory of it
is in use, and its hardware is sound. What a scheduler, a container or the user's environment hides is not chosen. What
a run waits for is not free for those that came later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ddplaunch.errors import LaunchError, UsageError
from ddplaunch.features.free_gpus import register
from ddplaunch.features.free_gpus.records import GpuUser
from ddplaunch.features.free_gpus.register import OwnFile
from ddplaunch.features.gpus import reader
from ddplaunch.features.health import rules
from ddplaunch.system import devices
from ddplaunch.text import free_gpus, grouped, local_time, plural, quote

if TYPE_CHECKING:
    from ddplaunch.features.gpus.records import GpuReading, GpusRead
    from ddplaunch.protocol.specs import AgentSpec

_READ_S, LOCK_S = 20.0, 10.0
_HINT = "Choose GPUs with --gpus 2,4, or end what uses them; `ddplaunch --kill RUN_ID` ends a run of yours."
_WAIT_HINT = "--wait-for-gpus 2h waits for them; --gpus 2,4 takes these; `ddplaunch --kill RUN_ID` ends a run of yours."


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

    def is_wanted_by(self, user: GpuUser) -> bool:
        """Whether the run waits for it, perhaps among others."""
        return not {self.key, self.uuid}.isdisjoint(user.wants)


class Wanted(NamedTuple):
    """How many GPUs a node needs, and how many it takes if they are free; they are a multiple of ``step``."""

    least: int
    most: int
    step: int

    def of(self, free: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those of the free GPUs that it takes; none if they are too few."""
        return free[: min(len(free), self.most) // self.step * self.step] if len(free) >= self.least else ()


class View(NamedTuple):
    """What the register says to a run that wants some of the GPUs ``found``.

    Attributes:
        users: the runs that have GPUs, or wait for some.
        waiting: those that wait for some of ``found``, the first to get them first.
        ahead: those of them that get them before this run.
        free: the GPUs that this run may take.
    """

    found: Sequence[Candidate]
    users: Sequence[GpuUser]
    waiting: Sequence[GpuUser]
    ahead: Sequence[GpuUser]
    free: Sequence[Candidate]

    def lines(self) -> list[str]:
        """Who uses the GPUs, a line for each user; and a line for each run that waits before this one."""
        used = grouped((who, each.name) for each in self.found if (who := who_uses(each, self.users)))
        lines = [f"{'GPU' if len(names) == 1 else 'GPUs'} {', '.join(names)}: {who}" for who, names in used.items()]
        return [*lines, *(f"{describe(user)} waits for {plural(user.needs, 'GPU')} before" for user in self.ahead)]


def view(found: Sequence[Candidate], others: Sequence[GpuUser], ticket: int = 0) -> View:
    """For a run with this ticket; 0: it does not wait. ``others`` are all others in the register, which is locked."""
    waiting = [user for user in register.waiting(others) if any(each.is_wanted_by(user) for each in found)]
    ahead = [user for user in waiting if not ticket or user.ticket < ticket]
    unused = (each for each in found if not who_uses(each, others))
    return View(found, others, waiting, ahead, [each for each in unused if not any(map(each.is_wanted_by, ahead))])


def chosen(spec: AgentSpec) -> tuple[AgentSpec, OwnFile]:
    """``spec`` with free GPUs, which this process has from now on.

    Raises:
        LaunchError: too few are free, or nobody knows which are.
    """
    found, wanted = choice_of(spec, _read(spec))
    try:
        with register.locked(LOCK_S) as opened:
            seen = view(found, register.users(opened))
            if not (taken := wanted.of(seen.free)):
                raise too_few(spec, seen, wanted)
            own = OwnFile(opened, this_run(spec, [each.key for each in taken]))
    except OSError as error:
        raise unusable(spec, error) from None
    return with_gpus(spec, taken), own


def with_gpus(spec: AgentSpec, taken: Iterable[Candidate]) -> AgentSpec:
    """``spec`` with these GPUs for the workers."""
    return replace(spec, workers=replace(spec.workers, gpus=tuple(each.name for each in taken)))


def choice_of(spec: AgentSpec, read: GpusRead) -> tuple[list[Candidate], Wanted]:
    """The GPUs among which the node chooses, and how many it needs. Raises LaunchError if it can never have them."""
    found = candidates(spec, os.environ, read)
    wanted = wanted_by(spec, len(found))
    if wanted.least > len(found):
        raise UsageError(f"--gpus {given(spec)}: {spec.host} has {plural(len(found), 'GPU')}{_of_environ()}")
    return found, wanted


def too_few(spec: AgentSpec, seen: View, wanted: Wanted, waited: str = "") -> LaunchError:
    """The error for a run that does not get its GPUs; ``waited`` is as ``; it has waited for 2h``."""
    count = f"{len(seen.free)} of {len(seen.found)}{_of_environ()}, and the run needs {wanted.least}"
    before = f"; {plural(len(seen.ahead), 'run')} waited before it" if seen.ahead else ""
    listed = "\n".join((f"{count}{before}{waited}", *(f"  {line}" for line in seen.lines())))
    return LaunchError(
        f"--gpus {given(spec)}: too few GPUs of {spec.host} are free: {listed}", _HINT if waited else _WAIT_HINT
    )


def unknown(spec: AgentSpec, why: str) -> LaunchError:
    """The error where the driver does not say what the GPUs do."""
    return LaunchError(f"--gpus {given(spec)}: nobody knows which GPUs of {spec.host} are free: {why}", _HINT)


def unusable(spec: AgentSpec, error: OSError) -> LaunchError:
    """The error for a register that cannot be used."""
    hint = f"All users of a machine need the same folder; {register.FOLDER_VARIABLE} names another one."
    where, reason = f"{register.folder()} on {spec.host}", error.strerror or error
    return LaunchError(f"--gpus {given(spec)}: the register in {where} cannot be used: {reason}", hint)


def this_run(spec: AgentSpec, keys: Iterable[str]) -> GpuUser:
    """What the register has of this run, which has no workers yet."""
    pid, run_id = os.getpid(), "" if os.environ.get(register.HIDE_VARIABLE) else spec.run_id
    return GpuUser(pid=pid, run_id=run_id, since_s=time.time(), gpus=tuple(keys), processes=(register.started(pid),))


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


def given(spec: AgentSpec) -> str:
    """What the user has given, as ``free:2``."""
    return (spec.workers.gpus or ("",))[0]


def _of_environ() -> str:
    """The variable that hides GPUs, and its value: SLURM sets it, too."""
    variable = devices.visibility_variable(os.environ)
    return f" that {variable}={os.environ[variable]} leaves visible" if variable in os.environ else ""


# The GPUs.


def _read(spec: AgentSpec) -> GpusRead:
    """What the driver says of all GPUs. Raises LaunchError where there are none."""
    visible(spec, os.environ)
    return reader.read_once("health", _READ_S)


def visible(spec: AgentSpec, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The ids of the GPUs among which the node may choose. Raises LaunchError if there are none."""
    names = devices.visible_devices(environ, None)
    if not names:
        missing = devices.NO_GPU if names is None else f"--gpus {given(spec)}: there is no GPU{_of_environ()}"
        raise UsageError(f"{missing} (on {spec.host})")
    return names


def candidates(spec: AgentSpec, environ: Mapping[str, str], read: GpusRead) -> list[Candidate]:
    """All GPUs that the workers may use, in the order of their ids, as they were ``read``.

    Raises:
        LaunchError: there are none, or the driver does not say what they do.
    """
    names = visible(spec, environ)
    if read.missing or not read.gpus:
        raise unknown(spec, read.missing or "the driver tells of none")
    is_named = devices.visibility_variable(environ) in environ
    if is_named and not knows_order(environ) and any(name.isdigit() for name in names):
        hint = "Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the GPUs by their UUIDs."
        unclear = f"{spec.host} has GPUs of several models, and nobody knows which are those{_of_environ()}"
        raise UsageError(f"--gpus {given(spec)}: {unclear}", hint)
    numbers_are_clear = is_named or (knows_order(environ) and not any(gpu.is_mig for gpu in read.gpus))
    return [_candidate(name, read.gpus, numbers_are_clear) for name in names]


def _candidate(name: str, gpus: Sequence[GpuReading], numbers_are_clear: bool) -> Candidate:
    gpu = next((gpu for gpu in gpus if gpu.is_named(name)), None)
    if gpu is None:  # A MIG instance: the driver does not say who uses it.
        return Candidate(name, key_of(name), "", "")
    is_clear = numbers_are_clear or not gpu.uuid
    return Candidate(name if is_clear else gpu.uuid, key_of(str(gpu.index)), gpu.uuid, in_use(gpu))


def in_use(gpu: GpuReading) -> str:
    """As ``Candidate.in_use``."""
    against = [each.text for each in rules.at_start(gpu) if each.severity == "refuse" or each.rule == "in-use"]
    if gpu.is_mig:
        against.append("it is divided into MIG instances, which CUDA_VISIBLE_DEVICES can name")
    return "; ".join(against)


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


def who_uses(gpu: Candidate, users: Iterable[GpuUser]) -> str:
    """The runs that have this GPU; or what else is on it; empty if it is free."""
    return ", ".join(describe(user) for user in users if gpu.is_of(user)) or gpu.in_use


def named(keys: Sequence[str]) -> str:
    """``GPUs 0, 2``, of PCI addresses; or ``GPU MIG-...``."""
    addresses = devices.gpu_pci_addresses()
    names = [str(addresses.index(key)) if key in addresses else key for key in keys]
    return f"{'GPU' if len(names) == 1 else 'GPUs'} {', '.join(names)}"


def describe(user: GpuUser) -> str:
    """``run 20261120-193012-a1b2c3 of alice (pid 4711, since 10:32)``; ``a run of alice (...)`` if she hides it."""
    since = local_time(user.since_s, "%H:%M" if 0 <= time.time() - user.since_s < 43200 else "%Y-%m-%d %H:%M")
    run = f"run {quote(user.run_id)}" if user.run_id else "a run"
    return f"{run} of {quote(user.user)} (pid {user.pid}, since {since or 'an unknown time'})"
