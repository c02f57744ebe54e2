"""Times training steps of `fully_shard`, of `fully_shard_model`, and of torch's `fully_shard`, in
turns in one process.

    torchrun --nproc-per-node 2 scripts/fsdp2_times.py --shape 8b --layers 12 --rounds 2

The model is Llama-shaped. Parameters are float32, compute is in bf16, gradients are reduced in
float32 and clipped, and the optimizer is `AdamW(fused=True)`. "fp32_sums" sends gradients in bf16
and sums them in float32. "floor" is forward and backward of the model in bf16 alone, on one rank.
Before the steps it prints the times of gathers and reductions of one layer: in one piece, and in a
piece for each parameter. With `--parts` it profiles one more step of each side, and prints what its
kernels do. Without a GPU (`--shape tiny`) times tell nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lib.step_parts import NORM, OPTIMIZER, as_text, measured, named
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from megatron_fsdp_adapter import MixedPrecisionPolicy as EnginePolicy
from megatron_fsdp_adapter import fully_shard, fully_shard_model

VOCAB = 32_000
WARM_UP = 3
"""Steps that are not counted."""


@dataclass(frozen=True)
class Shape:
    """The width of the model, and the tokens of a sample."""

    hidden: int
    inner: int
    heads: int
    groups: int
    tokens: int

    @property
    def numels(self) -> list[int]:
        """Elements of each parameter of a layer."""
        keys = self.hidden // self.heads * self.groups
        attention = [self.hidden**2, self.hidden * keys, self.hidden * keys, self.hidden**2]
        return [*attention, *[self.hidden * self.inner] * 3, self.hidden, self.hidden]


SHAPES = {
    "8b": Shape(4096, 14336, 32, 8, 4096),
    "1.5b": Shape(1536, 8960, 12, 2, 4096),
    "tiny": Shape(64, 128, 4, 2, 16),
}


class Layer(nn.Module):
    """A layer of Llama, without positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden
        keys = hidden // shape.heads * shape.groups
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, keys, bias=False)
        self.value = nn.Linear(hidden, keys, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, shape.inner, bias=False)
        self.up = nn.Linear(hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, hidden, bias=False)
        self.before_attention = nn.RMSNorm(hidden)
        self.before_mlp = nn.RMSNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before_attention(x)
        heads = []
        for linear in (self.query, self.key, self.value):
            heads.append(linear(y).unflatten(-1, (-1, x.size(-1) // self.shape.heads)))
        query, key, value = (part.transpose(1, 2) for part in heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Layers between an embedding and an output layer; its output is the loss."""

    def __init__(self, shape: Shape, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, VOCAB, bias=False)
        for param in self.parameters():
            if param.ndim == 2:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def by_calls(
    shard: Any, net: Any, mesh: DeviceMesh, reduces: torch.dtype = torch.float32, **options: Any
) -> Any:
    """`net`, sharded by a call for each layer and one for the model."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduces)
    for layer in net.layers:
        shard(layer, mesh=mesh, mp_policy=policy, **options)
    return shard(net, mesh=mesh, mp_policy=policy, **options)


def with_fp32_sums(net: Any, mesh: DeviceMesh) -> Any:
    """`net`, sharded by calls of `fully_shard` that send gradients in bf16."""
    options = {"reduce_scatter_with_fp32_accumulation": True}
    return by_calls(fully_shard, net, mesh, torch.bfloat16, **options)


def packed(net: Any, mesh: DeviceMesh) -> Any:
    """`net`, sharded by `fully_shard_model`, whose rows are packed."""
    policy = EnginePolicy(
        main_params_dtype=None,
        main_grads_dtype=torch.float32,
        grad_comm_dtype=torch.float32,
        compute_dtype=torch.bfloat16,
    )
    return fully_shard_model(net, mesh, [Layer], mixed_precision_policy=policy)


SIDES: dict[str, Callable[[Any, DeviceMesh], Any]] = {
    "torch": lambda net, mesh: by_calls(torchs_fully_shard, net, mesh),
    "fully_shard_model": packed,
    "fully_shard": lambda net, mesh: by_calls(fully_shard, net, mesh),
    "fp32_sums": with_fp32_sums,
    "floor": lambda net, mesh: net.bfloat16(),
}


def gathered(full: torch.Tensor, other: torch.Tensor, part: int, group: Any) -> None:
    """Gathers the first `part` elements of `other` into `full`."""
    dist.all_gather_into_tensor(full, other[:part], group=group)


def reduced(full: torch.Tensor, other: torch.Tensor, part: int, group: Any) -> None:
    """Reduces `full` into the first `part` elements of `other`."""
    dist.reduce_scatter_tensor(other[:part], full, group=group)


def exchanged(full: torch.Tensor, other: torch.Tensor, part: int, group: Any) -> None:
    """Sends each rank its part of `full`, and receives theirs into `other`."""
    dist.all_to_all_single(other, full, group=group)


class Bench:
    """One rank's measurements."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options  # of the command line
        self.shape = SHAPES[options.shape]  # of the model
        self.has_gpu = torch.cuda.is_available()  # else the CPU is used
        local = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", local) if self.has_gpu else torch.device("cpu")
        if self.has_gpu:
            torch.cuda.set_device(self.device)
        self.mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))  # all ranks
        self.is_first = dist.get_rank() == 0  # whether it prints

    def say(self, text: str) -> None:
        if self.is_first:
            print(text, flush=True)

    def wait(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()

    def tokens(self, generator: torch.Generator) -> torch.Tensor:
        size = (1, self.shape.tokens + 1)
        return torch.randint(0, VOCAB, size, generator=generator).to(self.device)

    def collectives(self) -> None:
        """Prints times of gathers, reductions and exchanges of a layer, in one piece and in
        several. Exchanges of several pieces are launched one by one, or together."""
        whole = sum(self.shape.numels)
        for pieces in ([whole], self.shape.numels):
            gather = self._timed(torch.bfloat16, pieces, gathered)
            reduce = self._timed(torch.float32, pieces, reduced)
            single = self._timed(torch.bfloat16, pieces, exchanged, together=False)
            joined = self._timed(torch.bfloat16, pieces, exchanged)
            self.say(
                f"{len(pieces)} pieces: gather {gather:.3f} ms, reduce {reduce:.3f} ms, "
                f"exchange {single:.3f} ms, together {joined:.3f} ms"
            )

    def _timed(
        self,
        dtype: torch.dtype,
        pieces: Sequence[int],
        launch_one: Callable[..., Any],
        together: bool = True,
    ) -> float:
        group = self.mesh.get_group()
        ranks = self.mesh.size()
        full = torch.empty(sum(pieces), dtype=dtype, device=self.device)
        other = torch.empty_like(full)

        def launch_each() -> None:
            begin = 0
            for numel in pieces:
                end = begin + numel
                launch_one(full[begin:end], other[begin:end], numel // ranks, group)
                begin = end

        def launch() -> None:
            if not together:
                launch_each()
                return
            with dist._coalescing_manager(group, device=self.device, async_ops=True) as work:
                launch_each()
            work.wait()

        for _ in range(WARM_UP):
            launch()
        self.wait()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(20):
            launch()
        self.wait()
        return (time.perf_counter() - begin) * 1000 / 20

    def train(self, side: str) -> None:
        """Trains one side, and prints its times, memory and losses."""
        torch.manual_seed(0)
        with self.device:
            net: Any = Model(self.shape, self.options.layers)
        if self.options.compile:
            for layer in net.layers:
                layer.compile()
        net = SIDES[side](net, self.mesh)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        if self.has_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = []
        losses = []

        def step() -> None:
            for tokens in batches:
                loss = net(tokens)
                (loss / len(batches)).backward()
            if side != "floor":
                with named(NORM):
                    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                with named(OPTIMIZER):
                    optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        for _ in range(self.options.steps + WARM_UP):
            batches = [self.tokens(generator) for _ in range(self.options.microbatches)]
            self.wait()
            dist.barrier()
            begin = time.perf_counter()
            step()
            self.wait()
            times.append(1000 * (time.perf_counter() - begin))
        counted = times[WARM_UP:]
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.has_gpu else 0.0
        self.say(
            f"{side:18} {statistics.median(counted):8.1f} ({min(counted):.1f}-{max(counted):.1f}) "
            f"ms, {peak:.2f} GiB, losses {losses[0].item():.5f} to {losses[-1].item():.5f}"
        )
        if self.options.parts:
            dist.barrier()
            self.say(f"  ms of kernels: {as_text(measured(step))}")

    def forget(self) -> None:
        """Frees what the last side has left."""
        gc.collect()
        torch._dynamo.reset()
        if self.has_gpu:
            torch.cuda.empty_cache()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="default %(default)s")
    for name, number in (("layers", 12), ("microbatches", 1), ("steps", 8), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=number, help="default %(default)s")
    parser.add_argument("--compile", action="store_true", help="compile each layer")
    parser.add_argument("--parts", action="store_true", help="profile a step of each side")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=list(SIDES), help="default: all"
    )
    options = parser.parse_args(arguments)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    bench = Bench(options)
    bench.say(f"torch {torch.__version__}, {vars(options)}")
    if bench.has_gpu:
        bench.collectives()
    for _ in range(options.rounds):
        for side in options.sides:
            bench.train(side)
            bench.forget()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
