"""What an agent knows about workers that stand still: records of ``WorkersExamined``, one ``RankEvidence`` per worker.

Sent by agents to the launcher. No behaviour belongs here: ``hangs`` interprets the records. Every source but the first
may be missing; ``missing_sources`` then says why.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from typing import Annotated, TypeVar

from ddplaunch.cluster.hosts import MAX_SLOTS_PER_HOST
from ddplaunch.features.gpus.records import MAX_GPUS, GpuReading
from ddplaunch.features.hangs import rank_list
from ddplaunch.features.hangs.rank_list import RankList
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import wire
from ddplaunch.protocol.control import Answer, Request
from ddplaunch.protocol.field_types import (
    Count,
    Limit,
    LongText,
    Nanoseconds,
    OneLine,
    Pid,
    Seconds,
    Size,
    at_most,
)
from ddplaunch.protocol.launcher_agent import OfRanks, Order, Report

_Record = TypeVar("_Record")

MAX_CALLS = 64
"""Calls of a flight record that are kept: the newest, and all unfinished ones up to this number."""

MAX_GROUPS = 256
MAX_STACK_CHARS = 32 << 10

MAX_UNANSWERED = 16
MAX_RAS_CHARS = 1 << 20
"""NCCL says some 700 characters of each rank and communicator."""

Sizes = Annotated[tuple[Annotated[tuple[Size, ...], at_most(16)], ...], at_most(16)]
"""Shapes of the tensors of a call; longer lists are cut."""


@dataclass(frozen=True)
class ProcessGroup(wire.Shared):
    """A c10d process group. ``members``: its ranks in group order, as ``rank_list`` folds them; empty: unknown."""

    name: OneLine
    description: OneLine
    members: RankList

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its global ranks in group order; empty if unknown."""
        return rank_list.unfold(self.members)


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One call of a collective or of send/recv, from torch's flight recorder.

    Attributes:
        group: the process group, as its place among those of the flight record.
        number: ``collective_seq_id``, or ``p2p_seq_id`` of send and recv; the first call of a group has 1.
        operation: as in ``all_reduce``, without the backend; for NCCL's send and recv ``send 0->1``, in group ranks.
        backend: ``gloo`` or ``nccl``.
        is_p2p: send or recv.
        is_started: NCCL's kernel runs on the GPU. Known only with TORCH_NCCL_ENABLE_TIMING=1.
        is_done: the call has finished on this rank.
    """

    group: Count
    number: Count
    operation: OneLine
    backend: OneLine
    input_sizes: Sizes = ()
    output_sizes: Sizes = ()
    dtypes: Annotated[tuple[OneLine, ...], at_most(16)] = ()
    is_p2p: bool = False
    is_started: bool = False
    is_done: bool = False


@dataclass(frozen=True, eq=False)
class Calls(wire.Shared):
    """Calls in the order in which they were made, and nothing that is of one rank alone: most ranks have the same.

    What is computed from them is computed once for all these ranks.
    """

    all: Annotated[tuple[CollectiveCall, ...], at_most(2 * MAX_CALLS)] = ()

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.all)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Calls) and self.all == other.all

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def unfinished(self) -> tuple[CollectiveCall, ...]:
        """Those that are not done."""
        return tuple(call for call in self.all if not call.is_done)

    @functools.cached_property
    def collectives(self) -> dict[int, dict[int, CollectiveCall]]:
        """All but send and recv, by group and number."""
        found: defaultdict[int, dict[int, CollectiveCall]] = defaultdict(dict)
        for call in self.all:
            if not call.is_p2p:
                found[call.group][call.number] = call
        return dict(found)


_NO_CALLS = Calls()


@dataclass(frozen=True, kw_only=True)
class FlightRecord:
    """The end of torch's flight record of one worker.

    Attributes:
        since_ns: when each call that is not done was made, by the clock of the worker's host, in nanoseconds since the
            epoch; 0: unknown.
        is_complete: false if older calls were cut, by torch's ring buffer or by ``MAX_CALLS``.
        made_of: in a report: the rank whose ``made`` these calls are, too; ``made`` is then empty.
    """

    groups: Annotated[tuple[ProcessGroup, ...], at_most(MAX_GROUPS)] = ()
    made: Calls = _NO_CALLS
    since_ns: Annotated[tuple[Nanoseconds, ...], at_most(2 * MAX_CALLS)] = ()
    is_complete: bool = True
    made_of: Count | None = None

    def group_name(self, call: CollectiveCall) -> str:
        """Empty if the group is unknown."""
        return self.groups[call.group].name if call.group < len(self.groups) else ""


@dataclass(frozen=True)
class PendingCall(wire.Shared):
    """A function of ``torch.distributed`` in which the worker's main thread is, from its Python frames.

    Attributes:
        function: as in ``recv`` or ``all_reduce``; the outermost function of ``torch.distributed``.
        peer: the global rank of send or recv; None if there is none.
        group: name of the process group; empty for the default group or if unknown.
    """

    function: OneLine
    peer: Count | None = None
    group: OneLine = ""


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """What is known about one worker at an examination.

    "Moved" refers to the time between the two last samples of the worker, ``window_s`` seconds.

    Attributes:
        is_running: false if it has ended; the rest is then empty.
        silent_s: seconds since its last output, or since its start.
        window_s: seconds between the two last samples.
        cpu_s: CPU seconds of the worker and its descendants in the window.
        io_bytes: bytes that they read and wrote in the window; pipes, TCP and the page cache included.
        run_queue_wait_s: seconds in the window for which its main thread was ready but had no CPU.
        collectives_moved: a collective was called or finished in the window; None if that source is missing.
        blocked_state: why the kernel does not run it ("suspended by a signal"); empty if it may run.
        where: its main thread's Python line, like ``train.py:6 in step (sleep)``; empty if unknown.
        stacks: Python stacks of all threads, faulthandler's format, the main thread last; cut at the begin.
        stacks_of: in a report: the rank whose ``stacks`` these are, too; ``stacks`` is then empty.
        waits_for_input: it reads from standard input.
        debugger: name of the debugger in which one of its threads is; empty if in none.
        pending: function of torch.distributed in which its main thread is.
        busy_child: command and state of the descendant that used the most CPU, or that is blocked; empty if none.
        unanswered: addresses of peers that do not acknowledge what the worker sends to them over TCP.
        missing_sources: what could not be asked, and why, one sentence each.
    """

    rank: Count
    local_rank: Count
    host: OneLine
    pid: Pid
    is_running: bool = True
    silent_s: Seconds = 0.0
    window_s: Seconds = 0.0
    cpu_s: Seconds = 0.0
    io_bytes: Size = 0
    run_queue_wait_s: Seconds = 0.0
    collectives_moved: bool | None = None
    blocked_state: OneLine = ""
    where: OneLine = ""
    stacks: LongText = ""
    stacks_of: Count | None = None
    waits_for_input: bool = False
    debugger: OneLine = ""
    pending: PendingCall | None = None
    flight_record: FlightRecord | None = None
    busy_child: OneLine = ""
    unanswered: Annotated[tuple[OneLine, ...], at_most(MAX_UNANSWERED)] = ()
    missing_sources: Annotated[tuple[OneLine, ...], at_most(16)] = field(default=())


def folded(ranks: Iterable[RankEvidence]) -> tuple[RankEvidence, ...]:
    """``ranks``, in which stacks and calls that are equal stand only once: with the first rank that has them."""
    stacks: dict[str, int] = {}
    made: dict[Calls, int] = {}
    found = []
    for each in ranks:
        record, changed = each.flight_record, dict[str, object]()
        if record and (first := made.setdefault(record.made, each.rank)) != each.rank:
            changed["flight_record"] = with_fields(record, made=_NO_CALLS, made_of=first)
        if each.stacks and (first := stacks.setdefault(each.stacks, each.rank)) != each.rank:
            changed |= {"stacks": "", "stacks_of": first}
        found.append(with_fields(each, **changed) if changed else each)
    return tuple(found)


def unfolded(ranks: Sequence[RankEvidence]) -> list[RankEvidence]:
    """What ``folded`` was made of. Ranks with equal stacks or calls share the object."""
    stacks = {each.rank: each.stacks for each in ranks}
    made = {each.rank: each.flight_record.made for each in ranks if each.flight_record}
    found = []
    for each in ranks:
        record = each.flight_record
        if record and record.made_of is not None:
            record = with_fields(record, made=made.get(record.made_of, _NO_CALLS), made_of=None)
        if record is not each.flight_record or each.stacks_of is not None:
            text = each.stacks if each.stacks_of is None else stacks.get(each.stacks_of, "")
            each = with_fields(each, flight_record=record, stacks=text, stacks_of=None)
        found.append(each)
    return found


def with_fields(record: _Record, **fields: object) -> _Record:
    """As ``replace``, in a tenth of the time: of tens of thousands of ranks."""
    copy = object.__new__(type(record))
    copy.__dict__.update(record.__dict__, **fields)
    return copy


_RasText = Annotated[str, Limit(f"at most {MAX_RAS_CHARS} characters", lambda text: len(text) <= MAX_RAS_CHARS)]


@dataclass(frozen=True, kw_only=True)
class NodeEvidence:
    """What is known about a node, apart from its workers.

    Attributes:
        ras: the answer of NCCL's RAS, which covers all nodes: JSON or text, as NCCL has it; empty if there is none.
        ras_missing: why there is none, or that it is cut; one sentence.
        gpus: the job's GPUs of NVIDIA.
        gpus_missing: why there are none; one sentence.
    """

    host: OneLine
    ras: _RasText = ""
    ras_missing: OneLine = ""
    gpus: Annotated[tuple[GpuReading, ...], at_most(MAX_GPUS)] = ()
    gpus_missing: OneLine = ""


@dataclass(frozen=True)
class ExamineWorkers(Order):
    """Launcher to agent: find out what the workers of ``attempt`` do; answered by WorkersExamined ``number``.

    Attributes:
        is_requested: by the user, who wants to know what moves now: the agent does not compare with an earlier sample,
            and answers at once if none of these workers runs any more.
        all_nodes_at: set by the agent where each node has a launcher, and another node serves the rendezvous:
            only this node is examined, and only its launcher gets the answer. Endpoint of the rendezvous.
    """

    attempt: Count
    number: Count
    is_requested: bool = False
    all_nodes_at: OneLine = ""

    def for_own_node(self, endpoint: str) -> ExamineWorkers | None:
        """As ``Order.for_own_node``: the user asks any launcher; the limits are watched by one."""
        return replace(self, all_nodes_at=endpoint) if self.is_requested else None


@dataclass(frozen=True)
class AbortHungAttempt(Order):
    """Launcher to all agents: the attempt hangs, for this ``reason``.

    The agent collects the Python stacks of the workers of ``attempt`` and stops them; the attempt has failed.
    """

    attempt: Count
    reason: LongText


@dataclass(frozen=True)
class WorkerActivity(Report):
    """Agent to launcher, repeated: for how long the workers of ``attempt`` have been quiet, or have only written.

    Attributes:
        quiet_s: seconds since a worker wrote output, or called or finished a collective; 0: they are active again.
        still_s: as ``quiet_s``, and no worker that does not wait in a collective used a CPU, or read or wrote data.
        is_finished: the attempt ends on this node; the other fields have no meaning.
        waiting_s: seconds since a worker called or finished a collective, whatever else they did; 0: just now, or it is
            not known.
        has_waiting: a worker waits in a collective.
        host: display name of the node.
    """

    attempt: Count
    quiet_s: Seconds = 0.0
    still_s: Seconds = 0.0
    is_finished: bool = False
    waiting_s: Seconds = 0.0
    has_waiting: bool = False
    host: OneLine = ""


@dataclass(frozen=True)
class WorkersExamined(Report, OfRanks):
    """Agent to launcher, in answer to ExamineWorkers ``number``; or with number 0, unasked.

    Unasked before a stop of quiet workers, and in AttemptEnded with what the ranks knew when collectives had failed.
    ``ranks`` are ``folded``. ``node`` is None where NCCL and the GPUs were not asked. ``all_nodes_at`` is that of
    ExamineWorkers.
    """

    attempt: Count
    number: Count
    ranks: Annotated[tuple[RankEvidence, ...], at_most(MAX_SLOTS_PER_HOST)]
    node: NodeEvidence | None = None
    all_nodes_at: OneLine = ""

    @property
    def named_ranks(self) -> list[int]:
        """As ``OfRanks.named_ranks``."""
        return [each.rank for each in self.ranks]


MAX_LINES = 1000

_Lines = Annotated[tuple[OneLine, ...], at_most(MAX_LINES)]


@dataclass(frozen=True)
class ExamineRun(Request):
    """Client to launcher: find out what the workers do now; answered by RunExamined or RequestRefused."""

    run_tag: OneLine


@dataclass(frozen=True, kw_only=True)
class RunExamined(Answer):
    """Launcher to client, in answer to ExamineRun.

    Attributes:
        sentences: what the job does; who waits for whom.
        lines: what each rank does and where it is, equal ranks together.
        path: stacks.txt with all stacks, on the launcher's machine; empty if it could not be written.
        all_nodes_at: where only the launcher's own node was examined: the host whose launcher can examine all nodes.
    """

    sentences: _Lines
    lines: _Lines = ()
    path: OneLine = ""
    all_nodes_at: OneLine = ""


TO_AGENT = (ExamineWorkers, AbortHungAttempt)
FROM_AGENT = (WorkerActivity, WorkersExamined)
TO_LAUNCHER, FROM_LAUNCHER = (ExamineRun,), (RunExamined,)
