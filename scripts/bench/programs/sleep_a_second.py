"""One job of a sweep: imports torch, and takes a second."""

import time

import torch

assert torch.__version__
time.sleep(1)
