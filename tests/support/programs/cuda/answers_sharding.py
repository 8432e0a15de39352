"""FlexAttention and sharded tensors: operations that torch has for GPUs only; two ranks."""

import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as Shard1
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, rand
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS = (2, 4, 8, 16)  # Batch, heads, sequence, width.


def tokens():
    torch.manual_seed(0)
    return torch.randn(TOKENS, device="cuda")


def attend_and_differentiate(attention, values):
    query = values.detach().clone().requires_grad_()
    out = attention(query, values, values)
    out.square().sum().backward()
    return out.detach(), query.grad


def causal(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def check_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, query, key: query >= key, 2, 4, 8, 8, device="cuda")
    expected = attend_and_differentiate(causal, tokens())
    for flex in (flex_attention, torch.compile(flex_attention)):
        found = attend_and_differentiate(lambda q, k, v, flex=flex: flex(q, k, v, block_mask=mask), tokens())
        torch.testing.assert_close(found, expected)


def check_attention_of_sharded_tensors():
    mesh, few = init_device_mesh("cuda", (2,)), tokens()[:, :2]
    mask = torch.ones(8, 8, dtype=torch.bool, device="cuda").tril()
    placements, choices = [Shard(0), Shard(1), Replicate()], [{}, {"is_causal": True}]
    if is_recent := torch.__version__ >= "2.13":
        # Torch 2.8 attends to the local part of the sequence alone, on GPUs too, and cannot shard a mask's operations.
        placements.append(Shard(2))
        choices += [{"attn_mask": mask}, {"is_causal": True, "enable_gqa": True}]
    for options in choices:

        def attention(q, k, v, options=options):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, **options)

        expected = attend_and_differentiate(attention, tokens())
        for placement in placements:
            sharded = distribute_tensor(tokens(), mesh, [placement])
            found = [each.full_tensor() for each in attend_and_differentiate(attention, sharded)]
            torch.testing.assert_close(found, list(expected))
    if not is_recent:
        return
    shared = F.scaled_dot_product_attention(tokens(), few, few, enable_gqa=True)
    query, few = (distribute_tensor(each, mesh, [Shard(1)]) for each in (tokens(), few))
    torch.testing.assert_close(F.scaled_dot_product_attention(query, few, few, enable_gqa=True).full_tensor(), shared)
    assert F.scaled_dot_product_attention(query, query, query, dropout_p=0.5).full_tensor().shape == TOKENS


def check_context_parallel():
    expected, values, mesh = attend_and_differentiate(causal, tokens()), tokens(), init_device_mesh("cuda", (2,))
    with context_parallel(mesh, buffers=[values], buffer_seq_dims=[2]):
        assert values.shape == (2, 4, 4, 16)
        found = context_parallel_unshard(mesh, list(attend_and_differentiate(causal, values)), [2, 2])
        with pytest.raises(NotImplementedError, match="dropout"):
            F.scaled_dot_product_attention(values, values, values, dropout_p=0.5, is_causal=True)
    torch.testing.assert_close(tuple(found), expected)


def check_meshes():
    mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("dp", "tp"))
    for each in (mesh, mesh["tp"], mesh._flatten("all"), DeviceMesh.from_group(dist.group.WORLD, "cuda")):
        assert each.device_type == "cuda"
        assert "'cuda'" in repr(each)
        assert "cpu" not in repr(each)
    assert mesh["tp"].get_group() is mesh.get_group("tp")
    assert init_device_mesh("cuda", (2,)).get_group() is dist.group.WORLD
    on_cpu = init_device_mesh("cpu", (2,))
    assert (on_cpu.device_type, "'cpu'" in repr(on_cpu)) == ("cpu", True)


def check_devices_of_shards():
    mesh, gpu = init_device_mesh("cuda", (2,)), torch.device("cuda", 0)
    on_cpu = torch.full((2,), float(dist.get_rank()), device="cpu")
    shared = distribute_tensor(on_cpu, mesh, [Replicate()])
    assert (shared.device, shared.is_cuda, shared.to_local().device) == (gpu, True, gpu)
    assert on_cpu.tolist() == [dist.get_rank()] * 2, "what goes to the GPUs is a copy"
    assert shared.full_tensor().tolist() == [0, 0]
    assert "device='cuda:0'" in repr(shared)
    part = torch.ones(1, 2, device="cuda") * dist.get_rank()
    offsets = ShardMetadata([dist.get_rank(), 0], [1, 2], f"rank:{dist.get_rank()}/cuda:0")
    for shard in (Shard1(part, offsets), Shard1.from_tensor_and_offsets(part, [dist.get_rank(), 0], dist.get_rank())):
        old = ShardedTensor._init_from_local_shards([shard], (2, 2))
        assert (old.device, old.local_shards()[0].tensor.device) == (gpu, gpu)
        assert str(old.metadata().shards_metadata[0].placement) == "rank:0/cuda:0"
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    checkpoint.save({"old": old}, checkpoint_id=folder[0])
    part.fill_(9)
    checkpoint.load({"old": old}, checkpoint_id=folder[0])
    assert part.tolist() == [[dist.get_rank()] * 2]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def check_hybrid_sharding():
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    strategy, policy = ShardingStrategy.HYBRID_SHARD, ModuleWrapPolicy({nn.Linear})
    model = FSDP(nn.Sequential(nn.Linear(4, 4)).cuda(), sharding_strategy=strategy, auto_wrap_policy=policy)
    assert model.process_group.size() == 2, "the simulated GPUs of a node"
    mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("replicas", "shards"))
    for each in (model, FSDP(nn.Linear(4, 4).cuda(), sharding_strategy=strategy, device_mesh=mesh)):
        each(torch.ones(1, 4, device="cuda")).sum().backward()


def check_random_numbers():
    mesh = init_device_mesh("cuda", (2,))
    torch.manual_seed(dist.get_rank())  # Unlike seeds: rank 0's becomes everyone's.
    made = rand(4, 64, device_mesh=mesh, placements=[Shard(0)])
    initial = nn.init.normal_(distribute_tensor(torch.zeros(4, 64, device="cuda"), mesh, [Shard(0)]))
    dropped = F.dropout(distribute_tensor(torch.ones(4, 64, device="cuda"), mesh, [Shard(0)]))
    for each in (made, initial, dropped):
        whole = each.full_tensor()
        assert not torch.equal(whole[:2], whole[2:])
    copies = [nn.init.normal_(distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()])).to_local() for _ in range(2)]
    both = [torch.empty(2, 2) for _ in range(2)]
    dist.all_gather(both, copies[1])
    assert torch.equal(*both)
    assert not torch.equal(*copies)
    generator = torch.Generator("cuda").manual_seed(3)
    first, second = (initial.normal_(generator=generator).full_tensor().clone() for _ in range(2))
    assert not torch.equal(first, second)


def check_fsdp_broadcasts_rank_0s_weights():
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    torch.manual_seed(dist.get_rank())
    model = FSDP(nn.Linear(4, 4, bias=False), device_id=torch.cuda.current_device(), sync_module_states=True)
    torch.manual_seed(0)
    with FSDP.summon_full_params(model):
        assert torch.equal(model.weight, nn.Linear(4, 4, bias=False).weight)


def check_dtensor():
    check_devices_of_shards()
    check_random_numbers()  # First: the first random sharded tensor of a process makes the seeds equal.
    check_attention_of_sharded_tensors()
    check_context_parallel()
