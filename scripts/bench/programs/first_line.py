"""Imports torch and prints a line, for the time from a command to the first line."""

import torch
import torch.distributed

print("first line", torch.__version__)
