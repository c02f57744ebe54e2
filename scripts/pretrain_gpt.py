"""Trains a GPT on megatron-core, with this package's FullyShardedDataParallel or with stock DDP.

    python scripts/pretrain_gpt.py --config configs/cpu-tiny.yaml --mock-data --eval-iters 0
    torchrun --nproc-per-node 2 scripts/pretrain_gpt.py --config FILE --use-megatron-fsdp

Flags have Megatron's names; ``--help`` lists them. Runs on GPUs with NCCL and on a CPU with gloo,
there in CPU mode (`megatron_fsdp_adapter.launch.cpu_mode`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

from megatron_fsdp_adapter.core.problems import RefusedByAllRanks
from megatron_fsdp_adapter.core.runtime.launcher import is_first_rank, refuse

if not is_first_rank():
    warnings.simplefilter("ignore")  # once is enough

from lib.check import this_machine, validated
from lib.options import Options, parse


def run(options: Options, lines: Sequence[str]) -> None:
    """Trains by the options. `lines` are printed first, by the first rank."""
    # Imported here so that bad options fail at once: megatron-core takes seconds to import.
    from lib import checkpoints, distributed, loop, model

    if options.deterministic:
        distributed.use_deterministic_kernels()
    place = distributed.start(options)
    trainee = model.build(options, place)
    if place.first:
        _print_summary(options, place, trainee, lines)
    progress = checkpoints.Progress()
    if not checkpoints.begins(options):
        progress = checkpoints.load(trainee, options)
        if place.first:
            print(f"resumed from {options.load} after iteration {progress.iteration}", flush=True)
    elif options.load is not None and place.first:
        print(f"{options.load} has no checkpoint yet: the run starts at its beginning", flush=True)
    loop.train(trainee, options, place, progress)
    # Not in a `finally`: after an error on one rank, leaving the groups would wait for the others.
    distributed.stop()


def _print_summary(options: Options, place: Any, trainee: Any, lines: Sequence[str]) -> None:
    """Prints the lines, then one about the run: parameters, wrapper, ranks, layers, batch."""
    if options.use_megatron_fsdp:
        wrapper = f"Megatron FSDP, {options.data_parallel_sharding_strategy}"
    elif options.use_distributed_optimizer:
        wrapper = "stock DDP with distributed optimizer"
    else:
        wrapper = "stock DDP"
    if place.device.type == "cpu":
        lines = ["CPU mode is on: megatron-core's calls of CUDA run on the CPU", *lines]
    print(
        *lines,
        f"{trainee.parameters:,} parameters per tensor-parallel rank | {wrapper} | "
        f"{place.world_size} x {place.device.type} over {options.distributed_backend} | "
        f"{options.transformer_impl} layers | global batch {options.global_batch_size} x "
        f"{options.seq_length} tokens",
        sep="\n",
        flush=True,
    )


def main(arguments: Sequence[str]) -> int:
    """Trains. Returns 0. Ends with status 2 for invalid options, which the first rank prints."""
    try:
        options, lines = validated(parse(arguments), this_machine())
    except (ValueError, FileNotFoundError) as error:
        refuse(f"pretrain_gpt.py: {error}")
    try:
        run(options, lines)
    except RefusedByAllRanks as error:
        refuse(f"pretrain_gpt.py: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
