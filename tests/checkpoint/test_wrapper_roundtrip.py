"""A GPT under our wrapper, saved and resumed as Megatron does it, goes on as if never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import dtensors_of
from launch import run_ranks

from megatron_fsdp_adapter.checkpoint.chunks import read_chunks
from megatron_fsdp_adapter.checkpoint.dcp import load_checkpoint, save_checkpoint
from megatron_fsdp_adapter.checkpoint.state import PerRank, flatten, to_stored

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def _sharded_state(trainer: Any, is_loading: bool) -> dict[str, Any]:
    """What Megatron's `generate_state_dict` makes for fsdp_dtensor."""
    model = trainer.wrapper.module.state_dict_for_save_checkpoint()
    metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    optimizer = trainer.optimizer.sharded_state_dict(
        {"model": model}, is_loading=is_loading, metadata=metadata
    )
    rng = PerRank({"cpu": torch.get_rng_state()})
    return {"model": model, "optimizer": optimizer, "iteration": 2, "rng_state": rng}


def _preprocessed(trainer: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """What Megatron's `preprocess_fsdp_dtensor_state_dict` does, by core's own functions."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as core

    state = raw.copy()
    core.handle_fp8_extra_state_case(state["model"])
    if trainer.case.swiglu:
        state["model"], state["optimizer"] = core.handle_swiglu_in_state_dict(
            trainer.wrapper.module, state["model"], state["optimizer"]
        )
    return uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)


def _save(trainer: Any, root: str) -> list[str]:
    state = _preprocessed(trainer, _sharded_state(trainer, is_loading=False))
    save_checkpoint(root, 2, state)
    return list(flatten(to_stored(state, 0)))


def _load(trainer: Any, root: str) -> None:
    """What Megatron's `load_checkpoint` does: DCP in place, then both load_state_dict."""
    raw = _sharded_state(trainer, is_loading=True)
    _, loaded = load_checkpoint(root, _preprocessed(trainer, raw))
    trainer.wrapper.load_state_dict(raw["model"])
    trainer.optimizer.load_state_dict(
        {
            "state": raw["optimizer"]["state"],
            "param_to_group_meta": loaded["optimizer"]["param_to_group_meta"],
        }
    )
    torch.set_rng_state(loaded["rng_state"]["cpu"])


def _bits(trainer: Any) -> dict[str, torch.Tensor]:
    """This rank's main weights and optimizer state, by name."""
    trainer.wrapper.stop_communication()
    bits = {n: p._local_tensor.clone() for n, p in trainer.wrapper.named_parameters()}
    state = _sharded_state(trainer, is_loading=False)["optimizer"]["state"]
    for name, entry in state.items():
        for key, value in entry.items():
            value = getattr(value, "_local_tensor", value)
            bits[f"{name}.{key}"] = torch.as_tensor(value).clone()
    return bits


def _poison(trainer: Any) -> None:
    for tensor in dtensors_of(_sharded_state(trainer, is_loading=True)["optimizer"]):
        tensor._local_tensor.fill_(77)
    with torch.no_grad():
        for param in trainer.wrapper.parameters():
            param._local_tensor.fill_(77)
    trainer.wrapper.module.install_optimized_model_weights()


def _resume(
    rank: int, size: int, root: str, options: dict[str, Any], instances: int = 1,
    outer: str = "no_shard",
) -> None:
    import gpt

    from megatron_fsdp_adapter import install

    device = gpt.init_megatron(num_distributed_optimizer_instances=instances)
    ddp = {"num_distributed_optimizer_instances": instances, "outer_dp_sharding_strategy": outer}
    install()
    case = gpt.Case(microbatches=2, **options)

    def steps(trainer: Any, first: int) -> list[tuple[float, float]]:
        return [
            gpt.train_step(trainer, gpt.batches(case, step, rank, device))
            for step in (first, first + 1)
        ]

    for strategy in STRATEGIES:
        folder = f"{root}/{strategy}"
        first = gpt.build_trainer(case, strategy, device, ddp=ddp)
        steps(first, 0)
        keys = _save(first, folder)
        saved = _bits(first)
        losses = steps(first, 2)
        final = _bits(first)

        second = gpt.build_trainer(case.but(seed=4321), strategy, device, ddp=ddp)
        _poison(second)
        _load(second, folder)
        _assert_same(_bits(second), saved, f"{strategy}, just loaded")
        second.case = first.case
        assert steps(second, 2) == losses, (strategy, losses)
        _assert_same(_bits(second), final, f"{strategy}, two steps on")
        # A checkpoint of the resumed run has the same keys in the same order.
        assert _save(second, folder) == keys


def _assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], where: str) -> None:
    assert list(a) == list(b), where
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, (where, different)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("options", [{}, {"swiglu": True, "bf16": True, "tied": True}])
def test_resume_is_bit_equal(tmp_path: Path, size: int, options: dict[str, Any]) -> None:
    run_ranks(_resume, size, str(tmp_path), options, timeout=400)


@pytest.mark.parametrize("outer", [pytest.param("no_shard", marks=pytest.mark.full), "optim"])
def test_resume_with_two_optimizer_instances(tmp_path: Path, outer: str) -> None:
    """Replicas of a shard are saved once, parts of a shard each in its place."""
    options = {"swiglu": True, "bf16": True}
    run_ranks(_resume, 4, str(tmp_path), options, 2, outer, timeout=400)


def _same_keys(rank: int, size: int, root: str) -> dict[str, Any]:
    import gpt

    from megatron_fsdp_adapter import install

    device = gpt.init_megatron()
    install()
    trainer = gpt.build_trainer(gpt.Case(hidden=12, ffn=20), "optim_grads_params", device)
    raw = _sharded_state(trainer, is_loading=True)
    tensors = dtensors_of(raw["model"]) + dtensors_of(raw["optimizer"])
    return {
        "keys": list(flatten(to_stored(raw, 0))),
        "empty": sum(read_chunks(tensor) == () for tensor in tensors),
        "count": len(tensors),
    }


def test_every_rank_has_every_key_though_it_holds_nothing(tmp_path: Path) -> None:
    ranks = run_ranks(_same_keys, 4, str(tmp_path), timeout=300)
    assert all(rank["keys"] == ranks[0]["keys"] for rank in ranks)
    assert all(rank["count"] == ranks[0]["count"] for rank in ranks)
    assert any(rank["empty"] for rank in ranks)
