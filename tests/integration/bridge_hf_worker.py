"""Hugging Face weights into and out of live sharded models, by Megatron-Bridge. Two ranks.

    python tests/integration/bridge_on_cpu.py tests/integration/bridge_hf_worker.py FOLDER CASE

CASE is FAMILY-TP-EP or "adapters". A line for each thing that was checked; an AssertionError where
something is not equal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import megatron_fsdp_adapter

_COMMON: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 256, "head_dim": 12, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "initializer_range": 0.2, "torch_dtype": "float32",
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**_COMMON),
    "moe": Qwen3MoeConfig(
        **_COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40,
        decoder_sparse_step=1, norm_topk_prob=True,
    ),
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "transformer_impl": "local", "apply_rope_fusion": False, "cross_entropy_loss_fusion": False,
    "masked_softmax_fusion": False, "bias_activation_fusion": False, "bias_dropout_fusion": False,
    "persist_layer_norm": False, "gradient_accumulation_fusion": False, "moe_grouped_gemm": False,
    "moe_permute_fusion": False, "moe_router_fusion": False, "parallel_output": False,
    "bf16": False, "fp16": False, "params_dtype": torch.float32, "seq_length": 16,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_token_dispatcher_type": "alltoall",
    "attention_backend": None,
}  # fmt: skip
TOKENS = torch.arange(2 * 16).view(2, 16) * 7 % 251


def hf_model(family: str, folder: Path) -> Any:
    """The same on both ranks; saved once."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]).float().eval()
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return model


def provider_of(bridge: Any, tp: int, ep: int) -> Any:
    provider = bridge.to_megatron_provider(load_weights=False)
    for name, value in OPTIONS.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    provider.tensor_model_parallel_size, provider.expert_model_parallel_size = tp, ep
    provider.finalize()
    return provider


def wrapped(provider: Any, strategy: str) -> list[Any]:
    return provider.provide_distributed_model(
        ddp_config=DistributedDataParallelConfig(
            use_distributed_optimizer=True, use_megatron_fsdp=True,
            data_parallel_sharding_strategy=strategy,
        ),
        use_megatron_fsdp=True, use_torch_fsdp2=False,
        overlap_param_gather_with_optimizer_step=False, data_parallel_random_init=False,
    )  # fmt: skip


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    mask = torch.ones(1, 1, TOKENS.shape[1], TOKENS.shape[1]).triu(1).bool()
    return model(TOKENS, positions, mask)[..., : _COMMON["vocab_size"]].float()


def innermost(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


GIVEN = {  # what Megatron-Bridge is given, by who calls it
    "wrapper": lambda model: [model],
    "inner wrapper, as a start from a folder": lambda model: [model.module],
    "unwrapped": lambda model: [innermost(model)],
}


def check_conversion(family: str, tp: int, ep: int, folder: Path) -> None:
    """Loads into models that have just computed, exports right after a forward pass."""
    reference = hf_model(family, folder)
    with torch.no_grad():
        expected = reference(TOKENS).logits
    state = load_file(folder / "model.safetensors")  # one tensor an expert, unlike in memory
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = provider_of(bridge, tp, ep)
    provider.initialize_model_parallel(seed=0)
    for strategy in ("optim_grads_params", "optim"):
        for who, given in GIVEN.items():
            [model] = wrapped(provider, strategy)
            before = logits(model)
            assert (before - expected).abs().max() > 0.1
            bridge.load_hf_weights(given(model))
            error = (logits(model) - expected).abs().max().item()
            assert error < 2e-5, (family, tp, ep, strategy, who, error)
            exported = dict(bridge.export_hf_weights(given(model), show_progress=False))
            unlike = [k for k, v in exported.items() if not torch.equal(v, state[k])]
            assert exported.keys() == state.keys() and not unlike, (who, unlike)
            told = f"{family} TP{tp} EP{ep} {strategy} {who}: {len(exported)} equal"
            print(f"checked {told}, logits within {error:.1e}", flush=True)
    parallel_state.destroy_model_parallel()


def check_adapters(folder: Path) -> None:
    """Adapters of a sharded model, merged into what is exported, and by themselves."""
    from megatron.bridge.peft.lora import LoRA

    reference = hf_model("llama", folder)
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = provider_of(bridge, 1, 1)
    provider.initialize_model_parallel(seed=0)

    def adapt(chunks: list[Any]) -> list[Any]:
        bridge.load_hf_weights(chunks)
        return LoRA(dim=4, alpha=8)(chunks, training=True)

    provider.register_pre_wrap_hook(adapt)
    [model] = wrapped(provider, "optim_grads_params")
    with torch.no_grad():
        for index, (name, param) in enumerate(model.named_parameters()):
            if "adapter" in name:
                local = param._local_tensor
                local.copy_(torch.randn(local.shape, generator=_generator(index)) * 0.2)
    model.module.engine.main_weights_changed()
    adapted = logits(model)
    exported = dict(bridge.export_hf_weights([model], show_progress=False))
    merged = AutoModelForCausalLM.from_config(CONFIGS["llama"]).float().eval()
    merged.load_state_dict(exported)
    with torch.no_grad():
        error = (merged(TOKENS).logits - adapted).abs().max().item()
        moved = (reference(TOKENS).logits - adapted).abs().max().item()
    assert error < 1e-4 < moved, (error, moved)
    print(f"checked adapters: merged within {error:.1e}, moved by {moved:.1e}", flush=True)
    parallel_state.destroy_model_parallel()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * seed + dist.get_rank())


def main(folder: str, case: str) -> None:
    dist.init_process_group("gloo")
    megatron_fsdp_adapter.install()
    if case == "adapters":
        check_adapters(Path(folder))
    else:
        family, tp, ep = case.split("-")
        check_conversion(family, int(tp), int(ep), Path(folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
