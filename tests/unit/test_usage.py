"""Usage samples: their mean, what an agent reads and sends, and the clock of the launcher."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.agent.launcher_channel import Outbox
from ddplaunch.agent.workers.worker import Worker
from ddplaunch.features.usage import agent as usage_sampling
from ddplaunch.features.usage.agent import UsagePart
from ddplaunch.features.usage.records import FROM_AGENT, MAX_SAMPLES, UsageSampled, UsageStarted, mean
from ddplaunch.features.usage.usage_files import Clock
from ddplaunch.features.usage.usage_recorder import DiskUse, KeptFile, ProcessFiles, UsageSampler, network_bytes
from ddplaunch.protocol import wire
from ddplaunch.system import procfs
from tests.support.configs import agent_spec
from tests.support.processes import wait_until
from tests.support.usage import sample

SPEC = agent_spec()


# Records.


def test_a_mean_weighs_by_time_and_keeps_peaks() -> None:
    merged = mean([sample(2.0, 2.0, 10.0), sample(8.0, 6.0, 30.0)])
    assert (merged.at_s, merged.span_s) == (8.0, 8.0)
    assert (merged.values["n.cpu"], merged.values["w.cpu"]) == ((25.0,), (25.0, 25.0))
    assert [merged.values[name] for name in ("n.mem", "w.rss", "w.quiet")] == [(30.0,), (30.0, 30.0), (30.0, 30.0)]


def test_a_mean_is_of_what_is_known() -> None:
    """A worker that has ended, a GPU that was silent, a list that is shorter."""
    first = replace(sample(2.0), values={"w.cpu": (4.0, 2.0), "g.util": (50.0,)}, throttle=("power brake",))
    second = replace(sample(4.0), values={"w.cpu": (None,), "g.util": (None, 10.0)}, throttle=(None,))
    merged = mean([first, second])
    assert merged.values == {"w.cpu": (4.0, 2.0), "g.util": (50.0, 10.0)}
    assert merged.throttle == ("power brake",)


# What the agent reads.


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A worker without output that sleeps, with a child that burns its CPU and writes."""
    child = "import os\nfd, data = os.open('/dev/null', os.O_WRONLY), bytes(1 << 20)\nwhile True: os.write(fd, data)"
    script = f"import subprocess,sys\nsubprocess.run([sys.executable, '-S', '-c', {child!r}])"
    process = subprocess.Popen([os.sys.executable, "-S", "-c", script], start_new_session=True)
    yield Worker(5, 0, None, pid=process.pid, started_at=time.monotonic())
    os.killpg(process.pid, 9)
    process.wait()


def test_a_sample_has_the_worker_and_its_children(worker: Worker) -> None:
    sampler = UsageSampler([worker], None, DiskUse("/"))
    files = ProcessFiles(worker.pid)

    def used() -> tuple[float, int]:
        """CPU seconds of the children, and bytes written."""
        own = files.own()
        cpu_s, _, written = files.tree(own) if own else (None, None, None)
        return cpu_s or 0.0, written or 0

    before = used()  # The child may have written already when the sampler has read its counters first.
    wait_until(lambda: all(now > then + least for now, then, least in zip(used(), before, (0.05, 0), strict=True)))
    own = sampler.sample(time.monotonic())
    (found,) = sampler.with_children([own])
    assert own.values["w.cpu"][0] is not None
    assert found.values["w.cpu"][0] > own.values["w.cpu"][0] + 1
    assert found.values["w.wr"][0] > 0
    assert found.values["w.rss"][0] > 1 << 20
    assert found.values["w.lines"] == found.values["w.quiet"] == (None,), "its output is not ours"
    assert 0 <= found.values["n.cpu"][0] <= 100
    assert found.values["n.mem"][0] > 1 << 20
    assert not [name for name in found.values if name.startswith("g.")]
    sampler.close()
    files.close()


def test_a_worker_that_has_ended_is_unknown() -> None:
    process = subprocess.Popen(["true"])
    sampler = UsageSampler([Worker(0, 0, None, pid=process.pid)], None, DiskUse(None))
    process.wait()
    (found,) = sampler.with_children([sampler.sample(time.monotonic())])
    assert (found.values["w.cpu"], found.values["w.rss"], found.values["w.rd"]) == ((None,), (None,), (None,))
    assert found.values["n.disk"] == (None,)
    sampler.close()


def test_lines_and_silence_are_counted() -> None:
    now = time.monotonic()
    streams: Any = [SimpleNamespace(lines=3, written_s=now - 7.0), SimpleNamespace(lines=1, written_s=0.0)]
    worker = Worker(0, 0, None, pid=os.getpid(), started_at=now - 100, streams=streams)
    sampler = UsageSampler([worker], None, DiskUse(None))
    streams[1].lines = 5
    found = sampler.sample(sampler._at + 2.0)
    assert found.values["w.lines"] == (2.0,)
    assert found.values["w.quiet"][0] == pytest.approx(9.0, abs=0.5)
    sampler.close()


def test_a_disk_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskUse("/")
    disk.percent(0.0)
    wait_until(lambda: disk.percent(1.0) is not None)
    disk._thread = SimpleNamespace(is_alive=lambda: True)  # type: ignore[assignment]
    assert disk.percent(5.0) is not None
    assert disk.percent(31.0) is None


def test_only_adapters_count_and_without_one_all_but_loopback() -> None:
    lines = (
        "Inter-|  Receive",
        " face |bytes",
        "  lo: 5 0 0 0 0 0 0 0 5",
        "eth0: 100 1 0 0 0 0 0 0 7 0",
        "br0:50 1 0 0 0 0 0 0 9",
    )
    text = "\n".join(lines).encode()
    assert network_bytes(text, frozenset({b"eth0"})) == (100, 7)
    assert network_bytes(text, frozenset()) == (150, 16)
    assert network_bytes(b"", frozenset()) == (None, None)


def test_the_memory_of_the_machine_is_known_if_the_kernel_says_what_is_available() -> None:
    assert procfs.memory(b"MemTotal:  100 kB\nMemFree: 1 kB\nMemAvailable:  40 kB\n") == (100 * 1024, 40 * 1024)
    assert procfs.memory(b"MemTotal:  100 kB\n") is None


def test_a_kept_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(bytes(range(256)) * 40)
    file = KeptFile(str(tmp_path / "long"))
    assert (len(file.read()), file.read_all()) == (4096, bytes(range(256)) * 40)
    file.close()
    assert KeptFile(str(tmp_path / "none")).read_all() == b""


# What the agent sends.


class Sampled:
    """A UsagePart of one worker, this process, with a launcher that reads or not, at a time that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(usage_sampling.time, "monotonic", lambda: self.now)
        self.sent: list[Any] = []
        self.reads = True
        outbox: Any = SimpleNamespace(send=self.sent.append, send_if_read=self._send_if_read)
        spec = replace(SPEC, **settings)
        node: Any = SimpleNamespace(spec=spec, outbox=outbox, begun={})
        self.watch = UsagePart(node)
        self.group: Any = SimpleNamespace(
            spec=spec, workers=[Worker(3, 0, None, pid=os.getpid())], attempt=2, all_ended=False, any_failed=True
        )

    def begin(self) -> None:
        self.watch.on_attempt(self.group, None)  # type: ignore[arg-type]
        self.watch.on_started()

    def _send_if_read(self, record: object) -> bool:
        if self.reads:
            self.sent.append(wire.decode(wire.encode(record), FROM_AGENT))
        return self.reads

    def go_on(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.watch.run_due(self.now)) <= end:
            self.now = max(self.now, due)
        self.now = end


def test_five_samples_make_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = Sampled(monkeypatch)
    sampled.begin()
    sampled.go_on(26)
    sampled.watch.on_attempt_ended(())
    started, *records = sampled.sent
    assert isinstance(started, UsageStarted)
    assert (started.attempt, started.ranks, started.gpus) == (2, (3,), ())
    assert [len(record.samples) for record in records] == [1, 5, 5, 2]
    assert sampled.watch.run_due(sampled.now) == float("inf")


@pytest.mark.parametrize(("failed_s", "spans"), [(0.9, []), (1.05, []), (1.5, [0.5]), (2.05, [1.0]), (3.5, [1.0, 1.5])])
def test_the_last_sample_is_of_the_time_before_a_failure(
    failed_s: float, spans: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = Sampled(monkeypatch)
    sampled.begin()
    sampled.go_on(failed_s)
    sampled.watch.before_stop(None)
    sampled.watch.before_stop(None)
    sampled.watch.on_attempt_ended(())
    found = [each.span_s for record in sampled.sent[1:] for each in record.samples]
    assert found == pytest.approx(spans, abs=0.01)


def test_over_a_network_a_record_is_one_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = Sampled(monkeypatch, run_dir_name="run")
    sampled.begin()
    sampled.go_on(17)
    sampled.watch.on_attempt_ended(())
    assert [[round(each.span_s) for each in record.samples] for record in sampled.sent[1:]] == [[1], [10], [2, 2]]


def test_a_launcher_that_does_not_read_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = Sampled(monkeypatch)
    sampled.begin()
    sampled.go_on(1)
    sampled.reads = False
    sampled.go_on(1200)
    recorder = sampled.watch._recorder
    assert recorder
    assert len(recorder._waiting) < MAX_SAMPLES
    sampled.reads = True
    sampled.go_on(10)
    (record,) = sampled.sent[1:]
    assert sum(each.span_s for each in record.samples) == pytest.approx(1206, abs=8)


def test_the_outbox_takes_no_sample_behind_records_that_nobody_reads() -> None:
    reader, writer = os.pipe()
    outbox = Outbox(writer)
    accepted = 0
    while outbox.send_if_read(UsageSampled(0, (sample(),) * MAX_SAMPLES)):
        accepted += 1
        assert accepted < 100
    os.close(reader)


# Clocks.


def test_the_fastest_record_sets_the_clock() -> None:
    clock = Clock()
    assert clock.ours(100.0, 1003.0) == 1003.0  # It took long: 3 s, as turns out later.
    assert clock.ours(110.0, 1010.5) == pytest.approx(1010.5)
    assert clock.ours(120.0, 1060.0) == pytest.approx(1020.5, abs=0.1), "the launcher was stopped"
