"""Attention in models that are spread over processes: two of them here, on the CPU, with gloo."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import attn_ext
from attn_ext import sharding

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
WORLD = 2


def spread(*checks: Callable[[], None]) -> None:
    """Runs the checks in WORLD processes of one group; fails with the traceback of any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.spawn(member, (port, checks), nprocs=WORLD, join=False)
    deadline = time.monotonic() + 150
    while not context.join(timeout=5):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("the processes did not end in time")


def member(rank: int, port: int, checks: tuple[Callable[[], None], ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    for check in checks:
        torch.manual_seed(0)
        check()
        dist.barrier()
    dist.destroy_process_group()


class Attention(nn.Module):
    """Self-attention as a model writes it: F.sdpa, grouped heads."""

    def __init__(self, dim: int = 32, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, kv_heads * self.head_dim)
        self.value = nn.Linear(dim, kv_heads * self.head_dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# DTensor: the ops' own rules.


def test_dtensors() -> None:
    spread(check_dtensors, check_gathered)


def check_dtensors() -> None:
    """Sharded by batch or heads, forward runs on the shards alone, and all results are right."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (WORLD,))
    cases = [
        (backend, axis, kv_heads, mask)
        for backend in ("naive", "flash")
        for axis in (0, 1, None)
        for kv_heads in (4, 2)
        for mask in (None, (8, 8), (4, 1, 1, 8), (1, 4, 8, 8))
    ]
    for backend, axis, kv_heads, mask in cases:
        shapes = [(4, 4, 8, 16), (4, kv_heads, 8, 16), (4, kv_heads, 8, 16)]
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        if mask is not None:
            inputs.append(torch.randn(mask, requires_grad=True))
        grad_out = torch.randn(shapes[0])
        options = {"enable_gqa": True, "backend": backend}
        expected = attn_ext.scaled_dot_product_attention(*inputs, **options)
        expected_grads = torch.autograd.grad(expected, inputs, grad_out)

        placement = [Replicate() if axis is None else Shard(axis)]
        placements = [placement, placement, placement, [Replicate()]]
        shards = [
            distribute_tensor(tensor.detach(), mesh, where).requires_grad_()
            for tensor, where in zip(inputs, placements, strict=False)
        ]
        with CommDebugMode() as forward:
            out = attn_ext.scaled_dot_product_attention(*shards, **options)
        grad_shards = distribute_tensor(grad_out, mesh, placement)
        with CommDebugMode() as backward:
            grads = torch.autograd.grad(out, shards, grad_shards)
        case = f"{backend}, axis {axis}, {kv_heads} key heads, mask {mask}"
        assert forward.get_total_counts() == backward.get_total_counts() == 0, case
        assert list(out.placements) == placement, case
        torch.testing.assert_close(out.full_tensor(), expected, msg=case)
        for grad, truth in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(grad.full_tensor(), truth, msg=case)


def check_gathered() -> None:
    """Groups of heads that a cut would split, sharded lengths, dropout: gathered, and right."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    q, k, v = torch.randn(2, 6, 8, 16), torch.randn(2, 3, 8, 16), torch.randn(2, 3, 8, 16)
    for axis in (1, 2):
        shards = [distribute_tensor(t, mesh, [Shard(axis)]) for t in (q, k, v)]
        out = attn_ext.scaled_dot_product_attention(
            *shards, is_causal=True, enable_gqa=True, backend="flash"
        )
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out.full_tensor(), expected)
    state = torch.tensor([1, 2])
    shards = [distribute_tensor(t, mesh, [Shard(0)]) for t in (q, k, v)]
    state_shard = distribute_tensor(state, mesh)
    out = attn_ext.ops.flash_attention_forward(*shards, None, 0.5, False, state_shard)[0]
    expected = attn_ext.ops.flash_attention_forward(q, k, v, None, 0.5, False, state)[0]
    torch.testing.assert_close(out.full_tensor(), expected)


def test_two_dimensional_mesh() -> None:
    """Rules alone, by their own logic: heads cut by both axes of a mesh of 2 x 4."""

    class Spec:
        def __init__(self, heads: int, *axes: int) -> None:
            from torch.distributed.tensor import Replicate, Shard

            self.shape = (8, heads, 16, 16)
            self.placements = [Shard(a) if a >= 0 else Replicate() for a in axes]
            self.mesh = type("Mesh", (), {"shape": (2, 4)})

    def axes(kv_heads: int, *where: int) -> list[int | None]:
        return sharding._axes((Spec(24, *where), Spec(kv_heads, *where)), 0.0)

    assert axes(12, 0, 1) == [None, 0, 1]
    assert axes(12, 1, 1) == [None, 0], "8 shards would split 12 groups"
    assert axes(8, 1, 1) == [None, 0, 1]
    assert axes(12, 0, -1) == [None, 0]


# Models.


def test_models() -> None:
    checks = (check_tensor_parallel, check_fully_sharded)
    spread(*(partial(check, route) for check in checks for route in ("use", "activated")))


def route_to_ours(route: str) -> Any:
    return attn_ext.use("flash", strict=True) if route == "use" else attn_ext.activated()


def check_tensor_parallel(route: str) -> None:
    """Columns, attention on a share of the heads, rows: against the whole model."""
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, x = Attention(), torch.randn(2, 9, 32)
    model(x).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    # Under `use` attention sees DTensors; where torch has no rule for its own op on the CPU, the
    # local shards, which is how these models are usually written.
    columns = ColwiseParallel(use_local_output=route == "activated")
    plan = {"query": columns, "key": columns, "value": columns, "out": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)
    with route_to_ours(route):
        model(x).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(full(p.grad), expected[name], atol=1e-4, rtol=1e-4)


def check_fully_sharded(route: str) -> None:
    """FSDP2: parameters are sharded, attention sees plain tensors."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    model = nn.Sequential(Attention(), Attention())
    x = torch.randn(WORLD, 9, 32)
    (model(x).square().sum() / WORLD).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rank = dist.get_rank()
    with route_to_ours(route):
        model(x[rank : rank + 1]).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(full(p.grad), expected[name], atol=1e-4, rtol=1e-4)
