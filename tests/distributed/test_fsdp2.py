"""`fully_shard` beside torch's: one loop, written for FSDP2, run with either. Losses, weights and
checkpoints are the same, bit for bit."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.fsdp import fully_shard as theirs
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron_fsdp_adapter import fully_shard as ours
from megatron_fsdp_adapter import (
    fully_shard_model,
    fully_shard_optimizer,
    leave_fsdp2,
    use_as_fsdp2,
)
from megatron_fsdp_adapter.plain.by_environment import VARIABLE
from megatron_fsdp_adapter.plain.casts import cast
from megatron_fsdp_adapter.plain.fsdp2 import HINTS
from megatron_fsdp_adapter.plain.mesh import data_parallel_groups
from tests.distributed.launch import run_ranks
from tests.distributed.plain import Block, Net, net, tokens

BF16, FP32 = torch.bfloat16, torch.float32
STEPS, MICROBATCHES = 3, 2


class Features(Net):
    """A Net that can return what it computes in front of its loss."""

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens))).square() * self.temperature


def model(dtype: torch.dtype = FP32) -> Any:
    made = net(dtype)
    made.__class__ = Features
    made.temperature = nn.Parameter(torch.tensor([1.5], dtype=dtype))  # torch's takes no scalars
    return made


Shards = Callable[..., Any]
Tensors = Mapping[str, torch.Tensor]


def _bottom_up(shard: Shards, made: Any, **options: Any) -> Any:
    for block in made.blocks:
        shard(block, **options)
    return shard(made, **options)


def _parts(shard: Shards, made: Any, **options: Any) -> Any:
    """Units inside of units, lists of modules, and weights that stay after forward."""
    shard(made.embedding, **options)
    for block in made.blocks:
        shard(block.up, **options)
        shard(block, reshard_after_forward=block is not made.blocks[-1], **options)
    shard([made.head], reshard_after_forward=False, **options)
    return shard(made, **options)


def _alone(shard: Shards, made: Any, **options: Any) -> Any:
    return shard(made, reshard_after_forward=True, **options)


def _checkpointed(shard: Shards, made: Any, **options: Any) -> Any:
    """Blocks, of which one has a unit inside, and the head, which is of the root."""
    for module in (*made.blocks, made.head):
        checkpoint(module)
    shard(made.blocks[0].up, **options)
    return _bottom_up(shard, made, **options)


def _by_methods(shard: Shards, made: Any, **options: Any) -> Any:
    """Blocks whose forward is not called, but another method."""

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        x = made.embedding(tokens)
        for block in made.blocks:
            x = block.encode(x)
        return made.head(x).square() * made.temperature

    made.forward = forward
    _bottom_up(shard, made, **options)
    for block in made.blocks:
        block.encode = block.forward
        register_fsdp_forward_method(block, "encode")
    return made


def _dtypes(shard: Shards, made: Any, **options: Any) -> Any:
    """Norms compute in float32, and give bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for block in made.blocks:
        shard(block.norm, mp_policy=replace(policy, param_dtype=None, output_dtype=BF16))
        shard(block, mp_policy=policy)
    return shard(made, mp_policy=policy)


class Around(nn.Module):
    """What is not sharded itself, as a LightningModule."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.set_requires_gradient_sync = net.set_requires_gradient_sync

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(tokens)
        return found


def _around(shard: Shards, made: Any, **options: Any) -> Any:
    return Around(_bottom_up(shard, made, **options))


def _frozen(shard: Shards, made: Any, **options: Any) -> Any:
    made.blocks[0].requires_grad_(False)
    return _bottom_up(shard, made, **options)


def _runs_only(rank: int, world: int) -> None:
    """A model of which nothing is trained, as a reference model of preferences is."""
    made = _bottom_up(ours, model().requires_grad_(False).eval())
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            assert torch.equal(made(tokens(0, 0, rank)), model()(tokens(0, 0, rank)))
    check(whole(made), dict(model().named_parameters()), "frozen")
    held = sum(param._local_tensor.numel() for param in made.parameters())
    assert held < 0.6 * sum(param.numel() for param in made.parameters())


def _ignored(shard: Shards, made: Any, **options: Any) -> Any:
    """The rest is trained by gradients that the loop sums."""
    made.head.requires_grad_(False)
    return _bottom_up(shard, made, ignored_params=set(made.head.parameters()), **options)


def _output(shard: Shards, made: Any, **options: Any) -> Any:
    """Features, which the model returns in another dtype than it computes in."""
    made.forward = made.features
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for block in made.blocks:
        shard(block, mp_policy=policy)
    return shard(made, mp_policy=replace(policy, output_dtype=FP32))


def _at_times(shard: Shards, made: Any, **options: Any) -> Any:
    """A unit, and a parameter of the root, that every third pass reads, and one that none reads."""
    made.spare, passes = nn.Linear(3, 3), itertools.count()

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        reads = next(passes) % 3 == 1
        x = made.embedding(tokens)
        for block in made.blocks if reads else made.blocks[::2]:
            x = block(x)
        scale = made.temperature if reads else made.temperature.detach()
        return made.head(x).square().float() * scale

    made.forward = forward
    return _bottom_up(shard, made, **options)


def _fused(shard: Shards, made: Any, **options: Any) -> Any:
    """A loss that reads the weight of the output layer, which is not called: in a unit with a
    module that is, under torch's; that stays after forward, under ours."""
    made.forward = functools.partial(_with_head, made)
    parts = [[made.blocks[-1], made.head]] if shard is theirs else [made.blocks[-1], [made.head]]
    for part in parts:
        shard(part, reshard_after_forward=False, **options)
    return shard(made, **options)


def _listed(shard: Shards, made: Any, **options: Any) -> Any:
    made.forward = functools.partial(_with_head, made)
    shard(made.blocks[0])
    shard([made.head, made.blocks[-1]], reshard_after_forward=True, **options)
    return shard(made, **options)


def _hooked(shard: Shards, made: Any, **options: Any) -> Any:
    """What reductions give is changed, of one block in a stream of its own."""
    _bottom_up(shard, made, **options)
    made.set_all_reduce_hook(lambda output: output.mul_(2.0))
    made.blocks[0].set_all_reduce_hook(
        lambda output: output.mul_(0.5), stream=None if options else torch.cpu.Stream()
    )
    return made


def _with_head(made: Any, tokens: torch.Tensor) -> torch.Tensor:
    hidden = made.blocks(made.embedding(tokens))
    return (hidden @ made.head.weight.t()).square().mean() * made.temperature.mean()


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "bottom up": (_bottom_up, {}),
    "parts": (_parts, {}),
    "one unit": (_alone, {}),
    "checkpointed": (_checkpointed, {}),
    "by methods": (_by_methods, {}),
    "around": (_around, {}),
    "frozen": (_frozen, {}),
    "ignored": (_ignored, {}),
    "read at times": (_at_times, {}),
    "fp32 in bf16": (
        _parts, {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)},
    ),
    "output": (_output, {}),
    "fused": (_fused, {}),
    "fused in a list": (_listed, {}),
    "dtypes of modules": (_dtypes, {}),
    "hooked": (_hooked, {}),
}  # fmt: skip


def train(
    made: Any, optimizer: Any, rank: int, accumulate: bool = False, first: int = 0,
    most: float = 100.0,
) -> tuple[list[float], list[float]]:
    """Losses, and norms of gradients, which are scaled to at most `most`. A norm adds up what each
    rank has, which is other rows under torch's: it differs in the last bits."""
    losses, norms = [], []
    for step in range(first, first + STEPS):
        for microbatch in range(MICROBATCHES if accumulate else 1):
            made.set_requires_gradient_sync(not accumulate or microbatch == MICROBATCHES - 1)
            output = made(tokens(step, microbatch, rank))
            assert output.dtype == FP32
            loss = output.mean()
            loss.backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(made.parameters(), most)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def whole(made: Any) -> dict[str, torch.Tensor]:
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
        for name, param in made.named_parameters()
    }


def check(found: Tensors, expected: Tensors, say: str) -> None:
    assert found.keys() == expected.keys(), say
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{say}: {name}"


def adam(made: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(made.parameters(), lr=1e-2)


def _cases(rank: int, world: int) -> None:
    for name, (shape, options) in CASES.items():
        one, other = shape(theirs, model(), **options), shape(ours, model(), **options)
        sides = [(made, adam(made)) for made in (one, other)]
        expected, found = (train(made, optimizer, rank) for made, optimizer in sides)
        assert found[0] == expected[0], name
        near(found[1], expected[1], f"{name}, norms")
        check(whole(other), whole(one), name)
        check(moments_of(*sides[1]), moments_of(*sides[0]), f"{name}, moments")
        for accumulate, most in ((True, 100.0), (False, 0.5)):
            expected, found = (
                train(made, optimizer, rank, accumulate, 7, most) for made, optimizer in sides
            )
            near(found, expected, f"{name}, {accumulate=}, {most=}")
        assert moments_of(*sides[1]).keys() == moments_of(*sides[0]).keys(), name


def near(found: Any, expected: Any, say: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, msg=lambda text: say + text)


def test_loops_written_for_fsdp2_give_its_numbers() -> None:
    run_ranks(_cases, 2)


MESHES: dict[str, Callable[[], dict[str, Any]]] = {
    "replicas": lambda: {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))},
    "one tensor-parallel rank": lambda: {
        "mesh": init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    },
    "no replicas, by name": lambda: {
        "mesh": init_device_mesh("cpu", (4, 1, 1), mesh_dim_names=("dp", "pp", "tp"))
    },
    "dims of a larger mesh": lambda: {
        "mesh": init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("r", "s", "tp")),
        "dp_mesh_dims": DataParallelMeshDims(shard=("r", "s")),
    },
}


def _meshes(rank: int, world: int) -> None:
    """The numbers of four shards, or of two by two, are the same but for the order of sums."""
    one = _bottom_up(theirs, model())
    expected = train(one, adam(one), rank)
    for name, options in MESHES.items():
        given = options()
        other = _bottom_up(ours, model(), **given)
        dims = {"replicas": ("r", "s"), "dims of a larger mesh": ("dp_cp",)}.get(name, ("dp",))
        shown = next(other.parameters()).device_mesh
        assert shown.mesh_dim_names == dims, name
        assert len(dims) == 1 or shown == given["mesh"], name
        near(train(other, adam(other), rank), expected, name)
        if name == "replicas":
            made = _bottom_up(ours, model(), **options())
            made.set_requires_all_reduce(False)
            made(tokens(0, 0, rank)).backward()
            assert made.head.weight.grad is None
            made.set_requires_all_reduce(True)
            made(tokens(0, 1, rank)).backward()
            summed = made.head.weight.grad.full_tensor()
            _read_by_one_rank(rank, world, **options())
            hooked = [_hooked(shard, model(), **options()) for shard in (theirs, ours)]
            for each in hooked:
                each(tokens(0, 0, rank)).backward()
            near(hooked[1].head.weight.grad.full_tensor(),
                 hooked[0].head.weight.grad.full_tensor(), "hooked over replicas")
            with pytest.raises(RuntimeError, match="after this step's gradients had been reduced"):
                hooked[1](tokens(0, 0, rank)).backward()
            repeated = _bottom_up(ours, model(), **options())
            for microbatch in range(2):
                repeated(tokens(0, microbatch, rank)).backward()
        held = sum(param._local_tensor.numel() for param in other.parameters())
        assert held < 0.7 * sum(param.numel() for param in other.parameters()), name
    one = _bottom_up(theirs, model())
    for microbatch in range(2):
        one(tokens(0, microbatch, rank)).backward()
    expected = one.head.weight.grad.full_tensor()
    near(summed, expected, "sums over replicas")
    near(repeated.head.weight.grad.full_tensor(), expected, "each backward sums over replicas")
    one_rank_of_two = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    for mesh, sizes in ((one_rank_of_two, (4, None)), (MESHES["replicas"]()["mesh"], (2, 2))):
        groups = data_parallel_groups(mesh)
        assert tuple(group and group.size() for group in groups) == sizes
    for name, wrapped in (("fully_shard", ours), ("fully_shard_model", fully_shard_model)):
        for names, message in (
            (("dp", "tp"), "its dim 'tp' has 2 ranks.*Pass the data-parallel"),
            (None, "its dims have no names.*Give init_device_mesh mesh_dim_names"),
        ):
            two = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            with pytest.raises(ValueError, match=message):
                wrapped(model(), mesh=two), name


def test_meshes_of_fsdp2() -> None:
    run_ranks(_meshes, 4)


def _states(made: Any, optimizer: Any, options: StateDictOptions) -> tuple[Any, Any]:
    return (
        get_model_state_dict(made, options=options),
        get_optimizer_state_dict(made, optimizer, options=options),
    )


def _cut_by_hand(made: Any, optimizer: Any, moments: Any, options: StateDictOptions) -> None:
    """Loads unsharded moments as torch's FSDP2 tutorial does: by `distribute_tensor`."""
    optimizer.load_state_dict({
        "param_groups": optimizer.state_dict()["param_groups"],
        "state": {
            number: {
                key: value if key == "step" else distribute_tensor(
                    value, param.device_mesh, param.placements
                )
                for key, value in moments["state"][name].items()
            }
            for number, (name, param) in enumerate(made.named_parameters())
        },
    })  # fmt: skip


def _interchange(rank: int, world: int) -> None:
    """What either has after some steps is loaded into the other, which goes on as the first."""
    options = StateDictOptions(full_state_dict=True)
    for first, second, load in (
        (theirs, ours, set_optimizer_state_dict), (theirs, ours, _cut_by_hand),
        (ours, theirs, set_optimizer_state_dict),
    ):  # fmt: skip
        made = _bottom_up(first, model())
        optimizer = adam(made)
        train(made, optimizer, rank)
        # Copies: torch's functions change what they are given, and share step counts.
        weights, moments = copy.deepcopy(_states(made, optimizer, options))
        other = _bottom_up(second, net_of_zeros())
        resumed = adam(other)
        set_model_state_dict(other, dict(weights), options=options)
        load(other, resumed, moments, options=options)
        say = f"resumed with {second.__module__}"
        check(whole(other), weights, say)
        check(moments_of(other, resumed), moments_of(made, optimizer), say)
        found, expected = (
            train(*side, rank, first=9)[0] for side in ((other, resumed), (made, optimizer))
        )
        assert found == expected, say
        check(whole(other), whole(made), say)


def moments_of(made: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value.full_tensor() if isinstance(value, DTensor) else value
        for name, param in made.named_parameters()
        for key, value in optimizer.state[param].items()
    }


def net_of_zeros() -> Any:
    made = model()
    for param in made.parameters():
        nn.init.zeros_(param)
    return made


def _meta_start(rank: int, world: int) -> None:
    """Parameters on the meta device are DTensors there, which `to_empty` or a load makes the
    sharded ones: the same objects, frozen or trained as they were."""
    values = model().state_dict()
    one = model()
    one.embedding.weight.requires_grad = False
    _bottom_up(theirs, one)
    expected = train(one, adam(one), rank)[0]
    for empties in (True, False):
        with torch.device("meta"):
            made = Features()
            made.temperature = nn.Parameter(torch.empty(1))
        _bottom_up(lambda module: _read(ours(module)), made)
        shown = list(made.parameters())
        made.bfloat16().float()
        optimizer = adam(made)
        assert isinstance(made.embedding.weight, DTensor)
        made.embedding.weight.requires_grad = False
        assert all(param.is_meta and param.dtype == FP32 for param in shown)
        if empties:
            made.to_empty(device="cpu")
            assert made.head.weight.device.type == "cpu"  # no rank had all of it
            nn.init.ones_(made.head.weight)
            assert whole(made)["head.weight"].eq(1).all()
        set_model_state_dict(
            made, dict(values) if rank == 0 else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
        check(whole(made), dict(model().named_parameters()), "loaded")
        assert all(param is read for param, read in zip(shown, made.parameters(), strict=True))
        assert train(made, optimizer, rank)[0] == expected, f"{empties=}"


def _backwards_inside_of_a_pass(rank: int, world: int) -> None:
    """The head's, chunk by chunk, before that of the features that it was given; gradients of all
    are summed whatever is said of one module."""
    found = []
    for shard in (theirs, ours):
        made = model()
        made.forward = lambda tokens, made=made: made.blocks(made.embedding(tokens))
        _checkpointed(shard, made)
        for microbatch in range(MICROBATCHES):
            if shard is ours:
                made.blocks[0].set_requires_gradient_sync(False)
            features = made(tokens(0, microbatch, rank))
            chunks = [chunk.detach().requires_grad_() for chunk in features.chunk(2)]
            for chunk in chunks:
                made.head(chunk).square().mean().backward()
            features.backward(torch.cat([chunk.grad for chunk in chunks]))
        used = {name: param for name, param in made.named_parameters() if name != "temperature"}
        found.append({name: param.grad.full_tensor() for name, param in used.items()})
    near(found[1], found[0], "chunks")


def _in_host_memory(rank: int, world: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for shape in (_bottom_up, _at_times):
        one = shape(theirs, model(), mp_policy=policy)
        expected = train(one, adam(one), rank)[0]
        made = shape(ours, model(), mp_policy=policy, offload_policy=CPUOffloadPolicy())
        assert train(made, fully_shard_optimizer(adam(made)), rank)[0] == expected
        check(whole(made), whole(one), f"in host memory, {shape.__name__}")


def _read_by_one_rank(rank: int, world: int, **options: Any) -> None:
    """A parameter that some ranks read has a gradient on all, and one that none reads has none: or
    zeros, as of torch's, where that is asked for."""
    made, one = _at_times(ours, model(), **options), model()
    one.features(tokens(0, 0, 0)).mean().backward()
    made.forward = lambda tokens: made.features(tokens) if rank == 0 else (
        made.head(made.blocks(made.embedding(tokens))).square()
    )  # fmt: skip
    for zeroed in (False, True):
        made.set_reduce_scatter_unused_params(zeroed)
        made(tokens(0, 0, 0)).mean().backward()
        near(made.temperature.grad.full_tensor() * world, one.temperature.grad, "read by one rank")
        assert (made.spare.weight.grad is not None) == zeroed
        made.zero_grad()


def _methods(rank: int, world: int) -> None:
    made = _bottom_up(ours, model())
    assert isinstance(made, FSDPModule) and isinstance(made.blocks[0], FSDPModule)
    assert type(made.blocks[0]).__name__ == "FSDPBlock" and isinstance(made.blocks[0], Block)
    made.set_gradient_divide_factor(4.0 * world)
    local = [param._local_tensor for param in made.parameters()]
    assert sum(one.numel() == 0 for one in local) > 1
    addresses = [one.data_ptr() for one in local]
    assert addresses == [param.data_ptr() for param in made.parameters()]
    assert len({*addresses}) == len(addresses)
    for name in HINTS:
        getattr(made, name)(True)
    block, before = made.blocks[1], dict(model().named_parameters())
    assert all(isinstance(param, DTensor) for param in made.parameters())
    handle = block.unshard(async_op=True)
    handle.wait()
    handle.wait()
    assert torch.equal(block.up.weight, before["blocks.1.up.weight"])
    made(tokens(0, 0, rank))  # the forward does not reshard it
    assert torch.equal(block.up.weight, before["blocks.1.up.weight"])
    block.reshard()
    block.reshard()
    made.reset_iter_state()
    assert all(isinstance(param, DTensor) for param in block.parameters())
    one = _bottom_up(theirs, model())
    for each in (made, one):
        each(tokens(0, 0, rank)).mean().backward()
    for (name, param), other in zip(made.named_parameters(), one.parameters(), strict=True):
        quarter = other.grad.full_tensor() / 4
        assert torch.equal(param.grad.full_tensor(), quarter), name
    assert type(ours(nn.Sequential(nn.Linear(2, 2), nn.GELU()))[:1]) is nn.Sequential
    register_fsdp_forward_method(made, "features")
    share_comm_ctx([made, block])
    found, expected = (one.features(tokens(0, 0, rank)) for one in (made, model()))
    assert torch.equal(found, expected)
    found.mean().backward()
    made.chosen = lambda of: made(of).detach().argmax()
    register_fsdp_forward_method(made, "chosen")
    made.chosen(tokens(0, 0, rank))
    assert all(isinstance(param, DTensor) for param in made.parameters())
    made.set_reshard_after_forward(False)
    with torch.no_grad():
        made(tokens(0, 0, rank))
        assert made.blocks[0].up.weight.untyped_storage().nbytes() > 0
    made.set_reshard_after_forward(True)
    adam(made).step()
    made(tokens(0, 0, rank))


def _compiled(rank: int, world: int) -> None:
    """Layers in one graph each: compiled before as torchtitan does, or by a function after."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    one = _bottom_up(theirs, model(), mp_policy=policy)
    expected = train(one, adam(one), rank)[0]
    for before in (True, False):
        made = model()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for number, block in enumerate(made.blocks):
            if before:
                block.compile(backend="aot_eager", fullgraph=True)
            ours(block, mp_policy=policy)
            if not before:
                made.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=True)
        ours(made, mp_policy=policy)
        assert train(made, adam(made), rank)[0] == expected, f"compiled, {before=}"
        counted = torch._dynamo.utils.counters
        assert counted["stats"]["unique_graphs"] == 1 and not counted["graph_break"], before


REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "twice": ("called with it before", lambda made: ours(ours(made))),
    "a list": ("no forward", lambda made: ours(nn.ModuleList([made]))),
    "columns": (
        r"Shard\(1\)", lambda made: ours(made, shard_placement_fn=lambda param: Shard(1)),
    ),
    "late": (
        "sharded already",
        lambda made: (list(ours(made.blocks[0]).parameters()), ours(made)),
    ),
    "policies": (
        "mp_policy.reduce_dtype",
        lambda made: list(_mixed(made).parameters()),
    ),
    "on the meta device": (
        "21 parameters are still on the meta device: .*'embedding.weight'.*call to_empty",
        lambda made: _bottom_up(ours, made.to("meta"))(tokens(0, 0, 0)),
    ),
    "gather": ("set_custom_all_gather", lambda made: ours(made).set_custom_all_gather(print)),
    "stream": (
        "stream=.*Leave stream out",
        lambda made: ours(
            made, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("r", "s"))
        ).set_all_reduce_hook(print, stream=torch.cpu.Stream()),
    ),
    "deepcopy": ("deepcopy", lambda made: copy.deepcopy(ours(made))),
    "optimizer of before": (
        "from before the model was sharded",
        lambda made: _step(adam(made), ours(made)),
    ),
    "optimizer that reads norms": (
        "optimizer=Adafactor: .*Use AdamW",
        lambda made: _step(torch.optim.Adafactor(ours(made).parameters()), made),
    ),
    "gradients of another dtype": (
        "in torch.bfloat16 and its gradients accumulate in torch.float32.*fully_shard_optimizer",
        lambda made: _step(adam(ours(_two_dtypes(made))), made),
    ),
    "factor": (
        "sharded already", lambda made: _read(ours(made)).set_gradient_divide_factor(2.0),
    ),
}  # fmt: skip


def _mixed(made: Any) -> Any:
    ours(made.blocks[0], mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16))
    return ours(made)


def _two_dtypes(made: Any) -> Any:
    made.blocks.to(BF16)
    made.blocks.register_forward_pre_hook(lambda module, inputs: inputs[0].to(BF16))
    made.blocks.register_forward_hook(lambda module, inputs, output: output.to(FP32))
    return made


class Layers(nn.ModuleList):
    """A list that is a layer itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x)


def _read(made: Any) -> Any:
    list(made.parameters())
    return made


def _step(optimizer: Any, made: Any) -> None:
    made(tokens(0, 0, 0)).mean().backward()
    optimizer.step()


@dataclass
class Given:
    x: torch.Tensor
    cache: Any


def test_inputs_in_dataclasses_are_cast_and_other_objects_stay() -> None:
    given = Given(torch.ones(1), types.SimpleNamespace(keys=torch.ones(1)))
    (found,), options = cast(BF16, ((given,), {"mask": torch.ones(1, dtype=torch.int64)}))
    assert (found.x.dtype, options["mask"].dtype) == (BF16, torch.int64)
    assert found.cache is given.cache and given.x.dtype == FP32


def test_a_parameter_that_no_loss_reads_has_no_gradient_on_one_rank(one_rank: None) -> None:
    _read_by_one_rank(0, 1)


def test_a_list_with_a_forward_is_a_module(one_rank: None) -> None:
    x = torch.ones(2, 2)
    made = Layers([nn.Linear(2, 2)])
    assert torch.equal(made(x), ours(made)(x))


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_does_and_this_does_not_is_an_early_error(one_rank: None, name: str) -> None:
    said, use = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError), match=said):
        use(model())


def _rest(rank: int, world: int) -> None:
    parts = (
        _interchange, _meta_start, _backwards_inside_of_a_pass, _in_host_memory, _methods,
        _runs_only, _read_by_one_rank, _compiled,
    )  # fmt: skip
    for part in parts:
        part(rank, world)


def test_checkpoints_meta_starts_offload_and_methods() -> None:
    run_ranks(_rest, 2)


def test_it_takes_the_place_of_torchs_wherever_that_was_imported() -> None:
    found = types.ModuleType("a_library_that_imported_it")
    found.shard = theirs  # type: ignore[attr-defined]
    sys.modules[found.__name__] = found
    try:
        places = use_as_fsdp2()
        own = f"{__name__}.theirs"
        assert {"torch.distributed.fsdp.fully_shard", f"{found.__name__}.shard", own} <= set(places)
        assert found.shard is ours is torch.distributed.fsdp.fully_shard  # type: ignore[attr-defined]
        assert use_as_fsdp2() == []
    finally:
        assert leave_fsdp2() == places
        del sys.modules[found.__name__]
    assert ours is not theirs
    assert found.shard is theirs is torch.distributed.fsdp.fully_shard  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", ["fsdp2", "", "fsdp1"])
def test_the_environment_has_it_take_that_place(tmp_path: Path, value: str) -> None:
    """torch loads the entry point that is in pyproject.toml."""
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    [entry] = re.findall(r'backends"\]\n(\S+) = "(.*)"', pyproject.read_text())
    info = tmp_path / "plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\n{} = {}\n".format(*entry))
    code = "import torch.distributed.fsdp as f, sys; print(f.fully_shard.__module__)"
    paths = [str(pyproject.parent), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
        env={**os.environ, VARIABLE: value, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    if value == "fsdp1":
        assert done.returncode and f"{VARIABLE}=fsdp1: not known" in done.stderr
        return
    assert done.stdout.split() == [ours.__module__ if value else theirs.__module__], done.stderr
    assert (f"{VARIABLE}=fsdp2, fully_shard is in" in done.stderr) == bool(value)
