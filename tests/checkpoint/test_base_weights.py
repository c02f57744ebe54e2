"""Weights of a checkpoint go into models that are not sharded, under any other split, bit for bit.

The models are wrapped afterwards, and their weights put together by rules of the tests' own
(`reshard_cases`). Two ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron_fsdp_adapter.checkpoint.convert.conversion import convert
from megatron_fsdp_adapter.megatron.compat.table import BASE_WEIGHTS, BRIDGE
from megatron_fsdp_adapter.megatron.frameworks import peft_base_weights
from megatron_fsdp_adapter.megatron.frameworks.peft_base_weights import WHOLE, load_plain, place_in
from tests.lib.checkpoint.convert_cases import Evil, save_fsdp
from tests.lib.checkpoint.reshard_cases import (
    ZERO1,
    ZERO3,
    Split,
    case_of,
    save_split,
    split_of,
    trainer_of,
    whole_state,
)
from tests.lib.gpt.checks import check_same_bits
from tests.lib.gpt.topologies import build_topology_trainer
from tests.lib.megatron.stand_ins import stand_ins
from tests.lib.ranks.launch import run_ranks

CHECKS = ("megatron/frameworks/peft_base_weights.py",)


def small(*split: Any, **sizes: Any) -> Split:
    """With two layers."""
    return replace(split_of(*split, **sizes), case={"num_layers": 2})


DENSE = small(2, ZERO3, tp=2)
EXPERTS = small(2, ZERO3, tp=2, ep=1)


def into_plain(root: Path, target: Split, vocab_size: int | None = None) -> dict[str, torch.Tensor]:
    """The weights of a model of `target`'s split that were read before it was wrapped."""
    trainer_of(target)  # makes the groups

    def read(model: nn.Module) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(77)
        dense = place_in(parallel_state.get_tensor_model_parallel_group())
        expert = place_in(parallel_state.get_expert_tensor_parallel_group())
        load_plain([model], root, None, dense, expert, vocab_size)

    trainer = build_topology_trainer(target.topology, case_of(target), target.strategy, change=read)
    return {name: values["weight"] for name, values in whole_state(trainer).items()}


def check_splits(
    rank: int, world: int, root: str, source: Split, targets: tuple[Split, ...]
) -> None:
    save_split(rank, root, source)
    saved = Path(root) / source.name
    plain = Path(root) / "torch_dist"
    if rank == 0:
        convert(saved, plain, "torch_dist", weights_only=True)
    dist.barrier()
    whole = {n: v["weight"] for n, v in torch.load(f"{root}/{source.name}.pt").items()}
    for target in targets:
        for folder in (saved, plain):
            check_same_bits(into_plain(folder, target), whole, f"{target.name} {folder}")


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        (DENSE, (small(2, ZERO1, pp=2), small(2, ZERO3, tp=2))),
        (EXPERTS, (small(2, ZERO3, ep=2), small(2, ZERO1, tp=2, ep=1))),
    ],
    ids=["tied embeddings and biases", "experts and gated layers"],
)
def test_weights_go_to_other_splits(
    tmp_path: Path, source: Split, targets: tuple[Split, ...]
) -> None:
    """From tensor parallelism to others, and to the split it came from; both formats."""
    run_ranks(check_splits, 2, str(tmp_path), source, targets)


def check_misfits(rank: int, world: int, root: str) -> list[str]:
    save_split(rank, root, DENSE)
    found: list[str] = []
    for change, vocab_size in (
        ({"vocab": 56}, 53),
        ({"vocab": 56}, None),
        ({"num_layers": 4}, None),
        ({"ffn": 48}, None),
    ):
        try:
            target = replace(DENSE, case={**DENSE.case, **change})
            into_plain(Path(root) / DENSE.name, target, vocab_size)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_does_not_fit_is_one_error_and_padding_does(tmp_path: Path) -> None:
    for padded, unsaid, layers, sizes in run_ranks(check_misfits, 2, str(tmp_path)):
        assert padded == ""
        assert "word_embeddings.weight: has shape (56, 24), in the checkpoint (54, 24)" in unsaid
        assert layers.count("is not in the checkpoint") > 10
        assert "decoder.layers.3." in layers
        assert "linear_fc1.weight: has shape (48, 24), in the checkpoint (44, 24)" in sizes


@pytest.fixture
def bridge() -> Iterator[Any]:
    """A stand-in for Megatron-Bridge's module."""

    def _load_base_checkpoint(
        load_dir: Any,
        ckpt_cfg: Any,
        rank0: bool = False,
        sharded_state_dict: Any = None,
        checkpointing_context: Any = None,
        ignore_ckpt_step: bool = False,
        cfg: Any = None,
        *,
        pg_collection: Any,
    ) -> Any:
        return "its own"

    types = SimpleNamespace(FSDP_DTENSOR="a type")
    names = {"_load_base_checkpoint": _load_base_checkpoint, "CheckpointType": types}
    with stand_ins({BRIDGE: names}, BASE_WEIGHTS) as made:
        yield made[BRIDGE]
    assert made[BRIDGE]._load_base_checkpoint is _load_base_checkpoint


def test_nothing_of_the_checkpoint_is_run(one_rank: None, tmp_path: Path) -> None:
    root = tmp_path / "a"
    made = tmp_path / "made"
    weights = {"module.decoder.layers.0.input_layernorm.weight": torch.ones(2)}
    evil = Evil(Path.touch, made)
    save_fsdp(root, {"model": weights, "args": {"num_layers": 1, "x": evil}})
    made.unlink(missing_ok=True)  # a save may copy its values
    load_plain([nn.Module()], root, None, WHOLE, WHOLE)
    assert not made.exists()


def test_a_model_from_the_meta_device_is_refused_and_other_loads_are_bridges(
    bridge: ModuleType, one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = SimpleNamespace(tp=None)
    assert bridge._load_base_checkpoint("x", None, rank0=True, pg_collection=groups) == "its own"
    opened = SimpleNamespace(folder=tmp_path), SimpleNamespace(weights={})
    monkeypatch.setattr(peft_base_weights, "open_state", lambda *_, **__: opened)
    state = {"_model": [nn.Linear(2, 3, device="meta")], "model": {}, "iteration": 3}
    with pytest.raises(ValueError, match="init_model_with_meta_device=False"):
        bridge._load_base_checkpoint(
            "x", SimpleNamespace(ckpt_step=None), sharded_state_dict=state, pg_collection=groups
        )
