"""A checkpoint saved under any split of the model loads under any other, bit for bit.

Each case saves at one split after two training steps and loads at another, into a model full of
other numbers. Weights, both moments and the step count are then put together by rules of the
test's own (`reshard_cases`) and compared with those of the run that saved.

The splits with `--full` are a pairwise cover of

    data-parallel size 1 2 3 4 x strategy x TP 1 2 x EP 1 2 x PP 1 2 (with 2 chunks a rank too)
    x one optimizer instance, HSDP, hybrid; dense, and with experts

on 1 to 8 processes, and from each the checkpoint goes to several others, so that every value of
each axis is left for every other. By default two splits of the dense model on four processes, and
two of the model with experts, whose strategies and replicas are others than those of dense
parameters.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.checkpoint import (
    load_checkpoint,
    load_training_state,
    training_state,
)
from megatron_fsdp_adapter.tools.inspection import diff
from tests.lib.checkpoint.reshard_cases import (
    TRAINED,
    ZERO0,
    ZERO1,
    ZERO2,
    ZERO3,
    Split,
    Whole,
    differences,
    save_split,
    split_of,
    trainer_of,
    whole_state,
)
from tests.lib.gpt.checkpoints import loaded, saved
from tests.lib.gpt.topologies import TopologyTrainer, topology_step
from tests.lib.ranks.launch import run_ranks

CHECKS = (
    "checkpoint/training.py",
    "core/dtensor/chunks.py",
    "core/dtensor/parts.py",
    "state/model_state.py",
    "megatron/optimizer/optimizer_state.py",
)


def apart(
    experts: str, split: Split, instances: int | None = None, outer: str | None = None
) -> Split:
    """The split, with another strategy for experts, other replicas, or another outer strategy."""
    words = [split.name, "experts", experts]
    words += [str(word) for word in (instances, outer) if word is not None]
    return replace(
        split,
        name="-".join(words),
        of_experts=experts,
        expert_instances=instances,
        expert_outer=outer,
    )


DEFAULT = (split_of(4, ZERO3, tp=2, outer="optim"), split_of(4, ZERO2, pp=2, vpp=2))
DEFAULT_APART = (
    apart(ZERO1, split_of(4, ZERO3, ep=2, outer="optim"), 1),
    apart(ZERO3, split_of(4, ZERO1, ep=2), 2, "optim"),
)

TP4 = split_of(4, ZERO3, tp=4)

DENSE = (
    split_of(1, ZERO0),
    split_of(2, ZERO3, tp=2),
    split_of(2, ZERO1, pp=2),
    split_of(4, ZERO2, tp=2, pp=2),
    split_of(2, ZERO2, outer="no_shard"),
    split_of(4, ZERO1, tp=2),
    split_of(4, ZERO0, pp=2, vpp=2),
    split_of(4, ZERO1),
    split_of(8, ZERO3, tp=2, pp=2),
    split_of(2, ZERO3, outer="optim"),
    split_of(3, ZERO3),
    split_of(6, ZERO0, tp=2),
    split_of(6, ZERO2, pp=2),
    split_of(3, ZERO1),
    split_of(4, ZERO3, outer="no_shard"),
    split_of(8, ZERO2, tp=2, outer="optim"),
    split_of(8, ZERO1, pp=2, vpp=2, outer="no_shard"),
    split_of(8, ZERO0, tp=2, outer="no_shard"),
    split_of(8, ZERO1, pp=2, outer="optim"),
    split_of(4, ZERO0, outer="optim"),
    split_of(4, ZERO2, outer="no_shard"),
    split_of(4, ZERO3, cp=2),
)

MOE = (
    split_of(1, ZERO1, ep=1),
    split_of(2, ZERO3, ep=2),
    split_of(2, ZERO3, tp=2, ep=2, etp=1),
    split_of(3, ZERO2, ep=1),
    split_of(4, ZERO1, pp=2, ep=1, outer="no_shard"),
    split_of(4, ZERO0, ep=2, outer="no_shard"),
    split_of(2, ZERO2, tp=2, ep=1),
    split_of(4, ZERO1, tp=2, ep=2),
    split_of(6, ZERO3, tp=2, ep=2, etp=1),
    split_of(8, ZERO2, tp=2, ep=2, outer="optim"),
    split_of(4, ZERO0, pp=2, ep=2),
    split_of(6, ZERO1, pp=2, ep=1),
    split_of(8, ZERO3, pp=2, vpp=2, ep=2),
    split_of(8, ZERO2, tp=2, pp=2, ep=2),
    split_of(6, ZERO0, tp=2, ep=1),
    split_of(8, ZERO1, pp=2, ep=2, outer="optim"),
    split_of(4, ZERO3, ep=1, outer="no_shard"),
    split_of(8, ZERO3, tp=2, ep=1, outer="optim"),
    split_of(2, ZERO0, ep=1, outer="optim"),
    split_of(8, ZERO2, pp=2, ep=2, outer="no_shard"),
    split_of(4, ZERO3, tp=2, pp=2, ep=1),
    split_of(2, ZERO0, pp=2, ep=1),
    split_of(4, ZERO1, ep=2, outer="no_shard"),
    split_of(8, ZERO1, tp=2, ep=1, outer="no_shard"),
    split_of(4, ZERO0, tp=2, ep=2, etp=1),
)


APART = (
    apart(ZERO0, split_of(4, ZERO1, ep=2)),
    apart(ZERO1, split_of(4, ZERO3, ep=2)),
    apart(ZERO2, split_of(4, ZERO0, ep=2)),
    apart(ZERO3, split_of(4, ZERO2, ep=2)),
    apart(ZERO0, split_of(4, ZERO3, ep=2, outer="optim")),
    apart(ZERO1, split_of(2, ZERO2, ep=1)),
    split_of(2, ZERO3, ep=2),
    apart(ZERO2, split_of(4, ZERO1, ep=2, outer="no_shard")),
    apart(ZERO3, split_of(4, ZERO0, tp=2, ep=2, etp=1)),
    apart(ZERO2, split_of(4, ZERO3, ep=1, outer="optim")),
    apart(ZERO0, split_of(2, ZERO2, ep=2)),
    apart(ZERO1, split_of(4, ZERO0, pp=2, ep=2)),
    apart(ZERO3, split_of(4, ZERO1, ep=1)),
    apart(ZERO1, split_of(4, ZERO3, ep=2, outer="optim"), 1),
    apart(ZERO2, split_of(4, ZERO3, ep=2), 2, "optim"),
    apart(ZERO0, split_of(8, ZERO1, ep=2, outer="no_shard"), 4),
    apart(ZERO3, split_of(8, ZERO0, ep=2, outer="optim"), 2, "no_shard"),
)
"""Experts with strategies and replicas of their own: each pair of strategies, and no pair."""

OFFSETS = (1, 5, 9)
"""A checkpoint goes from split i of a list to the splits i + each of these."""


def pairs_of(splits: tuple[Split, ...]) -> list[tuple[Split, Split]]:
    found = []
    for number, source in enumerate(splits):
        for offset in OFFSETS:
            target = splits[(number + offset) % len(splits)]
            found.append((source, target))
    return found


# Saving and loading.


def _poison(trainer: TopologyTrainer) -> None:
    with torch.no_grad():
        for chunk in trainer.chunks:
            for pair in chunk.engine.pairs:
                pair.sharded._local_tensor.fill_(77)
            chunk.engine.main_weights_changed()


def _load(root: str, source: Split, target: Split) -> TopologyTrainer:
    trainer = trainer_of(target)
    _poison(trainer)
    state = loaded(trainer, f"{root}/{source.name}", iteration=0)
    assert state["iteration"] == TRAINED
    return trainer


def _run(
    rank: int, world: int, root: str, saves: list[Split], loads: list[tuple[Split, Split]]
) -> dict[str, list[str]]:
    """What was found wrong with each pair; all saves come first."""
    for split in saves:
        save_split(rank, root, split)
    found = {}
    for source, target in loads:
        whole = torch.load(f"{root}/{source.name}.pt")
        trainer = _load(root, source, target)
        wrong = differences(whole_state(trainer), whole)
        found[f"{source.name} -> {target.name}"] = wrong
    return found


def _run_default(rank: int, world: int, root: str) -> dict[str, Any]:
    """All that the default tests look at: starting processes takes longer than a case."""
    return {
        "pairs": _run(rank, world, root, [*DEFAULT, *DEFAULT_APART[:1]], [DEFAULT, DEFAULT_APART]),
        "padding": _padded(root),
    }


@pytest.fixture(scope="module")
def default_outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank."""
    root = str(tmp_path_factory.mktemp("checkpoints"))
    return run_ranks(_run_default, 4, root, timeout=240.0)


def test_saved_at_one_split_loads_at_another(default_outcomes: list[dict[str, Any]]) -> None:
    assert len(default_outcomes) == 4
    for outcome in default_outcomes:
        assert len(outcome["pairs"]) == 2
        assert [wrong for wrong in outcome["pairs"].values() if wrong] == []


@pytest.mark.full
@pytest.mark.parametrize("splits", (DENSE, MOE, APART), ids=("dense", "experts", "experts apart"))
def test_pairwise_cover(tmp_path: Path, splits: tuple[Split, ...]) -> None:
    """Each split in processes of its own: the threads and sockets of gloo groups outlive them."""
    pairs = pairs_of(splits)
    root = str(tmp_path)
    for split in splits:
        run_ranks(_run, split.world, root, [split], [], timeout=300.0)
    count = 0
    wrong = {}
    for split in splits:
        loads = [pair for pair in pairs if pair[1] == split]
        for found in run_ranks(_run, split.world, root, [], loads, timeout=600.0):
            for pair, what in found.items():
                if what:
                    wrong[pair] = what
        count += len(found)
    assert count == len(pairs), wrong
    assert not wrong, wrong


MUON = (
    split_of(2, ZERO3, tp=2, ep=1),
    split_of(2, ZERO3, ep=1),
    split_of(2, ZERO3, ep=2),
    split_of(2, ZERO3, tp=2, ep=1),
)
"""What is saved under one is loaded under the next, and saved again."""


def _momentum(rank: int, world: int, root: str) -> None:
    for number, split in enumerate(MUON):
        trainer = trainer_of(
            replace(split, case={"seed": number}),
            fields={"num_query_groups": 2},
            optimizer_options={"optimizer": "muon"},
        )
        if number == 0:
            topology_step(trainer, 0)
        else:
            loaded(trainer, f"{root}/{number - 1}")
        saved(trainer, f"{root}/{number}")


@pytest.mark.full
def test_momentum_of_muon_goes_through_other_splits(tmp_path: Path) -> None:
    """Tensor-parallel, data-parallel, expert-parallel and back: each value is the first one's."""
    run_ranks(_momentum, 2, str(tmp_path), timeout=300.0)
    for number in range(1, len(MUON)):
        found = diff(tmp_path / "0", tmp_path / str(number))
        for kind in ("only_a", "only_b", "shapes", "values"):
            assert not found[kind], found


# What is not a change of the split.


def _padded(root: str) -> dict[str, Any]:
    """Of vocabularies that are padded to other lengths than 54. The last saved under tensor
    parallelism too: Megatron pads to a multiple of its size."""
    outcome: dict[str, Any] = {}
    for source, target, rows in (
        (DEFAULT[1], DEFAULT[0], 60),
        (DEFAULT[1], DEFAULT[0], 52),
        (DEFAULT[0], TP4, 56),
    ):
        whole = torch.load(f"{root}/{source.name}.pt")
        trainer = trainer_of(replace(target, case={"vocab": rows}))
        _poison(trainer)
        state = training_state(trainer.chunks, trainer.optimizer, is_loading=True)
        state["iteration"] = 0
        for said in ({}, {"vocab_size": 53}):
            name = f"{rows} {said}"
            try:
                _, found = load_checkpoint(f"{root}/{source.name}", state, **said)
            except ValueError as error:
                outcome[name] = str(error)
                continue
            load_training_state(trainer.chunks, found, trainer.optimizer)
            outcome[name] = _padding_problems(whole_state(trainer), whole, 54)
    return outcome


def _padding_problems(loaded: Whole, whole: Whole, rows: int) -> list[str]:
    table = "embedding.word_embeddings.weight"
    padding = loaded[table]["weight"][rows:]
    kept = dict(loaded)
    kept[table] = dict(loaded[table])
    for what in ("weight", "exp_avg", "exp_avg_sq"):
        kept[table][what] = loaded[table][what][:rows]
    found = differences(kept, whole)
    if padding.numel() == 0 or bool((padding != 77).any()):
        found.append("padding was written")
    return found


def test_a_vocabulary_with_other_padding_loads_if_its_real_size_is_said(
    default_outcomes: list[dict[str, Any]],
) -> None:
    """53 tokens, saved in 54 rows: 60 have room for them, 52 have not."""
    for of_rank in default_outcomes:
        outcome = of_rank["padding"]
        assert "stored with shape (54, 24), wanted with (60, 24)" in outcome["60 {}"]
        assert outcome["60 {'vocab_size': 53}"] == []
        for said in ("{}", "{'vocab_size': 53}"):
            assert "stored with shape (54, 24), wanted with (52, 24)" in outcome[f"52 {said}"]
        # From two tensor-parallel ranks with 27 rows each to four with 14.
        assert "stored with shape (54, 24), wanted with (56, 24)" in outcome["56 {}"]
        assert outcome["56 {'vocab_size': 53}"] == []
