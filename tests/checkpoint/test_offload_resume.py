"""A run whose optimizer is offloaded goes on as if never stopped, and one without offload goes on
from its checkpoint, on another number of ranks too; and the other way round."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from test_wrapper_roundtrip import (
    STRATEGIES,
    _assert_same,
    _load,
    _poison,
    _preprocessed,
    _save,
    _sharded_state,
)
from test_wrapper_roundtrip import (
    _bits as _found_bits,
)

from megatron_fsdp_adapter.checkpoint.dcp import load_checkpoint

WHOLE = "whole.pt"


def _case() -> Any:
    from tests.distributed.gpt import Case

    return Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=1, bf16=True)


def _bits(trainer: Any) -> dict[str, torch.Tensor]:
    """State of empty shards is there from the first save on, behind what steps have made."""
    return dict(sorted(_found_bits(trainer).items()))


def _builder(kind: str, stack: ExitStack) -> Any:
    """Makes trainers: without offload or with it, with torch's Adam or a fused one, asked for by
    our option alone or by core's too."""
    from tests.distributed.fused_adam import transformer_engine_optimizer
    from tests.distributed.gpt import build_trainer

    if kind.endswith("fused"):
        stack.enter_context(transformer_engine_optimizer())

    def build(strategy: str, device: Any, seed: int = 1, offloaded: bool = True) -> Any:
        asked = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
        options = asked if offloaded and kind.startswith("core") else {}
        return build_trainer(
            _case().but(seed=seed), strategy, device, optimizer=options,
            ddp={"chunked_optimizer_state_offload": True} if offloaded else {},
        )

    return build


def _whole(trainer: Any) -> dict[str, torch.Tensor]:
    """Main weights and moments, whole, and the step of each parameter."""
    from tests.distributed.gpt import full_all

    trainer.wrapper.stop_communication()
    shown = _sharded_state(trainer, is_loading=False)["optimizer"]
    state, meta = shown["state"], shown["param_to_group_meta"]
    found = dict(trainer.params())
    for moment in ("exp_avg", "exp_avg_sq"):
        whole = full_all({name: entry[moment] for name, entry in state.items()})
        found |= {f"{name}.{moment}": value for name, value in whole.items()}
    for name, entry in state.items():
        step = meta[name]["step"] if "step" in meta[name] else entry["step"]
        found[f"{name}.step"] = torch.tensor(float(step))
    return found


def _resume(rank: int, size: int, root: str, kind: str) -> None:
    from megatron_fsdp_adapter import install
    from tests.distributed.gpt import batches, init_megatron, train_step

    device = init_megatron()
    install()

    def steps(trainer: Any, first: int) -> list[tuple[float, float]]:
        data = [batches(_case(), step, rank, device) for step in (first, first + 1)]
        return [train_step(trainer, batch) for batch in data]

    with ExitStack() as stack:
        build = _builder(kind, stack)
        for strategy in STRATEGIES:
            folder = f"{root}/{strategy}"
            first = build(strategy, device)
            steps(first, 0)
            keys, saved, whole = _save(first, folder), _bits(first), _whole(first)
            if rank == 0:
                torch.save(whole, f"{folder}-{WHOLE}")
            losses, final = steps(first, 2), _bits(first)
            second = build(strategy, device, seed=4321)
            _poison(second)
            _load(second, folder)
            _assert_same(_bits(second), saved, f"{strategy}, just loaded")
            again = steps(second, 2)
            assert again == losses, (strategy, again, losses)
            _assert_same(_bits(second), final, f"{strategy}, two steps on")
            assert sorted(_save(second, f"{folder}-again")) == sorted(keys)
            plain = build(strategy, device, offloaded=False)
            steps(plain, 0)
            assert sorted(_save(plain, f"{folder}-plain")) == sorted(keys)
            whole = _whole(plain)
            if rank == 0:
                torch.save(whole, f"{folder}-plain-{WHOLE}")


def _load_elsewhere(rank: int, size: int, root: str, kind: str) -> None:
    from megatron_fsdp_adapter import install
    from tests.distributed.gpt import init_megatron

    device = init_megatron()
    install()
    with ExitStack() as stack:
        build = _builder(kind, stack)
        for strategy in STRATEGIES:
            for saved, offloaded in ((strategy, False), (f"{strategy}-plain", True)):
                trainer = build("optim_grads_params", device, offloaded=offloaded)
                _poison(trainer)
                raw = _sharded_state(trainer, is_loading=True)
                state = _preprocessed(trainer, {key: raw[key] for key in ("model", "optimizer")})
                others = ("rng_state", "iteration")
                _, loaded = load_checkpoint(f"{root}/{saved}", state, ignore_unexpected=others)
                trainer.wrapper.load_state_dict(raw["model"])
                trainer.optimizer.load_state_dict(
                    {
                        "state": raw["optimizer"]["state"],
                        "param_to_group_meta": loaded["optimizer"]["param_to_group_meta"],
                    }
                )
                expected, found = torch.load(f"{root}/{saved}-{WHOLE}"), _whole(trainer)
                assert expected.keys() == found.keys()
                bad = [name for name in expected if not torch.equal(found[name], expected[name])]
                assert not bad, (saved, bad)


@pytest.mark.parametrize(("kind", "size", "other"), [
    ("core", 1, 2), ("streamed", 2, 1), ("core, fused", 1, 2),
])
def test_an_offloaded_run_is_resumed_and_read_without_offload(
    tmp_path: Path, kind: str, size: int, other: int
) -> None:
    run_ranks(_resume, size, str(tmp_path), kind, timeout=300)
    run_ranks(_load_elsewhere, other, str(tmp_path), kind, timeout=300)
