"""Small parts of CUDA's API that libraries use; two GPUs."""

import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d


def check_devices():
    assert torch._C._cuda_getDeviceCount() == 2
    torch._C._cuda_setDevice(1)
    assert torch._C._cuda_getDevice() == torch.cuda.current_device() == 1
    torch.cuda.set_device(0)
    torch._C._cuda_synchronize()
    first, second = (torch.cuda.get_device_properties(index) for index in range(2))
    assert (first.pci_domain_id, first.pci_device_id) == (0, 0)
    assert first.pci_bus_id != second.pci_bus_id


def check_handles_and_preferences():
    assert torch.cuda.current_blas_handle()
    assert torch.cuda.current_solver_handle()
    before = torch.backends.cuda.preferred_blas_library()
    assert torch.backends.cuda.preferred_blas_library("cublaslt") == torch._C._BlasBackend.Cublaslt
    assert torch.backends.cuda.preferred_blas_library() == torch._C._BlasBackend.Cublaslt
    torch.backends.cuda.preferred_blas_library(before)
    assert torch.backends.cuda.preferred_linalg_library("magma") == torch._C._LinalgBackend.Magma
    plans = torch.backends.cuda.cufft_plan_cache
    plans.max_size = 10
    plans.clear()
    assert (plans.size, plans[0].max_size, plans[1].max_size) == (0, 10, 4096)


def check_printed():
    x = torch.ones(1, device="cuda:0")
    assert repr(x) == "tensor([1.], device='cuda:0')"
    assert "device='cuda:1'" in str(nn.Parameter(x.to("cuda:1")))
    assert repr(x.cpu()) == "tensor([1.])"
    assert torch.typename(x) == "torch.cuda.FloatTensor"
    assert torch.typename(x.cpu()) == "torch.FloatTensor"
    memory = x.to("cuda:1").untyped_storage()
    assert (memory.device, memory.is_cuda, memory.get_device()) == (torch.device("cuda", 1), True, 1)
    memory = x.cpu().untyped_storage()
    assert (memory.device.type, memory.is_cuda, memory.get_device()) == ("cpu", False, -1)


def check_out_dtype():
    a = torch.full((1, 2, 2), 257.0, device="cuda").bfloat16()  # Its products are not numbers of bfloat16.
    exact = a.float() @ a.float()
    assert torch.equal(torch.bmm(a, a, out_dtype=torch.float32), exact)
    assert torch.equal(torch.mm(a[0], a[0], out_dtype=torch.float32), exact[0])
    assert torch.equal(torch.addmm(exact[0], a[0], a[0], out_dtype=torch.float32, beta=2), 3 * exact[0])
    assert torch.equal(torch.baddbmm(exact, a, a, out_dtype=torch.float32), 2 * exact)
    total = exact[0].clone()
    assert torch.addmm(total, a[0], a[0], out_dtype=torch.float32, out=total) is total
    assert torch.equal(total, 2 * exact[0])


def check_autocast_of_operations():
    """CUDA's rules, which differ from the CPU's."""
    F, low = nn.functional, torch.bfloat16
    x = torch.rand(4, 4, device="cuda").to(low).requires_grad_()
    float32 = (x.softmax, x.log_softmax, x.cumsum), (x.exp, x.sum, x.norm, x.rsqrt, x.log), (F.softplus,)
    operations = [lambda f=f: f(0) for f in float32[0]] + list(float32[1]) + [lambda f=f: f(x) for f in float32[2]]
    operations += [nn.LayerNorm(4).cuda().to(low).__call__, nn.GroupNorm(2, 4).cuda().__call__]
    found = {}
    for dtype in (low, torch.float16):
        with torch.autocast("cuda", dtype=dtype):
            for operation in operations[:-2]:
                assert operation().dtype is torch.float32, operation
            for module in operations[-2:]:
                assert module(x).dtype is torch.float32, module
            assert F.gelu(x).dtype is low
            assert x.softmax(0, dtype=low).dtype is low
            found[dtype] = [(x.float() @ x.float()).dtype, x.float().mv(x.float()[0]).dtype]
            found[dtype].append(nn.GRU(4, 4).cuda()(x.float())[0].dtype)
            total = torch.zeros(4, 4, device="cuda")
            total = total.scatter_add(0, torch.zeros(4, 4, dtype=torch.long, device="cuda"), x)
            assert total.dtype is torch.float32
            with torch.autocast("cuda", enabled=False):
                assert x.softmax(0).dtype is low
        assert found[dtype] == [dtype] * 3
    with torch.autocast("cuda", dtype=low):
        x.softmax(0)[0].sum().backward()
    assert x.grad.dtype is low
    with torch.autocast("cpu"):
        assert x.softmax(0).dtype is low, "the CPU's rules"


def check_nccl_class():
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    assert isinstance(backend, dist.ProcessGroupNCCL)
    assert type(backend).__name__ == "ProcessGroupNCCL"
    assert (backend.name(), backend.rank(), backend.size()) == ("nccl", dist.get_rank(), 2)
    assert isinstance(backend.options, dist.ProcessGroupNCCL.Options)
    backend.eager_connect_single_device(torch.device("cuda:0"))
    on_cpu = dist.new_group([0, 1], backend="gloo")._get_backend(torch.device("cpu"))
    assert not isinstance(on_cpu, dist.ProcessGroupNCCL)
    assert on_cpu.name() == "gloo"
    from torch._C._distributed_c10d import _dump_nccl_trace, _dump_nccl_trace_json

    assert pickle.loads(_dump_nccl_trace())["entries"]
    assert b"entries" in _dump_nccl_trace_json()


def check_runtime():
    runtime, staged = torch.cuda.cudart(), torch.ones(4)
    assert runtime.cudaHostRegister(staged.data_ptr(), 16, 1) == runtime.cudaError.success == 0
    assert runtime.cudaHostUnregister(staged.data_ptr()) == 0
    assert runtime.cudaMemGetInfo(0) == torch.cuda.mem_get_info()
    least, greatest = torch.cuda.Stream.priority_range()
    assert greatest < least
    torch.cuda._sleep(1000)


def check_lazy_modules():
    for make in (lambda: nn.LazyLinear(3).cuda(), lambda: nn.LazyLinear(3).to("cuda:0")):
        model = make()
        model(torch.ones(2, 2, device="cuda"))
        assert model.weight.device == torch.device("cuda", 0)


def check_types():
    x = torch.ones(1, device="cuda")
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.half().type() == "torch.cuda.HalfTensor"
    assert x.cpu().type() == "torch.FloatTensor"
    assert x.double().type(x.type()).dtype is torch.float32
    check_printed()


def check_nccl_options():
    options = distributed_c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    assert options.is_high_priority_stream
    options.config.min_ctas = 4
    options.config.blocking = 0
    group = dist.new_group([0, 1], pg_options=options)
    dist.all_reduce(x := torch.ones(1, device="cuda"), group=group)
    assert x.item() == 2


def check_backend_config():
    assert dist.get_backend_config() == "cuda:nccl"
    assert dist.get_backend_config(dist.new_group([0, 1], backend="cpu:gloo,cuda:nccl")) == "cpu:gloo,cuda:nccl"
    assert dist.get_backend_config(dist.new_group([0, 1], backend="gloo")) == "cpu:gloo,cuda:gloo"


libraries = []


def check_operators():
    @torch.library.custom_op("answers::plus", mutates_args=(), device_types="cuda")
    def plus(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    torch.library.define("answers::minus", "(Tensor x) -> Tensor")
    torch.library.impl("answers::minus", "cuda", lambda x: x - 1)
    library = torch.library.Library("answers", "FRAGMENT")
    libraries.append(library)  # As long as it lives, its operators do.
    library.define("twice(Tensor x) -> Tensor")
    library.define("thrice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CUDA")
    library.impl("thrice", lambda x: x * 3, "CPU")
    library.impl("thrice", lambda x: x * 33, "CUDA")
    x = torch.ones(1, device="cuda")
    operators = (plus, torch.ops.answers.minus, torch.ops.answers.twice, torch.ops.answers.thrice)
    assert [operator(x).item() for operator in operators] == [2, 0, 2, 3]
    library.impl("twice", lambda x: x * 20, "CPU")
    assert torch.ops.answers.twice(x).item() == 20
