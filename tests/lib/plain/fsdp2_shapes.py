"""A plain model, and the ways in which FSDP2 is used on it: each of `CASES` runs with torch's
`fully_shard` and with ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp import fully_shard as theirs

from megatron_fsdp_adapter import MixedPrecisionPolicy as OurPolicy
from megatron_fsdp_adapter import fully_shard as ours
from megatron_fsdp_adapter import fully_shard_model
from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.lib.plain.plain import Block, Net, net

BF16 = torch.bfloat16
FP32 = torch.float32


class Features(Net):
    """A Net with more methods that compute its outputs, in place of its forward."""

    passes = 0

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embedding(tokens))

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens)).square() * self.temperature

    def by_methods(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of blocks not forward is called, but another method."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block.encode(x)
        return self.head(x).square() * self.temperature

    def at_times(self, tokens: torch.Tensor) -> torch.Tensor:
        """Reads a block, and a parameter of the root, in every third pass."""
        self.passes += 1
        reads = self.passes % 3 == 2
        x = self.embedding(tokens)
        for block in self.blocks if reads else self.blocks[::2]:
            x = block(x)
        scale = self.temperature if reads else self.temperature.detach()
        return self.head(x).square().float() * scale.float()

    def with_head(self, tokens: torch.Tensor) -> torch.Tensor:
        """A loss that reads the weight of the output layer, which is not called."""
        logits = self.hidden(tokens) @ self.head.weight.t()
        return logits.square().mean() * self.temperature.mean()


def model(dtype: torch.dtype = FP32) -> Any:
    made = net(dtype)
    made.__class__ = Features
    made.temperature = nn.Parameter(torch.tensor([1.5], dtype=dtype))  # torch's takes no scalars
    return made


Shards = Callable[..., Any]
POLICY = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
MIXED = {"mp_policy": POLICY}
FP32_OUT = {"mp_policy": replace(POLICY, output_dtype=FP32)}
NORM = {"mp_policy": replace(POLICY, param_dtype=None, output_dtype=BF16)}
"""Norms compute in float32, and give bfloat16."""
STAYS = {"reshard_after_forward": False}
BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def sharded(
    shard: Shards,
    made: Any,
    units: Iterable[Any] = BLOCKS,
    forward: str = "forward",
    root: Mapping[str, Any] = MappingProxyType({}),
    frozen: str = "",
    **options: Any,
) -> Any:
    """Sharded bottom up. A unit is the name of a module, or a list of names, alone or with options
    of its own; those of the root are beside."""
    made.forward = getattr(made, forward)
    if frozen:
        made.get_submodule(frozen).requires_grad_(False)
    for unit in units:
        names, own = unit if isinstance(unit, tuple) else (unit, {})
        is_one = isinstance(names, str)
        modules = [made.get_submodule(name) for name in ([names] if is_one else names)]
        shard(modules[0] if is_one else modules, **options, **own)
    return shard(made, **options, **root)


def checkpointed(shard: Shards, made: Any, **options: Any) -> Any:
    """Blocks, of which one has a unit inside, and the head, which is of the root."""
    for module in (*made.blocks, made.head):
        checkpoint(module)
    return sharded(shard, made, ("blocks.0.up", *BLOCKS), **options)


def by_methods(shard: Shards, made: Any, **options: Any) -> Any:
    sharded(shard, made, forward="by_methods", **options)
    for block in made.blocks:
        block.encode = block.forward
        register_fsdp_forward_method(block, "encode")
    return made


def inside_of_another(shard: Shards, made: Any, **options: Any) -> Any:
    """Inside of what is not sharded itself, as a LightningModule."""
    around = nn.Sequential(sharded(shard, made, **options))
    around.set_requires_gradient_sync = made.set_requires_gradient_sync
    return around


def with_ignored(shard: Shards, made: Any, **options: Any) -> Any:
    """The rest is trained by gradients that the loop sums."""
    ignored = set(made.head.parameters())
    return sharded(shard, made, frozen="head", ignored_params=ignored, **options)


def with_spare_layer(shard: Shards, made: Any, **options: Any) -> Any:
    """With a layer that no pass reads, too."""
    made.spare = nn.Linear(3, 3)
    return sharded(shard, made, forward="at_times", **options)


def fused(shard: Shards, made: Any, **options: Any) -> Any:
    """The layer that is not called is in a unit with a module that is."""
    return sharded(shard, made, [(["blocks.2", "head"], STAYS)], "with_head", **options)


def tied_in_a_list(shard: Shards, made: Any, **options: Any) -> Any:
    """The embedding reads a weight of the output layer, and is in one unit with it, as accelerate
    shards tied models."""
    made.embedding.weight = made.head.weight
    return sharded(shard, made, [*BLOCKS, (["embedding", "head"], STAYS)], **options)


def hooked(shard: Shards, made: Any, **options: Any) -> Any:
    """What reductions give is changed, of one block in a stream of its own."""
    sharded(shard, made, **options)
    made.set_all_reduce_hook(lambda output: output.mul_(2.0))
    made.blocks[0].set_all_reduce_hook(
        lambda output: output.mul_(0.5), stream=None if options else torch.cpu.Stream()
    )
    return made


def compiled(shard: Shards, made: Any, before: bool, **options: Any) -> Any:
    """Layers in one graph each, under ours: compiled before as torchtitan does, or by a function
    after."""
    for number, block in enumerate(made.blocks):
        if shard is ours and before:
            block.compile(backend="aot_eager", fullgraph=True)
        shard(block, **options)
        if shard is ours and not before:
            made.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=True)
    return shard(made, **options)


def in_host_memory(shard: Shards, made: Any, shape: Any = sharded, **options: Any) -> Any:
    """Main weights and state, under ours."""
    policy = {"offload_policy": CPUOffloadPolicy()} if shard is ours else {}
    return shape(shard, made, **policy, **options)


def wrapped_whole(shard: Shards, made: Any, strategy: str, **options: Any) -> Any:
    """By `fully_shard_model` in the place of ours, with a weight that is not trained and is not
    what bfloat16 can hold."""
    made.blocks[0].norm.weight.requires_grad_(False).add_(1e-4)
    if shard is theirs:
        return sharded(shard, made, **options)
    policy = OurPolicy(main_params_dtype=None, compute_dtype=BF16)
    wrapped: Any = fully_shard_model(
        made, None, [Block], mixed_precision_policy=policy, data_parallel_sharding_strategy=strategy
    )
    wrapped.set_requires_gradient_sync = wrapped.engine.microbatch
    return wrapped


PARTS = {
    "units": ("embedding", "blocks.0.up", "blocks.0", "blocks.1.up", "blocks.1", "blocks.2.up",
              ("blocks.2", STAYS), (["head"], STAYS)),
}  # fmt: skip
"""Units inside of units, lists of modules, and weights that stay after forward."""
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "bottom up": (sharded, {}),
    "parts": (sharded, PARTS),
    "one unit": (sharded, {"units": (), "reshard_after_forward": True}),
    "checkpointed": (checkpointed, {}),
    "by methods": (by_methods, {}),
    "around": (inside_of_another, {}),
    "frozen": (sharded, {"frozen": "blocks.0"}),
    "ignored": (with_ignored, {}),
    "read at times": (with_spare_layer, {}),
    "fp32 in bf16": (sharded, {**PARTS, **MIXED}),
    "output": (
        sharded,
        {"forward": "features", "units": [(name, MIXED) for name in BLOCKS], "root": FP32_OUT},
    ),
    "fused": (fused, {}),
    "fused in a list": (
        sharded,
        {"units": ("blocks.0", ["head", "blocks.2"]), "forward": "with_head"},
    ),
    "tied in a list": (tied_in_a_list, {}),
    "dtypes of modules": (
        sharded,
        {
            "units": [part for name in BLOCKS for part in ((f"{name}.norm", NORM), (name, MIXED))],
            "root": MIXED,
        },
    ),
    "hooked": (hooked, {}),
    "compiled before": (compiled, {"before": True, **MIXED}),
    "compiled after": (compiled, {"before": False, **MIXED}),
    "in host memory": (in_host_memory, MIXED),
    "in host memory, read at times": (in_host_memory, {"shape": with_spare_layer, **MIXED}),
    **{f"wrapped, {name}": (wrapped_whole, {"strategy": name, **MIXED}) for name in STRATEGIES},
}
