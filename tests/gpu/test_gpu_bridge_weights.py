"""Megatron-Bridge's import and export of layers of Llama-3 8B on two GPUs: seconds, bytes and peak
memory, beside those of the same calls on Megatron's own DDP.

    python -m pytest -q -s tests/gpu/test_gpu_bridge_weights.py          # 8 layers
    BRIDGE_LAYERS=32 python -m pytest -q -s tests/gpu/test_gpu_bridge_weights.py

Needs megatron-bridge, transformers and safetensors; two GPUs of 40 GiB, or of 80 for all 32 layers.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import run_ranks

LAYERS = int(os.environ.get("BRIDGE_LAYERS", "8"))
SIZES: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "num_hidden_layers": LAYERS,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
AT_A_TIME = 5
"""Times the largest weight: what is converted, its pieces, the one before."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in bf16, in one file."""
    pytest.importorskip("megatron.bridge", reason="its conversion is measured")
    pytest.importorskip("transformers", reason="Megatron-Bridge reads its configuration")
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("hf")
    config = LlamaConfig(**SIZES, torch_dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(root)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    generator = torch.Generator("cuda").manual_seed(0)
    empty = partial(torch.empty, dtype=torch.bfloat16, device="cuda")
    values = {
        name: empty(shape).normal_(0, 0.02, generator=generator).cpu()
        for name, shape in shapes.items()
    }
    torch.cuda.empty_cache()
    save_file(values, root / "model.safetensors", metadata={"format": "pt"})
    return root


def provided(bridge: Any, strategy: str | None) -> list[Any]:
    """A wrapped model, of Megatron's own DDP without a strategy."""
    from megatron.core.distributed import DistributedDataParallelConfig

    provider = bridge.to_megatron_provider(load_weights=False)
    provider.bf16, provider.params_dtype = True, torch.bfloat16
    provider.gradient_accumulation_fusion = False  # core's own layers need apex for it
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    sharded: dict[str, Any] = {}
    if strategy is not None:
        sharded = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}
    return provider.provide_distributed_model(
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True, **sharded),
        use_megatron_fsdp=strategy is not None, use_torch_fsdp2=False,
        init_model_with_meta_device=strategy is not None,
        overlap_param_gather_with_optimizer_step=False, data_parallel_random_init=False,
    )  # fmt: skip


def measured(work: Any) -> dict[str, float]:
    """Seconds, and bytes of the device at the peak beyond those before."""
    torch.distributed.barrier()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    torch.distributed.barrier()
    peak = torch.cuda.max_memory_allocated() - before
    return {"seconds": time.perf_counter() - start, "peak": peak}


def convert(rank: int, world: int, folder: str, strategy: str | None) -> dict[str, Any]:
    import megatron_fsdp_adapter

    if strategy is not None:
        megatron_fsdp_adapter.install()
    from megatron.bridge import AutoBridge
    from safetensors import safe_open

    if strategy is not None:
        megatron_fsdp_adapter.install()  # what has been imported since
    bridge = AutoBridge.from_hf_pretrained(folder)
    models = provided(bridge, strategy)
    loaded = measured(lambda: bridge.load_hf_weights(models))
    exported: dict[str, Any] = {"bytes": 0, "tensors": 0, "unlike": []}

    def export(check: bool) -> None:
        with safe_open(f"{folder}/model.safetensors", "pt") as file:
            for name, value in bridge.export_hf_weights(models, cpu=False, show_progress=False):
                exported["bytes"] += value.nbytes
                exported["tensors"] += 1
                if check and not torch.equal(value.cpu(), file.get_tensor(name)):
                    exported["unlike"].append(name)

    export(check=True)  # and once more, when all is warm
    told = {"bytes": exported["bytes"], "tensors": exported["tensors"]}
    unlike = exported["unlike"]
    return {"load": loaded, "export": measured(lambda: export(False)), **told, "unlike": unlike,
            "resident": torch.cuda.memory_allocated()}  # fmt: skip


@pytest.mark.parametrize("strategy", ("optim_grads_params", "optim"))
def test_layers_of_8b_beside_megatrons_own_ddp(folder: Path, strategy: str) -> None:
    """Bit for bit what the folder has, in bf16; a rank holds a few weights more, and no model."""
    largest = SIZES["vocab_size"] * SIZES["hidden_size"] * 2
    for label, chosen in (("stock DDP", None), (strategy, strategy)):
        for found in run_ranks(convert, 2, str(folder), chosen, timeout=540.0, backend="nccl"):
            assert found["unlike"] == [] and found["tensors"] == 9 * LAYERS + 3
            gib = {what: found[what]["peak"] / 2**30 for what in ("load", "export")}
            print(
                f"\n{label}, {LAYERS} layers: load {found['load']['seconds']:.2f} s, "
                f"+{gib['load']:.2f} GiB; export {found['export']['seconds']:.2f} s, "
                f"+{gib['export']:.2f} GiB, {found['bytes'] / 2**30:.2f} GiB given, "
                f"{found['resident'] / 2**30:.2f} GiB resident"
            )
            if chosen is not None:
                for what in ("load", "export"):
                    assert found[what]["peak"] <= AT_A_TIME * largest, (what, found)
