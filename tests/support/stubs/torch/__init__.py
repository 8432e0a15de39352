"""Stands for torch in jobs whose test promises nothing about torch: the import of the real one costs 1.2 s of CPU.

It has what ddplaunch itself uses of torch before the script runs, and nothing else. tests/unit/test_torch_stub.py
compares it with the real torch. A job that needs more fails with the message below.
"""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType
from typing import NoReturn

__version__ = "stub"


class _Generator:
    def seed(self) -> int:
        return 0


default_generator = _Generator()

time.sleep(float(os.environ.get("TORCH_STUB_IMPORT_S", "0")))


def _without_gpus() -> ModuleType:
    """In place of what pretends GPUs in a dry run's workers: there is no ``torch.cuda`` here to be pretended."""
    module = ModuleType("ddplaunch.features.dry_run.fake_cuda")
    module.install = lambda *_, **__: None  # type: ignore[attr-defined]
    return module


# Dry runs are how most tests get several nodes; a worker is forked from the process that has imported this.
sys.modules["ddplaunch.features.dry_run.fake_cuda"] = _without_gpus()


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"the stub of torch has no {name}: mark this test with @pytest.mark.torch")
