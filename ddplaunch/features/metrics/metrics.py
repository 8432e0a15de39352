"""The text of ``--metrics-file``: what is known of a run, in Prometheus' text format, with names as OpenMetrics wants.

Pure: ``MetricsWatch`` collects the values and writes the file. docs/metrics.md lists the metrics.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Literal

from ddplaunch.features.usage.records import UsageSample, UsageStarted
from ddplaunch.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


RunState = Literal["starting", "running", "ended"]
RUN_STATES: tuple[RunState, ...] = ("starting", "running", "ended")

METRICS: dict[str, tuple[str, str]] = {
    "ddplaunch_run_info": ("gauge", "always 1; the version of ddplaunch"),
    "ddplaunch_run_state": ("gauge", "1 for the state of the run, 0 for the others"),
    "ddplaunch_run_start_time_seconds": ("gauge", "when the launcher started, in seconds since 1970"),
    "ddplaunch_run_update_time_seconds": ("gauge", "when this file was written, in seconds since 1970"),
    "ddplaunch_run_end_time_seconds": ("gauge", "when the run ended, in seconds since 1970; only after the end"),
    "ddplaunch_run_exit_code": ("gauge", "exit code of the run; only after the end"),
    "ddplaunch_run_attempt": ("gauge", "number of the attempt, from 0 on"),
    "ddplaunch_run_restarts_total": ("counter", "restarts after failures"),
    "ddplaunch_run_nodes": ("gauge", "nodes of this launcher that take part"),
    "ddplaunch_run_workers": ("gauge", "workers of the attempt, on all nodes of the job"),
    "ddplaunch_node_cpu_ratio": ("gauge", "share of all CPUs of the node that was not idle"),
    "ddplaunch_node_memory_used_bytes": ("gauge", "memory of the node that is not available"),
    "ddplaunch_node_memory_bytes": ("gauge", "main memory of the node"),
    "ddplaunch_node_disk_used_ratio": ("gauge", "share of the log folder's file system in use"),
    "ddplaunch_node_network_receive_bytes_total": ("counter", "bytes received by network adapters while workers ran"),
    "ddplaunch_node_network_transmit_bytes_total": ("counter", "bytes sent by network adapters while workers ran"),
    "ddplaunch_worker_running": ("gauge", "1 while the worker runs, 0 after its end"),
    "ddplaunch_worker_cpu_seconds_total": ("counter", "CPU time of the rank's workers and their children"),
    "ddplaunch_worker_resident_memory_bytes": ("gauge", "memory of the worker's process"),
    "ddplaunch_worker_read_bytes_total": ("counter", "bytes that the rank's workers and their children have read"),
    "ddplaunch_worker_written_bytes_total": (
        "counter",
        "bytes that the rank's workers and their children have written",
    ),
    "ddplaunch_worker_output_lines_total": ("counter", "lines of output of the rank's workers"),
    "ddplaunch_worker_output_age_seconds": ("gauge", "seconds since the worker's last output"),
    "ddplaunch_gpu_utilization_ratio": ("gauge", "share of the time in which a kernel ran"),
    "ddplaunch_gpu_memory_used_bytes": ("gauge", "device memory in use"),
    "ddplaunch_gpu_memory_bytes": ("gauge", "device memory"),
    "ddplaunch_gpu_power_watts": ("gauge", "power"),
    "ddplaunch_gpu_temperature_celsius": ("gauge", "temperature"),
    "ddplaunch_gpu_throttled": ("gauge", "1 while the GPU's clocks are lowered by the hardware, else 0"),
}
"""Name -> type and meaning."""

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

Labels = dict[str, str]
Value = tuple[str, Labels, float]


@dataclass
class RunMetrics:
    """Of the run.

    Attributes:
        update_s: when the text is written, in seconds since 1970.
        exit_code: None while the run goes on.
    """

    run_id: str
    version: str
    start_s: float
    update_s: float = 0.0
    state: RunState = "starting"
    attempt: int | None = None
    restarts: int = 0
    nodes: int = 0
    workers: int = 0
    end_s: float | None = None
    exit_code: int | None = None

    def values(self) -> Iterator[Value]:
        yield "ddplaunch_run_info", {"version": self.version}, 1
        for state in RUN_STATES:
            yield "ddplaunch_run_state", {"state": state}, int(state == self.state)
        known = {
            "start_time_seconds": self.start_s,
            "update_time_seconds": self.update_s,
            "end_time_seconds": self.end_s,
            "exit_code": self.exit_code,
            "attempt": self.attempt,
            "restarts_total": self.restarts,
            "nodes": self.nodes,
            "workers": self.workers,
        }
        for name, value in known.items():
            if value is not None:
                yield f"ddplaunch_run_{name}", {}, value


@dataclass
class NodeMetrics:
    """Of one node: its newest sample, and totals since the run began.

    Attributes:
        totals: by metric and row: the position of a worker, 0 for the node.
    """

    index: int
    host: str
    started: UsageStarted
    newest: UsageSample | None = None
    totals: dict[tuple[str, int], float] = field(default_factory=dict)

    def add(self, samples: Sequence[UsageSample]) -> None:
        """Samples of the newest attempt."""
        for sample in samples:
            self.newest = sample
            node, workers = sample.node, sample.workers
            self._count("ddplaunch_node_network_receive_bytes_total", (node.rx,), sample.span_s)
            self._count("ddplaunch_node_network_transmit_bytes_total", (node.tx,), sample.span_s)
            self._count("ddplaunch_worker_cpu_seconds_total", workers.cpu, sample.span_s / 100)
            self._count("ddplaunch_worker_read_bytes_total", workers.rd, sample.span_s)
            self._count("ddplaunch_worker_written_bytes_total", workers.wr, sample.span_s)
            self._count("ddplaunch_worker_output_lines_total", workers.lines, sample.span_s)

    def _count(self, name: str, rates: Sequence[float | None], span_s: float) -> None:
        for row, rate in enumerate(rates):
            if rate is not None:
                self.totals[name, row] = self.totals.get((name, row), 0.0) + rate * span_s

    def values(self) -> Iterator[Value]:
        for found in (self._of_node(), self._of_workers(), self._of_gpus()):
            for name, labels, value in found:
                yield name, {"host": self.host, "node": str(self.index), **labels}, value

    def _of_node(self) -> Iterator[Value]:
        node = self.newest.node if self.newest else None
        yield "ddplaunch_node_memory_bytes", {}, self.started.memory_bytes
        if node:
            yield from _known("ddplaunch_node_cpu_ratio", {}, node.cpu, 0.01)
            yield from _known("ddplaunch_node_memory_used_bytes", {}, node.mem)
            yield from _known("ddplaunch_node_disk_used_ratio", {}, node.disk, 0.01)
        yield from ((name, {}, total) for (name, _), total in self.totals.items() if name.startswith("ddplaunch_node_"))

    def _of_workers(self) -> Iterator[Value]:
        workers = self.newest.workers if self.newest else None
        labels = [
            {"rank": str(rank), "local_rank": str(local_rank)} for local_rank, rank in enumerate(self.started.ranks)
        ]
        for row, of_rank in enumerate(labels):
            rss = _at(workers.rss, row) if workers else None
            yield "ddplaunch_worker_running", of_rank, int(workers is None or rss is not None)
            yield from _known("ddplaunch_worker_resident_memory_bytes", of_rank, rss)
            quiet = _at(workers.quiet, row) if workers else None
            yield from _known("ddplaunch_worker_output_age_seconds", of_rank, quiet)
        for (name, row), total in self.totals.items():
            if name.startswith("ddplaunch_worker_") and row < len(labels):
                yield name, labels[row], total

    def _of_gpus(self) -> Iterator[Value]:
        gpus = self.newest.gpus if self.newest else None
        for row, gpu in enumerate(self.started.gpus):
            users = [
                str(rank)
                for rank, used in zip(self.started.ranks, self.started.gpu_of_worker, strict=False)
                if used == row
            ]
            labels = {"gpu": str(gpu.index), "uuid": gpu.uuid, "name": gpu.name, "rank": ",".join(users)}
            yield from _known("ddplaunch_gpu_memory_bytes", labels, gpu.memory_bytes or None)
            if gpus:
                yield from _known("ddplaunch_gpu_utilization_ratio", labels, _at(gpus.util, row), 0.01)
                yield from _known("ddplaunch_gpu_memory_used_bytes", labels, _at(gpus.mem, row))
                yield from _known("ddplaunch_gpu_power_watts", labels, _at(gpus.power, row))
                yield from _known("ddplaunch_gpu_temperature_celsius", labels, _at(gpus.temp, row))
                is_known = _at(gpus.util, row) is not None
                throttled = int(row < len(gpus.throttle) and bool(gpus.throttle[row]))
                yield from _known("ddplaunch_gpu_throttled", labels, throttled if is_known else None)


def _at(values: Sequence[float | None], row: int) -> float | None:
    return values[row] if row < len(values) else None


def _known(name: str, labels: Labels, value: float | None, factor: float = 1) -> Iterator[Value]:
    if value is not None:
        yield name, labels, value if factor == 1 else value * factor


def text(run: RunMetrics, nodes: Iterable[NodeMetrics]) -> str:
    """The whole file: all values of a metric together, each with the label ``run_id``."""
    found: dict[str, list[str]] = {name: [] for name in METRICS}
    values = [*run.values(), *(value for node in nodes for value in node.values())]
    for name, labels, value in values:
        found[name].append(f"{name}{_labels({'run_id': run.run_id, **labels})} {_number(value)}\n")
    return "".join(
        f"# HELP {name} {METRICS[name][1]}\n# TYPE {name} {METRICS[name][0]}\n{''.join(lines)}"
        for name, lines in found.items()
        if lines
    )


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(round(value, 6))
