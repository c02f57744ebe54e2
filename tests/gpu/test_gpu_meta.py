"""A model of 20B parameters starts on the meta device on two GPUs: with Transformer Engine's
layers, whose `reset_parameters` draw under Megatron's tracker, and the device's own peak.

    python -m pytest -q -s tests/gpu/test_gpu_meta.py        # two GPUs of 60 GiB or more
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.launch import run_ranks

LAYERS, HIDDEN, HEADS, VOCAB = 44, 6144, 64, 50432
"""The shape of GPT-NeoX-20B."""
ROOM = 60 * 2**30
SLACK = 512 * 2**20
"""Bytes beside weights: NCCL's and cuBLAS's buffers come from elsewhere; this is fragmentation."""


def build(layers: int, meta: bool, **options):
    import contextlib

    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=HEADS,
        ffn_hidden_size=4 * HIDDEN, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, init_model_with_meta_device=meta,
    )  # fmt: skip
    for name, value in options.items():
        setattr(config, name, value)
    with torch.device("meta") if meta else contextlib.nullcontext():
        model = GPTModel(
            config, get_gpt_layer_with_transformer_engine_spec(), vocab_size=VOCAB,
            max_sequence_length=2048, share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )  # fmt: skip
    if not meta:
        model.cuda()
    return Float16Module(config, model)


def _wrap(model):
    from megatron_fsdp_adapter import FullyShardedDataParallel
    from tests.distributed.gpt import Case, ddp_config

    config = ddp_config(Case(bf16=True), "optim_grads_params")
    return FullyShardedDataParallel(model.config, config, model)


def _start(rank: int, world: int) -> dict[str, float]:
    from tests.distributed.gpt import init_megatron
    from tests.distributed.test_meta_peak import allowed

    init_megatron()
    torch.cuda.reset_peak_memory_stats()
    model = build(LAYERS, meta=True)
    # Core makes the vocabulary's weights on the GPU, whatever the default device is.
    outright = torch.cuda.memory_allocated()
    numel = sum(param.numel() for param in model.parameters())
    wrapper = _wrap(model)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    shards, unit = allowed(wrapper.engine)
    tokens = torch.arange(128, device="cuda")[None]
    with torch.no_grad():
        losses = wrapper(tokens, tokens, None, labels=tokens)
    return {
        "parameters": numel, "peak": peak, "shards": shards, "unit": unit, "outright": outright,
        "loss": losses.float().mean().item(),
    }  # fmt: skip


def test_peak_of_a_20b_start_is_the_shards_and_one_unit() -> None:
    pytest.importorskip("transformer_engine")
    if torch.cuda.get_device_properties(0).total_memory < ROOM:
        pytest.skip("needs two GPUs of 60 GiB or more")
    for rank, one in enumerate(run_ranks(_start, 2, timeout=500, backend="nccl")):
        text = ", ".join(f"{name} {value:.4g}" for name, value in one.items())
        print(f"rank {rank}: {text}")
        assert one["parameters"] > 20e9, text
        assert one["peak"] <= one["shards"] + one["unit"] + one["outright"] + SLACK, text
        # As an untrained model should: log(50432) is 10.8.
        assert 10 < one["loss"] < 13, text


def _spread(wrapper) -> dict[str, tuple[float, float]]:
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


def _same_spread(ours: dict[str, tuple[float, float]], theirs) -> None:
    assert ours.keys() == theirs.keys()
    for name, (mean, deviation) in theirs.items():
        assert abs(ours[name][0] - mean) <= 1e-3, (name, ours[name], mean)
        bound = 0.02 * deviation + 1e-6
        assert abs(ours[name][1] - deviation) <= bound, (name, ours[name], deviation)


def _same_start(rank: int, world: int) -> None:
    """What core makes outright draws its numbers before the layers do: their distribution is that
    of a start without the meta device, their numbers are not."""
    from tests.distributed.gpt import init_megatron

    init_megatron()
    _same_spread(*(_spread(_wrap(build(2, meta))) for meta in (True, False)))


def test_weights_are_drawn_from_the_same_distributions() -> None:
    pytest.importorskip("transformer_engine")
    run_ranks(_same_start, 2, timeout=300, backend="nccl")


def _same_quantized_start(rank: int, world: int, recipe: str) -> None:
    """Mean and deviation of the main weights are those of a start without the meta device, whose
    main weights are values from before quantization; the loss is that of an untrained model."""
    from tests.distributed.gpt import init_megatron

    init_megatron()
    tokens = torch.arange(128, device="cuda")[None]
    starts = []
    for meta in (True, False):
        wrapper = _wrap(build(2, meta, fp8="hybrid", fp8_recipe=recipe, fp8_param=True))
        quantized = [pair for pair in wrapper.engine.pairs if pair.group.key.quantized]
        assert len(quantized) == 8, "four matrices a layer"
        starts.append(_spread(wrapper))
        with torch.no_grad():
            loss = wrapper(tokens, tokens, None, labels=tokens).float().mean().item()
        assert 10 < loss < 13, (meta, loss)
    _same_spread(*starts)


@pytest.mark.parametrize("recipe", ("delayed", "tensorwise", "blockwise"))
def test_quantized_weights_are_made_unit_by_unit(recipe: str) -> None:
    pytest.importorskip("transformer_engine")
    run_ranks(_same_quantized_start, 2, recipe, timeout=300, backend="nccl")
