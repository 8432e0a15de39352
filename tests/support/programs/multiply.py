"""Multiplies matrices with all the threads there are, in torch and in numpy, and prints how many that is."""

import os

import numpy
import torch

print(f"ready (pid: {os.getpid()}) threads {torch.get_num_threads()}", flush=True)
a = torch.rand(600, 600)
assert torch.isfinite(a @ a).all()
b = numpy.random.rand(600, 600)
assert numpy.isfinite(b @ b).all()
assert torch.nn.functional.conv2d(torch.rand(8, 3, 64, 64), torch.rand(16, 3, 3, 3)).shape == (8, 16, 62, 62)
print("multiplied", flush=True)
