"""Versions of torch and of what it was built for, read from torch's files: an import takes a second.

Runs in the agent, for ``--check`` and for the report.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path


def versions() -> tuple[str, str]:
    """Versions of torch and of its CUDA or ROCm; empty where there is none, ``unknown`` where it cannot be read."""
    spec = find_spec("torch")
    if not spec or not spec.submodule_search_locations:
        return "", ""
    try:
        text = Path(spec.submodule_search_locations[0], "version.py").read_text(errors="replace")
    except OSError:
        return "unknown", ""
    hip = _version_in(text, "hip")
    return _version_in(text, "__version__") or "unknown", _version_in(text, "cuda") or (f"ROCm {hip}" if hip else "")


def _version_in(text: str, name: str) -> str:
    """The text that ``name`` has in torch's version.py; empty if it has none."""
    found = re.search(rf"^{name}\b.*= *['\"]([^'\"]+)", text, re.MULTILINE)
    return found[1] if found else ""
