"""The parts of an agent: each does one thing for the user beside starting and stopping workers.

Runs in the agent, in its main thread. ``Agent`` calls each method of all parts, in the order of
``features.FEATURES``, and names none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ddplaunch import features
from ddplaunch.mailbox import NEVER

if TYPE_CHECKING:
    from ddplaunch.agent.launcher_channel import Outbox
    from ddplaunch.agent.rendezvous import Rendezvous, Wait
    from ddplaunch.agent.workers.exit_details import AttemptFailure
    from ddplaunch.agent.workers.forkserver_client import ForkserverClient
    from ddplaunch.agent.workers.start_plan import Placement
    from ddplaunch.agent.workers.worker import Worker
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.protocol.launcher_agent import Report, StopWorkers
    from ddplaunch.protocol.results import AttemptResult, Round, WorkerExit
    from ddplaunch.protocol.specs import AgentSpec
    from ddplaunch.system.unix_socket import Connection, LocalServer

T = TypeVar("T")


class StoppedEarly(Exception):
    """The run was stopped before the agent was made. Its text: why, if only this node knows."""


class NodeServices:
    """What an agent offers its rendezvous and its parts. Its only subclass is ``Agent``, which they must not import.

    Attributes:
        spec: what the launcher wants of this node. What nodes agree on when they meet is in ``WorkerGroup.spec`` alone:
            the run id, ``max_restarts``, and ``node_dir``: where each node has a launcher, the node folder is then
            moved, and ``spec.node_dir`` is where it was.
        placement: the devices and CPUs of the workers.
        forkserver: starts the workers.
        rendezvous: the rounds of the run.
        saved: what the job would go on from, as the first part says that knows it (``Part.saved``); may wait.
        worker_socket: what features run in a worker connects to it, and the part of that feature takes the connection.
        begun: what features have begun ahead, by name of the feature, see ``begin``.
        outbox: sends records to the launcher.
        post: has the main thread call a function, or posts an event for all parts; any thread may call it.
        report: sends a report to the launcher that watches the job. Where each node has a launcher, it is dropped
            without a message unless the attempt that it names runs.
        wait: handles events until a condition holds (True), or until a deadline, which may change.
        is_stopping: whether the run, or this node's part in it, is being stopped.
        stops_by: until when workers that are being stopped may run, as ``time.monotonic()``.
        stop: stops the run on this node, as an order of its launcher to stop it, which must know it.
        fail: makes the attempt fail for another reason than a worker's exit.
        start_member: starts the member of the rendezvous with five descriptors (three streams, its channel, the
            endpoint's socket), and closes them in this process. Raises a LaunchError if it cannot.
    """

    spec: AgentSpec
    placement: Placement
    forkserver: ForkserverClient
    rendezvous: Rendezvous
    saved: Callable[[], str | None]
    worker_socket: LocalServer
    begun: Mapping[str, Any]
    outbox: Outbox
    post: Callable[[object], None]
    report: Callable[[Report], None]
    wait: Wait
    is_stopping: Callable[[], bool]
    stops_by: Callable[[], float]
    stop: Callable[[StopWorkers], None]
    fail: Callable[[AttemptFailure], None]
    start_member: Callable[[list[int]], None]


class Part:
    """One part of an agent, of all attempts. A method that a part does not define does nothing.

    But ``on_attempt`` keeps the group: a part that defines it, and uses ``_group``, calls ``super().on_attempt``.
    """

    feature = ""
    """Name of its feature; set by ``load``."""

    has_failed = False
    """An unexpected error was raised by ``run_due`` or ``on_event``: they are not called again."""

    def __init__(self, node: NodeServices) -> None:
        self._node = node
        self._group: WorkerGroup | None = None
        """The workers of the present attempt, or of the last one; None before the first."""

    def may_take_part(self) -> bool:
        """Whether this node may take part in the run. Called before the first attempt; may wait.

        Called once, or never if an earlier part has returned False: the node then waits for its end.

        Raises:
            LaunchError: it must not, and its launcher has no other node.
        """
        return True

    def on_attempt(self, group: WorkerGroup, round_: Round) -> None:
        """An attempt begins. No worker of ``group`` runs yet."""
        self._group = group

    def default_environ(self) -> Mapping[str, str]:
        """Variables for the workers of the attempt, if their environment has no value. May wait for a short time."""
        return {}

    def script_args(self, args: tuple[str, ...]) -> tuple[str, ...]:
        """The arguments of the script in the attempt, of those that the user has given. After ``default_environ``."""
        return args

    def for_worker(self, worker: Worker) -> dict[str, str]:
        """Texts for features' parts in ``worker``, by name of the feature: only those that get a text act there.

        Called before each start of a worker, but not for a program or an interpreter without ddplaunch.
        """
        return {}

    def on_started(self) -> None:
        """All workers of the attempt run, or the attempt ends already."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of this part that must outlive the workers: a sweep leaves them alone."""
        return ()

    def on_event(self, event: object) -> bool:
        """Handle an event of the agent's mailbox if it is one of this part's. Returns whether it was."""
        return False

    def on_connection(self, connection: Connection) -> bool:
        """Take a connection that a worker has opened for this feature (``worker.parts.connect``). In another thread.

        Returns whether; else it is closed. Any process of the user may connect and send anything.
        """
        return False

    def on_worker_exited(self, worker: Worker) -> None:
        """A worker has ended. It is reaped next: until then its pid cannot be another's."""

    def run_due(self, now: float) -> float:
        """Do what is due at ``now`` (``time.monotonic()``). Returns when to call again at the latest, or infinity.

        Must not wait: each wait of the agent calls it.
        """
        return NEVER

    @property
    def delays_stop(self) -> bool:
        """Whether ``before_stop`` must see the workers as they are, before they get the signal that stops them."""
        return False

    def before_stop(self, failure: AttemptFailure | None) -> None:
        """The attempt ends: workers that still run are stopped next. May wait for a short time.

        ``failure``: why the attempt has failed, if not by a worker's exit.
        """

    def on_attempt_ended(self, exits: tuple[WorkerExit, ...]) -> tuple[WorkerExit, ...]:
        """All workers have ended as ``exits``, by local rank. Returns them with what this part knows of them."""
        return exits

    def evidence(self, exits: tuple[WorkerExit, ...]) -> tuple[Report, ...]:
        """What the launcher gets with the result of the attempt: ``Watch.explain`` uses it."""
        return ()

    def saved(self) -> str | None:
        """What the job would go on from, a text that differs for each saved state; empty: nothing was saved so far.

        None: this part does not know it. Asked before the first round, and after each; may wait for a short time. By
        what the node of rank 0 answers, ``rounds.restarts`` knows whether an attempt has made progress, and all nodes
        get it with the next round (``Round.saved``).
        """
        return None

    def before_next_attempt(self, result: AttemptResult) -> None:
        """Another attempt follows the one that has ended with ``result``. May wait until the node is ready for it."""

    def on_run_ended(self) -> None:
        """The run has ended in order, and no process of it is left: the last act of the agent. Must not raise."""

    def close(self) -> None:
        """End what the part has started."""


def begin(spec: AgentSpec, post: Callable[[object], None]) -> dict[str, Any]:
    """What features begin before the devices of the workers are chosen, because it takes time; by name of the feature.

    That is what ``begin(spec, post)`` of their modules ``agent`` returns; ``post`` is as in NodeServices.
    """
    modules = [module for module in features.modules("agent") if hasattr(module, "begin")]
    return {_feature_of(module): module.begin(spec, post) for module in modules}


def with_devices(spec: AgentSpec, node: NodeServices) -> AgentSpec:
    """``spec`` with the devices that features choose. They may wait: ``node`` has no placement and no parts yet.

    Raises:
        LaunchError: they cannot be chosen.
    """
    for module in features.modules("agent"):
        if hasattr(module, "with_devices"):
            spec = module.with_devices(spec, node)
    return spec


def load(node: NodeServices) -> tuple[Part, ...]:
    """All parts of an agent. A feature that only begins something ahead has none."""
    return tuple(_part(module, node) for module in features.modules("agent") if hasattr(module, "part"))


def _part(module: Any, node: NodeServices) -> Part:
    part: Part = module.part(node)
    part.feature = _feature_of(module)
    return part


def _feature_of(module: Any) -> str:
    name: str = module.__name__.split(".")[-2]
    return name


def saved(parts: Sequence[Part]) -> str | None:
    """As ``NodeServices.saved``."""
    return next((found for part in parts if (found := part.saved()) is not None), None)


def with_script_args(parts: Sequence[Part], spec: AgentSpec) -> AgentSpec:
    """``spec`` with the arguments that the script gets in this attempt."""
    args = spec.program.args
    for part in parts:
        args = part.script_args(args)
    return spec if args == spec.program.args else replace(spec, program=replace(spec.program, args=args))


def on_connection(parts: Sequence[Part], connection: Connection) -> bool:
    """Offer a connection of a worker to the part of the feature that it is for. Returns whether that has taken it."""
    name = features.of_worker_address(connection.address)
    return any(part.on_connection(connection) for part in parts if part.feature == name)


def run_due(parts: Sequence[Part], now: float) -> float:
    """Have all parts do what is due. Returns when to call again.

    An error that a part raises ends the agent, whose last waits do without this part.
    """
    return min((_called(part, part.run_due, now, NEVER) for part in parts), default=NEVER)


def on_event(parts: Sequence[Part], event: object) -> bool:
    """Whether a part has handled ``event``. Errors are as those of ``run_due``."""
    return any(_called(part, part.on_event, event, False) for part in parts)


def _called(part: Part, method: Callable[[Any], T], argument: object, otherwise: T) -> T:
    if part.has_failed:
        return otherwise
    try:
        return method(argument)
    except Exception:
        part.has_failed = True
        raise
