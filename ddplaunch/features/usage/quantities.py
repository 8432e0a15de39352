"""The quantities of usage samples and their units, for the files, the page, the metrics and the live table. Pure."""

from __future__ import annotations

from typing import NamedTuple

FOLDER = "samples"
"""Of the run folder, with the files of samples."""

_CHARTS = {"bytes": ("GB", 1e-9), "bytes/s": ("MB/s", 1e-6)}
"""Unit of a sample -> unit of a chart, and the factor between them. Other units are the same."""


class Quantity(NamedTuple):
    """One value of a usage sample: of the node, or of each worker or GPU.

    Attributes:
        name: its part of the line of a sample, and its key there. The parts are ``n``, the node; ``w``, its workers;
            ``g``, its GPUs.
        unit: of the sample.
        title: of its chart on the page of a run; empty if it has none.
        least: a chart with no larger value is not shown, and no smaller difference makes an outlier.
        top: the upper end of the chart; None: a round number above the largest value.
        peaks: several samples have its largest value, since its peaks matter; otherwise the mean.
        head: of its column in the live table; empty if it has none.
    """

    name: str
    unit: str
    title: str = ""
    least: float = 0.0
    top: float | None = None
    peaks: bool = False
    head: str = ""

    @property
    def part(self) -> str:
        """Of the line of a sample."""
        return self.name.partition(".")[0]

    @property
    def key(self) -> str:
        """In that part."""
        return self.name.partition(".")[2]

    @property
    def chart_unit(self) -> str:
        """The unit of its chart."""
        return _CHARTS.get(self.unit, (self.unit, 1.0))[0]

    @property
    def scale(self) -> float:
        """The factor from a sample to the chart."""
        return _CHARTS.get(self.unit, (self.unit, 1.0))[1]

    @property
    def is_percent(self) -> bool:
        """Whether 100 is the whole of something."""
        return self.unit.startswith("%")


QUANTITIES = (
    Quantity("g.util", "%", "GPU utilisation", 3, 100, head="GPU"),
    Quantity("g.mem", "bytes", "GPU memory", 0.1, peaks=True, head="GPU memory"),
    Quantity("g.power", "W", "GPU power", 20),
    Quantity("g.temp", "°C", "GPU temperature", 5, peaks=True),
    Quantity("w.cpu", "% of a core", "Worker CPU", 5, head="CPU"),
    Quantity("w.rss", "bytes", "Worker memory", 0.01, peaks=True, head="memory"),
    Quantity("w.lines", "lines/s", "Lines of output", 0.01, head="lines/s"),
    Quantity("w.rd", "bytes/s", "Worker reads", 0.1),
    Quantity("w.wr", "bytes/s", "Worker writes", 0.1),
    Quantity("w.quiet", "s", peaks=True, head="last line"),
    Quantity("n.cpu", "% of all cores", "Node CPU", 5, 100),
    Quantity("n.mem", "bytes", "Node memory", peaks=True),
    Quantity("n.rx", "bytes/s", "Network received", 0.1),
    Quantity("n.tx", "bytes/s", "Network sent", 0.1),
    Quantity("n.disk", "% full", "Disk of the logs", top=100, peaks=True),
)
"""In the order of the charts. docs/samples.md says what each is. Why clocks are lowered (``g.throttle``) is a text."""

BY_NAME = {each.name: each for each in QUANTITIES}
