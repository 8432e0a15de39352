"""Looks at a normal worker's torch before and after the import of fake CUDA; to show that it can see, installs it."""

import importlib
import multiprocessing.spawn
import os
import pkgutil
import sys
from types import FunctionType

import torch
import torch.distributed
import torch.utils.cpp_extension
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import ddplaunch

CLASSES = (torch.Tensor, torch.nn.SyncBatchNorm, DistributedDataParallel, FullyShardedDataParallel)


def look():
    """What every name in torch's modules, and in the classes that fake CUDA changes, stands for."""
    places = {name: vars(module) for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch"}
    places |= {kind.__qualname__: vars(kind) for kind in CLASSES}
    seen = {(place, name): id(value) for place, names in places.items() for name, value in list(names.items())}
    hooks = (sys.excepthook, multiprocessing.spawn.get_preparation_data, *sys.meta_path)
    return seen | {("hooks", str(number)): id(hook) for number, hook in enumerate(hooks)}


def changes(before):
    now = look()
    return [".".join(name) for name in before if now[name] != before[name]]


def functions_of_ours():
    """Those in torch's modules and classes."""
    places = [vars(module) for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch"]
    values = [value for names in (*places, *map(vars, CLASSES)) for value in list(names.values())]
    functions = [value for value in values if isinstance(value, FunctionType)]
    return [function for function in functions if function.__code__.co_filename.startswith(ddplaunch.__path__[0])]


def main():
    print(f"ready (pid: {os.getpid()})", flush=True)
    assert not [name for name in sys.modules if name.startswith("ddplaunch.worker.") and name.count(".") > 2]
    assert not functions_of_ours(), functions_of_ours()
    assert not {"device", "is_cuda", "to", "cuda"} & vars(torch.Tensor).keys()
    before = look()
    from ddplaunch.features.dry_run import fake_cuda

    for module in pkgutil.iter_modules(fake_cuda.__path__):
        importlib.import_module(f"{fake_cuda.__name__}.{module.name}")
    assert not changes(before), changes(before)
    print("untouched", flush=True)
    fake_cuda.install(2)
    many = len(changes(before)) > 200 and len(functions_of_ours()) > 200
    print(f"{'many' if many else 'few'} changes by install", flush=True)


if __name__ == "__main__":
    main()
