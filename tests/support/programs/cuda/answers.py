"""Asks everything that is said to be supported, by one function for each row of the table; two ranks, two GPUs each."""

import io
import os
import sys
import threading
import warnings

import answers_apis
import answers_collectives
import answers_sharding
import pytest
import torch
import torch.distributed as dist
from tables import SUPPORTED, UNSUPPORTED
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DataParallel
from torch.nn.parallel import DistributedDataParallel as DDP

from ddplaunch.features.dry_run import fake_cuda
from ddplaunch.features.dry_run.fake_cuda.unsupported import unsupported_calls

FAKE_CUDA_FOLDER = fake_cuda.__path__[0]
CHECKS = {}
ORDINAL = "CUDA error: invalid device ordinal"


def row(name):
    def keep(function):
        CHECKS[name] = function
        return function

    return keep


@row("torch.cuda: device_count, set_device, ...")
def devices():
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device(1)
    assert torch.cuda.is_initialized()
    with torch.cuda.device(0):
        assert torch.cuda.current_device() == 0
        with torch.cuda.device(torch.ones(1).device):  # The CPU is no other GPU.
            assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 1
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]  # Each thread starts with the first.
    torch.cuda.set_device("cuda:0")
    torch.cuda.set_device(-1)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.can_device_access_peer(0, 1)


@row("cuda:8 where there are 8")
def ordinals():
    x, module = torch.ones(1), nn.Linear(1, 1)
    for use in (
        lambda: torch.cuda.set_device(2),
        lambda: torch.cuda.get_device_name(2),
        lambda: torch.cuda.synchronize("cuda:2"),
        lambda: torch.cuda.memory_allocated(2),
        lambda: torch.cuda.Stream(device=2),
        lambda: torch.cuda.device(2).__enter__(),
        lambda: torch.accelerator.set_device_index(2),
        lambda: x.to("cuda:2"),
        lambda: x.to(2),
        lambda: x.cuda(2),
        lambda: module.to("cuda:2"),
        lambda: module.to(2),
        lambda: module.cuda(2),
        lambda: torch.zeros(1, device="cuda:2"),
        lambda: torch.zeros_like(x, device=2),
        lambda: x.new_ones(1, device=2),
        lambda: torch.Generator(device="cuda:2"),
        lambda: torch.set_default_device("cuda:2"),
        lambda: DDP(module, device_ids=[2]),
        lambda: dist.barrier(device_ids=[2]),
        lambda: dist.new_group(device_id=torch.device("cuda", 2)),
        lambda: torch.load(saved(x), map_location="cuda:2"),
    ):
        with pytest.raises(RuntimeError, match=ORDINAL):
            use()


@row("CUDA in a forked process")
def forked():
    torch.cuda.init()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            assert torch.cuda.device_count() == 2
            assert not torch.cuda.is_initialized()
            assert torch.ones(1).device.type == "cpu"
            torch.ones(1).cuda()
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 1000).startswith(b"Cannot re-initialize CUDA in forked subprocess")


@row("torch.cuda: get_device_properties, ...")
def properties():
    told = torch.cuda.get_device_properties(1)
    assert told.name == torch.cuda.get_device_name()
    assert "simulated" in told.name
    assert (told.major, told.minor) == torch.cuda.get_device_capability("cuda:1") == (9, 0)
    assert told.total_memory == torch.cuda.mem_get_info()[1]
    assert torch.cuda.is_bf16_supported()
    assert torch.cuda.is_tf32_supported()
    assert torch.cuda.get_arch_list() == ["sm_90"]
    assert "sm_90" in torch.cuda.get_gencode_flags()
    assert torch.version.cuda.split(".")[0] >= "11"
    assert torch.backends.cuda.is_built()
    assert isinstance(torch.cuda.list_gpu_processes(), str)
    answers_apis.check_devices()


@row("torch.cuda: mem_get_info, memory_*, ...")
def memory():
    kept = torch.ones(1000, device="cuda")
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated(kept.device) == 0
    assert torch.cuda.memory_reserved() == torch.cuda.max_memory_reserved() > 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
    assert "CPU" in torch.cuda.memory_summary(abbreviated=True)
    assert torch.cuda.memory_snapshot() == []
    torch.cuda.memory._record_memory_history(max_entries=100)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(0.5)
    torch.cuda.empty_cache()
    torch.cuda.ipc_collect()
    assert torch.cuda.utilization() == torch.cuda.temperature() == torch.cuda.power_draw() == 0


@row("torch.cuda: Stream, Event, synchronize, ...")
def streams():
    stream, before = torch.cuda.Stream(priority=-1), torch.cuda.current_stream()
    assert before == torch.cuda.default_stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() is stream
        assert isinstance(stream, torch.cuda.Stream)
        start.record()
        x = torch.ones(3, device="cuda")
        end.record(stream)
    x.record_stream(stream)
    before.wait_event(stream.record_event())
    end.synchronize()
    torch.cuda.synchronize()
    assert end.query()
    assert stream.query()
    assert start.elapsed_time(end) > 0
    assert torch.cuda.current_stream() is before
    assert stream.device == torch.device("cuda:0")
    with torch.cuda.stream(None):
        pass
    assert isinstance(stream, torch.Stream)
    with torch.Stream(device="cuda"):
        torch.Event().record()
    assert not torch.cuda.is_current_stream_capturing()


@row("torch.cuda: manual_seed, get_rng_state, ...")
def randomness():
    torch.manual_seed(3)
    first = torch.randn(3, device="cuda")
    torch.manual_seed(3)
    torch.cuda.manual_seed(4)
    torch.cuda.manual_seed_all(5)
    assert torch.equal(torch.randn(3, device="cuda"), first)
    states = torch.cuda.get_rng_state_all()
    torch.cuda.set_rng_state_all(states)
    torch.cuda.set_rng_state(torch.cuda.get_rng_state(1), 1)
    with torch.random.fork_rng(devices=[0, 1]):
        inside = torch.randn(1)
    assert torch.equal(torch.randn(1), inside)
    assert len(states) == 2
    assert len(torch.cuda.default_generators) >= 2


@row("torch.backends.cudnn, .cuda")
def backends():
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = False
    torch.backends.cuda.matmul.allow_tf32 = True
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.is_available()
    assert torch.backends.cudnn.version() >= 90000
    answers_apis.check_handles_and_preferences()
    with torch.backends.cudnn.flags(enabled=True, benchmark=False):
        nn.Conv2d(1, 1, 1).cuda()(torch.ones(1, 1, 2, 2, device="cuda"))


@row("torch.cuda: nvtx, profiler, cudart")
def profiling():
    with torch.cuda.nvtx.range("part"):
        torch.cuda.nvtx.range_push("x")
        torch.cuda.nvtx.mark("here")
        torch.cuda.nvtx.range_pop()
    with torch.cuda.profiler.profile():
        pass
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
    assert any(event.key == "aten::mm" for event in profile.key_averages())
    answers_apis.check_runtime()


@row("torch.accelerator")
def accelerator():
    kind = torch.accelerator.current_accelerator()
    assert kind == torch.device("cuda")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 2
    torch.accelerator.set_device_index(1)
    assert torch.accelerator.current_device_index() == torch.cuda.current_device() == 1
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_device_index() == 0
    torch.accelerator.set_device_index("cuda:0")
    torch.accelerator.synchronize()
    assert torch.accelerator.current_stream() == torch.cuda.current_stream()
    assert torch.get_device_module() is torch.get_device_module(kind) is torch.cuda
    if hasattr(torch.accelerator, "empty_cache"):
        torch.accelerator.empty_cache()
        assert torch.accelerator.memory_allocated() == 0


@row("tensor.to, .cuda, .cpu, module.to")
def moves():
    x = torch.arange(3.0)
    moved = [x.cuda(), x.cuda(1, non_blocking=True), x.to("cuda"), x.to(torch.device("cuda", 1)), x.to(1)]
    moved += [x.to(device="cuda:1", non_blocking=True), x.to("cuda", torch.float32), x.to(0, copy=True)]
    for each in moved:
        each += 1
        assert torch.equal(x, torch.arange(3.0)), "a move makes a copy"
    on_gpu = moved[1]
    assert on_gpu.to("cuda:1") is on_gpu
    assert on_gpu.cuda(1) is on_gpu
    assert on_gpu.cuda(0) is not on_gpu
    assert on_gpu[1:].to(1).data_ptr() == on_gpu[1:].data_ptr()
    kept = on_gpu.cpu()
    kept_too = on_gpu.to("cpu")
    on_gpu.zero_()
    assert kept.sum() == kept_too.sum() == 6
    assert x.to("cuda", torch.half).dtype is torch.half
    assert on_gpu.to("cuda:1", torch.float, False, True) is not on_gpu
    assert nn.Linear(2, 2).to(1, torch.half).weight.dtype is torch.half
    assert x.to(torch.double).dtype is torch.double
    leaf = torch.ones(2, requires_grad=True)
    assert leaf.is_leaf
    assert not leaf.cuda().is_leaf
    on_gpu_leaf = torch.ones(2, device="cuda", requires_grad=True)
    assert on_gpu_leaf.to("cuda").is_leaf
    model = nn.Linear(2, 2)
    weight = model.weight
    for move in (lambda: model.cuda(), lambda: model.to(1), lambda: model.to("cuda:0", torch.double)):
        assert move().weight is weight
    model.float().to("cuda:0")
    before = model.weight.data_ptr()
    assert model.to("cuda:0").weight.data_ptr() == before, "what is there already stays"
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert packed.to("cuda").data.sum() == packed.cuda().data.sum() == 3
    assert torch.ones(1).to("meta").is_meta
    assert torch.sparse_coo_tensor([[0]], [1.0], (1,), check_invariants=True).cuda().to_dense().sum() == 1
    answers_apis.check_lazy_modules()


@row("tensor.device, .is_cuda, .get_device")
def places():
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    x = torch.ones(2).to(second)
    y = x * 2
    for each in (x, y, x[1:], nn.Linear(1, 1).to(second).weight):
        assert each.device == second
        assert (each.is_cuda, each.is_cpu, each.get_device()) == (True, False, 1)
    assert x.to(x.device) is x
    assert torch.zeros(2, device=y.device).device == torch.randn(2).to(y.device).device == second
    z = torch.ones(2, device="cuda")
    assert (z.device, (z * 2).device, x.device) == (first, first, second)
    model = nn.Linear(1, 1).cuda()
    pinned = torch.ones(1).pin_memory()
    for each in (y.cpu(), y.to("cpu"), torch.ones(1, device="cpu"), pinned, model.cpu().weight):
        assert (each.device.type, each.is_cuda, each.is_cpu, each.get_device()) == ("cpu", False, True, -1)
    assert model.cuda().weight.device == first
    assert torch.ones(1, device="meta").device.type == "meta"
    assert not torch.ones(1, device="meta").is_cuda


def nothing_is_on_a_gpu_before_something_is_put_there():
    x = torch.ones(1)
    assert (x.device.type, x.is_cuda, x.get_device()) == ("cpu", False, -1)
    assert x.to("cpu") is x
    assert x.cpu() is x


@row("torch.zeros(..., device=, pin_memory=)")
def factories():
    x = torch.ones(2)
    for device in ("cuda", "cuda:1", 1, torch.device("cuda"), torch.device("cuda:0")):
        made = (
            torch.zeros(2, device=device),
            torch.empty((2, 3), device=device, dtype=torch.half),
            torch.randn(2, device=device, requires_grad=True),
            torch.randint(0, 3, (2,), device=device),
            torch.randperm(4, device=device),
            torch.arange(4, device=device),
            torch.linspace(0, 1, 3, device=device),
            torch.eye(2, device=device),
            torch.full((2,), 3.0, device=device),
            torch.tensor([1, 2], device=device),
            torch.as_tensor([1.0], dtype=torch.half, device=device),
            torch.as_tensor([1.0], torch.half, device),
            torch.asarray([1.0], device=device),
            torch.normal(0.0, 1.0, (2,), device=device),
            torch.tril_indices(2, 2, device=device),
            torch.hann_window(3, device=device),
            torch.fft.fftfreq(3, device=device),
            torch.zeros_like(x, device=device),
            torch.rand_like(x, device=device),
            x.new_zeros(2, device=device),
            x.new_tensor([1.0], device=device),
            torch.nested.nested_tensor([x, x], device=device),
            nn.Linear(2, 2, device=device).weight,
            nn.Embedding(2, 2, device=device, dtype=torch.bfloat16).weight,
        )
        assert {each.device.type for each in made} == {"cuda"}
    numbers = __import__("numpy").ones(2)
    torch.as_tensor(numbers, device="cuda").zero_()
    assert numbers.sum() == 2, "what is made on a GPU does not share memory"
    pinned = torch.zeros(2, pin_memory=True)
    assert pinned.is_pinned()

    @torch.jit.script
    def scripted(x, device: torch.device):
        return x + torch.zeros(2, device=device)

    assert scripted(x, torch.device("cpu")).sum() == 2


@row("torch.device, torch.set_default_device")
def names():
    assert torch.device(1) == torch.device("cuda", 1)
    assert torch.device("cuda:1").index == 1
    assert isinstance(torch.device("cpu"), torch.device)
    with torch.device("cuda"):
        assert nn.Linear(2, 2)(torch.ones(2)).shape == (2,)
    torch.set_default_device("cuda:1")
    assert torch.ones(2).sum() == 2
    assert torch.ones(2).device == torch.get_default_device() == torch.device("cuda:1")
    torch.set_default_device(None)
    assert torch.get_default_device().type == "cpu"
    torch.set_default_device(1)
    torch.set_default_device(None)
    loaded = torch.load(saved({"device": torch.device("cuda", 1)}))
    assert loaded["device"].index == 1


@row("torch.Generator(device=)")
def generators():
    generator = torch.Generator(device="cuda").manual_seed(1)
    first = torch.randn(2, device="cuda", generator=generator)
    assert torch.equal(first, torch.randn(2, generator=torch.Generator().manual_seed(1)))
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)


@row("tensor.pin_memory, DataLoader(pin_memory=)")
def pinning():
    x = torch.ones(2)
    assert x.pin_memory().is_pinned()
    assert not x.is_pinned()
    x.pin_memory().zero_()
    assert x.sum() == 2
    loader = torch.utils.data.DataLoader([(torch.ones(1), 1)] * 4, batch_size=2, pin_memory=True)
    assert all(values.is_pinned() for values, _ in loader)


def saved(what):
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return file


@row("torch.load(map_location=)")
def loading():
    cuda = {"cuda:0": "cuda:1", "cpu": "cuda:1"}
    for place in (None, "cpu", "cuda", "cuda:1", torch.device("cuda", 1), cuda, lambda s, _: s.cuda(1), lambda s, _: s):
        assert torch.load(saved(torch.ones(2).cuda()), map_location=place).sum() == 2
    file = io.BytesIO()  # What a GPU's checkpoint says of its place:
    torch.save(torch.ones(2), file, _use_new_zipfile_serialization=False)
    from_gpus = file.getvalue().replace(b"\x03\x00\x00\x00cpu", b"\x06\x00\x00\x00cuda:1")
    assert from_gpus != file.getvalue()
    assert torch.load(io.BytesIO(from_gpus)).sum() == 2


@row("torch.cuda.FloatTensor, ...")
def old_types():
    assert torch.cuda.FloatTensor([1, 2]).sum() == 3
    assert isinstance(torch.ones(1), torch.cuda.FloatTensor)
    assert torch.ones(1).type("torch.cuda.HalfTensor").dtype is torch.half
    assert torch.ones(1).type(torch.cuda.LongTensor).dtype is torch.long
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
    answers_apis.check_types()


class Scaled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        assert x.dtype is torch.float32
        assert not torch.is_autocast_enabled()
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return grad * 2


@row("torch.autocast, torch.cuda.amp")
def autocast():
    model, x = nn.Linear(2, 2, device="cuda"), torch.ones(2, device="cuda")
    with torch.autocast("cuda"):
        assert model(x).dtype is torch.float16
        assert torch.is_autocast_enabled()
        with torch.autocast(device_type="cuda", enabled=False):
            assert model(x).dtype is torch.float32
        assert Scaled.apply(model(x)).dtype is torch.float32
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert model(x).dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(x, x)
        assert torch.get_autocast_dtype("cuda") is torch.bfloat16
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        out.sum().backward()
    assert model(x).dtype is torch.float32
    assert not torch.is_autocast_enabled()
    with torch.autocast("cpu"):
        assert model(x).dtype is torch.bfloat16
        assert torch.tensordot(model.weight, model.weight, 1).dtype is torch.bfloat16
        with torch.autocast("cuda"):
            assert model(x).dtype is torch.float16
        with torch.autocast("cuda", enabled=False):
            assert model(x).dtype is torch.bfloat16
        assert model(x).dtype is torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.cuda.amp.autocast():
            assert model(x).dtype is torch.float16
    answers_apis.check_autocast_of_operations()


row("torch.mm(..., out_dtype=)")(answers_apis.check_out_dtype)


@row("GradScaler")
def scaler():
    for make in (lambda: torch.amp.GradScaler("cuda"), lambda: torch.GradScaler(), old_scaler):
        model, gradient = nn.Linear(2, 1).cuda(), make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before, scale = model.weight.detach().clone(), gradient.get_scale()
        assert gradient.is_enabled()
        assert scale == 2.0**16
        gradient.scale(model(torch.full((1, 2), float("inf"), device="cuda")).sum()).backward()
        gradient.step(optimizer)
        gradient.update()
        assert torch.equal(model.weight, before)
        assert gradient.get_scale() == scale / 2
        optimizer.zero_grad()
        gradient.scale(model(torch.ones(1, 2, device="cuda")).sum()).backward()
        gradient.unscale_(optimizer)
        assert model.weight.grad.abs().max() == 1
        gradient.step(optimizer)
        gradient.update()
        assert not torch.equal(model.weight, before)


def old_scaler():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.amp.GradScaler()


@row("sdpa_kernel")
def attention():
    q = torch.randn(1, 2, 4, 8, device="cuda")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        nn.functional.scaled_dot_product_attention(q, q, q)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_math_sdp(False)
    nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(4, 4, dtype=torch.bool))
    torch.backends.cuda.enable_flash_sdp(True)


row("flex_attention")(answers_sharding.check_flex_attention)


@row("optimizers: fused, foreach, capturable")
def optimizers():
    for option in ("fused", "foreach", "capturable"):
        model = nn.Linear(2, 1).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), **{option: True})
        model(torch.ones(2, device="cuda")).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        before = model.weight.detach().clone()
        optimizer.step()
        assert not torch.equal(model.weight, before), option


@row("torch.compile")
def compiling():
    python_only = []

    @torch.compile(fullgraph=True, mode="max-autotune")
    def function(x):
        python_only.append(x)  # The compiler would not run this every time.
        return x + 1

    model = torch.compile(nn.Linear(2, 2).cuda())
    assert list(model.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
    model(function(function(torch.ones(2, device="cuda")))).sum().backward()
    assert len(python_only) == 2
    module = nn.Linear(2, 2)
    module.compile()
    module(torch.ones(2))


@row("init_process_group, new_group")
def groups():
    x = torch.ones(2, device="cuda") * (dist.get_rank() + 1)
    dist.all_reduce(x)
    assert x.tolist() == [3, 3], x
    group = dist.new_group([0, 1], backend="nccl", device_id=torch.device("cuda", 0))
    for kind in (torch.bfloat16, torch.float16, torch.int64):
        x = torch.ones(2, device="cuda", dtype=kind) * dist.get_rank(group)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [1, 1]
    dist.all_reduce(mean := torch.tensor(float(dist.get_rank()), device="cuda"), op=dist.ReduceOp.AVG)
    assert mean == 0.5
    objects = [{"rank": dist.get_rank()}]
    dist.broadcast_object_list(objects, src=0, device=torch.device("cuda", 0))
    assert objects == [{"rank": 0}]
    gathered = torch.empty(4, device="cuda")
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered, torch.ones(2, device="cuda"))
    parts = list(torch.empty(2, device="cuda").chunk(2))
    dist.all_to_all(parts, list(torch.full((2,), float(dist.get_rank()), device="cuda").chunk(2)))
    assert [part.item() for part in parts] == [0, 1]
    dist.barrier(group, device_ids=[0])
    dist.destroy_process_group(group)
    answers_apis.check_nccl_options()


row("all_gather, reduce_scatter, all_to_all, ...")(answers_collectives.check)


row("work.get_future, .result, ...")(answers_collectives.check_futures)


row("ProcessGroup._get_backend, _dump_nccl_trace")(answers_apis.check_nccl_class)


@row("get_backend, is_nccl_available")
def backends_of_groups():
    assert dist.get_backend() == "nccl" == dist.get_backend(dist.new_group([0, 1]))
    assert dist.is_nccl_available()
    assert dist.get_backend(dist.new_group([0, 1], backend="gloo")) == "gloo"
    assert dist.get_default_backend_for_device("cuda") == "nccl"
    assert torch.cuda.nccl.version() >= (2, 10)
    answers_apis.check_backend_config()


row("torch.library: kernels for CUDA")(answers_apis.check_operators)


@row("DistributedDataParallel")
def parallel():
    model = DDP(nn.Linear(2, 1).cuda(), device_ids=[0], output_device=0, find_unused_parameters=True)
    model.register_comm_hook(None, bf16_compress_hook)
    model(torch.full((1, 2), float(dist.get_rank()), device="cuda")).sum().backward()
    assert model.module.weight.grad.tolist() == [[0.5, 0.5]]
    DDP(nn.Linear(2, 1).cuda(), [torch.device("cuda", 1)], torch.device("cuda", 1))
    with model.join():
        pass


@row("DataParallel")
def data_parallel():
    assert DataParallel(nn.Linear(2, 1)).cuda()(torch.ones(4, 2, device="cuda")).shape == (4, 1)


@row("SyncBatchNorm")
def batch_norm():
    torch.manual_seed(0)
    everything = torch.randn(6, 3, 4, dtype=torch.double)
    alone = nn.BatchNorm1d(3, dtype=torch.double)
    shared = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, dtype=torch.double)).cuda()
    whole, mine = everything.clone().requires_grad_(), everything.clone().requires_grad_()
    part = slice(0, 2) if dist.get_rank() == 0 else slice(2, 6)  # Unlike batches.
    weights = torch.randn(6, 3, 4, dtype=torch.double)
    out, expected = shared(mine[part]), alone(whole)
    (out * weights[part]).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(out, expected[part])
    torch.testing.assert_close(mine.grad[part], whole.grad[part])
    torch.testing.assert_close(shared.running_mean, alone.running_mean)
    torch.testing.assert_close(shared.running_var, alone.running_var)
    torch.testing.assert_close(shared.eval()(mine[part]), alone.eval()(whole)[part])
    DDP(nn.SyncBatchNorm(3).cuda(), device_ids=[0])


@row("init_device_mesh, DeviceMesh")
def meshes():
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(4.0, device="cuda")
    sharded = distribute_tensor(whole, mesh["tp"], [Shard(0)])
    assert sharded.to_local().shape == (2,)
    assert torch.equal(sharded.redistribute(placements=[Replicate()]).to_local(), whole)
    assert DeviceMesh("cuda", [0, 1]).size() == 2
    answers_sharding.check_meshes()


row("DTensor, context_parallel")(answers_sharding.check_dtensor)


@row("fully_shard, FullyShardedDataParallel")
def sharding():
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision, fully_shard

    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    for model in (
        FSDP(nn.Linear(4, 4).cuda(), device_id=torch.cuda.current_device()),
        FSDP(nn.Linear(4, 4), device_id=torch.device("cuda", 0), mixed_precision=mixed, use_orig_params=True),
        FSDP(nn.Linear(4, 4)).to("cuda"),
        fully_shard(nn.Linear(4, 4).cuda()),
    ):
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4, device="cuda")).float().sum().backward()
        optimizer.step()
    answers_sharding.check_fsdp_broadcasts_rank_0s_weights()
    answers_sharding.check_hybrid_sharding()


def every_public_name_is_supported_or_not():
    """Only classes and modules of torch's own are left, and the functions that go through what is replaced."""
    for module in (torch.cuda, torch.accelerator):
        for name in module.__all__:
            value = getattr(module, name, None)
            code = getattr(value, "__code__", None)
            is_ours = code is None or code.co_filename.startswith(FAKE_CUDA_FOLDER)
            assert is_ours or name == "caching_allocator_disabled", f"{module.__name__}.{name} is torch's"


def unsupported_calls_are_in_the_table():
    import torch.utils.cpp_extension  # noqa: F401

    rows = [name for name, line in UNSUPPORTED.items() if line.startswith("stops")]
    missing = {name for name in unsupported_calls if not name.startswith(tuple(rows))}
    assert not missing, missing
    # Those that other Pythons and torches lack are not replaced there.
    unknown = {r for r in rows if r.startswith("torch") and not any(name.startswith(r) for name in unsupported_calls)}
    assert all(r.partition(".")[0] == "torch" and not resolves(r) for r in unknown), unknown


def resolves(name):
    import pkgutil

    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def main():
    devices()  # Before anything else has used a device.
    nothing_is_on_a_gpu_before_something_is_put_there()
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    print(f"ready (pid: {os.getpid()})", flush=True)
    assert CHECKS.keys() == SUPPORTED.keys(), CHECKS.keys() ^ SUPPORTED.keys()
    every_public_name_is_supported_or_not()
    unsupported_calls_are_in_the_table()
    for name, check in CHECKS.items():
        if name in (sys.argv[1:] or CHECKS):
            check()
            print(f"supported: {name}", flush=True)
    dist.destroy_process_group()
    for backend in ("cpu:gloo,cuda:nccl", dist.Backend.NCCL, None):  # As often as the script likes.
        dist.init_process_group(backend)
        dist.all_reduce(torch.ones(1, device="cuda"))
        assert dist.get_backend() == (backend or "undefined")
        dist.destroy_process_group()
    dist.init_process_group("gloo")
    assert dist.get_backend() == dist.get_backend(dist.new_group([0, 1])) == "gloo"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
