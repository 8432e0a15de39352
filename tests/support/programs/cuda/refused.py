"""Makes calls that a dry run refuses: ``ROW``, one of them; ``all FOLDER``, each in a fork, and says what became."""

import importlib.util
import os
import re
import sys
import sysconfig

import torch
import torch.distributed as dist
from tables import UNSUPPORTED
from torch.utils import cpp_extension

CALLS = {
    "torch.cuda.CUDAGraph": lambda: torch.cuda.CUDAGraph(),
    "torch.cuda.graph": lambda: torch.cuda.graph(None).__enter__(),
    "torch.cuda.graph_pool_handle": lambda: torch.cuda.graph_pool_handle(),
    "torch.cuda.make_graphed_callables": lambda: torch.cuda.make_graphed_callables(torch.nn.Linear(1, 1), ()),
    "torch.cuda.export_dot": lambda: torch.cuda.export_dot(None),
    "torch.cuda.export_graph_data": lambda: torch.cuda.export_graph_data(None),
    "torch.accelerator.Graph": lambda: torch.accelerator.Graph(),
    "torch.cuda.jiterator": lambda: torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }"),
    "torch.cuda.ExternalStream": lambda: torch.cuda.ExternalStream(1),
    "torch.cuda.get_stream_from_external": lambda: torch.cuda.get_stream_from_external(1),
    "torch.cuda.GreenContext": lambda: torch.cuda.GreenContext.create(1),
    "torch.cuda.MemPool": lambda: torch.cuda.MemPool(),
    "torch.cuda.use_mem_pool": lambda: torch.cuda.use_mem_pool(None),
    "torch.cuda.CUDAPluggableAllocator": lambda: torch.cuda.memory.CUDAPluggableAllocator("a.so", "a", "f"),
    "torch.cuda.change_current_allocator": lambda: torch.cuda.change_current_allocator(None),
    "torch.cuda.caching_allocator_alloc": lambda: torch.cuda.caching_allocator_alloc(8),
    "torch.cuda.caching_allocator_delete": lambda: torch.cuda.caching_allocator_delete(8),
    "torch.cuda.comm": lambda: torch.cuda.comm.broadcast(torch.ones(1), [0, 1]),
    "torch.cuda.nccl": lambda: torch.cuda.nccl.all_reduce([torch.ones(1)]),
    "torch.distributed.ProcessGroupNCCL": lambda: dist.ProcessGroupNCCL(dist.HashStore(), 0, 1),
    "torch.cuda.Event.ipc_handle": lambda: torch.cuda.Event(interprocess=True).ipc_handle(),
    "torch.cuda.Event.from_ipc_handle": lambda: torch.cuda.Event.from_ipc_handle(torch.device("cuda"), b"\0" * 64),
    "torch.distributed._symmetric_memory": lambda: symmetric_memory().empty(1, device="cuda"),
    "torch.utils.cpp_extension": lambda: cpp_extension.load("mine", ["bind.cpp", "kernel.cu"]),
    "torch.utils.cpp_extension, inline": lambda: cpp_extension.load_inline("mine", "", cuda_sources=["int x;"]),
    "Triton": lambda: __import__("triton_program"),
    "Triton, missing": lambda: without_triton(),
    "torch.cuda.CUDAGraph, in a library": lambda: library(),
    "what NCCL can and this torch's gloo cannot": lambda: unknown_to_gloo(),
    "tensor.__cuda_array_interface__": lambda: cuda_array(),
    "other calls into CUDA": lambda: torch._C._cuda_getCurrentRawStream(0),
    "other calls into CUDA, in words of others": lambda: other_words(),
}

LIBRARY = f"{sysconfig.get_path('purelib')}/a_library/steps.py"

ADVICE = {
    "Triton": "add_kernel of {folder}/triton_program.py:3 needs a real GPU: Triton compiles for GPUs only; choose an",
    "Triton, missing": "install Triton here, too",
    "torch.cuda.CUDAGraph, in a library": f"called by {LIBRARY}:2 needs a real GPU: a graph",
    "what NCCL can and this torch's gloo cannot": "distributed_c10d.all_reduce needs a real GPU (RuntimeError: gloo",
    "torch.cuda.CUDAGraph": "needs a real GPU: a graph is work that a GPU has recorded; run it without graphs",
    "torch.distributed._symmetric_memory": "needs a real GPU: a kernel on one GPU uses the memory of the others; use",
    "torch.distributed.ProcessGroupNCCL": "needs a real GPU: NCCL connects GPUs only; use torch.distributed.new_group",
    "other calls into CUDA, in words of others": "; skip it in a dry run",
    "torch.cuda.MemPool": "needs a real GPU: it manages the memory of a GPU; skip it in a dry run, where torch",
}
"""Parts of the line about some calls: why they are refused, and what to do."""


REFUSED_BY_TORCH = {
    "what NCCL can and this torch's gloo cannot",
    "tensor.__cuda_array_interface__",
    "other calls into CUDA",
    "other calls into CUDA, in words of others",
    "Triton, missing",
}
"""Calls that end with an exception."""


def library():
    """Run code of a library that is installed, for all that its file name says."""
    exec(compile("import torch\ntorch.cuda.CUDAGraph()", LIBRARY, "exec"), {})


def without_triton():
    raise ModuleNotFoundError("No module named 'triton.language'")


def cuda_array():
    tensor = torch.ones(1).cuda()
    assert not hasattr(tensor, "__cuda_array_interface__")  # Libraries that ask first take the tensor as the CPU's.
    return tensor.__cuda_array_interface__


def other_words():
    """The line has parts of the words by which other advice is chosen."""
    paragraph = torch._C._cuda_getCurrentRawStream(0)
    return paragraph


def symmetric_memory():
    return importlib.import_module("torch.distributed._symmetric_memory")


def unknown_to_gloo():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1).to(torch.float8_e5m2))


TRITON = """
import torch, triton
@triton.jit
def add_kernel(x): pass
add_kernel[(1,)](torch.ones(1, device="cuda"))
"""

TRITON_STUB = """
class JITFunction:
    def __init__(self, fn): self.fn = fn
    def __getitem__(self, grid): return self.run
    def run(self, *args): raise RuntimeError("0 active drivers")
"""
"""Triton's place in torch's dry run, where it is not installed."""


def write_triton(folder):
    os.makedirs(f"{folder}/triton/runtime")
    for name, text in (("runtime/jit", TRITON_STUB), ("__init__", "from triton.runtime.jit import JITFunction as jit")):
        with open(f"{folder}/triton/{name}.py", "w") as file:
            file.write(text)


def outcome(call):
    """The exit code and what was written to stderr of a process that calls ``call``."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writer, 2)
        try:
            call()
        except BaseException:
            sys.excepthook(*sys.exc_info())  # As the interpreter, were this the script's end.
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        said = stream.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


def main():
    if sys.argv[1] != "all":
        CALLS[sys.argv[1]]()
    stops = {name for name, line in UNSUPPORTED.items() if line.startswith("stops")}
    assert stops == {name.partition(",")[0] for name in CALLS}, stops ^ CALLS.keys()
    folder = sys.argv[2]
    with open(f"{folder}/triton_program.py", "w") as file:
        file.write(TRITON)
    sys.path.insert(0, folder)
    if not importlib.util.find_spec("triton"):
        write_triton(folder)
    for name, call in CALLS.items():
        owner, _, last = name.partition(",")[0].rpartition(".")
        if owner in ("torch.cuda", "torch.accelerator") and not hasattr(sys.modules[owner], last):
            print(f"refused: {name} (unknown to torch {torch.__version__})")
            continue
        code, said = outcome(call)
        place = rf"{re.escape(folder)}/triton_program.py:\d" if name == "Triton" else rf"{re.escape(__file__)}:\d+"
        is_refused = name in REFUSED_BY_TORCH
        reason = r" \(\w+Error: .+\)" if is_refused else ": .+"
        line = rf"ddplaunch: {place}: .+ needs a real GPU{reason}; .+"
        assert (code, bool(re.search(rf"(?m)^{line}\n\Z", said))) == (85, True), f"{name}: {code}, {said}"
        assert is_refused == said.startswith("Traceback"), said
        row = name.partition(",")[0]
        named = {"other calls into CUDA": "_cuda_getCurrentRawStream"}.get(row, row)
        assert named in said or "gloo" in name, said
        assert ADVICE.get(name, "").format(folder=folder) in said, said
        print(f"refused: {name}")
    # Sources in C++ alone go to the compiler, which does not find this one.
    code, said = outcome(lambda: cpp_extension.load("mine", ["no such file.cpp"], build_directory=folder))
    assert (code, "no such file" in said, "real GPU" in said) == (0, True, False), said
    # What only names a class goes on.
    assert not isinstance(1, torch.cuda.CUDAGraph)
    assert not isinstance(1, dist.ProcessGroupNCCL)
    print(f"ready (pid: {os.getpid()})", flush=True)


if __name__ == "__main__":
    main()
