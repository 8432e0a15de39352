"""Python imports this as it starts: makes PyPI's torchvision, built for CUDA, importable beside torch for the CPU.

Its library does not load there, and its Python code then fails for want of two operators, which no program here calls.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.metadata import version
from typing import Any


class DeclareOperators(MetaPathFinder):
    """Declares the operators before the import of torchvision."""

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare()


def declare() -> None:
    global library
    if "+cpu" in version("torch") and "+cpu" not in version("torchvision"):
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, DeclareOperators())
