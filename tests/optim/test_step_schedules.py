"""The optimizer in host memory, streamed through the device, with updates that go on behind a step:
the bits of an optimizer that stays and steps that wait, under every strategy and topology, whatever
a loop does around steps; and no race between streams, which are pretended, so that they are seen on
a CPU. In plain loops: test_plain_loops.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from megatron_fsdp_adapter import export_weights, release_memory, return_memory
from megatron_fsdp_adapter.build import building
from tests.lib.engine.recording import RaceError, RecordingRuntime
from tests.lib.gpt.changed_models import freeze
from tests.lib.gpt.checks import Step, check_same_bits
from tests.lib.gpt.fused_adam import precision_aware, transformer_engine_optimizer
from tests.lib.gpt.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    forward_backward,
    init_megatron,
    optimizer_config,
    train_step,
)
from tests.lib.gpt.topologies import TOPOLOGIES, TopologyTrainer, run_schedule
from tests.lib.gpt.variants import Variant, compare, marked, train
from tests.lib.megatron.bridge_stand_in import Task, standing_in
from tests.lib.plain.plain import assert_nothing_is_staged
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("optim/residency.py", "optim/step.py", "optim/local_shards.py", "optim/state.py")

CPU = torch.device("cpu")
SMALL = {"num_layers": 2, "hidden": 12, "heads": 2, "ffn": 20, "vocab": 23, "microbatches": 2,
         "clip": 0.5, "bf16": True}  # fmt: skip
CASE = Case(**SMALL)  # type: ignore[arg-type]
OFFLOAD = {"chunked_optimizer_state_offload": True}
BF16 = torch.bfloat16


# Steps, with nothing around them.


def read_now_and_then(trainer: Any, number: int, rank: int) -> Step:
    """Weights are read after steps, and after several without a read between them."""
    if number not in (2, 3):
        return train(trainer, number, rank)
    if isinstance(trainer, TopologyTrainer):
        loss = run_schedule(trainer, number)
        return Step(loss, float(trainer.optimizer.step()[1]), {}, {})
    return Step(*train_step(trainer, batches(trainer.case, number, rank, CPU)), {}, {})


def nothing_is_on_the_device(ours: Any, reference: Any, strategy: str) -> None:
    """Of what belongs to the optimizer."""
    units = [unit for chunk in ours.chunks for unit in chunk.engine.units]
    for group in (group for unit in units for group in unit.groups):
        if group.main.is_on_host:
            assert not group.main.device_buffer.allocated
            assert group.main.buffer is group.main.device_buffer.host
    inner = distributed_optimizer(ours).optimizer
    assert_nothing_is_staged(inner)
    assert 1 < len(inner._fsdp_shards.residency.parts) <= len(units)


def steps_were_counted(ours: Any, reference: Any, strategy: str) -> None:
    nothing_is_on_the_device(ours, reference, strategy)
    for trainer in (ours, reference):
        assert {group["step"] for group in trainer.optimizer.param_groups} == {5}


def _row(name: str, case: Any = None, ddp: Any = None, **more: Any) -> Variant:
    return Variant(
        name,
        **{
            "case": {**SMALL, **(case or {})},
            "ddp": {**(ddp or {}), **OFFLOAD},
            "steps": 5,
            "compare": "bits",
            "drive": read_now_and_then,
            "expect": nothing_is_on_the_device,
            "reference": {"strategy": "own", "ddp": ddp or {}},
            **more,
        },
    )


def _split(name: str, strategy: str, world: int = 4, **more: Any) -> Variant:
    """Experts and chunks in one optimizer."""
    topology = TOPOLOGIES[name]
    return _row(name, world=world, topology=topology, strategies=(strategy,), **more).but(
        name, case={"bf16": True}
    )


ROWS = (
    _row("bf16 weights"),
    # An Adam that counts a step in each call and does not see empty shards.
    _row(
        "fused, bf16 gradients and moments, frozen parameters",
        ddp={"megatron_fsdp_main_grads_dtype": BF16},
        around=transformer_engine_optimizer,
        change=freeze("module.decoder.layers.0.mlp"),
        expect=steps_were_counted,
        optimizer=partial(precision_aware, exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16),
    ),
    *(
        _row(
            f"instances, outer {outer}",
            ddp={"outer_dp_sharding_strategy": outer},
            instances=2,
            strategies=("optim", "optim_grads_params"),
        )
        for outer in ("no_shard", "optim")
    ),
    _split("pp2-vpp2", "optim_grads_params", 2),
    *(
        _row(name, case, ddp, full=True)
        for name, case, ddp in (
            ("float32 weights, which have moments alone to offload", {"bf16": False}, {}),
            ("fp16 and a loss scale", {"fp16": True, "bf16": False}, {}),
            ("tied, recomputed", {"tied": True, "recompute": "full-1"}, {}),
            ("no overlap, one microbatch", {"overlap": False, "microbatches": 1}, {}),
            ("bf16 on the wire", {}, {"megatron_fsdp_grad_comm_dtype": BF16}),
        )
    ),
    _split("ep2-etp2", "optim", full=True),
    _split("ep2-pp2", "optim_grads_params", full=True),
    _split("tp2-sp", "optim_grads", full=True),
)


# What a loop does around steps whose updates go on.

Habit = Callable[[Trainer, int], Any]


def _data(trainer: Trainer, number: int) -> list[torch.Tensor]:
    return batches(trainer.case, number, torch.distributed.get_rank(), CPU)


def _step(trainer: Trainer, number: int) -> Any:
    return train_step(trainer, _data(trainer, number))


def _evaluation(trainer: Trainer, number: int = 50) -> float:
    return forward_backward(trainer, _data(trainer, number), forward_only=True)


def _overflows(trainer: Trainer, number: int) -> Any:
    """A step that is left out changes nothing."""
    found = _step(trainer, number)
    before = trainer.params()
    forward_backward(trainer, _data(trainer, number + 10))
    for param in trainer.wrapper.parameters():
        param.grad._local_tensor.fill_(float("inf"))
    assert trainer.optimizer.step()[0] is False
    check_same_bits(trainer.params(), before, "left out")
    return found, float(trainer.optimizer.get_loss_scale()), _evaluation(trainer)


def _norm_is_large(trainer: Trainer, number: int) -> Any:
    found = _step(trainer, number)
    config = distributed_optimizer(trainer).config
    config.grad_norm_skip_threshold = 0.0
    forward_backward(trainer, _data(trainer, number + 10))
    left_out = trainer.optimizer.step()
    config.grad_norm_skip_threshold = float("inf")
    assert left_out[0] is False
    return found, left_out


def _goes_back(trainer: Trainer, number: int) -> Any:
    """To what was saved right after a step, from one step later."""
    found = _step(trainer, number)
    inner = distributed_optimizer(trainer)
    saved = inner.sharded_param_state_fsdp_dtensor()
    state = {
        name: {
            key: v.detach().clone() if isinstance(v, torch.Tensor) else v
            for key, v in entry.items()
        }
        for name, entry in saved["state"].items()
    }
    meta = {name: dict(options) for name, options in saved["param_to_group_meta"].items()}
    weights = {name: value.clone() for name, value in trainer.params().items()}
    _step(trainer, number + 10)
    inner.load_state_dict({"state": state, "param_to_group_meta": meta})
    trainer.load(weights)
    return found


def _exports(trainer: Trainer, number: int) -> Any:
    """Exported tensors are the main weights: after a step, a load, and memory that was away."""
    found = _step(trainer, number)
    _check_export(trainer)
    trainer.load({name: value * 0.5 for name, value in trainer.params().items()})
    _check_export(trainer)
    first = release_memory(trainer.wrapper, trainer.optimizer, keep="main_weights")
    dict(export_weights(trainer.wrapper))
    second = release_memory(trainer.wrapper, trainer.optimizer)
    if any(group.main.is_on_host for group in trainer.wrapper.engine.groups):
        assert first["optimizer"] == second["main_weights"] == 0, "they are on the host"
    return_memory(trainer.wrapper, trainer.optimizer)
    _check_export(trainer)
    return found


def _check_export(trainer: Trainer) -> None:
    mains = {name.removeprefix("module."): value for name, value in trainer.params().items()}
    for dtype in (BF16, None):
        wanted = {name: value.to(dtype or value.dtype) for name, value in mains.items()}
        check_same_bits(dict(export_weights(trainer.wrapper, dtype=dtype)), wanted, str(dtype))


def _steps_twice(trainer: Trainer, number: int) -> Any:
    """With gradients that the first step has clipped."""
    return _step(trainer, number), trainer.optimizer.step()


def _cores_offload(trainer: Trainer, number: int) -> Any:
    """Of state and gradients, for reinforcement learning."""
    found = _step(trainer, number)
    inner = distributed_optimizer(trainer)
    inner.offload_to_cpu()
    trainer.wrapper.offload_grad_buffers()
    trainer.wrapper.restore_grad_buffers()
    inner.restore_from_cpu()
    return found


@contextmanager
def pretended_streams(runtime: type[RecordingRuntime] = RecordingRuntime) -> Iterator[None]:
    with mock.patch.object(building, "make_runtime", lambda device: runtime()):
        yield


def _around(habit: Habit, trainer: Any, number: int, rank: int) -> Step:
    """What is found in a step, with a habit in the two in the middle; weights in the end."""
    with trainer.wrapper.engine.runtime.watch():
        found: Any = (_step if number in (0, 3) else habit)(trainer, number)
    return Step(found, 0.0, {}, trainer.params() if number == 3 else {})


def _habit(habit: Habit, world: int, **changes: Any) -> Variant:
    """On one rank under ZeRO-3; on two where gathered weights stay and where they are freed."""
    return _row(
        f"{habit.__name__.strip('_')}, {world} ranks",
        {"clip": 0.05, **changes},
        world=world,
        strategies=STRATEGIES[-1:] if world == 1 else STRATEGIES[1::2],
        steps=4,
        around=pretended_streams,
        drive=partial(_around, habit),
    )


HABITS = (
    _habit(_overflows, 2, bf16=False, fp16=True),
    _habit(_norm_is_large, 1),
    _habit(_goes_back, 1, recompute="full-1"),
    _habit(_exports, 2),
    _habit(_steps_twice, 1),
    _habit(_cores_offload, 1, tied=True),
)
EVERYWHERE = tuple(
    row.but(f"{row.name}, every strategy on two", world=2, strategies=STRATEGIES, full=True)
    for row in HABITS
)


@pytest.mark.parametrize("row", marked((*ROWS, *HABITS, *EVERYWHERE)))
@on_ranks()
def test_steps_have_the_bits_of_steps_without_offload(row: Variant, rank: int, seed: int) -> None:
    compare(row, rank, seed)


# What reads or writes what the updates of a step that has returned still write or read.


class DoesNotBlock(RecordingRuntime):
    def block(self, event: Any) -> None:
        """The host goes on."""


def _read(values: Any) -> None:
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            getattr(value, "_local_tensor", value).clone()


def _released(trainer: Trainer) -> None:
    release_memory(trainer.wrapper, trainer.optimizer)
    return_memory(trainer.wrapper, trainer.optimizer)


def _evaluates_before_the_step(trainer: Trainer) -> None:
    """Between a backward and its step; the evaluation raises, with gathers that nothing uses."""
    forward_backward(trainer, _data(trainer, 8))
    layer = next(one for name, one in trainer.wrapper.named_modules() if name.endswith("layers.0"))
    raises = layer.register_forward_pre_hook(lambda *unused: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _evaluation(trainer, 9)
    raises.remove()
    trainer.optimizer.step()


def _by_bridge(trainer: Trainer) -> None:
    """An export with tasks of before, as for every refit of an engine that generates."""
    pairs = trainer.wrapper.engine.pairs
    tasks = [Task(pair.managed.fqns[0], pair.unsharded) for pair in pairs]
    with standing_in() as module:
        made = module.MegatronModelBridge()
        _read(dict(made.stream_weights_megatron_to_hf([trainer.wrapper], None, tasks)))


def _load_by_bridge(trainer: Trainer) -> None:
    with standing_in() as module:
        module.MegatronModelBridge().load_weights_hf_to_megatron(
            lambda name, shape: torch.ones(shape), [trainer.wrapper]
        )


def _state_dict(t):
    return _read(t.wrapper.state_dict_for_save_checkpoint())


def _optimizer_state(t):
    return _read(t.optimizer.optimizer.state_dict()["state"])


def _optimizer_checkpoint(t):
    return _read(distributed_optimizer(t).sharded_param_state_fsdp_dtensor()["state"])


def _export(t):
    return _read(dict(export_weights(t.wrapper, dtype=None)))


def _export_of_bf16(t):
    return _read(dict(export_weights(t.wrapper)))


def _load(t):
    return t.load(t.wrapper.test_began)


def _evaluated_reading(t):
    return _evaluation(t, 9)


def _another_step(t):
    return t.optimizer.step()


READERS = {
    "state dict": (_state_dict, True),
    "optimizer state": (_optimizer_state, True),
    "optimizer checkpoint": (
        _optimizer_checkpoint,
        True,
    ),
    "export": (_export, True),
    "export of bf16": (_export_of_bf16, False),
    "bridge, cached tasks": (_by_bridge, True),
    "bridge, load": (_load_by_bridge, True),
    "load": (_load, True),
    "release": (_released, False),
    "evaluation": (_evaluated_reading, False),
    "another step": (_another_step, False),
    "evaluation before a step": (_evaluates_before_the_step, False),
}
"""What comes after a step, and whether it is a race where the host does not wait."""


CELLS = [*((name, OFFLOAD) for name in READERS), ("evaluation before a step", {})]


@pytest.mark.parametrize("runtime", [RecordingRuntime, DoesNotBlock])
@pytest.mark.parametrize(("name", "ddp"), CELLS)
@on_ranks(1)
def test_everybody_waits_for_updates_behind_a_step(
    name: str, ddp: dict[str, Any], runtime: type[RecordingRuntime]
) -> None:
    init_megatron()
    read, races = READERS[name]
    with pretended_streams(runtime):
        trainer = build_trainer(CASE, "optim_grads_params", CPU, ddp=ddp)
    trainer.wrapper.test_began = trainer.params()
    is_told = races and runtime is DoesNotBlock
    said = pytest.raises(RaceError, match="without waiting for (store|update)")
    with said if is_told else nullcontext(), trainer.wrapper.engine.runtime.watch():
        for number in range(2):
            _step(trainer, number)
        read(trainer)
        _step(trainer, 2)


# What it cannot do.

CORES = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
"""Megatron's own option, which asks for the same."""
REFUSED = (
    ("Set chunked_optimizer_state_offload=True in the DDP", {}, CORES),
    (
        "optimizer_offload_fraction=0.5: .* Use 1.0",
        OFFLOAD,
        {**CORES, "optimizer_offload_fraction": 0.5},
    ),
    ("optimizer='sgd' with chunked_optimizer_state_offload", OFFLOAD, {"optimizer": "sgd"}),
)


@on_ranks(1)
def test_what_it_cannot_do_is_an_early_error(rank: int) -> None:
    device = init_megatron()
    for said, ddp, options in REFUSED:
        with pytest.raises(ValueError, match=said):
            build_trainer(CASE, "optim", device, ddp=ddp, optimizer=options)
    config = optimizer_config(CASE)
    config.chunked_optimizer_state_offload = True  # a field of releases to come
    assert build_trainer(CASE, "optim", device, ddp=OFFLOAD, optimizer=lambda _: config).optimizer
    assert config.chunked_optimizer_state_offload is False, "core would offload it once more"
