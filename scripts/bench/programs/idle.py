"""Imports torch, creates a file in the folder READY, and sleeps."""

import os
import signal
from pathlib import Path

import torch  # noqa: F401

(Path(os.environ["READY"]) / os.environ["RANK"]).touch()
signal.pause()
