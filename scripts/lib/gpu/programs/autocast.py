"""Prints the type of the result of many operations under autocast for CUDA, a line each: on a GPU, or as a dry run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

warnings.simplefilter("ignore")

UNARY = "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan sqrt sin cos tanh sigmoid relu "
UNARY += "abs neg floor erf erfc sum prod mean var std median norm isnan"
PAIRS = "matmul mm chain_matmul atan2 dist cdist tensordot add mul sub div maximum fmod pow"
LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss soft_margin_loss hinge_embedding_loss "
LOSSES += "binary_cross_entropy binary_cross_entropy_with_logits cosine_similarity"
TYPES = (torch.float32, torch.float32), (torch.float64, torch.float64)

Operation = tuple[str, Callable[[], torch.Tensor]]


def operations(x: torch.Tensor, y: torch.Tensor) -> Iterator[Operation]:
    """Operations on two matrices of 4 x 4, whose types may differ."""
    classes = torch.zeros(4, dtype=torch.int64, device="cuda")
    for name in UNARY.split():
        yield name, lambda name=name: getattr(torch, name)(x)
    for name in PAIRS.split():
        yield name, lambda name=name: getattr(torch, name)(x, y)
    for name in LOSSES.split():
        yield name, lambda name=name: getattr(F, name)(x, y)
    for name in ("cross_entropy", "nll_loss", "multi_margin_loss"):
        yield name, lambda name=name: getattr(F, name)(x, classes)
    yield from products(x, y)
    yield from reductions(x, y)
    yield from layers(x, y)
    yield from others(x, y)


def products(x: torch.Tensor, y: torch.Tensor) -> Iterator[Operation]:
    v, w = x[0], y[0]
    yield "bmm", lambda: torch.bmm(x[None], y[None])
    yield "baddbmm", lambda: torch.baddbmm(x[None], x[None], y[None])
    yield "addmm", lambda: torch.addmm(x, x, y)
    yield "addmv", lambda: torch.addmv(v, x, w)
    yield "addr", lambda: torch.addr(x, v, w)
    yield "mv", lambda: torch.mv(x, w)
    yield "dot", lambda: torch.dot(v, w)
    yield "vdot", lambda: torch.vdot(v, w)
    yield "cross", lambda: torch.cross(x[:, :3], y[:, :3], dim=1)
    yield "linear", lambda: F.linear(x, y)
    yield "bilinear", lambda: F.bilinear(x, y, torch.ones(2, 4, 4, device="cuda"))
    yield "einsum", lambda: torch.einsum("ij,jk->ik", x, y)
    yield "multi_dot", lambda: torch.linalg.multi_dot((x, y, x))
    yield "conv1d", lambda: F.conv1d(x[None], y[:, :, None])
    yield "conv2d", lambda: F.conv2d(x[None, :, :, None], y[:, :, None, None])
    yield "conv_transpose2d", lambda: F.conv_transpose2d(x[None, :, :, None], y[:, :, None, None])
    yield (
        "scaled_dot_product_attention",
        lambda: F.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None]),
    )
    yield "mm, out", lambda: torch.mm(x, y, out=torch.empty(4, 4, device="cuda", dtype=x.dtype))
    yield "mm, out_dtype", lambda: torch.mm(x, y, out_dtype=torch.float32)
    yield "addmm_", lambda: x.clone().addmm_(x, y)
    yield "checkpoint", lambda: checkpoint(torch.matmul, x, y, use_reentrant=False)


def reductions(x: torch.Tensor, y: torch.Tensor) -> Iterator[Operation]:
    yield "sum of a dimension", lambda: x.sum(0)
    yield "sum, dtype", lambda: x.sum(dtype=torch.float16)
    yield "prod of a dimension", lambda: x.prod(0)
    yield "cumsum", lambda: x.cumsum(0)
    yield "cumsum, dtype", lambda: x.cumsum(0, dtype=torch.float16)
    yield "cumprod", lambda: x.cumprod(0)
    yield "logsumexp", lambda: x.logsumexp(0)
    yield "softmax", lambda: x.softmax(0)
    yield "softmax, dtype", lambda: torch.softmax(x, 0, torch.float16)
    yield "softmax, dtype by name", lambda: torch.softmax(x, 0, dtype=torch.bfloat16)
    yield "softmin", lambda: F.softmin(x, 0)
    yield "log_softmax", lambda: x.log_softmax(0)
    yield "log_softmax, dtype", lambda: torch.log_softmax(x, 0, torch.float16)
    yield "norm of a dimension", lambda: x.norm(dim=0)
    yield "norm, nuclear", lambda: x.norm(p="nuc")
    yield "norm, dtype", lambda: torch.norm(x, dtype=torch.float64)
    yield "vector_norm", lambda: torch.linalg.vector_norm(x)
    yield "matrix_norm", lambda: torch.linalg.matrix_norm(x)
    yield "_foreach_norm", lambda: torch._foreach_norm([x])[0]
    yield "renorm", lambda: x.renorm(2, 0, 1)
    yield "pdist", lambda: F.pdist(x)
    yield "histc", lambda: torch.histc(x)
    yield "quantile", lambda: x.quantile(0.5)
    yield "trapezoid", lambda: torch.trapezoid(x)
    yield "triplet_margin_loss", lambda: F.triplet_margin_loss(x, y, x)
    yield "margin_ranking_loss", lambda: F.margin_ranking_loss(x, y, x)
    yield "cosine_embedding_loss", lambda: F.cosine_embedding_loss(x, y, torch.ones(4, device="cuda"))


def layers(x: torch.Tensor, y: torch.Tensor) -> Iterator[Operation]:
    v = y[0]
    yield "layer_norm", lambda: F.layer_norm(x, (4,))
    yield "layer_norm, weight", lambda: F.layer_norm(x, (4,), v, v)
    yield "group_norm", lambda: F.group_norm(x, 2)
    yield "rms_norm", lambda: F.rms_norm(x, (4,))
    yield "batch_norm", lambda: F.batch_norm(x, None, None, training=True)
    yield "instance_norm", lambda: F.instance_norm(x[None])
    yield "embedding", lambda: F.embedding(torch.tensor([0], device="cuda"), x)
    yield "avg_pool2d", lambda: F.avg_pool2d(x[None], 2)
    yield "max_pool2d", lambda: F.max_pool2d(x[None], 2)
    for mode in ("nearest", "bilinear", "bicubic", "nearest-exact", "area"):
        yield f"interpolate, {mode}", lambda mode=mode: F.interpolate(x[None, None], scale_factor=2, mode=mode)
    yield "interpolate, linear", lambda: F.interpolate(x[None], scale_factor=2, mode="linear")
    yield "interpolate, antialias", lambda: F.interpolate(x[None, None], size=(2, 2), mode="bilinear", antialias=True)
    grid = torch.zeros(1, 2, 2, 2, device="cuda")
    yield "grid_sample", lambda: F.grid_sample(x[None, None], grid, align_corners=False)
    for name in ("LSTM", "GRU", "RNN"):
        yield name, lambda name=name: getattr(torch.nn, name)(4, 4, device="cuda")(x[None])[0]
    yield "LSTMCell", lambda: torch.nn.LSTMCell(4, 4, device="cuda")(x)[0]
    yield "GRUCell", lambda: torch.nn.GRUCell(4, 4, device="cuda")(x)
    yield "MultiheadAttention", lambda: torch.nn.MultiheadAttention(4, 2, device="cuda")(x[None], x[None], x[None])[0]
    yield "TransformerEncoderLayer", lambda: torch.nn.TransformerEncoderLayer(4, 2, 8, 0.0, device="cuda")(x[None])


def others(x: torch.Tensor, y: torch.Tensor) -> Iterator[Operation]:
    zeros, rows = torch.zeros(4, 4, device="cuda"), torch.zeros(4, 4, dtype=torch.int64, device="cuda")
    yield "softplus", lambda: F.softplus(x)
    yield "gelu", lambda: F.gelu(x)
    yield "silu", lambda: F.silu(x)
    yield "prelu", lambda: F.prelu(x, y[0][:1])
    yield "power of a number", lambda: 2**x
    yield "addcdiv", lambda: torch.addcdiv(x, y, x)
    yield "addcmul", lambda: torch.addcmul(x, y, x)
    yield "index_put", lambda: zeros.index_put((rows[0, :1],), x[0])
    yield "scatter_add", lambda: zeros.scatter_add(0, rows, x)
    yield "cat", lambda: torch.cat([x, y])
    yield "stack", lambda: torch.stack([x, y])
    yield "where", lambda: torch.where(x > 0, x, y)
    yield "lerp", lambda: torch.lerp(x, y, 0.5)
    yield "exp, out", lambda: torch.exp(x, out=torch.empty(4, 4, device="cuda", dtype=x.dtype))
    yield "exp_", lambda: x.clone().exp_()
    yield "inv", lambda: torch.linalg.inv(x + 3 * torch.eye(4, device="cuda"))
    yield "svd", lambda: torch.linalg.svd(x)[1]
    yield "fft", lambda: torch.fft.fft(x)


def result(call: Callable[[], torch.Tensor], dtype: torch.dtype) -> str:
    try:
        with torch.autocast("cuda", dtype=dtype):
            return str(call().dtype)
    except Exception as error:
        return type(error).__name__


for autocast in (torch.float16, torch.bfloat16):
    for types in (*TYPES, (autocast, autocast), (autocast, torch.float32), (torch.float32, autocast)):
        first, second = (torch.linspace(0.1, 0.6, 16, device="cuda").reshape(4, 4).to(each) for each in types)
        for name, call in operations(first, second):
            print(
                f"{name} of {types[0]} and {types[1]} under {autocast}: {result(call, autocast)}".replace("torch.", "")
            )
