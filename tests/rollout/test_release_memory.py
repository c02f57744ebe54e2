"""Models whose memory was given back and taken again, by `release_memory` and by the calls of
core's own reinforcement learning and of verl, train on bit for bit, and are an error to use
meanwhile. Buffers are poisoned where the suite runs. With the optimizer in host memory:
test_step_schedules.py; quantized weights that are left alone: tests/quantized/test_te_loads.py."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter import (
    export_shards,
    export_weights,
    fully_shard_optimizer,
    release_memory,
    return_memory,
)
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.buffer import BUFFER_KINDS
from megatron_fsdp_adapter.core.runtime.device import storage_bytes
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FRAMEWORKS, VERL
from megatron_fsdp_adapter.megatron.frameworks.rl_frameworks import export_index
from megatron_fsdp_adapter.rollout.release import storages
from tests.lib.engine.engine_cases import buffers_of
from tests.lib.gpt.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    forward_backward,
    init_megatron,
    train_step,
)
from tests.lib.plain.exports import assert_same, mesh_options, sharded, train
from tests.lib.plain.plain import tokens
from tests.lib.ranks.groups import everyones
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "rollout/release.py",
    "core/runtime/host_stash.py",
    "megatron/frameworks/rl_frameworks.py",
)


def buffers(model: Any) -> list[torch.Tensor]:
    """Every flat tensor of the engine's, found without the code that releases them."""
    return [flat for _, flat in buffers_of(model.engine)]


def states(optimizer: Any) -> list[torch.Tensor]:
    shards = optimizer._fsdp_shards.state.values()
    return [v for state in shards for v in state.values() if isinstance(v, torch.Tensor)]


def state_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    found = model.full_state_dict()
    for number, state in enumerate(states(optimizer)):
        found[f"state {number}"] = getattr(state, "_local_tensor", state).clone()
    return found


# Plain modules.


def _cycle(model: Any, optimizer: Any) -> None:
    """Everything away and back, in the steps that users take, with nothing left on the device."""
    held, moments = (sum(map(storage_bytes, of)) for of in (buffers(model), states(optimizer)))
    first = release_memory(model, optimizer, keep="main_weights")
    assert first["optimizer"] == moments
    dict(export_weights(model))
    list(export_shards(model))
    second = release_memory(model, optimizer)
    assert not any(map(storage_bytes, buffers(model)))
    assert not any(map(storage_bytes, states(optimizer)))
    # Gradients, and what was gathered ahead, are forgotten before anything is counted.
    assert 0 < sum(first.values()) + second["main_weights"] - moments <= held
    assert not any(release_memory(model, optimizer).values()), "it is away"
    return_memory(model, only="main_weights")
    dict(export_weights(model))
    return_memory(model, optimizer)
    return_memory(model, optimizer)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
@on_ranks()
def test_training_of_a_plain_module_goes_on_bit_for_bit(
    rank: int, world: int, strategy: str
) -> None:
    flat, *hybrid = mesh_options(world, strategy)
    cells = [(flat, torch.float32), *((options, torch.bfloat16) for options in (flat, *hybrid))]
    for options, computes in cells:
        plain, without = sharded(strategy, computes, **options)
        model, optimizer = sharded(strategy, computes, **options)
        for step in range(4):
            for one, stepper in ((plain, without), (model, optimizer)):
                train(one, stepper, step)
                if step == 1:
                    with torch.no_grad():
                        one(tokens(step, 1, rank))  # gathered ahead, and not used
            if step < 3:
                _cycle(model, optimizer)
        assert_same(state_of(model, optimizer), state_of(plain, without), f"{options} {computes}")


def _forward(model, _):
    return model(tokens(0, 0, 0))


def _evaluation(model, _):
    return torch.no_grad()(model)(tokens(0, 0, 0))


def _a_module_below(model, _):
    return model.module.blocks[0](torch.ones(2, 10))


def _state_dict(model, _):
    return model.state_dict()


def _state_dict_of_a_module_below(model, _):
    return model.module.blocks.state_dict()


def _full_state_dict(model, _):
    return model.full_state_dict()


def _load(model, _):
    return model.load_state_dict({}, strict=False)


def _export(model, _):
    return list(export_weights(model))


def _export_of_shards(model, _):
    return list(export_shards(model))


def _step(_, optimizer):
    return optimizer.step()


def _state_dict_of_the_optimizer(_, optimizer):
    return optimizer.state_dict()


def _load_into_the_optimizer(_, optimizer):
    return optimizer.load_state_dict({"state": {}, "param_groups": []})


def _values(model, _):
    return next(iter(model.parameters())) + 1


def _finish(model, _):
    return model.finish_grad_sync()


def _clip(model, _):
    return model.clip_grad_norm_(1.0)


USES = {
    "forward": _forward,
    "evaluation": _evaluation,
    "a module below": _a_module_below,
    "state dict": _state_dict,
    "state dict of a module below": _state_dict_of_a_module_below,
    "full state dict": _full_state_dict,
    "load": _load,
    "export": _export,
    "export of shards": _export_of_shards,
    "step": _step,
    "state dict of the optimizer": _state_dict_of_the_optimizer,
    "load into the optimizer": _load_into_the_optimizer,
    "values": _values,
    "finish": _finish,
    "clip": _clip,
}


def assert_named(uses: Mapping[str, Callable[[], Any]]) -> None:
    """Each raises, with the remedy."""
    for name, use in uses.items():
        with pytest.raises(RuntimeError, match="return_memory"):
            use()
            pytest.fail(name)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_using_what_was_released_is_an_error_that_names_the_remedy(
    one_rank: None, strategy: str
) -> None:
    model, optimizer = sharded(strategy)
    train(model, optimizer, 0)
    before = copy.deepcopy(state_of(model, optimizer))
    release_memory(model, optimizer)
    # Without gradients there is nothing to clip.
    uses = {n: use for n, use in USES.items() if n != "clip" or strategy == "optim"}
    assert_named({n: lambda use=use: use(model, optimizer) for n, use in uses.items()})
    assert [tuple(p.shape) for _, p in model.named_parameters()], "names and shapes are there"
    model.zero_grad()
    optimizer.zero_grad()
    model.describe()
    return_memory(model, optimizer)
    assert_same(state_of(model, optimizer), before, "nothing was written")
    train(model, optimizer, 1)


def test_host_memory_is_taken_once(one_rank: None) -> None:
    model, optimizer = sharded("optim")
    train(model, optimizer, 0)
    places = []
    for _ in range(2):
        release_memory(model, optimizer)
        return_memory(model, optimizer)
        lots = (model.engine.stash, optimizer._fsdp_shards.parked)
        known = [one for lot in lots for of in lot._known.values() for one in of.values()]
        places.append([copied.data_ptr() for one in known for h in one._host for copied in h])
    assert places[0] == places[1]


def _keeps_no_list(model, optimizer):
    release_memory(model, optimizer, keep="weights")


def _keeps_an_unknown_kind(model, optimizer):
    release_memory(model, optimizer, keep=["slots", "x"])


def _returns_no_list(model, optimizer):
    return_memory(model, optimizer, only="weights")


def _another_optimizer(model, _):
    weight = torch.nn.Parameter(torch.ones(2))
    release_memory(model, torch.optim.SGD([weight], lr=1.0))


WRONG = [
    (_keeps_no_list, "keep='weights'"),
    (_keeps_an_unknown_kind, "keep='x'"),
    (_returns_no_list, "only='weights'"),
    (_another_optimizer, "SGD is not over a wrapped model"),
]


@pytest.mark.parametrize(("use", "named"), WRONG)
def test_a_wrong_kind_or_optimizer_is_named(one_rank: None, use: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        use(*sharded("optim"))


def test_memory_whose_addresses_a_graph_has_stays(one_rank: None) -> None:
    model, optimizer = sharded("optim")
    train(model, optimizer, 0)
    model.engine.pinned_by = "a CUDA graph"
    with pytest.raises(RuntimeError, match="a CUDA graph has addresses of main_weights"):
        release_memory(model, optimizer)
    assert all(map(storage_bytes, states(optimizer))), "nothing was released"
    assert release_memory(model, optimizer, keep=BUFFER_KINDS)["optimizer"] > 0
    return_memory(model, optimizer)
    train(model, optimizer, 1)


def test_an_optimizer_without_state_has_nothing_to_release(one_rank: None) -> None:
    model, _ = sharded("optim_grads_params")
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert release_memory(model, optimizer)["optimizer"] == 0
    return_memory(model, optimizer)
    train(model, optimizer, 0)


# Megatron models.

CASE = Case(num_layers=3, bf16=True, tied=True, swiglu=True, bias=False, microbatches=2)


def freeze(model: torch.nn.Module) -> None:
    model.module.decoder.layers[0].requires_grad_(False)


def freeze_flat(model: torch.nn.Module) -> None:
    """Frozen weights that are views of one storage, as those of cuDNN's recurrent layers."""
    freeze(model)
    params = list(model.module.decoder.layers[0].parameters())
    flat = torch.cat([param.detach().view(-1) for param in params])
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.data = part.view(param.shape)


VARIANTS = {
    "plain": {},
    "slots": {"ddp": {"fsdp_double_buffer": True}},
    "frozen": {"change": freeze},
    "left alone": {"change": freeze_flat, "module_placements": {"decoder.layers.0": "leave"}},
}


def slots_of(model: Any) -> list[torch.Tensor]:
    return [slot for slot, _ in storages(model.engine)["slots"]]


def by_ours(trainer: Trainer, data: Any) -> None:
    model = trainer.wrapper
    optimizer = trainer.optimizer
    release_memory(model, optimizer, keep=["main_weights"])
    sum(tensor.float().sum() for _, tensor in export_weights(model))
    assert release_memory(model, optimizer)["main_weights"] > 0
    left = [param for name, param in model.named_parameters() if "layers.0." in name]
    left = [param for param in left if not hasattr(param, "_local_tensor")]
    moments = states(distributed_optimizer(trainer).optimizer)
    assert not any(map(storage_bytes, [*buffers(model), *moments, *slots_of(model), *left]))
    assert_named(
        {
            "evaluation": lambda: forward_backward(trainer, data, forward_only=True),
            "step": trainer.optimizer.step,
            "checkpoint": model.state_dict_for_save_checkpoint,
            "state dict of the optimizer": trainer.optimizer.state_dict,
        }
    )
    return_memory(model, optimizer)


def by_core(trainer: Trainer, data: Any) -> None:
    model = trainer.wrapper
    optimizer = trainer.optimizer
    model.offload_grad_buffers()
    optimizer.offload_to_cpu()
    assert not any(map(storage_bytes, states(distributed_optimizer(trainer).optimizer)))
    with torch.no_grad():
        forward_backward(trainer, data, forward_only=True)  # generation reads weights alone
    with pytest.raises(RuntimeError, match="gradients of this model were released"):
        forward_backward(trainer, data)
    model.restore_grad_buffers()
    optimizer.restore_from_cpu()
    model.param_and_grad_buffer.offload_to_cpu()
    in_slots = {slot.untyped_storage()._cdata for slot in slots_of(model)}
    mine = [one for one in buffers(model) if one.untyped_storage()._cdata not in in_slots]
    assert not any(map(storage_bytes, mine))
    model.param_and_grad_buffer.reload_from_cpu()


def _verl() -> ModuleType:
    """Names and parameters of `verl.utils.megatron_utils` (checked against 0.9.1, and the real one
    by tests/integration/test_verl.py). None is to be called for what is sharded here."""
    module = ModuleType(VERL)
    own = "verl's own: parameters would lose their buffers"
    vars(module).update(
        offload_megatron_model_to_cpu=lambda models: pytest.fail(own),
        load_megatron_model_to_gpu=lambda models, load_grad=True, load_frozen_params=True: (
            pytest.fail(own)
        ),
        offload_megatron_optimizer=lambda optimizers: pytest.fail(own),
        load_megatron_optimizer=lambda optimizers: pytest.fail(own),
        get_megatron_module_device=lambda models: "the device",
    )
    return module


def by_verl(trainer: Trainer, data: Any) -> None:
    model = trainer.wrapper
    optimizer = trainer.optimizer
    sys.modules[VERL] = utils = _verl()
    patches.install(FRAMEWORKS)
    try:
        assert utils.get_megatron_module_device([model]) == "the device"
        utils.offload_megatron_model_to_cpu([model])
        utils.offload_megatron_optimizer(optimizer)
        assert utils.get_megatron_module_device([model]) == "cpu"
        moments = states(distributed_optimizer(trainer).optimizer)
        assert not any(map(storage_bytes, [*buffers(model), *moments, *slots_of(model)]))
        utils.load_megatron_model_to_gpu([model], load_grad=False, load_frozen_params=False)
        dict(export_weights(model))
        with pytest.raises(RuntimeError, match="gradients of this model were released"):
            forward_backward(trainer, data)
        utils.load_megatron_model_to_gpu([model])
        utils.load_megatron_optimizer(optimizer)
    finally:
        patches.uninstall(FRAMEWORKS)
        del sys.modules[VERL]


WAYS = (by_ours, by_core, by_verl)
CELLS = [
    (world, strategy, name)
    for world in (2, 1)
    for strategy in STRATEGIES
    for name in VARIANTS
    if name != "slots" or strategy == "optim_grads_params"
]
RUN = [
    *((2, strategy, "plain") for strategy in STRATEGIES),
    (2, "optim_grads_params", "slots"),
    (1, "optim_grads_params", "left alone"),
]
"""Cells that run without --full."""


@pytest.mark.parametrize(
    ("world", "strategy", "variant"),
    [pytest.param(*cell, marks=[pytest.mark.full] * (cell not in RUN)) for cell in CELLS],
)
@on_ranks(seconds=300)
def test_training_of_a_gpt_goes_on_bit_for_bit(
    rank: int, world: int, strategy: str, variant: str
) -> None:
    device = init_megatron()
    plain, trainer = (build_trainer(CASE, strategy, device, **VARIANTS[variant]) for _ in range(2))
    for step in range(4):
        data = batches(CASE, step, rank, device)
        assert train_step(plain, data) == train_step(trainer, data), step
        forward_backward(plain, data, forward_only=True)
        for wrapper in (plain.wrapper, trainer.wrapper):
            wrapper.start_param_sync()
        if step < 3:
            WAYS[step](trainer, data)
    found, wanted = (
        {**one.params(), **dict(enumerate(states(distributed_optimizer(one).optimizer)))}
        for one in (trainer, plain)
    )
    assert_same(found, wanted, "in the end")  # type: ignore[arg-type]


@dataclass
class _Spec:
    """As verl's, of what is set."""

    place: Any = None
    gather_group: Any = None
    contributes: bool = True


@pytest.mark.parametrize("copies", [1, 2])
@on_ranks(2)
def test_each_element_of_a_weight_is_in_the_rows_that_one_rank_sends(copies: int) -> None:
    """By verl's export. With its own code: tests/integration/test_verl.py."""
    instances = {"num_distributed_optimizer_instances": copies}
    device = init_megatron(**instances)
    probe = SimpleNamespace(is_expert=False)
    for strategy in STRATEGIES:
        trainer = build_trainer(CASE, strategy, device, ddp=instances)
        pairs = trainer.wrapper.engine.pairs
        made = [SimpleNamespace(param=p.unsharded, spec=_Spec(), probe=probe) for p in pairs]
        worker = SimpleNamespace(module=[trainer.wrapper])
        records = export_index(lambda _, made=made: made, worker)  # type: ignore[misc]
        assert all(r.param.data.dtype == torch.bfloat16 for r in records)
        mine = [(r.param.data.numel(), r.spec.contributes) for r in records]
        for pair, *rows in zip(pairs, *everyones(mine), strict=True):
            sent = sum(count for count, contributes in rows if contributes)
            assert sent == pair.unsharded.numel(), (strategy, pair.managed.fqns)
