"""Collectives that NCCL runs and gloo alone refuses, or answers wrongly; two ranks."""

import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager

AVG = dist.ReduceOp.AVG

# torch 2.13 renames these two, and warns of the old names.
gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_from = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def mine(*shape, dtype=torch.float32):
    """A tensor full of this rank's number."""
    return torch.full(shape, dist.get_rank(), device="cuda").to(dtype)


def check_shapes():
    """Only the numbers of elements count."""
    for output, shape in (((8,), (2, 2)), ((2, 4), (4,)), ((2,), ()), ((4, 2), (2, 2)), ((0,), (0,))):
        out = torch.empty(output, device="cuda")
        gather_into(out, mine(*shape))
        half = out.numel() // 2
        assert out.flatten().tolist() == [0.0] * half + [1.0] * half
    for output, shape in (((2, 2), (8,)), ((), (2,)), ((4,), (2, 4)), ((2, 2), (4, 2))):
        out, whole = torch.empty(output, device="cuda"), torch.arange(8.0, device="cuda")
        whole = whole[: 2 * out.numel()].reshape(shape)
        scatter_from(out, whole)
        assert torch.equal(out.flatten(), 2 * whole.flatten().chunk(2)[dist.get_rank()])
    parts = [torch.empty(4, device="cuda") for _ in range(2)]
    dist.all_gather(parts, mine(2, 2))
    assert [part.sum() for part in parts] == [0, 4]
    images = torch.ones(2, 3, 2, 2, device="cuda").to(memory_format=torch.channels_last)
    dist.all_reduce(images)
    assert images.eq(2).all()
    columns = torch.zeros(2, 4, device="cuda")
    for use in (
        lambda: dist.all_reduce(columns[:, ::2]),
        lambda: dist.broadcast(columns.t(), 0),
        lambda: gather_into(columns.t(), torch.ones(4, device="cuda")),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            use()
    for use in (gather_into, lambda out, whole: scatter_from(whole, out)):
        with pytest.raises(ValueError, match="world"):
            use(torch.empty(3, device="cuda"), torch.empty(2, device="cuda"))
        with pytest.raises(TypeError, match="same type"):
            use(torch.empty(4, device="cuda"), torch.empty(2, device="cuda", dtype=torch.int32))
    with pytest.raises(ValueError, match="dense"):
        dist.all_gather([columns[:, ::2], columns[:, ::2]], torch.ones(4, device="cuda"))


def check_uneven_lists():
    rank = dist.get_rank()
    parts = [torch.empty(1 + source, device="cuda") for source in range(2)]
    dist.all_gather(parts, mine(1 + rank))
    assert [part.tolist() for part in parts] == [[0], [1, 1]]
    parts = [torch.empty(1 + rank, device="cuda") for _ in range(2)]
    work = dist.all_to_all(parts, [mine(1 + target) for target in range(2)], async_op=True)
    assert [part.tolist() for part in work.get_future().wait()] == [[0] * (1 + rank), [1] * (1 + rank)]
    part = torch.empty(1 + rank, device="cuda")
    dist.reduce_scatter(part, [torch.ones(1 + target, device="cuda") for target in range(2)])
    assert part.tolist() == [2] * (1 + rank)
    rows = torch.empty(2, 2, device="cuda", dtype=torch.float8_e4m3fn)
    dist.all_to_all_single(rows, mine(2, 2, dtype=torch.float8_e4m3fn), [1, 1], [1, 1])
    assert rows.float().tolist() == [[0, 0], [1, 1]]


def check_futures():
    """Of every collective, and of messages; the results are the script's tensors."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    out, pair, whole = torch.empty(2, device="cuda"), list(torch.empty(2, 1, device="cuda")), mine(2)
    sent, received = mine(1), torch.empty(1, device="cuda")
    starts = {
        "all_reduce": (lambda: dist.all_reduce(out.fill_(rank), async_op=True), [[1, 1]]),
        "all_gather": (lambda: dist.all_gather(pair, mine(1), async_op=True), [[0], [1]]),
        "gather into": (lambda: gather_into(out, mine(1), async_op=True), [[0, 1]]),
        "reduce_scatter": (lambda: dist.reduce_scatter(received, list(whole.chunk(2)), async_op=True), [[1]]),
        "scatter from": (lambda: scatter_from(received, whole, op=AVG, async_op=True), [[0.5]]),
        "broadcast": (lambda: dist.broadcast(out.fill_(rank), 1, async_op=True), [[1, 1]]),
        "all_to_all": (lambda: dist.all_to_all(pair, list(whole.chunk(2)), async_op=True), [[0], [1]]),
        "barrier": (lambda: dist.barrier(async_op=True), []),
        "message": (lambda: dist.isend(sent, 1) if rank == 0 else dist.irecv(received, 0), [[0]]),
    }
    for name, (start, expected) in starts.items():
        assert [each.tolist() for each in start().get_future().wait()] == expected, name
        work = start()
        work.wait()
        work.wait()  # As often as the script likes.
        assert [each.tolist() for each in work.result()] == expected, name
        assert (work.is_completed(), work.is_success()) == (True, True)
        assert start().get_future_result().wait() == 0
        start().block_current_stream()
        assert start().get_future().then(lambda ended: len(ended.value())).wait() == len(expected)
        work = start()
        while not work.is_completed():
            time.sleep(0.001)
    received.zero_()
    for wait in (torch.cuda.synchronize, dist.barrier):  # Instead of the work's own method.
        scatter_from(received, torch.ones(2, device="cuda"), async_op=True)
        wait()
        assert received.item() == 2
        received.zero_()
    dist.isend(sent, other)  # Arrives, though nothing keeps it.
    gc.collect()
    dist.recv(received, other)
    assert received.item() == other


def check_types():
    for kind in (torch.int16, torch.uint16):
        for use in (
            dist.all_reduce,
            lambda values: dist.broadcast(values, 0),
            lambda values: gather_into(values, values),
        ):
            with pytest.raises(TypeError, match=r"not supported for NCCL process group: (Short|UInt16)$"):
                use(mine(2, dtype=kind))
    with pytest.raises(RuntimeError, match="gloo does not support"):
        dist.all_reduce(mine(2, dtype=torch.float8_e5m2))
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.bool):
        out = torch.empty(2, dtype=kind, device="cuda")
        gather_into(out, mine(dtype=kind))
        dist.all_gather(parts := [torch.empty(1, dtype=kind, device="cuda") for _ in range(2)], mine(1, dtype=kind))
        dist.broadcast(sent := mine(dtype=kind), 1)
        received = torch.empty(1, dtype=kind, device="cuda")
        if dist.get_rank() == 0:
            dist.send(torch.ones(1, device="cuda").to(kind), 1)
        else:
            dist.recv(received, 0)
            assert received.to(torch.float).item() == 1, kind
        assert [each.to(torch.float).item() for each in (*out, *parts, sent)] == [0, 1, 0, 1, 1], kind


def check_operations():
    rank, is_root = dist.get_rank(), dist.get_rank() == 0
    dist.all_reduce(mean := torch.tensor([3 + rank, -4 - rank], device="cuda"), op=AVG)
    assert mean.tolist() == [3, -4], "an average of integers is rounded to zero"
    work = dist.all_reduce(mean := torch.tensor(3 + 2 * rank, device="cuda"), op=AVG, async_op=True)
    work.wait()
    assert (mean, work.is_completed()) == (4, True)
    dist.reduce(kept := torch.tensor([2 * rank + 4], device="cuda"), 0, op=AVG)
    assert kept.item() == (5 if is_root else 6)
    scatter_from(part := torch.empty(1, dtype=torch.int64, device="cuda"), torch.tensor([3, 5], device="cuda"), op=AVG)
    assert part.item() == (3 if is_root else 5)
    dist.all_reduce(both := torch.tensor([True, is_root, False], device="cuda"))
    assert both.view(torch.uint8).tolist() == [1, 1, 0]
    scatter_from(part := torch.empty(1, dtype=torch.complex64, device="cuda"), mine(2, dtype=torch.complex64), op=AVG)
    assert part.item() == 0.5
    with pytest.raises(TypeError, match="boolean inputs"):
        dist.all_reduce(both, op=AVG)
    with pytest.raises(ValueError, match=r"ReduceOp\.BXOR with NCCL"):
        dist.all_reduce(mean, op=dist.ReduceOp.BXOR)
    for factor in (0.5, torch.tensor(0.5)):
        half = dist._make_nccl_premul_sum(factor)
        dist.all_reduce(total := torch.tensor([3.0 + rank], device="cuda"), op=half)
        whole = torch.tensor([2.0, 4.0], device="cuda")
        scatter_from(part := torch.empty(1, device="cuda"), whole, op=dist._make_nccl_premul_sum(factor))
        dist.reduce_scatter(last := part.clone(), list(whole.chunk(2)), op=dist._make_nccl_premul_sum(factor))
        assert (total.item(), part.item(), last.item()) == (3.5, *(2 * [2.0 if is_root else 4.0]))
        assert whole.tolist() == [2, 4]


def check_coalescing():
    a, b, device = torch.ones(2, device="cuda"), torch.ones(3, device="cuda"), torch.device("cuda", 0)
    with _coalescing_manager(device=device, async_ops=True) as works:
        dist.all_reduce(a)
        dist.all_reduce(b)
    works.wait()
    assert (a.tolist(), b.tolist()) == ([2, 2], [2, 2, 2])
    gathered, scattered = torch.empty(2, 2, device="cuda"), torch.empty((), device="cuda")
    with _coalescing_manager():
        gather_into(gathered, mine(2))
    with _coalescing_manager():
        scatter_from(scattered, torch.ones(2, device="cuda"))
    assert (gathered.tolist(), scattered) == ([[0, 0], [1, 1]], 2)
    with _coalescing_manager(device=device, async_ops=True) as works:
        dist.isend(mine(1), 1 - dist.get_rank())
        dist.irecv(received := mine(1), 1 - dist.get_rank())
    works.wait()
    assert received.item() == 1 - dist.get_rank()


def check_functional_collectives():
    """As DTensor and compiled code call them."""
    functional, group, rank = torch.ops._c10d_functional, dist.group.WORLD.group_name, dist.get_rank()
    values = torch.tensor([3 + rank, -4 - rank], device="cuda")
    small = mine(2, dtype=torch.float8_e4m3fn)
    for found, expected in (
        (functional.all_reduce(values, "avg", group), [3, -4]),
        (functional.reduce_scatter_tensor(values, "avg", 2, group), [[3], [-4]][rank]),
        (functional.all_gather_into_tensor(values, 2, group), [3, -4, 4, -5]),
        (functional.all_gather_into_tensor(small, 2, group), [0, 0, 1, 1]),
        (functional.all_gather_into_tensor(mine(), 2, group), [0, 1]),
        (functional.all_gather_into_tensor_coalesced([mine(), values], 2, group)[1], [3, -4, 4, -5]),
        (functional.reduce_scatter_tensor_coalesced([values], "avg", 2, group)[0], [[3], [-4]][rank]),
        (functional.all_reduce_coalesced([small.float(), values], "avg", group)[1], [3, -4]),
        (functional.all_reduce_(values.clone(), "avg", group), [3, -4]),
        (functional.all_to_all_single(small, [1, 1], [1, 1], group), [0, 1]),
        (functional.all_to_all_single(mine(3), [1 + rank] * 2, [1, 2], group), [0] * (1 + rank) + [1] * (1 + rank)),
        (functional.broadcast(small, 1, group), [1, 1]),
    ):
        assert functional.wait_tensor(found).float().tolist() == expected
    assert values.tolist() == [3 + rank, -4 - rank]


def check_what_only_gloo_has():
    with pytest.raises(ValueError, match="only implemented for GLOO"):
        dist.monitored_barrier()
    dist.monitored_barrier(dist.new_group([0, 1], backend="gloo"))


def check_messages_to_itself():
    rank = dist.get_rank()
    received = [mine(2), mine(2), mine(1)]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, received[0], rank),
            dist.P2POp(dist.irecv, received[1], rank),
            dist.P2POp(dist.isend, torch.full((2,), 5.0 + rank, device="cuda"), rank),
            dist.P2POp(dist.isend, mine(1), 1 - rank),
            dist.P2POp(dist.isend, torch.full((2,), 7.0 + rank, device="cuda"), rank),
            dist.P2POp(dist.irecv, received[2], 1 - rank),
        ]
    )
    for work in works:
        work.wait()
    with pytest.raises(RuntimeError, match="that it has not sent"):
        dist.irecv(late := mine(2), rank).wait()
    dist.isend(torch.full((2,), 9.0, device="cuda"), rank)
    assert late[0].item() == 9
    assert [each[0].item() for each in received] == [5 + rank, 7 + rank, 1 - rank]


def check_failure_is_told_once():
    with pytest.raises(RuntimeError, match="Split sizes"):
        dist.all_to_all_single(mine(4), mine(4), [3, 1], [4, 1])
    dist.barrier()


def check_split_groups():
    rank = dist.get_rank()
    both = dist.split_group(split_ranks=[[1, 0]], group_desc="both")
    dist.all_reduce(total := mine(1), group=both)
    assert (total.item(), dist.get_process_group_ranks(both), dist.get_backend(both)) == (1, [0, 1], "nccl")
    alone = dist.split_group(both, [[0], [1]])
    assert dist.get_process_group_ranks(alone) == [rank]
    assert (dist.split_group(split_ranks=[[0]]) is None) == (rank == 1)


def check_averages_of_models():
    """Torch's code that asks for the number of GPUs of a node, or for the backend."""
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    sgd = torch.optim.SGD
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False).cuda())
    model.register_comm_hook(PostLocalSGDState(None, None, start_localSGD_iter=1), post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    optimizer = PostLocalSGDOptimizer(sgd(model.parameters(), lr=0.1), averager)
    for _ in range(4):
        model(mine(1)).sum().backward()
        optimizer.step()
    dist.all_gather(both := [torch.empty(1, 1, device="cuda") for _ in range(2)], model.module.weight.data)
    assert torch.equal(*both)
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1).cuda())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), sgd, overlap_with_ddp=True, lr=0.1)
    model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))
    for _ in range(3):
        model(mine(1)).sum().backward()


def check():
    check_what_only_gloo_has()
    check_messages_to_itself()
    check_failure_is_told_once()
    check_split_groups()
    check_averages_of_models()
    check_functional_collectives()
    check_shapes()
    check_uneven_lists()
    check_types()
    check_operations()
    check_coalescing()
