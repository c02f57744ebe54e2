"""The seam to Megatron's optimizer: installed and undone, overrides, state without a step, clip."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import (
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
)
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter import install, uninstall
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import OPTIMIZER
from tests.lib.gpt.checks import free_run
from tests.lib.gpt.gpt import (
    Trainer,
    build_trainer,
    distributed_optimizer,
    optimizer_config,
    train_step,
)
from tests.lib.gpt.one_layer import CASE, DEVICE, data, wrapped
from tests.lib.gpt.precision_aware import precision_aware_trainer as precision_aware_trainer

CHECKS = (
    "megatron/optimizer/optimizer.py",
    "megatron/optimizer/clipping.py",
    "megatron/optimizer/optimizer_state.py",
    "megatron/compat/table.py",
)

pytestmark = pytest.mark.usefixtures("one_rank")


def _methods() -> dict[str, Any]:
    found = {row.path: patches.place(row) for row in OPTIMIZER}
    result = {}
    for path, at in found.items():
        if at is not None:
            result[path] = vars(at[0]).get(at[1], "inherited")
    return result


def test_constructing_a_wrapper_changes_megatron_until_uninstall(not_installed: None) -> None:
    original = _methods()
    wrapped("optim")
    changed = _methods()
    for name in original:
        assert changed[name] is not original[name]
    install()
    wrapped("no_shard")
    assert _methods() == changed
    uninstall()
    assert _methods() == original


def test_stock_training_is_not_touched_by_the_seam(not_installed: None) -> None:
    """The replaced methods act only on an optimizer whose model chunks are ours."""
    before = free_run(build_trainer(CASE, None, DEVICE), 0, 2, DEVICE)
    patches.install(OPTIMIZER)
    after = free_run(build_trainer(CASE, None, DEVICE), 0, 2, DEVICE)
    torch.testing.assert_close([*map(vars, after)], [*map(vars, before)], rtol=0, atol=0)


def test_inner_optimizer_keeps_its_class(trainer: Trainer) -> None:
    """`DistributedOptimizer` and users ask for it by isinstance."""
    inner = distributed_optimizer(trainer).optimizer
    assert isinstance(inner, torch.optim.AdamW)
    assert type(inner).__name__ == "AdamW"
    for group in inner.param_groups:
        for param in group["params"]:
            assert isinstance(param, DTensor)


def _named(name: str) -> Any:
    return ParamWithNamePredicate(name=name, fn=lambda param, called: called.startswith(name))


OVERRIDDEN = {
    "attribute": (ParamKey(attr="small_lr"), 2),
    "predicate": (ParamKey(predicate=ParamPredicate("small", lambda p: hasattr(p, "small_lr"))), 2),
    "name": (ParamKey(name="module.decoder.layers.0.mlp.linear_fc2.weight"), 1),
    "pattern": (ParamKey(name="module.decoder.layers.0.mlp.*"), 4),
    "predicate of the name": (ParamKey(with_name_predicate=_named("module.decoder.final")), 2),
}
"""Keys of overrides, and how many parameters they match under DDP."""


@pytest.mark.parametrize("what", OVERRIDDEN)
def test_overrides_match_the_parameters_that_they_match_under_ddp(what: str) -> None:
    (key, count) = OVERRIDDEN[what]
    found = []
    for strategy in (None, "optim_grads_params"):
        trainer = build_trainer(CASE, strategy, DEVICE, _mark_final_norm)
        groups = get_megatron_optimizer(
            optimizer_config(CASE),
            [trainer.wrapper],
            use_gloo_process_groups=False,
            config_overrides={key: {"max_lr": 1e-6}},
        ).param_groups
        found.append({group["max_lr"]: sum(p.numel() for p in group["params"]) for group in groups})
        if strategy is not None:
            assert [len(g["params"]) for g in groups if g["max_lr"] == 1e-6] == [count]
    assert found[0] == found[1], found


def _mark_final_norm(model: Any) -> None:
    for param in model.decoder.final_layernorm.parameters():
        param.small_lr = True


@pytest.mark.parametrize("is_loading", (False, True))
def test_making_state_takes_no_step(trainer: Trainer, is_loading: bool) -> None:
    """Trap M8: core made it by a step with zero gradients, which decays weights and counts. Before
    a load, and for a checkpoint of an optimizer that has not stepped yet."""
    fresh = build_trainer(CASE, trainer.strategy, DEVICE)
    before = trainer.params()
    inner = distributed_optimizer(trainer)
    trainer.wrapper.stop_communication()
    if is_loading:
        inner._init_optimizer_states_with_dummy_values()
    else:
        inner.sharded_param_state_fsdp_dtensor()
    after = trainer.params()
    for name in before:
        assert torch.equal(after[name], before[name])
    for param in trainer.wrapper.parameters():
        state = inner.optimizer.state[param]
        assert float(state["step"]) == 0
        assert not state["exp_avg"]._local_tensor.any()
        assert param.grad is None
    assert train_step(trainer, data()) == train_step(fresh, data())
    mine, theirs = trainer.params(), fresh.params()
    for name in mine:
        assert torch.equal(mine[name], theirs[name])


def test_gradients_are_gone_from_the_local_tensors_after_a_step(trainer: Trainer) -> None:
    """They would keep a step's gradient storage alive through the next forward."""
    train_step(trainer, data())
    trainer.wrapper.stop_communication()
    for param in trainer.wrapper.parameters():
        assert param._local_tensor.grad is None


def test_state_of_another_model_is_refused(trainer: Trainer) -> None:
    train_step(trainer, data())
    inner = distributed_optimizer(trainer).optimizer
    state = copy.copy(inner.state_dict())
    state["param_groups"] = [{**group, "params": [0]} for group in state["param_groups"]]
    with pytest.raises(ValueError, match="Load the state of the same model"):
        inner.load_state_dict(state)


def test_what_a_load_asks_for_has_the_step_count_of_a_fused_optimizer() -> None:
    """FusedAdam has none before its first step, and a load reads only what is asked for: without
    it, training went on with Adam's first, doubled, steps."""
    inner = distributed_optimizer(precision_aware_trainer("optim_grads_params", {}, DEVICE))
    template = inner.sharded_param_state_fsdp_dtensor(is_loading=True)
    assert {meta["step"] for meta in template["param_to_group_meta"].values()} == {0}
