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
from tests.distributed.checks import check_same_bits
from tests.distributed.plain import Block, Net, net, tokens
from tests.distributed.shared_ranks import on_ranks

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


def _around(shard: Shards, made: Any, **options: Any) -> Any:
    """Inside of what is not sharded itself, as a LightningModule."""
    around = nn.Sequential(_bottom_up(shard, made, **options))
    around.set_requires_gradient_sync = made.set_requires_gradient_sync
    return around


def _frozen(shard: Shards, made: Any, **options: Any) -> Any:
    made.blocks[0].requires_grad_(False)
    return _bottom_up(shard, made, **options)


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


def _compiled(shard: Shards, made: Any, before: bool, **options: Any) -> Any:
    """Layers in one graph each, under ours: compiled before as torchtitan does, or by a function
    after."""
    for number, block in enumerate(made.blocks):
        if shard is ours and before:
            block.compile(backend="aot_eager", fullgraph=True)
        shard(block, **options)
        if shard is ours and not before:
            made.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=True)
    return shard(made, **options)


def _in_host_memory(shard: Shards, made: Any, shape: Any = _bottom_up, **options: Any) -> Any:
    """Main weights and state, under ours."""
    policy = {"offload_policy": CPUOffloadPolicy()} if shard is ours else {}
    return shape(shard, made, **policy, **options)


MIXED = {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)}
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
    "fp32 in bf16": (_parts, MIXED),
    "output": (_output, {}),
    "fused": (_fused, {}),
    "fused in a list": (_listed, {}),
    "dtypes of modules": (_dtypes, {}),
    "hooked": (_hooked, {}),
    "compiled before": (_compiled, {"before": True, **MIXED}),
    "compiled after": (_compiled, {"before": False, **MIXED}),
    "in host memory": (_in_host_memory, MIXED),
    "in host memory, read at times": (_in_host_memory, {"shape": _at_times, **MIXED}),
}


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


def named(made: Any) -> dict[str, Any]:
    """Parameters by the names that they have in modules that are not compiled."""
    return {name.replace("_orig_mod.", ""): param for name, param in made.named_parameters()}


def whole(made: Any) -> dict[str, torch.Tensor]:
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
        for name, param in named(made).items()
    }


def adam(made: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(made.parameters(), lr=1e-2)


def near(found: Any, expected: Any, say: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, msg=lambda text: say + text)


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_loops_written_for_fsdp2_give_its_numbers(rank: int, name: str) -> None:
    shape, options = CASES[name]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    one, other = shape(theirs, model(), **options), shape(ours, model(), **options)
    sides = [(one, adam(one)), (other, adam(other))]
    if shape is _in_host_memory:
        sides[1] = (other, fully_shard_optimizer(sides[1][1]))
    expected, found = (train(made, optimizer, rank) for made, optimizer in sides)
    assert found[0] == expected[0]
    near(found[1], expected[1], "norms")
    check_same_bits(whole(other), whole(one), name)
    known, all_of_ours = (moments_of(*side) for side in sides)
    check_same_bits({name: all_of_ours[name] for name in known}, known, "moments")
    # Torch's accumulates no gradients in bfloat16 beside those that a pass leaves in float32.
    accumulates = () if shape is _in_host_memory else ((True, 100.0),)
    for accumulate, most in (*accumulates, (False, 0.5)):
        expected, found = (
            train(made, optimizer, rank, accumulate, 7, most) for made, optimizer in sides
        )
        near(found, expected, f"{accumulate=}, {most=}")
    # In host memory there are moments of what no step has read, too.
    same = moments_of(*sides[1]).keys() == moments_of(*sides[0]).keys()
    assert same or shape is _in_host_memory
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == (shape is _compiled), "all layers have one graph"


def _mesh(sizes: tuple[int, ...], names: tuple[str, ...] | None) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def _replicas() -> dict[str, Any]:
    return {"mesh": _mesh((2, 2), ("r", "s"))}


MESHES: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "replicas": (_replicas, ("r", "s")),
    "one tensor-parallel rank": (lambda: {"mesh": _mesh((4, 1), ("dp", "tp"))}, ("dp",)),
    "no replicas, by name": (lambda: {"mesh": _mesh((4, 1, 1), ("dp", "pp", "tp"))}, ("dp",)),
    "dims of a larger mesh": (
        lambda: {
            "mesh": _mesh((2, 2, 1), ("r", "s", "tp")),
            "dp_mesh_dims": DataParallelMeshDims(shard=("r", "s")),
        },
        ("dp_cp",),
    ),
}
"""Options, and the dims of the mesh that parameters show."""


@on_ranks(4)
def test_meshes_of_fsdp2(rank: int) -> None:
    """The numbers of four shards, or of two by two, are the same but for the order of sums."""
    one = _bottom_up(theirs, model())
    expected = train(one, adam(one), rank)
    for name, (make, dims) in MESHES.items():
        options = make()
        other = _bottom_up(ours, model(), **options)
        shown = next(other.parameters()).device_mesh
        assert shown.mesh_dim_names == dims, name
        assert len(dims) == 1 or shown == options["mesh"], name
        near(train(other, adam(other), rank), expected, name)
        held = sum(param._local_tensor.numel() for param in other.parameters())
        assert held < 0.7 * sum(param.numel() for param in other.parameters()), name
    for mesh, sizes in ((_mesh((4, 1), ("dp", "tp")), (4, None)), (_replicas()["mesh"], (2, 2))):
        groups = data_parallel_groups(mesh)
        assert tuple(group and group.size() for group in groups) == sizes
    for wrapped, (names, message) in itertools.product((ours, fully_shard_model), (
        (("dp", "tp"), "its dim 'tp' has 2 ranks.*Pass the data-parallel"),
        (None, "its dims have no names.*Give init_device_mesh mesh_dim_names"),
    )):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            wrapped(model(), mesh=_mesh((2, 2), names))


@on_ranks(4)
def test_gradients_of_several_backwards_are_summed_over_replicas(rank: int, world: int) -> None:
    _read_by_one_rank(rank, world, **_replicas())
    one = _bottom_up(theirs, model())
    held_back, repeated = (_bottom_up(ours, model(), **_replicas()) for _ in range(2))
    for microbatch in range(2):
        held_back.set_requires_all_reduce(microbatch == 1)
        for made in (one, held_back, repeated):
            made(tokens(0, microbatch, rank)).backward()
        assert (held_back.head.weight.grad is not None) == microbatch
    hooked = [_hooked(shard, model(), **_replicas()) for shard in (theirs, ours)]
    for made in hooked:
        made(tokens(0, 0, rank)).backward()
    for found, expected in ((held_back, one), (repeated, one), reversed(hooked)):
        grads = [made.head.weight.grad.full_tensor() for made in (found, expected)]
        near(*grads, "sums over replicas")
    with pytest.raises(RuntimeError, match="after this step's gradients had been reduced"):
        hooked[1](tokens(0, 0, rank)).backward()


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


@on_ranks(2)
def test_what_either_has_after_some_steps_goes_on_in_the_other(rank: int) -> None:
    options = StateDictOptions(full_state_dict=True)
    for first, second, load in (
        (theirs, ours, set_optimizer_state_dict), (theirs, ours, _cut_by_hand),
        (ours, theirs, set_optimizer_state_dict),
    ):  # fmt: skip
        made = _bottom_up(first, model())
        optimizer = adam(made)
        train(made, optimizer, rank)
        # Copies: torch's functions change what they are given, and share step counts.
        weights, moments = copy.deepcopy((
            get_model_state_dict(made, options=options),
            get_optimizer_state_dict(made, optimizer, options=options),
        ))
        other = _bottom_up(second, model())
        resumed = adam(other)
        set_model_state_dict(other, dict(weights), options=options)
        load(other, resumed, moments, options=options)
        say = f"resumed with {second.__module__}"
        check_same_bits(whole(other), weights, say)
        check_same_bits(moments_of(other, resumed), moments_of(made, optimizer), say)
        found, expected = (
            train(*side, rank, first=9)[0] for side in ((other, resumed), (made, optimizer))
        )
        assert found == expected, say
        check_same_bits(whole(other), whole(made), say)


def moments_of(made: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value.full_tensor() if isinstance(value, DTensor) else value
        for name, param in named(made).items()
        for key, value in optimizer.state[param].items()
    }


@on_ranks(2)
def test_a_start_on_the_meta_device(rank: int) -> None:
    """Parameters there are DTensors, which `to_empty` or a load makes the sharded ones: the same
    objects, frozen or trained as they were."""
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
        check_same_bits(whole(made), values, "loaded")
        assert all(param is read for param, read in zip(shown, made.parameters(), strict=True))
        assert train(made, optimizer, rank)[0] == expected, f"{empties=}"


@on_ranks(2)
def test_backwards_inside_of_a_pass(rank: int) -> None:
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


@on_ranks(2)
def test_a_model_of_which_nothing_is_trained(rank: int) -> None:
    """As a reference model of preferences is."""
    made = _bottom_up(ours, model().requires_grad_(False).eval())
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            assert torch.equal(made(tokens(0, 0, rank)), model()(tokens(0, 0, rank)))
    check_same_bits(whole(made), model().state_dict(), "frozen")
    held = sum(param._local_tensor.numel() for param in made.parameters())
    assert held < 0.6 * sum(param.numel() for param in made.parameters())


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


@on_ranks(2)
def test_methods_of_fsdp2(rank: int, world: int) -> None:
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
    block.unshard()
    made.reset_iter_state()
    block.reshard()
    assert all(isinstance(param, DTensor) for param in block.parameters())
    one = _bottom_up(theirs, model())
    for each in (made, one):
        each(tokens(0, 0, rank)).mean().backward()
    found, whole_ones = ([p.grad.full_tensor() for p in m.parameters()] for m in (made, one))
    assert all(map(torch.equal, found, (grad / 4 for grad in whole_ones)))
    assert type(ours(nn.Sequential(nn.Linear(2, 2), nn.GELU()))[:1]) is nn.Sequential
    register_fsdp_forward_method(made, "features")
    share_comm_ctx([made, block])
    made.zero_grad()
    hook = made.head.register_forward_pre_hook(lambda *_: {}["a pass that raises"])
    with pytest.raises(KeyError):
        made(tokens(0, 0, rank))
    hook.remove()
    found, expected = (one.features(tokens(0, 0, rank)) for one in (made, model()))
    assert torch.equal(found, expected)
    found.mean().backward()
    assert all(param.grad is not None for param in made.parameters())
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
        lambda made: (
            ours(made.blocks[0], mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16)),
            list(ours(made).parameters()),
        ),
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
    "factor of a part": (
        "set_gradient_divide_factor was called for modules in it",
        lambda made: (ours(made.blocks[0]).set_gradient_divide_factor(2.0), ours(made)),
    ),
    "factor": (
        "sharded already", lambda made: _read(ours(made)).set_gradient_divide_factor(2.0),
    ),
}  # fmt: skip


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


@pytest.mark.parametrize("world", (1, 2))
@on_ranks()
def test_a_parameter_that_no_loss_reads_has_no_gradient(rank: int, world: int) -> None:
    _read_by_one_rank(rank, world)


def test_a_list_with_a_forward_is_a_module(one_rank: None) -> None:
    x = torch.ones(2, 2)
    made = Layers([nn.Linear(2, 2)])
    assert torch.equal(made(x), ours(made)(x))


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_does_and_this_does_not_is_an_early_error(one_rank: None, name: str) -> None:
    said, use = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError), match=said):
        use(model())


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
