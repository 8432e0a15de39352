"""Simulates CUDA on the CPU: workers of a dry run see GPUs that do not exist.

Runs in the workers of a dry run, never in others. A call that needs a real GPU exits the worker with a message that
names the call. Must not compute a wrong tensor.
"""

from __future__ import annotations

import sys

from ddplaunch.features import worker_patches


def install(gpus: int, compile_on_cpu: bool = False) -> None:
    """Make this process a worker on a node with fake GPUs; CUDA_VISIBLE_DEVICES hides some, as on a real node.

    Torch may be imported already but must not have used a GPU.

    Args:
        gpus: number of GPUs of the node.
        compile_on_cpu: ``torch.compile`` compiles for the CPU; otherwise it returns functions unchanged.
    """
    from ddplaunch.features.dry_run.fake_cuda import (
        cuda,
        kernels,
        patching,
        process_groups,
        sharding,
        tensors,
        training,
        unsupported,
    )
    from ddplaunch.features.dry_run.fake_cuda.devices import FakeDevices, hide_real_gpus

    devices = FakeDevices(gpus)
    hide_real_gpus()
    tensors.install(devices, compile_on_cpu)
    cuda.install(devices)
    process_groups.install(devices)
    sharding.install(devices)
    training.install(compile_on_cpu)
    kernels.install()
    patching.replace_imported_names()
    worker_patches.in_children("dry_run", lambda: (install, (gpus, compile_on_cpu)))
    sys.excepthook = unsupported.excepthook
