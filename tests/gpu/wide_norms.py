"""Gradient norms of the first steps at a real width, ours and stock DDP's, under FP8 compute.

    torchrun --nproc_per_node 2 -m tests.gpu.wide_norms [--layers 24] [--recipes tensorwise,delayed]

Small shapes hid that buckets were added to which nobody had cleared: this is Llama-3 8B's width.
Prints a line a run; exit status 1 where a norm is more than `BOUND` off.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from tests.distributed.gpt import Case, batches, build_trainer, give_up, init_megatron, train_step
from tests.gpu.test_gpu_fp8 import fp8_layers

CASE = Case(
    num_layers=24, hidden=4096, heads=32, ffn=14336, vocab=128256, seq=4096, batch=1,
    microbatches=1, swiglu=True, bias=False, bf16=True, lr=1e-5, weight_decay=0.0, fused=True,
)  # fmt: skip
STEPS, BOUND = 5, 1e-2

VARIANTS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "slots": {"fsdp_double_buffer": True},
    "copy engines": {
        "fsdp_copy_engine_all_gather": True, "fsdp_copy_engine_reduce_scatter": True
    },
}  # fmt: skip


def norms(case: Case, strategy: str | None, recipe: str, ddp: Mapping[str, Any]) -> list[float]:
    device = torch.device("cuda", torch.cuda.current_device())
    with fp8_layers(recipe):
        trainer = build_trainer(case, strategy, device, ddp=ddp)
    data = batches(case, 0, dist.get_rank(), device)
    found = [train_step(trainer, data)[1] for _ in range(STEPS)]
    if strategy is None:
        give_up(trainer.wrapper)
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=CASE.num_layers)
    parser.add_argument("--recipes", default="tensorwise,delayed")
    parser.add_argument("--fusion", choices=("on", "off"), default="on", help="of both wrappers")
    parser.add_argument("--microbatches", default="1,3")
    parser.add_argument("--variants", default=";".join(VARIANTS))
    parser.add_argument("--strategies", default="optim_grads_params")
    parser.add_argument("--seconds", type=float, default=540.0, help="start no run after that")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=120))
    init_megatron()
    patches.install(FUSED_WGRAD)
    started, wrong = time.monotonic(), 0
    for count in (int(text) for text in given.microbatches.split(",")):
        for recipe in given.recipes.split(","):
            case = CASE.but(
                num_layers=given.layers, microbatches=count, fused=given.fusion == "on"
            )
            reference: list[float] = []
            ours: list[tuple[str, str | None, dict[str, Any]]] = [
                (f"{name}, {strategy}", strategy, VARIANTS[name])
                for strategy in given.strategies.split(",")
                for name in given.variants.split(";")
            ]
            for label, strategy, ddp in [("DDP", None, {}), *ours]:
                late = torch.tensor(float(time.monotonic() - started > given.seconds)).cuda()
                dist.all_reduce(late)
                if late.item():
                    if dist.get_rank() == 0:
                        print(f"{recipe}, {count} microbatches, {label}: not run", flush=True)
                    continue
                found = norms(case, strategy, recipe, ddp)
                reference = reference or found
                off = max(abs(a / b - 1) for a, b in zip(found, reference, strict=True))
                wrong += not off <= BOUND
                if dist.get_rank() == 0:
                    shown = " ".join(f"{norm:.4g}" for norm in found)
                    print(
                        f"{recipe:<10} {count} microbatches  fusion {given.fusion:<3} "
                        f"{label:<40} {shown:<44} "
                        f"off by {100 * off:.2f}%  {time.monotonic() - started:.0f} s",
                        flush=True,
                    )
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
