"""Hugging Face weights into and out of live sharded models, by Megatron-Bridge. Two ranks.

    cd tests/lib/integration; python bridge_on_cpu.py bridge_hf_worker.py FOLDER CASE ...

CASE is one of `CASES`. A line for each thing that was checked; an AssertionError where something is
not equal.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

import megatron_fsdp_adapter
from megatron_fsdp_adapter.megatron.frameworks.bridge_weights import engines_of
from megatron_fsdp_adapter.state.module_weights import ModuleWeight
from tests.lib.integration.live_bytes import LiveBytes

STRATEGIES = ("optim_grads_params", "optim_grads", "optim", "no_shard")
_COMMON: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 256, "head_dim": 12, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "initializer_range": 0.2, "torch_dtype": "float32",
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**_COMMON),
    "deep": LlamaConfig(**{**_COMMON, "num_hidden_layers": 12, "vocab_size": 64}),
    "low": LlamaConfig(**{**_COMMON, "torch_dtype": "bfloat16"}),
    "qwen2": Qwen2Config(**{**_COMMON, "tie_word_embeddings": True}),
    "moe": Qwen3MoeConfig(
        **_COMMON,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    ),
}
OPTIONS: dict[str, Any] = {
    "transformer_impl": "local", "apply_rope_fusion": False, "cross_entropy_loss_fusion": False,
    "masked_softmax_fusion": False, "bias_activation_fusion": False, "bias_dropout_fusion": False,
    "persist_layer_norm": False, "gradient_accumulation_fusion": False, "moe_grouped_gemm": False,
    "moe_permute_fusion": False, "moe_router_fusion": False, "parallel_output": False,
    "bf16": False, "fp16": False, "params_dtype": torch.float32, "seq_length": 16,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_token_dispatcher_type": "alltoall",
    "attention_backend": None,
}  # fmt: skip
TOKENS = torch.arange(2 * 16).view(2, 16) * 7 % 61


def hf_model(family: str, folder: Path) -> Any:
    """The same on both ranks, in fp32; saved once, in its config's dtype."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]).float().eval()
    with torch.no_grad():
        for param in model.parameters():  # biases and norms begin as zeros and ones
            param.add_(torch.randn_like(param), alpha=0.05)
    model.to(torch.bfloat16 if family == "low" else torch.float32)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return model.float()


def provider_of(bridge: Any, tp: int = 1, ep: int = 1, pp: int = 1, **more: Any) -> Any:
    provider = bridge.to_megatron_provider(load_weights=False)
    for name, value in {**OPTIONS, **more}.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    provider.tensor_model_parallel_size = tp
    provider.expert_model_parallel_size = ep
    provider.pipeline_model_parallel_size, provider.pipeline_dtype = pp, provider.params_dtype
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    return provider


def wrapped(provider: Any, strategy: str, **more: Any) -> list[Any]:
    return provider.provide_distributed_model(
        ddp_config=DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=strategy,
        ),
        use_megatron_fsdp=True,
        use_torch_fsdp2=False,
        overlap_param_gather_with_optimizer_step=False,
        data_parallel_random_init=False,
        **more,
    )


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Of the whole pipeline, on every rank."""
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    mask = torch.ones(1, 1, TOKENS.shape[1], TOKENS.shape[1]).triu(1).bool()
    inner = innermost(model)
    stages = inner.config.pipeline_model_parallel_size
    hidden = torch.zeros(TOKENS.shape[1], TOKENS.shape[0], inner.config.hidden_size)
    if stages > 1 and dist.get_rank() == 1:
        dist.recv(hidden, 0)
        inner.set_input_tensor(hidden)
    found = model(TOKENS, positions, mask)
    if stages == 1:
        return found[..., : inner.vocab_size].float()
    if dist.get_rank() == 0:
        dist.send(found.contiguous(), 1)
        found = torch.zeros(*TOKENS.shape, inner.vocab_size)
    dist.broadcast(found, 1)
    return found


def innermost(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


GIVEN = {  # what Megatron-Bridge is given, by caller
    "wrapper": lambda model: [model],
    "inner wrapper, as a start from a folder": lambda model: [model.module],
    "unwrapped": lambda model: [innermost(model)],
}


def check_conversion(
    folder: Path,
    family: str,
    tp: int,
    ep: int,
    pp: int,
    strategies: tuple[str, ...] = STRATEGIES,
    given: tuple[str, ...] = ("wrapper",),
    bound: float = 2e-5,
    **options: Any,
) -> None:
    """Loads into models that have just computed, exports right after a forward pass."""
    reference = hf_model(family, folder)
    with torch.no_grad():
        expected = reference(TOKENS).logits
    state = load_file(folder / "model.safetensors")  # one tensor an expert, unlike in memory
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = provider_of(bridge, tp, ep, pp, **options)
    for strategy in strategies:
        for who in given:
            [model] = wrapped(provider, strategy)
            before = logits(model)
            assert (before - expected).abs().max() > 0.1
            bridge.load_hf_weights(GIVEN[who](model))
            error = (logits(model) - expected).abs().max().item()
            assert error < bound, (family, tp, ep, pp, strategy, who, error)
            check_export(bridge, GIVEN[who](model), state)
            told = f"{family} TP{tp} EP{ep} PP{pp} {strategy} {who}: {len(state)} equal"
            print(f"checked {told}, logits within {error:.1e}", flush=True)


def check_export(bridge: Any, models: list[Any], state: dict[str, torch.Tensor]) -> None:
    exported = dict(bridge.export_hf_weights(models, show_progress=False))
    unlike = []
    for k, v in exported.items():
        if v.dtype != state[k].dtype or not torch.equal(v, state[k]):
            unlike.append(k)
    assert exported.keys() == state.keys(), unlike
    assert not unlike, unlike


def check_low_precision(folder: Path) -> None:
    """Compute weights in bf16: exported as such, or all of the main weights if that is asked."""
    check_conversion(
        folder,
        "low",
        1,
        1,
        1,
        ("optim_grads_params", "optim"),
        bound=0.5,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    parallel_state.destroy_model_parallel()
    [model] = wrapped(
        provider_of(bridge, bf16=True, params_dtype=torch.bfloat16), "optim_grads_params"
    )
    bridge.load_hf_weights([model])
    for engine in engines_of(model):
        with torch.no_grad():
            for pair in engine.pairs:
                pair.sharded._local_tensor.add_(2**-13)
        engine.main_weights_changed()
    try:
        whole = dict(bridge.export_hf_weights([model], weight_dtype=torch.float32))
    except TypeError:  # releases before 0.4
        return
    rounded = dict(bridge.export_hf_weights([model]))
    for name, value in load_file(folder / "model.safetensors").items():
        assert torch.equal(whole[name], value.float() + 2**-13), name
        assert torch.equal(rounded[name], whole[name].bfloat16()), name


def check_memory(folder: Path, tp: int) -> None:
    """What a rank holds meanwhile is a few times the largest weight, and not the model."""
    hf_model("deep", folder)
    state = load_file(folder / "model.safetensors")
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    [model] = wrapped(provider_of(bridge, tp), "optim_grads_params")
    largest = tp * max(
        ModuleWeight(pair, e).shape.numel() * 4 for e in engines_of(model) for pair in e.pairs
    )
    together = sum(value.nbytes for value in state.values())
    assert together > 20 * largest
    with LiveBytes() as loading:
        bridge.load_hf_weights([model])
    with LiveBytes() as exporting:
        for name, value in bridge.export_hf_weights([model], show_progress=False):
            assert torch.equal(value, state[name]), name
    for what in (loading, exporting):
        assert 0.5 * largest < what.peak <= 5 * largest, (what.peak, largest, together)
    told = f"{loading.peak} and {exporting.peak} bytes of {together}, largest {largest}"
    print(f"checked memory: {told}", flush=True)


def check_meta(folder: Path) -> None:
    """A model that is made on the meta device is initialized and sharded unit by unit, and then
    takes its weights; a folder that is saved from it is the one it came from."""
    state_of = functools.partial(load_file, folder / "model.safetensors")
    hf_model("qwen2", folder)
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = provider_of(bridge)
    for strategy in ("optim_grads_params", "optim"):
        [model] = wrapped(provider, strategy, init_model_with_meta_device=True)
        bridge.load_hf_weights([model])
        check_export(bridge, [model], state_of())
        bridge.save_hf_pretrained([model], folder / strategy, show_progress=False)
        dist.barrier()
        [saved] = sorted((folder / strategy).glob("*.safetensors"))
        found = load_file(saved)
        assert found.keys() == state_of().keys()
        for name, value in state_of().items():
            assert torch.equal(found[name], value)
        print(f"checked meta {strategy}", flush=True)


def check_adapters(folder: Path, tp: int) -> None:
    """Adapters of a sharded model, merged into what is exported, and by themselves."""
    from megatron.bridge.peft.lora import LoRA

    reference = hf_model("llama", folder)
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = provider_of(bridge, tp)

    def adapt(chunks: list[Any]) -> list[Any]:
        bridge.load_hf_weights(chunks)
        return LoRA(dim=4, alpha=8)(chunks, training=True)

    provider.register_pre_wrap_hook(adapt)
    [model] = wrapped(provider, "optim_grads_params")
    [engine] = engines_of(model)
    torch.manual_seed(11)
    for pair in engine.pairs:
        if pair.group.key.requires_grad:
            weight = ModuleWeight(pair, engine)
            weight.copy_(torch.randn(weight.shape) * 0.2)
    engine.main_weights_changed()
    adapted = logits(model)
    exported = dict(bridge.export_hf_weights([model], show_progress=False))
    merged = AutoModelForCausalLM.from_config(CONFIGS["llama"]).float().eval()
    merged.load_state_dict(exported)
    with torch.no_grad():
        error = (merged(TOKENS).logits - adapted).abs().max().item()
        moved = (reference(TOKENS).logits - adapted).abs().max().item()
    assert error < 1e-4 < moved, (error, moved)
    print(f"checked adapters: merged within {error:.1e}, moved by {moved:.1e}", flush=True)


CASES: dict[str, Callable[[Path], None]] = {
    "llama": functools.partial(
        check_conversion, family="llama", tp=1, ep=1, pp=1, given=tuple(GIVEN)
    ),
    "llama-tp2": functools.partial(check_conversion, family="llama", tp=2, ep=1, pp=1),
    "tied": functools.partial(check_conversion, family="qwen2", tp=1, ep=1, pp=1),
    "tied-tp2": functools.partial(check_conversion, family="qwen2", tp=2, ep=1, pp=1),
    "tied-pp2": functools.partial(check_conversion, family="qwen2", tp=1, ep=1, pp=2),
    "moe": functools.partial(check_conversion, family="moe", tp=1, ep=1, pp=1),
    "moe-ep2": functools.partial(check_conversion, family="moe", tp=1, ep=2, pp=1),
    "low": check_low_precision,
    "memory": functools.partial(check_memory, tp=1),
    "memory-tp2": functools.partial(check_memory, tp=2),
    "meta": check_meta,
    "adapters": functools.partial(check_adapters, tp=1),
    "adapters-tp2": functools.partial(check_adapters, tp=2),
}


def main(folder: str, *cases: str) -> None:
    dist.init_process_group("gloo")
    megatron_fsdp_adapter.install()
    for case in cases:
        CASES[case](Path(folder) / case)
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
