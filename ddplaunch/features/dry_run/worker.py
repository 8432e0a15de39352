"""Simulates the GPUs of a dry run in a worker, from the moment before its script. Runs in the worker."""

from __future__ import annotations

from ddplaunch.worker.parts import WorkerPart


class FakeGpus(WorkerPart):
    """The GPUs of one worker."""

    def __init__(self, text: str) -> None:
        """``text``: the number of GPUs, and 1 if ``torch.compile`` compiles for the CPU."""
        self._gpus, self._compiles = map(int, text.split())

    def before_script(self) -> None:
        """Import torch, and change it."""
        from ddplaunch.features.dry_run.fake_cuda import install

        install(self._gpus, compile_on_cpu=bool(self._compiles))


part = FakeGpus
