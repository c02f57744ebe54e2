"""A GPT under our wrapper, saved and resumed as Megatron does it, goes on as if never stopped, and
its checkpoint is read on another number of ranks, under another strategy, without the options that
it was trained with, and through the other format and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer, install
from megatron_fsdp_adapter.checkpoint import (
    PerRank,
    load_checkpoint,
    load_training_state,
    save_checkpoint,
    training_state,
)
from megatron_fsdp_adapter.checkpoint.convert import convert
from megatron_fsdp_adapter.checkpoint.state import flatten, to_stored
from megatron_fsdp_adapter.core.dtensor.uneven import own_chunks
from megatron_fsdp_adapter.megatron.compat import core_api
from megatron_fsdp_adapter.megatron.options.table import UNIT_NUMEL
from tests.lib.checkpoint.checkpoint_cases import dtensors_of
from tests.lib.checkpoint.megatron_states import preprocessed, raw_state
from tests.lib.gpt import gpt
from tests.lib.gpt.checks import (
    check_number,
    check_run_bits,
    check_same_bits,
    check_weights,
    recorded_step,
)
from tests.lib.gpt.fused_adam import FusedAdam, transformer_engine_optimizer
from tests.lib.plain.plain import Block, Net, tokens
from tests.lib.ranks.groups import everyones
from tests.lib.ranks.launch import run_ranks

CHECKS = (
    "checkpoint/training.py",
    "checkpoint/fitting.py",
    "megatron/optimizer/optimizer_state.py",
    "optim/state.py",
)

FULL = pytest.mark.full
STRATEGIES = gpt.STRATEGIES
ENDS = (STRATEGIES[0], STRATEGIES[-1])
NOT_READ = ("rng_state", "iteration", "checkpoint_version")
STEPS = 2
"""Before the save, and behind it."""


@dataclass(frozen=True)
class Run:
    """What is trained, and how its checkpoint is read again.

    case, ddp, optimizer: fields that differ from those of the tests' GPT. context: makes what is
    entered while it trains. readers: strategies of another number of ranks that reads it. plain: a
    run without `ddp` and `optimizer` reads it, and is read by it. alone: how many weights have no
    second moment; converters know their keys. kept: the one parameter without weight decay that is
    trained, so that a rank holds nothing of a parameter group.
    """

    case: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    strategies: tuple[str, ...] = STRATEGIES
    readers: tuple[str, ...] = ()
    plain: bool = False
    alone: int | None = None
    kept: str = ""

    def trainer(self, strategy: str, device: Any, plain: bool = False, seed: int = 1) -> Any:
        case = gpt.Case(**{"microbatches": 2, "seed": seed, **self.case})
        if plain:
            options = {}
        else:
            options = {"ddp": self.ddp, "optimizer": self.optimizer}
        return gpt.build_trainer(case, strategy, device, self.freeze, **options)

    def freeze(self, model: torch.nn.Module) -> None:
        if not self.kept:
            return
        for name, param in model.named_parameters():
            if param.dim() == 1 and not name.endswith(self.kept):
                param.requires_grad_(False)


SMALL = {"num_layers": 2, "hidden": 12, "heads": 2, "ffn": 20, "vocab": 23}
ONCE = {**SMALL, "microbatches": 1}
GATED = {"swiglu": True, "bf16": True}
STREAMED = {"chunked_optimizer_state_offload": True}
CORE = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
TWO = {"num_distributed_optimizer_instances": 2}
SPLIT = {**TWO, "outer_dp_sharding_strategy": "optim"}
FUSED = transformer_engine_optimizer


@contextmanager
def newer_fused() -> Iterator[None]:
    """With the optimizer of Transformer Engine's main, which counts steps of empty groups too."""
    with FUSED(), mock.patch.object(FusedAdam, "COUNTS_EMPTY_GROUPS", True):
        yield


offloaded = partial(
    Run, {**ONCE, "bf16": True}, STREAMED, strategies=ENDS, readers=ENDS[1:], plain=True
)
matrices = partial(Run, {**SMALL, "lr": 0.05}, strategies=ENDS, readers=ENDS, alone=8)
counted = partial(Run, ONCE, kept="layers.0.input_layernorm.weight")

RUNS: dict[str, Run] = {
    "adam": Run(),
    "gated": Run({**GATED, "tied": True}, readers=ENDS[1:]),
    "instances": Run(GATED, TWO),
    "split instances": Run(GATED, SPLIT, strategies=ENDS),
    "sgd": Run(
        {**SMALL, "lr": 0.05},
        optimizer={"optimizer": "sgd", "sgd_momentum": 0.9},
        strategies=ENDS,
        readers=ENDS[1:],
    ),
    "muon": matrices(optimizer={"optimizer": "muon"}),
    "lion": matrices(optimizer={"optimizer": "lion"}),
    "offload of core": offloaded(optimizer=CORE),
    "offload of core, fused": offloaded(optimizer=CORE, context=FUSED),
    "streamed": offloaded(),
    "joined units": Run(
        {**SMALL, "num_layers": 5},
        {UNIT_NUMEL: 2500},
        strategies=ENDS,
        readers=ENDS[1:],
        plain=True,
    ),
    "fused": counted(context=FUSED, strategies=("no_shard", "optim", "optim_grads_params")),
    "fused, newer": counted(context=newer_fused, strategies=("optim",)),
    "fused, streamed": counted(STREAMED, context=FUSED, strategies=ENDS[1:]),
    "fused, streamed, newer": counted(STREAMED, context=newer_fused, strategies=ENDS[1:]),
    "fused, split instances": counted(SPLIT, context=FUSED, strategies=ENDS[1:]),
}


# As Megatron saves and loads.


def sharded_state(trainer: Any, is_loading: bool = False) -> dict[str, Any]:
    """What Megatron's `generate_state_dict` makes for fsdp_dtensor."""
    raw = raw_state(trainer, is_loading=is_loading)
    rng = PerRank({"cpu": torch.get_rng_state()})
    return {**raw, "iteration": 2, "rng_state": rng}


def save(trainer: Any, root: str, kept: str = "") -> list[str]:
    """The keys of what was saved. kept: a group whose count of steps is saved as 0 on the ranks
    behind the first, as older releases did where they held nothing of it."""
    state = preprocessed(trainer, sharded_state(trainer))
    if kept and dist.get_rank() > 0:
        for name, options in state["optimizer"]["param_to_group_meta"].items():
            if name.endswith(kept):
                options["step"] = 0
    save_checkpoint(root, 2, state)
    return list(flatten(to_stored(state, 0)))


def load(trainer: Any, root: str, **others: Any) -> Any:
    """What Megatron's `load_checkpoint` does: DCP in place, then both load_state_dict. others: what
    the checkpoint has and this run does not ask for. Returns what was loaded."""
    raw = sharded_state(trainer, is_loading=True)
    if others:
        asked = {"model": raw["model"], "optimizer": raw["optimizer"]}
    else:
        asked = dict(raw)
    _, loaded = load_checkpoint(root, preprocessed(trainer, asked), **others)
    trainer.wrapper.load_state_dict(raw["model"])
    meta = loaded["optimizer"]["param_to_group_meta"]
    trainer.optimizer.load_state_dict(
        {"state": raw["optimizer"]["state"], "param_to_group_meta": meta}
    )
    return loaded


def poison(trainer: Any) -> None:
    """Other weights and state than any checkpoint's."""
    state = sharded_state(trainer, is_loading=True)
    for tensor in dtensors_of(state["optimizer"]):
        tensor._local_tensor.fill_(77)
    with torch.no_grad():
        for param in trainer.wrapper.parameters():
            param._local_tensor.fill_(77)
    trainer.wrapper.module.install_optimized_model_weights()


def bits(trainer: Any) -> dict[str, torch.Tensor]:
    """This rank's main weights and optimizer state, by name."""
    trainer.wrapper.stop_communication()
    found = {n: p._local_tensor.clone() for n, p in trainer.wrapper.named_parameters()}
    shown = sharded_state(trainer)["optimizer"]
    for name, entry in shown["state"].items():
        for key, value in entry.items():
            value = getattr(value, "_local_tensor", value)
            found[f"{name}.{key}"] = torch.as_tensor(value).clone()
    return found


def whole(trainer: Any) -> dict[str, torch.Tensor]:
    """Main weights and what the optimizer keeps of them, whole, and counts of steps; collective."""
    trainer.wrapper.stop_communication()
    shown = sharded_state(trainer)["optimizer"]
    found = dict(trainer.params())
    kept = {}
    for name, entry in shown["state"].items():
        for key, value in entry.items():
            if key != "step":
                kept[f"{name}.{key}"] = value
        options = shown["param_to_group_meta"].get(name, {})
        step = options.get("step", entry.get("step"))
        found[f"{name}.step"] = torch.tensor(float(step or 0))
    return found | gpt.full_all(kept)


def counts(trainer: Any) -> list[Any]:
    """Steps of a fused optimizer's groups, as they are and as they are saved; the same on all
    ranks."""
    trainer.wrapper.stop_communication()
    inner = gpt.distributed_optimizer(trainer).optimizer
    meta = sharded_state(trainer)["optimizer"]["param_to_group_meta"]
    found = [group.get("step") for group in inner.param_groups if group["params"]]
    shown = [options["step"] for options in meta.values()]
    of_ranks = everyones(found + shown)
    for other in of_ranks:
        assert other == of_ranks[0], of_ranks
    return sorted(set(of_ranks[0]))


def a_rank_holds_nothing_of_a_group(trainer: Any) -> bool:
    is_without = False
    for group in gpt.distributed_optimizer(trainer).optimizer.param_groups:
        sizes = [param._local_tensor.numel() for param in group["params"]]
        if sizes and not any(sizes):
            is_without = True
    return any(everyones(is_without))


# A run, and those that read it.


def check_run(rank: int, device: Any, run: Run, strategy: str, folder: str) -> tuple[Any, int]:
    """Trains, saves, resumes and goes on; keys of the checkpoint and how many of its tensors this
    rank holds nothing of."""

    def steps(trainer: Any, first: int) -> list[tuple[float, float]]:
        trainer.case = trainer.case.but(seed=1)
        found = []
        for step in range(first, first + STEPS):
            batch = gpt.batches(trainer.case, step, rank, device)
            found.append(gpt.train_step(trainer, batch))
        return found

    first = run.trainer(strategy, device)
    if run.kept:
        assert a_rank_holds_nothing_of_a_group(first) is (strategy != "no_shard"), folder
        assert counts(first) == [0], folder
    steps(first, 0)
    keys = save(first, folder)
    saved = bits(first)
    sources = [folder]
    if run.kept:
        before = f"{folder}-before"
        save(first, before, run.kept)
        sources.append(before)
    if run.readers:
        keep_whole(run, first, f"{folder}.pt", rank)
    tensors = dtensors_of(sharded_state(first))
    losses = steps(first, STEPS)
    final = bits(first)

    order = sorted if run.plain else list  # offload makes state where a rank has no rows
    for source in sources:
        second = run.trainer(strategy, device, seed=4321)
        poison(second)
        loaded = load(second, source)
        torch.set_rng_state(loaded["rng_state"]["cpu"])
        check_same_bits(bits(second), saved, f"{source}, just loaded")
        if run.kept:
            assert counts(second) == [STEPS], source
        assert steps(second, STEPS) == losses, source
        check_same_bits(bits(second), final, f"{source}, two steps on")
        again = save(second, f"{source}-again")
        assert order(again) == order(keys), source

    if run.plain:
        plain = run.trainer(strategy, device, plain=True)
        steps(plain, 0)
        of_plain = save(plain, f"{folder}-plain")
        assert sorted(of_plain) == sorted(keys)
        keep_whole(run, plain, f"{folder}-plain.pt", rank)
    empty = [tensor for tensor in tensors if own_chunks(tensor).boxes == ()]
    return keys, len(empty)


def keep_whole(run: Run, trainer: Any, file: str, rank: int) -> None:
    found = whole(trainer)
    if run.alone is not None:
        state = sharded_state(trainer)["optimizer"]["state"]
        assert sum("exp_avg_sq" not in entry for entry in state.values()) == run.alone
    if rank == 0:
        torch.save(found, file)


def check_runs(
    rank: int, size: int, root: str, names: tuple[str, ...], instances: int
) -> dict[str, tuple[Any, int]]:
    device = gpt.init_megatron(num_distributed_optimizer_instances=instances)
    install()
    found = {}
    for name in names:
        run = RUNS[name]
        with run.context():
            for strategy in run.strategies:
                folder = f"{root}/{name}-{strategy}"
                found[folder] = check_run(rank, device, run, strategy, folder)
    return found


def check_readers(rank: int, size: int, root: str, saved: dict[str, list[str]]) -> None:
    device = gpt.init_megatron()
    install()
    for name, folders in saved.items():
        run = RUNS[name]
        with run.context():
            for folder in folders:
                for strategy in run.readers:
                    plain = run.plain and not folder.endswith("-plain")
                    trainer = run.trainer(strategy, device, plain=plain)
                    poison(trainer)
                    load(trainer, f"{root}/{folder}", ignore_unexpected=NOT_READ)
                    expected = torch.load(f"{root}/{folder.removesuffix('-converted')}.pt")
                    check_same_bits(whole(trainer), expected, f"{folder}, read under {strategy}")


OTHERS = (
    "sgd",
    "streamed",
    "joined units",
    "fused",
    "fused, newer",
    "fused, streamed",
    "fused, streamed, newer",
)


@pytest.mark.parametrize(
    ("names", "size", "other", "instances"),
    [
        pytest.param(("gated", "offload of core", "offload of core, fused"), 1, 2, 1, id="1 rank"),
        pytest.param(("adam", "gated"), 2, 1, 1, id="2 ranks"),
        pytest.param(OTHERS, 2, 1, 1, id="other optimizers"),
        pytest.param(("muon",), 2, 1, 1, id="muon"),
        pytest.param(("lion",), 2, 1, 1, id="lion", marks=FULL),
        pytest.param(("split instances",), 4, 0, 2, id="split instances"),
        pytest.param(("instances", "fused, split instances"), 4, 0, 2, id="instances", marks=FULL),
    ],
)
def test_a_run_is_resumed_bit_for_bit_and_read_elsewhere(
    tmp_path: Path, names: tuple[str, ...], size: int, other: int, instances: int
) -> None:
    """other: how many ranks read the checkpoints. Replicas of a shard are saved once, parts of a
    shard each in its place, and each rank has each key, though it holds nothing."""
    if "lion" in names and not core_api.HAS_EMERGING_FUNCTION:
        pytest.skip("this core makes Lion of all weights")
    ranks = run_ranks(check_runs, size, str(tmp_path), names, instances, timeout=600)
    for folder, (keys, _) in ranks[0].items():
        for rank in ranks:
            assert rank[folder][0] == keys, folder
    if size >= 4:
        assert any(empty for rank in ranks for _, empty in rank.values())

    saved: dict[str, list[str]] = {}
    for name in names:
        run = RUNS[name]
        ends = ["", "-plain"] if run.plain else [""]
        if run.readers:
            saved[name] = [f"{name}-{one}{end}" for one in run.strategies for end in ends]
        if run.alone is not None:
            source = saved[name][-1]
            back = f"{source}-converted"
            converted = tmp_path / "other" / name
            convert(tmp_path / source, converted, "torch_dist")
            convert(converted, tmp_path / back, "fsdp_dtensor")
            saved[name].append(back)
    if saved:
        run_ranks(check_readers, other, str(tmp_path), saved, timeout=600)


# Weights alone.


def adam_state(trainer: Any) -> dict[Any, Any]:
    return gpt.distributed_optimizer(trainer).optimizer.state


def check_weights_only(rank: int, size: int, root: str) -> None:
    device = gpt.init_megatron()

    def steps(trainer: Any, *numbers: int) -> list[Any]:
        trainer.case = case
        return [recorded_step(trainer, gpt.batches(case, n, rank, device)) for n in numbers]

    for name, case in {"fp32": gpt.Case(), "bf16": gpt.Case(bf16=True, swiglu=True)}.items():
        first = gpt.build_trainer(case, ENDS[1], device)
        steps(first, 0, 1)
        save_checkpoint(f"{root}/{name}", 2, training_state([first.wrapper], first.optimizer))
        weights = first.params()
        # The same run again, whose optimizer forgets all it knows: bit for bit.
        again = gpt.build_trainer(case, ENDS[1], device)
        steps(again, 0, 1)
        for entry in adam_state(again).values():
            for value in entry.values():
                getattr(value, "_local_tensor", value).zero_()
        expected = steps(again, 2, 3)
        for strategy in STRATEGIES:
            # As Megatron does with --no-load-optim: the model, and then `reload_model_params`.
            trainer = gpt.build_trainer(case.but(seed=4321), strategy, device)
            state = training_state([trainer.wrapper])
            _, state = load_checkpoint(f"{root}/{name}", state, ignore_unexpected=("optimizer.",))
            load_training_state([trainer.wrapper], state)
            trainer.optimizer.reload_model_params()
            where = f"{name}, {strategy}"
            check_same_bits(trainer.params(), weights, f"{where}, just loaded")
            found = steps(trainer, 2, 3)
            counted = set()
            for entry in adam_state(trainer).values():
                if "step" in entry:
                    counted.add(float(entry["step"]))
            assert counted == {2.0}, where
            if strategy == ENDS[1]:
                check_run_bits(found, expected, where)
            for mine, theirs in zip(found, expected, strict=True):
                check_number(mine.loss, theirs.loss, f"{where}: loss")
                check_weights(mine.weights, theirs.weights, where)


def test_the_next_step_is_that_of_a_fresh_optimizer_on_the_loaded_weights(tmp_path: Path) -> None:
    run_ranks(check_weights_only, 2, str(tmp_path), timeout=400)


# Parameter groups of a plain model.


def _plain(rank: int, size: int) -> None:
    model = fully_shard_model(Net(2), None, [Block])
    params = list(model.parameters())
    groups = []
    for scalar in (False, True):
        groups.append({"params": [param for param in params if (param.numel() == 1) is scalar]})
    with pytest.raises(ValueError, match="Make it with capturable=False"):
        fully_shard_optimizer(FusedAdam(groups, capturable=True))
    optimizer = fully_shard_optimizer(FusedAdam(groups, lr=1e-2))
    saved = optimizer.state_dict()
    for steps in (1, 2, 1):  # the last one begins with the state of before the first
        if steps == 1:
            optimizer.load_state_dict(saved)
        model(tokens(0, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert [int(group["step"]) for group in optimizer.param_groups] == [steps] * 2
    holds_some = any(param._local_tensor.numel() for param in groups[1]["params"])
    assert not all(everyones(holds_some)), "every rank holds something of each group"


def test_groups_of_a_plain_model_count_and_begin_anew_with_a_state_dict_without_a_count() -> None:
    run_ranks(_plain, 2)
