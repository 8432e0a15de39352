"""The measurement of ``--check --deep`` on simulated GPUs, shortened; ``blocks`` or ``fails``: the product of GPU 1."""

import sys
import threading

import torch

from ddplaunch.features.check import worker_gpus as gpu_check

gpu_check._MEASURE_S, gpu_check._PAIR_S = 0.01, 0.001
gpu_check._MATRIX_ROWS, gpu_check._COPY_BYTES, gpu_check._PEER_BYTES = (16, 32), (1 << 10, 1 << 12), (1 << 10,)
gpu_check.LIMIT_S = 1.0

multiply = torch.mm


def multiply_badly(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if torch.cuda.current_device() == 1:
        if sys.argv[1] == "blocks":
            threading.Event().wait()
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore")
    return multiply(left, right)


torch.mm = multiply_badly
gpu_check.main()
