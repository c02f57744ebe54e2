"""A run with Muon, or with Lion, goes on as if never stopped, what they keep is read on another
number of ranks and under another strategy, and it goes through the other format and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from megatron.core.optimizer import OptimizerConfig
from test_wrapper_roundtrip import (
    _assert_same,
    _bits,
    _load,
    _poison,
    _preprocessed,
    _save,
    _sharded_state,
)

from megatron_fsdp_adapter.checkpoint.convert import Options, convert
from megatron_fsdp_adapter.checkpoint.dcp import load_checkpoint
from megatron_fsdp_adapter.checkpoint.inspection import diff

BACK = "optim_grads_params-converted"
WHOLE = "whole.pt"
STRATEGIES = ("no_shard", "optim_grads_params")


def _trainer(
    strategy: str, device: torch.device, kind: str = "muon", **changed: Any
) -> Any:
    from tests.distributed.gpt import Case, build_trainer

    case = Case(
        num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, lr=0.05, **changed
    )
    return build_trainer(case, strategy, device, optimizer={"optimizer": kind})


def _whole(trainer: Any) -> dict[str, torch.Tensor]:
    """Weights and state by name; collective."""
    from tests.distributed.gpt import full_all

    state = _sharded_state(trainer, is_loading=False)["optimizer"]["state"]
    kept = {
        f"{name}.{field}": value
        for name, entry in state.items()
        for field, value in entry.items()
        if field != "step"
    }
    alone = [name for name in state if "exp_avg_sq" not in state[name]]
    assert len(alone) == 8, alone
    return {**trainer.params(), **full_all(kept)}


def _resume(rank: int, size: int, root: str, kind: str = "muon") -> None:
    from megatron_fsdp_adapter import install
    from tests.distributed.gpt import batches, init_megatron, train_step

    device = init_megatron()
    install()

    case = _trainer("optim", device).case

    def steps(trainer: Any, first: int) -> list[tuple[float, float]]:
        return [
            train_step(trainer, batches(case, step, rank, device)) for step in (first, first + 1)
        ]

    for strategy in STRATEGIES:
        folder = f"{root}/{strategy}"
        first = _trainer(strategy, device, kind)
        steps(first, 0)
        keys, saved, whole = _save(first, folder), _bits(first), _whole(first)
        if rank == 0:
            torch.save(whole, f"{root}/{strategy}-{WHOLE}")
        losses, final = steps(first, 2), _bits(first)
        second = _trainer(strategy, device, kind, seed=4321)
        _poison(second)
        _load(second, folder)
        _assert_same(_bits(second), saved, f"{strategy}, just loaded")
        assert steps(second, 2) == losses, strategy
        _assert_same(_bits(second), final, f"{strategy}, two steps on")
        assert _save(second, f"{folder}-again") == keys


def _load_elsewhere(
    rank: int, size: int, root: str, names: tuple[str, ...], kind: str = "muon"
) -> None:
    from megatron_fsdp_adapter import install
    from tests.distributed.gpt import init_megatron

    device = init_megatron()
    install()
    for name in names:
        for strategy in STRATEGIES:
            trainer = _trainer(strategy, device, kind)
            _poison(trainer)
            raw = _sharded_state(trainer, is_loading=True)
            state = _preprocessed(trainer, {key: raw[key] for key in ("model", "optimizer")})
            others = ("rng_state", "iteration", "checkpoint_version")
            load_checkpoint(f"{root}/{name}", state, ignore_unexpected=others)
            expected = torch.load(f"{root}/{name.split('-')[0]}-{WHOLE}")
            found = _whole(trainer)
            assert expected.keys() == found.keys()
            different = [one for one in expected if not torch.equal(found[one], expected[one])]
            assert not different, (name, strategy, different)


def _resumed_and_converted(root: Path, kind: str) -> None:
    run_ranks(_resume, 2, str(root), kind, timeout=300)
    style = Options(transformer_impl="local", swiglu=False)
    source, between, back = root / STRATEGIES[1], root / "other", root / BACK
    convert(source, between, "torch_dist", options=style)
    convert(between, back, "fsdp_dtensor", options=style)
    run_ranks(_load_elsewhere, 1, str(root), (*STRATEGIES, BACK), kind, timeout=300)


@pytest.mark.once
def test_momentum_is_resumed_and_read_by_another_number_of_ranks(tmp_path: Path) -> None:
    _resumed_and_converted(tmp_path, "muon")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["adaptive_muon", "lion"])
def test_what_others_keep_is_resumed_and_read_by_another_number_of_ranks(
    tmp_path: Path, kind: str
) -> None:
    if not hasattr(OptimizerConfig, "adaptive_muon_beta2"):
        pytest.skip("this core has no adaptive_muon_beta2, and makes Lion of all weights")
    _resumed_and_converted(tmp_path, kind)


# Under another tensor-parallel split.

SPLITS = ("tp2", "dp2", "ep2", "tp2")
"""What is saved under one is loaded under the next, and saved again."""


def _through(rank: int, size: int, root: str) -> None:
    from megatron_fsdp_adapter.checkpoint import load_training_state, training_state
    from megatron_fsdp_adapter.checkpoint.dcp import save_checkpoint
    from tests.distributed.topologies import (
        CASE,
        Topology,
        build_topology_trainer,
        init_topology,
        topology_step,
    )

    rows: dict[str, dict[str, Any]] = {
        "dp2": {}, "ep2": {"ep": 2},
        "tp2": {"tp": 2, "etp": 2, "sp": True, "dispatcher": "allgather"},
    }  # fmt: skip
    for number, name in enumerate(SPLITS):
        topology = Topology(name, experts=4, **rows[name])
        init_topology(topology)
        trainer = build_topology_trainer(
            topology, CASE.but(swiglu=True, bias=False, seed=100 + number), "optim_grads_params",
            fields={"num_query_groups": 2}, optimizer_options={"optimizer": "muon"},
        )  # fmt: skip
        if number == 0:
            topology_step(trainer, 0)
        else:
            state = training_state(trainer.chunks, trainer.optimizer, is_loading=True)
            _, state = load_checkpoint(f"{root}/{number - 1}", {**state, "iteration": 0})
            load_training_state(trainer.chunks, state, trainer.optimizer)
        state = training_state(trainer.chunks, trainer.optimizer)
        save_checkpoint(f"{root}/{number}", 1, {**state, "iteration": 1})


@pytest.mark.full
def test_momentum_goes_through_other_parallel_splits(tmp_path: Path) -> None:
    """Tensor-parallel, whole, expert-parallel and back: every saved value is the first one's."""
    run_ranks(_through, 2, str(tmp_path), timeout=300)
    for number in range(1, len(SPLITS)):
        found = diff(tmp_path / "0", tmp_path / str(number))
        assert not (found.only_a or found.only_b or found.shapes or found.values), found
