"""What `estimate` says of Llama-3 8B against what two GPUs measure: FP8 weights beside FP8 products
of bf16 weights, with full recompute and without. And starts on the meta device, one of a model of
20B parameters: with Transformer Engine's layers, whose `reset_parameters` draw under Megatron's
tracker, and the device's own peak; two GPUs of 60 GiB or more.

    python -m pytest -q -rA tests/gpu/test_gpu_estimate.py
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.plan.memory import (
    BACKWARD_TO_STEP,
    LIFE,
    OPTIMIZER_STATE,
    UNIT_IN_USE,
    Precision,
    unit_bytes,
)
from megatron_fsdp_adapter.tools.cli import estimate
from tests.lib.gpt.gpt import Case, ddp_config, init_megatron
from tests.lib.gpu.gpu_ranks import Check, Outcomes, expecting

CHECKS = ("plan/memory.py", "tools/cli/estimate.py", "build/materialize.py")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

GIB = 2**30
LAYERS = int(os.environ.get("ESTIMATE_LAYERS", "32"))
STEPS = 3
STRATEGY = "optim_grads_params"
RECOMPUTE = (
    "--recompute-granularity=full",
    "--recompute-method=uniform",
    "--recompute-num-layers=1",
)
BESIDE = 64 * 2**20
"""Bytes beside the formula between steps: batches, rotary angles, scales of blocks, workspaces."""


def estimated(rank: int, world: int, words: list[str], precision: str, again: bool) -> Any:
    """Of ZeRO-3. `words`: options of the model that both commands have."""
    recipe = precision.partition("_")[2]
    if recipe:
        more = [f"--fp8-recipe={recipe}", "--fp8-format=hybrid"]
    else:
        more = []
    more += ["--fp8-param-gather"] if precision.startswith("fp8w") else []
    more += ["--recompute-granularity=full"] if again else []
    run = [f"--data-parallel-size={world}", f"--rank={rank}", "--json", "--params-dtype=bf16"]
    given = [*words, *more, *run, f"--data-parallel-sharding-strategy={STRATEGY}"]
    report = estimate.run(estimate.make_parser().parse_args(given))
    return report["strategies"][STRATEGY]


def measured(
    rank: int, world: int, words: list[str], precision: str, again: bool
) -> tuple[int, int | None]:
    """Bytes between two steps, gradients forgotten and nothing gathered ahead, and at the peak of
    three steps (None on a CPU)."""
    import benchmark
    from lib.bench_measure import free_memory, live_bytes, make_batches
    from lib.bench_subjects import Subject
    from lib.bench_wrappers import build, forget_fp8
    from lib.distributed import Place

    device = init_megatron()
    place = Place(rank, world, rank, world, device)
    arguments = [*words, *(RECOMPUTE if again else ())]
    options = benchmark.parse_arguments(arguments).options
    pool = make_batches(options, 1, place)

    def trained(layers: int) -> Any:
        one = benchmark.dataclasses.replace(options, num_layers=layers)
        runner = build(Subject("ours", STRATEGY, precision), one, place)
        for step in range(STEPS):
            runner.step(pool[step % len(pool)])
        return runner

    forget_fp8()
    trained(1).close()  # libraries take their workspaces
    forget_fp8()
    before = free_memory(device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    runner = trained(options.num_layers)
    peak = None
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(device) - before
    runner.zero()
    runner.model.engine.gather.reshard_all()
    gc.collect()
    held = live_bytes(device) - before
    runner.close()
    return held, peak


def compare(rank: int, world: int, words: list[str], precision: str, again: bool) -> str:
    """What is held between steps is what is estimated. What is beside the estimate at the peak,
    activations less kinds that are not there at once, is printed."""
    expected = estimated(rank, world, words, precision, again)
    held, peak = measured(rank, world, words, precision, again)
    wanted = expected["between_steps"]
    told = f"{precision}, recompute {again}: held {held / GIB:.3f} GiB, estimated "
    told += f"{wanted / GIB:.3f}"
    assert wanted <= held + BESIDE, told
    assert held <= 1.005 * wanted + BESIDE, told
    if peak is None:
        return told
    assert peak >= wanted, told
    parts = ", ".join(f"{kind} {count / GIB:.2f}" for kind, count in expected["bytes"].items())
    return f"{told}; peak {peak / GIB:.2f} GiB, estimated {expected['peak'] / GIB:.2f} ({parts})"


LLAMA = [f"--config={ROOT / 'configs' / 'llama3-8b.yaml'}", f"--num-layers={LAYERS}"]
DEVICE_CHECKS = {
    f"{precision}, {'full recompute' if again else 'no recompute'}": Check(
        compare, (LLAMA, precision, again)
    )
    for again in (False, True)
    for precision in ("fp8w_tensorwise", "fp8_tensorwise", "fp8w_blockwise")
}


# Starts on the meta device.

NEOX_LAYERS = 44
HIDDEN = 6144
HEADS = 64
VOCAB = 50432
"""The shape of GPT-NeoX-20B."""
ROOM = 60 * 2**30
SLACK = 512 * 2**20
"""Bytes beside weights: NCCL's and cuBLAS's buffers come from elsewhere; this is fragmentation."""
Spread = dict[str, tuple[float, float]]


def build(layers: int, meta: bool, **options: Any) -> torch.nn.Module:
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=4 * HIDDEN,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        init_model_with_meta_device=meta,
    )
    for name, value in options.items():
        setattr(config, name, value)
    with torch.device("meta") if meta else contextlib.nullcontext():
        model = GPTModel(
            config,
            get_gpt_layer_with_transformer_engine_spec(),
            vocab_size=VOCAB,
            max_sequence_length=2048,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
    if not meta:
        model.cuda()
    return Float16Module(config, model)


def _wrap(model: Any) -> FullyShardedDataParallel:
    config = ddp_config(Case(bf16=True), "optim_grads_params")
    return FullyShardedDataParallel(model.config, config, model)


def allowed(engine: FsdpEngine) -> tuple[int, int]:
    """Bytes of the shards, and of the largest unit with everything that it has while in use."""
    policy = engine.config.policy
    precision = Precision(policy.main_params_dtype, policy.grads_dtype, policy.comm_dtype)
    shards = 0
    largest = 0
    for unit in engine.units:
        held = unit_bytes(
            [group.shards.held.layout for group in unit.groups],
            engine.config.strategy,
            precision,
            0,
        )
        passing = [n for k, n in held.items() if LIFE[k] in (UNIT_IN_USE, BACKWARD_TO_STEP)]
        kept = sum(held.values()) - sum(passing) - held.get(OPTIMIZER_STATE, 0)
        shards = shards + kept
        largest = max(largest, sum(passing))
    return shards, largest


def peak_of_a_20b_start(rank: int, world: int) -> str:
    """The shards and one unit."""
    if torch.cuda.get_device_properties(0).total_memory < ROOM:
        return "not run: it needs GPUs of 60 GiB or more"
    init_megatron()
    torch.cuda.reset_peak_memory_stats()
    model = build(NEOX_LAYERS, meta=True)
    # Core makes the vocabulary's weights on the GPU, whatever the default device is.
    outright = torch.cuda.memory_allocated()
    numel = sum(param.numel() for param in model.parameters())
    wrapper = _wrap(model)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    shards, unit = allowed(wrapper.engine)
    loss = _untrained_loss(wrapper)
    text = f"{numel} parameters, peak {peak}, shards {shards}, unit {unit}, outright {outright}"
    assert numel > 20e9, text
    assert peak <= shards + unit + outright + SLACK, text
    return f"{text}, loss {loss:.4g}"


def _untrained_loss(wrapper: Any) -> float:
    """About log(50432), which is 10.8."""
    tokens = torch.arange(128, device="cuda")[None]
    with torch.no_grad():
        loss = wrapper(tokens, tokens, None, labels=tokens).float().mean().item()
    assert 10 < loss < 13, loss
    return float(loss)


def _spread(wrapper: Any) -> Spread:
    """Mean and deviation of each sharded weight over all ranks. Sums travel, not weights: to bring
    1.5B parameters together on the host of each rank takes minutes."""
    out = {}
    for name, weight in wrapper.named_parameters():
        mine = weight.to_local().detach().double()
        sums = torch.stack((mine.sum(), mine.square().sum()))
        torch.distributed.all_reduce(sums)
        mean, square = (sums / weight.numel()).tolist()
        out[name] = (mean, max(square - mean * mean, 0.0) ** 0.5)
    return out


def _same_spread(ours: Spread, theirs: Spread) -> None:
    assert ours.keys() == theirs.keys()
    for name, (mean, deviation) in theirs.items():
        assert abs(ours[name][0] - mean) <= 1e-3, (name, ours[name], mean)
        bound = 0.02 * deviation + 1e-6
        assert abs(ours[name][1] - deviation) <= bound, (name, ours[name], deviation)


def same_start(rank: int, world: int) -> None:
    """What core makes outright draws its numbers before the layers do: their distribution is that
    of a start without the meta device, their numbers are not."""
    init_megatron()
    _same_spread(*(_spread(_wrap(build(2, meta))) for meta in (True, False)))


def same_quantized_start(rank: int, world: int, recipe: str) -> None:
    """Mean and deviation of the main weights are those of a start without the meta device, whose
    main weights are values from before quantization; the loss is that of an untrained model."""
    init_megatron()
    starts = []
    for meta in (True, False):
        wrapper = _wrap(build(2, meta, fp8="hybrid", fp8_recipe=recipe, fp8_param=True))
        quantized = [pair for pair in wrapper.engine.pairs if pair.group.key.quantized]
        assert len(quantized) == 8, "four matrices a layer"
        starts.append(_spread(wrapper))
        _untrained_loss(wrapper)
    _same_spread(*starts)


STARTS = {
    "peak of a 20B start": Check(peak_of_a_20b_start),  # first, in processes that hold nothing
    "same distributions": Check(same_start),
    **{
        f"quantized, {recipe}": Check(same_quantized_start, (recipe,))
        for recipe in ("delayed", "tensorwise", "blockwise")
    },
}
OUTCOMES = Outcomes(DEVICE_CHECKS, timeout_s=500.0, needs=("te",))
START_OUTCOMES = Outcomes(STARTS, timeout_s=500.0, needs=("te",))

test_what_is_held_is_what_is_estimated = expecting(OUTCOMES)
test_starts_on_the_meta_device = expecting(START_OUTCOMES)
