"""What Megatron and a user read from the wrapper, call on it and do to it. One rank; see also
tests/megatron/wrapper/test_adapter_ranks.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_fsdp_adapter import (
    FullyShardedDataParallel,
    fully_shard_optimizer,
    install,
)
from megatron_fsdp_adapter.core.engine.step import Last
from tests.lib.gpt.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    forward_step,
    full_all,
    train_step,
)
from tests.lib.gpt.one_layer import CASE, DEVICE, data, wrapped

CHECKS = (
    "megatron/wrapper/adapter.py",
    "megatron/wrapper/param_attributes.py",
    "megatron/wrapper/no_sync_check.py",
    "megatron/inner_module.py",
    "build/guards.py",
    "build/grad_sync.py",
    "build/shard_attributes.py",
    "state/not_copyable.py",
)

pytestmark = pytest.mark.usefixtures("one_rank")


def backward(trainer: Trainer, tokens: torch.Tensor | None = None) -> None:
    """Forward and backward of one microbatch, without the end of the step."""
    given = data()[0] if tokens is None else tokens
    output, loss_func = forward_step(CASE, iter([given]), trainer.wrapper)
    loss_func(output)[0].backward()


# Depth and attributes.


def test_attributes_that_megatron_must_find_on_the_model(trainer: Trainer) -> None:
    """`get_attr_wrapped_model` takes them from the first level that has them (trap S4)."""
    names = {
        "pre_process", "decoder", "share_embeddings_and_output_weights", "set_input_tensor",
        "model_type", "xattn_needed", "pg_collection", "build_schedule_plan", "vp_stage",
    }  # fmt: skip
    for level in (trainer.wrapper, trainer.wrapper.module):
        assert {name for name in names if hasattr(level, name)} == set()


def test_attributes_that_megatron_reads_on_the_wrapper(trainer: Trainer) -> None:
    wrapper = trainer.wrapper
    assert vars(wrapper)["ddp_config"].use_megatron_fsdp  # on the wrapper itself
    assert wrapper.buffers.__func__ is nn.Module.buffers
    assert list(wrapper.param_and_grad_buffer.parameter_groups) == []
    wrapper.param_and_grad_buffer.manual_buffer_registration()
    wrapper.set_is_first_microbatch()


@pytest.mark.parametrize(
    ("strategy", "reduce", "gather"),
    (("no_shard", False, False), ("optim", False, False), ("optim_grads", True, False),
     ("optim_grads_params", True, True)),
)  # fmt: skip
def test_overlap_that_a_strategy_needs_is_set_in_the_config(
    strategy: str, reduce: bool, gather: bool
) -> None:
    """Megatron wires no_sync by the fields of the same object, which it compares for equality."""
    config = wrapped(strategy, CASE.but(overlap=False)).ddp_config
    assert (config.overlap_grad_reduce, config.overlap_param_gather) == (reduce, gather)


def test_signatures_that_megatron_calls() -> None:
    """Trap A7: a signature that has drifted from DDP's crashes the shared training loop."""
    parameters = {}
    for name in ("__init__", "start_param_sync", "finish_grad_sync", "scale_gradients"):
        parameters[name] = list(
            inspect.signature(getattr(FullyShardedDataParallel, name)).parameters
        )
    assert parameters == {
        "__init__": [
            "self",
            "config",
            "ddp_config",
            "module",
            "fsdp_unit_modules",
            "disable_bucketing",
            "device",
            "pg_collection",
            "module_placements",
        ],
        "start_param_sync": ["self", "unused", "force_sync", "force_dispatch"],
        "finish_grad_sync": ["self", "force_all_reduce"],
        "scale_gradients": ["self", "scaling_factor"],
    }


# The two identities of a parameter.


Act = Callable[[Trainer], Any]
EVENTS: dict[str, tuple[Act, str]] = {}
"""What happens to a trainer, and which identity is shown after it."""


def event(name: str, expected: str) -> Callable[[Act], Act]:
    """Adds a function to the table."""

    def add(act: Act) -> Act:
        EVENTS[name] = (act, expected)
        return act

    return add


@event("construction", "optimizer")
def _construction(trainer: Trainer) -> None:
    pass


@event("forward", "raw")
def _forward(trainer: Trainer) -> None:
    forward_step(CASE, iter(data()), trainer.wrapper)


@event("start_param_sync", "raw")
def _start_param_sync(trainer: Trainer) -> None:
    trainer.wrapper.start_param_sync()


@event("finish_grad_sync", "optimizer")
def _finish_grad_sync(trainer: Trainer) -> None:
    backward(trainer)
    trainer.wrapper.finish_grad_sync()


@event("synchronize_param_gather", "optimizer")
def _synchronize_param_gather(trainer: Trainer) -> None:
    backward(trainer)
    trainer.wrapper.synchronize_param_gather()


@event("stop_communication", "optimizer")
def _stop_communication(trainer: Trainer) -> None:
    backward(trainer)
    trainer.wrapper.stop_communication()


@event("state_dict of the wrapper", "optimizer")
def _state_dict_of_the_wrapper(trainer: Trainer) -> None:
    backward(trainer)
    trainer.wrapper.state_dict()


@event("state_dict of a layer", "optimizer")
def _state_dict_of_a_layer(trainer: Trainer) -> None:
    backward(trainer)
    layers = trainer.wrapper.module.module.decoder.layers
    layers[0].state_dict()


@event("optimizer step", "raw")
def _optimizer_step(trainer: Trainer) -> None:
    train_step(trainer, data())


@pytest.mark.parametrize("name", EVENTS)
def test_identity_after_each_event(trainer: Trainer, name: str) -> None:
    """Which `named_parameters()` shows: one for all."""
    act, expected = EVENTS[name]
    act(trainer)
    kinds = {isinstance(p, DTensor) for _, p in trainer.wrapper.named_parameters()}
    assert kinds == {expected == "optimizer"}


def test_optimizer_parameters_are_made_once(trainer: Trainer) -> None:
    """Optimizer groups, name caches and state dicts go by object identity."""
    before = dict(trainer.wrapper.named_parameters())
    for number in range(2):
        train_step(trainer, data(number))
    trainer.wrapper.stop_communication()
    after = dict(trainer.wrapper.named_parameters())
    assert list(before) == list(after)
    for name in before:
        assert before[name] is after[name]
    grouped = set()
    for group in trainer.optimizer.param_groups:
        for p in group["params"]:
            grouped.add(id(p))
    assert grouped == {id(param) for param in after.values()}


def test_tied_weights_are_one_object_under_both_names() -> None:
    """In either identity (traps S1, S3)."""
    wrapper = wrapped(case=CASE.but(tied=True))
    model = get_attr_wrapped_model(wrapper, "decoder", return_model_obj=True)
    for show in (wrapper.start_param_sync, wrapper.stop_communication):
        show()
        embedding = model.embedding.word_embeddings.weight
        assert model.shared_embedding_or_output_weight() is embedding
    names = [name for name, _ in wrapper.named_parameters()]
    assert len([name for name in names if "embedding" in name]) == 1
    assert not [name for name in names if "output_layer" in name]


def test_attributes_of_optimizer_parameters(trainer: Trainer) -> None:
    """A `main_grad` would go before `.grad` in finalize_model_grads."""
    kept = Replicate() if trainer.strategy == "no_shard" else Shard(0)
    for name, param in trainer.wrapper.module.module.named_parameters():
        raw = param.orig_param
        assert isinstance(param, nn.Parameter), name
        assert isinstance(param, DTensor), name
        assert (param.shape, param.dtype) == (raw.shape, torch.float32), name
        assert param.requires_grad, name
        assert param.is_leaf, name
        assert param._local_tensor.is_contiguous(), name
        assert param.__fsdp_param__ is True
        assert param.megatron_fsdp_slice == slice(0, param.numel()), name
        assert list(param.placements) == [kept]
        assert param.device_mesh.mesh_dim_names == ("dp_cp",)
        assert not hasattr(param, "main_grad")


def test_attributes_of_raw_parameters(trainer: Trainer) -> None:
    """`__fsdp_param__`, even False, would send core's fused weight gradients another way;
    `grad_added_to_main_grad` would make fused kernels return a placeholder as gradient."""
    trainer.wrapper.start_param_sync()
    for name, raw in trainer.wrapper.named_parameters():
        found = {one for one in ("__fsdp_param__", "grad_added_to_main_grad") if hasattr(raw, one)}
        assert not isinstance(raw, DTensor), name
        assert not found, name


MARKED = (
    "allreduce", "average_gradients_across_tp_domain", "expert_tp", "grad_norm_group",
    "is_embedding_or_output_parameter", "is_embedding_parameter", "is_qkv", "partition_dim",
    "partition_stride", "pipeline_parallel", "sequence_parallel", "shared", "shared_embedding",
    "tensor_model_parallel", "small_lr", "_no_weight_decay",
)  # fmt: skip
"""By Megatron, and the last two by a user."""


def test_what_was_marked_on_a_parameter_is_on_both_identities() -> None:
    """Without `average_gradients_across_tp_domain` a reduction is skipped in silence (trap T7)."""
    marks = {name: True if name == "allreduce" else f"value of {name}" for name in MARKED}

    def mark(model: Any) -> None:
        vars(model.decoder.final_layernorm.weight).update(marks)

    shown = wrapped(change=mark).module.module.decoder.final_layernorm.weight
    for param in (shown, shown.orig_param):
        assert {name: getattr(param, name) for name in MARKED} == marks


# Gradients.


Calls = tuple[Callable[[Any], Any], ...]


def _gradients(trainer: Trainer, before: Calls = (), after: Calls = ()) -> dict[str, torch.Tensor]:
    """Of one microbatch. before, after: what is called on the wrapper around the reduction."""
    trainer.wrapper.zero_grad_buffer()
    backward(trainer)
    for call in (*before, lambda wrapper: wrapper.finish_grad_sync(), *after):
        call(trainer.wrapper)
    named = trainer.wrapper.named_parameters()
    return {name: param.grad._local_tensor.clone() for name, param in named}


def _start(wrapper: Any) -> None:
    wrapper.start_grad_sync(wrapper.parameters())


CALLS_MORE: dict[str, tuple[Calls, Calls]] = {
    "with align_grad_reduce the schedule starts": ((_start,), ()),
    "it starts for two chunks": ((_start, _start), ()),
    "the end comes twice": ((), (lambda wrapper: wrapper.finish_grad_sync(),)),
    "parameter norms are logged": ((), (lambda wrapper: wrapper.stop_communication(),)),
}


@pytest.mark.parametrize("calls", CALLS_MORE)
def test_a_call_more_reduces_nothing_twice(trainer: Trainer, calls: str) -> None:
    expected, found = _gradients(trainer), _gradients(trainer, *CALLS_MORE[calls])
    for name in expected:
        assert torch.equal(found[name], expected[name])


def test_force_all_reduce(trainer: Trainer) -> None:
    """Trap A7. Full gradients exist only where they are not sharded; elsewhere it is refused."""
    backward(trainer)
    if trainer.strategy == "no_shard":
        trainer.wrapper.finish_grad_sync(force_all_reduce=True)
        for param in trainer.wrapper.parameters():
            assert param.grad is not None
    else:
        with pytest.raises(ValueError, match=r"force_all_reduce=True.*Use 'no_shard'"):
            trainer.wrapper.finish_grad_sync(force_all_reduce=True)


def test_no_sync_is_a_fresh_context_each_time(trainer: Trainer) -> None:
    """Schedules enter and leave by hand, with nothing inside when there is one microbatch."""
    engine = trainer.wrapper.engine
    for _ in range(2):
        with pytest.raises(KeyError), trainer.wrapper.no_sync():
            assert engine.is_last is Last.NO
            raise KeyError
        assert engine.is_last is Last.YES


def test_what_is_wrapped_is_not_wrapped_again_and_its_optimizer_is_megatrons(trainer) -> None:
    model = trainer.wrapper.module.module
    with pytest.raises(ValueError, match="sharded already. Wrap a module once"):
        FullyShardedDataParallel(model.config, trainer.wrapper.ddp_config, model)
    with pytest.raises(ValueError, match="Use get_megatron_optimizer"):
        fully_shard_optimizer(torch.optim.AdamW(trainer.wrapper.parameters()))


# Resharded parameters and conversions.


def test_weights_of_the_last_step_are_never_read_in_silence(trainer: Trainer) -> None:
    """Trap M9: kept weights are older than the main weights until they are gathered again."""
    forward_backward(trainer, data())
    trainer.optimizer.optimizer.step()
    trainer.wrapper.param_and_grad_buffer.copy_main_weights_to_model_weights()
    trainer.wrapper.engine.to_unsharded()
    raw = get_attr_wrapped_model(trainer.wrapper, "decoder").layers[0].mlp.linear_fc1.weight
    with pytest.raises(RuntimeError, match="not gathered"):
        raw.sum()
    trainer.wrapper.start_param_sync(force_sync=True)
    pair = next(pair for pair in trainer.wrapper.engine.pairs if pair.unsharded is raw)
    assert torch.equal(raw.detach(), full_all({"main": pair.sharded})["main"])


def test_a_step_in_a_graph_is_an_error_as_its_replays_outdate_nothing(trainer: Trainer) -> None:
    buffer = trainer.wrapper.param_and_grad_buffer
    runtime = trainer.wrapper.engine.runtime
    with (
        mock.patch.object(runtime, "is_capturing", return_value=True),
        pytest.raises(RuntimeError, match="Take the step outside of the graph"),
    ):
        buffer.copy_main_weights_to_model_weights()


def test_units_by_default_and_by_name() -> None:
    """Layers, and embedding and output layer unless their weights are tied."""
    for wrapper, named in (
        (wrapped(), ["embedding", "decoder.layers.0", "output_layer", "root"]),
        (wrapped(case=CASE.but(tied=True)), ["decoder.layers.0", "root"]),
        (wrapped(units=[TransformerLayer]), ["decoder.layers.0", "root"]),
    ):
        assert [unit.name for unit in wrapper.engine.units] == named


def test_dtypes_can_be_read_under_megatrons_name() -> None:
    for options, comm in (
        ({}, torch.float32),
        ({"megatron_fsdp_grad_comm_dtype": torch.bfloat16}, torch.bfloat16),
    ):
        policy = wrapped("optim", ddp=options).mp_policy
        assert (policy.main_params_dtype, policy.grad_comm_dtype) == (torch.float32, comm)


# What is done to a wrapped module from outside: conversions, hooks, compilation.


CONVERSIONS: tuple[Callable[[nn.Module], nn.Module], ...] = (
    lambda module: module.half(),
    lambda module: module.bfloat16(),
    lambda module: module.double(),
    lambda module: module.to(torch.float16),
    lambda module: module.to("meta"),
    lambda module: module.to_empty(device="cpu"),
    lambda module: module.to_empty(device="meta"),
)
CHANGE_NOTHING: tuple[Callable[[nn.Module], nn.Module], ...] = (
    lambda module: module.float(),
    lambda module: module.to("cpu"),
    lambda module: module.to(torch.float32),
    lambda module: module.cpu(),
)


def test_conversion_after_wrapping_is_refused_unless_it_changes_nothing(trainer: Trainer) -> None:
    """Of the wrapper and of every module below: it would detach parameters from their buffers."""
    layer = get_attr_wrapped_model(trainer.wrapper, "decoder").layers[0]
    for module in (trainer.wrapper, trainer.wrapper.module, layer, layer.mlp.linear_fc1):
        for convert in CONVERSIONS:
            with pytest.raises(RuntimeError, match="Convert the module before wrapping it"):
                convert(module)
        for convert in CHANGE_NOTHING:
            assert convert(module) is module
    assert train_step(trainer, data())[0] > 0


def test_hooks_of_the_user_on_the_model_run(trainer: Trainer) -> None:
    """Trap I3: calling `module.forward` would skip them. They see gathered weights."""
    model = get_attr_wrapped_model(trainer.wrapper, "decoder", return_model_obj=True)
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.register_forward_hook(lambda *_: seen.append("after"))
    layer: Any = model.decoder.layers[0]
    layer.register_forward_pre_hook(lambda m, _: seen.append(m.mlp.linear_fc1.weight.sum().item()))
    forward_step(CASE, iter(data()), trainer.wrapper)
    assert seen[0] == "before"
    assert seen[-1] == "after"
    assert isinstance(seen[1], float)


def test_compiling_the_wrapper_is_refused(trainer: Trainer) -> None:
    """An error raised while torch traces would make it run the module as it is, in silence."""
    compiled = torch.compile(trainer.wrapper, backend="eager")
    with pytest.raises(RuntimeError, match=r"torch\.compile of a wrapped model"):
        forward_step(CASE, iter(data()), compiled)


# A training loop that tests the wrapper against another class does not wire `no_sync`: an error in
# its first step.


def _by_hand(trainer: Trainer) -> None:
    """A loop of one's own that calls no_sync."""
    first, last = data()
    trainer.wrapper.zero_grad_buffer()
    with trainer.wrapper.no_sync():
        backward(trainer, first)
    backward(trainer, last)
    trainer.wrapper.finish_grad_sync()


def _steps(trainer: Trainer) -> None:
    for step in range(2):
        train_step(trainer, batches(trainer.case, step, 0, DEVICE))


def _evaluates(trainer: Trainer) -> None:
    with torch.no_grad():
        forward_backward(trainer, data(), forward_only=True)
    trainer.wrapper.eval()
    forward_backward(trainer, data(), forward_only=True)


ONE = CASE.but(microbatches=1)
LOOPS: dict[str, tuple[Case, str, bool, bool, Callable[[Trainer], None], bool]] = {
    "unwired": (CASE, "optim", True, False, _steps, True),
    "unwired, ZeRO-3": (CASE, "optim_grads_params", True, False, _steps, True),
    "wired": (CASE, "optim", True, True, _steps, False),
    # ZeRO-2 and 3 reduce every microbatch anyway.
    "not installed": (CASE, "optim_grads_params", False, False, _steps, False),
    "by hand": (CASE, "optim", True, False, _by_hand, False),
    "evaluation": (CASE, "optim", True, False, _evaluates, False),
    "one microbatch": (ONE, "optim", True, False, _steps, False),
}
"""Case and strategy, whether install() was called, whether the loop wires, what it does, and
whether that is an error."""


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_is_not_wired_is_an_error_in_its_first_step(
    not_installed: None, name: str
) -> None:
    case, strategy, is_installed, is_wired, act, is_error = LOOPS[name]
    if is_installed:
        install()
    trainer = build_trainer(case, strategy, DEVICE)
    if not is_wired:  # as Megatron leaves it when its isinstance test fails
        trainer.wrapper.config.no_sync_func = None
    says = pytest.raises(RuntimeError, match=r"Call megatron_fsdp_adapter\.install\(\) after")
    with says if is_error else nullcontext():
        act(trainer)
