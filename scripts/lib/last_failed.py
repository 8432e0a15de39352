"""Prints how many tests failed in the last run of pytest, and their names."""

from __future__ import annotations

import json
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".pytest_cache/v/cache/lastfailed"

names = json.loads(CACHE.read_text()) if CACHE.exists() else {}
print(len(names), *names, sep="\n  ")
