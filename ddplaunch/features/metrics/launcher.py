"""``--metrics-file``: writes what is known of a run for Prometheus, every 10 s and at the end.

Runs in the launcher, in the main thread; a short thread writes, because a disk may be slow: while it does, no other is
started. The file is renamed into place: a reader sees all of it. Unlike the files of a run folder, others may read it,
as far as the umask allows: Prometheus' node_exporter is another user. After the end it has the outcome, and nothing
about nodes, workers and GPUs, which are no longer known. Names are as OpenMetrics wants; docs/metrics.md lists them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ddplaunch.errors import Level
from ddplaunch.features.usage.quantities import BY_NAME, Quantity
from ddplaunch.features.usage.records import UsageSample, UsageSampled, UsageStarted
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted
from ddplaunch.system.files import kept_files
from ddplaunch.threads import in_thread
from ddplaunch.version import __version__

if TYPE_CHECKING:
    import threading

    from ddplaunch.protocol.run_result import RunResult

RunState = Literal["starting", "running", "ended"]
RUN_STATES: tuple[RunState, ...] = ("starting", "running", "ended")


class Metric(NamedTuple):
    """A metric of the file.

    Attributes:
        suffix: its name after ``ddplaunch_``.
        meaning: its help text.
        quantity: the quantity of usage samples whose value it is, as ``g.util``; empty: it is no value of a sample.
    """

    suffix: str
    meaning: str
    quantity: str = ""

    @property
    def name(self) -> str:
        """As Prometheus knows it."""
        return f"ddplaunch_{self.suffix}"

    @property
    def kind(self) -> str:
        """Its type. A counter has the sum of what the samples say for each second."""
        return "counter" if self.suffix.endswith("_total") else "gauge"


METRICS = (
    Metric("run_info", "always 1; the version of ddplaunch"),
    Metric("run_state", "1 for the state of the run, 0 for the others"),
    Metric("run_start_time_seconds", "when the launcher started, in seconds since 1970"),
    Metric("run_update_time_seconds", "when this file was written, in seconds since 1970"),
    Metric("run_end_time_seconds", "when the run ended, in seconds since 1970; only after the end"),
    Metric("run_exit_code", "exit code of the run; only after the end"),
    Metric("run_limit_time_seconds", "when the job ends, in seconds since 1970; only with --stop-before-end"),
    Metric("run_checkpoint_time_seconds", "when the newest checkpoint was saved, in seconds since 1970"),
    Metric("run_checkpoint_step", "training step of the newest checkpoint"),
    Metric("run_lost_work_seconds_total", "time of attempts that was lost, since no checkpoint has it"),
    Metric("run_goodput_ratio", "share of the time so far in which workers ran and their work was not lost"),
    Metric("run_attempt", "number of the attempt, from 0 on"),
    Metric("run_restarts_total", "restarts after failures"),
    Metric("run_nodes", "nodes of this launcher that take part"),
    Metric("run_workers", "workers of the attempt, on all nodes of the job"),
    Metric("node_cpu_ratio", "share of all CPUs of the node that was not idle", "n.cpu"),
    Metric("node_memory_used_bytes", "memory of the node that is not available", "n.mem"),
    Metric("node_memory_bytes", "main memory of the node"),
    Metric("node_disk_used_ratio", "share of the log folder's file system in use", "n.disk"),
    Metric("node_network_receive_bytes_total", "bytes received by network adapters while workers ran", "n.rx"),
    Metric("node_network_transmit_bytes_total", "bytes sent by network adapters while workers ran", "n.tx"),
    Metric("worker_running", "1 while the worker runs, 0 after its end"),
    Metric("worker_cpu_seconds_total", "CPU time of the rank's workers and their children", "w.cpu"),
    Metric("worker_resident_memory_bytes", "memory of the worker's process", "w.rss"),
    Metric("worker_read_bytes_total", "bytes that the rank's workers and their children have read", "w.rd"),
    Metric("worker_written_bytes_total", "bytes that the rank's workers and their children have written", "w.wr"),
    Metric("worker_output_lines_total", "lines of output of the rank's workers", "w.lines"),
    Metric("worker_output_age_seconds", "seconds since the worker's last output", "w.quiet"),
    Metric("gpu_utilization_ratio", "share of the time in which a kernel ran", "g.util"),
    Metric("gpu_memory_used_bytes", "device memory in use", "g.mem"),
    Metric("gpu_memory_bytes", "device memory"),
    Metric("gpu_power_watts", "power", "g.power"),
    Metric("gpu_temperature_celsius", "temperature", "g.temp"),
    Metric("gpu_throttled", "1 while the GPU's clocks are lowered by the hardware, else 0"),
)

_SAMPLED = [(each, BY_NAME[each.quantity]) for each in METRICS if each.quantity]
"""The metrics of samples, each with its quantity."""

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_OF_FACTS = {"end_t": "limit_time_seconds", "saved_t": "checkpoint_time_seconds", "step": "checkpoint_step"}
"""Facts of events that other features note, and metrics of the run."""

PERIOD_S = 10.0
_CLOSE_S = 2.0

Labels = dict[str, str]
Value = tuple[str, Labels, float]


# The text: pure.


def of_run(state: RunState, numbers: Mapping[str, float], version: str = __version__) -> Iterator[Value]:
    """The values of the run; ``numbers``: by name after ``ddplaunch_run_``."""
    yield "ddplaunch_run_info", {"version": version}, 1
    for each in RUN_STATES:
        yield "ddplaunch_run_state", {"state": each}, int(each == state)
    for name, value in numbers.items():
        yield f"ddplaunch_run_{name}", {}, value


class NodeMetrics:
    """Of one node: its newest sample, and totals since the run began.

    Attributes:
        totals: by metric and row: the position of a worker, 0 for the node.
    """

    def __init__(self, index: int, host: str, started: UsageStarted) -> None:
        self.started = started
        self._labels = {"host": host, "node": str(index)}
        self._newest: UsageSample | None = None
        self.totals: dict[tuple[str, int], float] = {}

    def add(self, samples: Sequence[UsageSample]) -> None:
        """Samples of the newest attempt."""
        for sample in samples:
            self._newest = sample
            for metric, quantity in _SAMPLED:
                for row, rate in enumerate(sample.values.get(quantity.name, ()) if metric.kind == "counter" else ()):
                    if rate is not None:
                        before = self.totals.get((metric.name, row), 0.0)
                        self.totals[metric.name, row] = before + rate * sample.span_s * _factor(quantity)

    def values(self) -> Iterator[Value]:
        workers, gpus = self._labels_of_workers(), self._labels_of_gpus()
        for found in (self._sampled({"n": [{}], "w": workers, "g": gpus}), self._others(workers, gpus)):
            for name, own, value in found:
                yield name, {**self._labels, **own}, value

    def _sampled(self, labels: Mapping[str, Sequence[Labels]]) -> Iterator[Value]:
        for metric, quantity in _SAMPLED:
            now = self._newest.values.get(quantity.name, ()) if self._newest else ()
            for row, own in enumerate(labels[quantity.part]):
                if metric.kind == "counter":
                    value = self.totals.get((metric.name, row))
                else:
                    value = _at(now, row)
                    value = None if value is None else value * _factor(quantity)
                if value is not None:
                    yield metric.name, own, value

    def _labels_of_workers(self) -> list[Labels]:
        ranks = enumerate(self.started.ranks)
        return [{"rank": str(rank), "local_rank": str(local_rank)} for local_rank, rank in ranks]

    def _labels_of_gpus(self) -> list[Labels]:
        found = []
        for row, gpu in enumerate(self.started.gpus):
            pairs = zip(self.started.ranks, self.started.gpu_of_worker, strict=False)
            users = ",".join(str(rank) for rank, used in pairs if used == row)
            found.append({"gpu": str(gpu.index), "uuid": gpu.uuid, "name": gpu.name, "rank": users})
        return found

    def _others(self, workers: Sequence[Labels], gpus: Sequence[Labels]) -> Iterator[Value]:
        """What the samples do not say as a number."""
        yield "ddplaunch_node_memory_bytes", {}, self.started.memory_bytes
        sample = self._newest
        for row, own in enumerate(workers):
            runs = sample is None or _at(sample.values.get("w.rss", ()), row) is not None
            yield "ddplaunch_worker_running", own, int(runs)
        for row, own in enumerate(gpus):
            if memory := self.started.gpus[row].memory_bytes:
                yield "ddplaunch_gpu_memory_bytes", own, memory
            if sample and _at(sample.values.get("g.util", ()), row) is not None:
                reasons = sample.throttle
                yield "ddplaunch_gpu_throttled", own, int(row < len(reasons) and bool(reasons[row]))


def _at(values: Sequence[float | None], row: int) -> float | None:
    return values[row] if row < len(values) else None


def _factor(quantity: Quantity) -> float:
    """By what a value of a sample is multiplied: a sample has percents, and a metric a share from 0 to 1."""
    return 0.01 if quantity.is_percent else 1.0


def text(run_id: str, values: Iterable[Value]) -> str:
    """The whole file: all values of a metric together, each with the label ``run_id``."""
    found: dict[str, list[str]] = {metric.name: [] for metric in METRICS}
    for name, labels, value in values:
        found[name].append(f"{name}{_labels({'run_id': run_id, **labels})} {_number(value)}\n")
    return "".join(
        f"# HELP {each.name} {each.meaning}\n# TYPE {each.name} {each.kind}\n{''.join(found[each.name])}"
        for each in METRICS
        if found[each.name]
    )


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(round(value, 6))


# The file.


class MetricsWatch(Watch):
    """Watches one run."""

    def __init__(self, run: RunServices) -> None:
        self._path = Path(run.config.output.metrics_file or "").absolute()
        self._messages, self._participants = run.messages, run.participants
        self._state: RunState = "starting"
        self._run_values: dict[str, float] = {"start_time_seconds": time.time(), "workers": 0}
        self._lost_s: float | None = None if run.config.checkpoint is None else 0.0
        self._ran_s, self._began_at = 0.0, NEVER
        self._of_node: dict[int, NodeMetrics] = {}
        self._restarts: set[int] = set()
        self._due = self._made_at = time.monotonic()
        self._writer: threading.Thread | None = None
        self._error: OSError | None = None
        self._is_warned = False

    def on_event(self, index: int, event: object) -> None:
        """An event of node ``index``; other events have no effect."""
        run_values = self._run_values
        match event:
            case AttemptStarted(attempt=attempt, world_size=world_size) if attempt >= run_values.get("attempt", 0):
                self._state, run_values["attempt"], run_values["workers"] = "running", attempt, world_size
                self._began_at = min(self._began_at, time.monotonic())
            case AttemptEnded(result=result):
                self._ran_s += max(0.0, time.monotonic() - self._began_at)
                self._began_at = NEVER
                self._restarts |= {result.attempt} if result.restart_follows else set()
            case UsageStarted():
                host = self._participants.nodes.all[index].host
                before = self._of_node.get(index)
                self._of_node[index] = NodeMetrics(index, host, event)
                if before and before.started.ranks == event.ranks:
                    self._of_node[index].totals = before.totals
            case UsageSampled(attempt=attempt, samples=samples):
                node = self._of_node.get(index)
                if node and node.started.attempt == attempt:
                    node.add(samples)

    def on_note(self, event: str, text: str, t: float | None, node: int | None, facts: Mapping[str, object]) -> None:
        """What other features note of the run. Any thread."""
        for name in ("end_t", "saved_t", "step") if event in ("time_limit", "checkpoint") else ():
            if isinstance(value := facts.get(name), (int, float)):
                self._run_values[_OF_FACTS[name]] = value
        if event == "work_lost" and isinstance(value := facts.get("s"), float):
            self._lost_s = (self._lost_s or 0.0) + value

    def run_due(self, now: float) -> float:
        """Write the file, if it is time. Returns when to call again."""
        if now >= self._due:
            self._due = now + PERIOD_S
            self._warn()
            self._write()
        return self._due

    def _text(self) -> str:
        present = self._participants.indices
        self._run_values |= {
            "update_time_seconds": time.time(),
            "restarts_total": len(self._restarts),
            "nodes": len(present),
        }
        if self._lost_s is not None:
            now = time.monotonic()
            ran_s = self._ran_s + max(0.0, now - self._began_at)
            goodput = max(0.0, ran_s - self._lost_s) / max(now - self._made_at, 1e-3)
            self._run_values |= {"lost_work_seconds_total": self._lost_s, "goodput_ratio": min(1.0, goodput)}
        nodes = (self._of_node[index].values() for index in present if index in self._of_node)
        # Nodes may have agreed on another run id.
        return text(self._messages.run_id, chain(of_run(self._state, self._run_values), *nodes))

    def _write(self) -> None:
        """In a thread, unless an earlier one still writes."""
        if self._writer and self._writer.is_alive():
            return
        content = self._text()

        def run() -> None:
            try:
                kept_files.write_whole(self._path, content, 0o666)
            except OSError as error:
                self._error = error

        self._writer = None
        with contextlib.suppress(RuntimeError):  # The limit of threads.
            self._writer = in_thread("metrics", run)

    def _warn(self) -> None:
        if self._error and not self._is_warned:
            self._is_warned = True
            self._messages.show(f"--metrics-file {self._path}: {self._error.strerror}; the job goes on", Level.ALWAYS)

    def add_to_result(self, result: RunResult) -> RunResult:
        """The run has ended: write the outcome. Waits up to ``_CLOSE_S`` for the disk."""
        self._of_node, self._due = {}, NEVER
        self._state = "ended"
        self._run_values |= {"end_time_seconds": time.time(), "exit_code": result.exit_code}
        if self._writer:
            self._writer.join(_CLOSE_S)
        self._write()
        if self._writer:
            self._writer.join(_CLOSE_S)
        self._warn()
        return result


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    return (MetricsWatch(run),)
