from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import megatron.core
import pytest
import torch

from megatron_fsdp_adapter.launch import cpu_mode
from megatron_fsdp_adapter.megatron.compat import patches
from tests.lib.ranks.on_the_cpu import cpu_mode_enabled, cpu_mode_inside

CHECKS = ("launch/cpu_mode.py",)

CORE = Path(megatron.core.__file__).parent

# Parts of core that CPU mode does not serve.
NOT_SERVED = {
    "datasets.data_schedule": "hybrid context parallelism",
    "datasets.data_schedule_utils": "hybrid context parallelism",
    "distributed.fsdp": "the bundled FSDP engine",
    "export": "inference engines",
    "fault_injector": "faults of a GPU, made on purpose",
    "extensions": "Transformer Engine",
    "fp8_utils": "FP8",
    "full_cuda_graph": "CUDA graphs",
    "fusions.fused_indices_converter": "a Triton kernel",
    "inference": "inference",
    "models.bert": "no GPT",
    "models.mimo": "several models in one",
    "models.multimodal": "several models in one",
    "nccl_allocator": "NCCL",
    "optimizer.cpu_offloading": "offload from a GPU",
    "optimizer.optimizer_cuda_graph": "CUDA graphs",
    "pipeline_parallel.bridge_communicator": "several models of different layout",
    "pipeline_parallel.fine_grained_activation_offload": "offload from a GPU",
    "pipeline_parallel.hybrid_cp_schedule": "hybrid context parallelism",
    "resharding": "weight transfer between GPUs",
    "ssm": "no GPT",
    "tensor_parallel.generalized_tensor_parallelism": "weights rematerialized on a side stream",
    "tensor_parallel.gtp_cuda_graphs": "CUDA graphs",
    "tensor_parallel.gtp_symmetric_memory": "NCCL",
    "transformer.cuda_graphs": "CUDA graphs",
    "transformer.experimental_attention_variant.dsa_cudnn_kernels": "kernels of cuDNN",
    "transformer.hyper_connection": "no model of core is built with it",
    "transformer.moe.paged_stash": "static buffers of a GPU",
    "transformer.moe.token_dispatcher_inference": "inference",
}


ANSWERED = rf"""torch\.cuda\.({"|".join(cpu_mode.CUDA_ANSWERS)})\b"""
ASKS = re.compile(rf"""^[^#\n]*({ANSWERED}|\bdevice=["']cuda|pin_memory=True)""", re.M)


def test_table_has_every_module_of_core_that_asks_cuda() -> None:
    asking = (path for path in CORE.rglob("*.py") if ASKS.search(path.read_text()))
    names = {".".join(path.relative_to(CORE).with_suffix("").parts) for path in asking}
    names -= {row.module.removeprefix("megatron.core.") for row in cpu_mode.VIEWS}
    other = tuple(f"{part}." for part in NOT_SERVED)
    assert not [name for name in names if not f"{name}.".startswith(other)]


PRESENT = [
    row
    for row in cpu_mode.VIEWS
    if importlib.util.find_spec(row.module.rpartition(".")[0])
    and importlib.util.find_spec(row.module)
]


def test_only_modules_that_came_later_may_be_absent() -> None:
    absent = [row for row in cpu_mode.VIEWS if row not in PRESENT]
    for row in absent:
        assert not row.required, absent
    assert len(PRESENT) > 40


def test_refuses_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match=r"is_available\(\) is True.*CUDA_VISIBLE_DEVICES"):
        cpu_mode.enable_cpu_mode()


@pytest.mark.usefixtures("cpu_mode_off")
def test_refuses_where_core_has_kernels_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    adam = type("FusedAdam", (), {"__module__": "transformer_engine.pytorch.optimizers"})
    monkeypatch.setattr("megatron.core.optimizer.Adam", adam)
    with pytest.raises(RuntimeError, match="with transformer_engine: .* without it"):
        cpu_mode.enable_cpu_mode()


def _patched_places() -> list[tuple[str, str, object]]:
    """(owner, attribute, value in the owner's own dictionary) of every row."""
    found = [(row.path, patches.place(row)) for row in (*PRESENT, *cpu_mode.FUNCTIONS)]
    return [(path, at[1], vars(at[0]).get(at[1], "absent")) for path, at in found if at]


@pytest.mark.usefixtures("cpu_mode_off")
def test_is_idempotent_and_restores_everything() -> None:
    """Inside of the context manager as well, which leaves the mode as it was."""
    before = _patched_places()
    cpu_mode.enable_cpu_mode()
    once = _patched_places()
    with cpu_mode_inside():
        assert _patched_places() == once
    assert cpu_mode_enabled()
    assert _patched_places() == once
    changed = ((old, new) for (*_, old), (*_, new) in zip(before, once, strict=True))
    assert all(new is not old or new is None for old, new in changed)  # 0.19 binds one itself
    for _ in range(2):
        cpu_mode.disable_cpu_mode()
        assert _patched_places() == before
    with cpu_mode_inside():
        assert cpu_mode_enabled()
    assert not cpu_mode_enabled()
    assert _patched_places() == before


@pytest.mark.usefixtures("cpu_mode_off")
def test_refuses_a_core_that_lacks_a_patched_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import random

    before = _patched_places()
    monkeypatch.delattr(random, "_set_cuda_rng_state")
    with pytest.raises(RuntimeError, match=r"does not support.*_set_cuda_rng_state"):
        cpu_mode.enable_cpu_mode()
    monkeypatch.undo()
    assert _patched_places() == before


@pytest.mark.usefixtures("cpu_mode_off")
def test_torch_itself_is_left_alone() -> None:
    with cpu_mode_inside():
        assert not torch.cuda.is_available()
        assert torch.ones(2).type() == "torch.FloatTensor"
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")
        with pytest.raises((AssertionError, RuntimeError)):
            torch.ones(2).cuda()
