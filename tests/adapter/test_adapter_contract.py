"""What Megatron and a user read from the wrapper, call on it and do to it. One rank; see also
`test_adapter_ranks`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_fsdp_adapter import (
    FullyShardedDataParallel,
    fully_shard_model,
    fully_shard_optimizer,
    install,
    uninstall,
)
from megatron_fsdp_adapter.megatron.inner_module import ShardedModule
from tests.distributed.gpt import (
    Case,
    Trainer,
    batches,
    build_model,
    build_trainer,
    ddp_config,
    forward_backward,
    forward_step,
    full_all,
    train_step,
)

CASE = Case(num_layers=1, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2)

pytestmark = pytest.mark.usefixtures("one_rank")

DEVICE = torch.device("cpu")


@pytest.fixture
def sharded() -> Trainer:
    return build_trainer(CASE, "optim_grads_params", DEVICE)


def data(number: int = 0) -> list[torch.Tensor]:
    return batches(CASE, number, 0, DEVICE)


def backward(trainer: Trainer, number: int = 0) -> None:
    """Forward and backward of one microbatch, without the end of the step."""
    output, loss_func = forward_step(CASE, iter(data(number)), trainer.wrapper)
    loss_func(output)[0].backward()


def shown(trainer: Trainer) -> str:
    """The identity that `named_parameters()` shows, which must be one for all."""
    kinds = {isinstance(p, DTensor) for _, p in trainer.wrapper.named_parameters()}
    assert len(kinds) == 1
    return "optimizer" if kinds.pop() else "raw"


# Depth and attributes.


@pytest.mark.parametrize("bf16", (False, True))
def test_wrapper_depth(bf16: bool) -> None:
    """Checkpointing unwraps the outer level only and builds its keys on the rest."""
    wrapper = build_trainer(CASE.but(bf16=bf16), "optim_grads_params", DEVICE).wrapper
    inner = wrapper.module
    assert isinstance(wrapper, _BaseDataParallel) and isinstance(inner, ShardedModule)
    assert isinstance(inner.module, Float16Module if bf16 else GPTModel)
    assert wrapper.config is inner.config is get_model_config(wrapper)
    assert isinstance(get_attr_wrapped_model(wrapper, "decoder"), nn.Module)


@pytest.mark.parametrize(
    "name",
    ("pre_process", "decoder", "share_embeddings_and_output_weights", "set_input_tensor",
     "model_type", "xattn_needed", "pg_collection", "build_schedule_plan", "vp_stage"),
)  # fmt: skip
def test_attributes_that_megatron_must_find_on_the_model(sharded: Trainer, name: str) -> None:
    """`get_attr_wrapped_model` takes them from the first level that has them (trap S4)."""
    assert not hasattr(sharded.wrapper, name) and not hasattr(sharded.wrapper.module, name)


def test_attributes_that_megatron_reads_on_the_wrapper(trainer: Trainer) -> None:
    wrapper = trainer.wrapper
    assert vars(wrapper)["ddp_config"].use_megatron_fsdp  # on the wrapper itself
    assert wrapper.megatron_fsdp_dist_index.get_submesh("dp_cp").mesh.numel() == 1
    assert wrapper.buffers.__func__ is nn.Module.buffers
    assert list(wrapper.param_and_grad_buffer.parameter_groups) == []
    wrapper.param_and_grad_buffer.manual_buffer_registration()
    wrapper.force_all_reduce = True
    wrapper.set_is_first_microbatch()


def test_getters_of_the_index(sharded: Trainer) -> None:
    """What Megatron's checkpoint path and tools ask `megatron_fsdp_dist_index`."""
    index = sharded.wrapper.megatron_fsdp_dist_index
    assert (index.dp_shard_dim, index.tp_dim, index.dp_outer_dim) == ("dp_cp", "tp", None)
    assert index.use_hybrid_fsdp is index.hsdp_outer_dp_shard is False
    assert index.get_submesh("dp_cp") is index.get_submesh(["dp_cp"]) is index.get_root_mesh()
    assert index.get_submesh("tp", is_expert_parallel=True).mesh.numel() == 1
    assert index.get_dp_group() is index.get_fsdp_group() is index.get_submesh("dp_cp").get_group()
    assert index.get_outer_fsdp_group() is None
    with pytest.raises(ValueError, match=r"'ep'.* not registered"):
        index.get_submesh("ep")


@pytest.mark.parametrize(
    ("strategy", "reduce", "gather"),
    (("no_shard", False, False), ("optim", False, False), ("optim_grads", True, False),
     ("optim_grads_params", True, True)),
)  # fmt: skip
def test_overlap_that_a_strategy_needs_is_set_in_the_config(
    strategy: str, reduce: bool, gather: bool
) -> None:
    """Megatron wires no_sync by the fields of the same object, which it compares for equality."""
    config = ddp_config(CASE.but(overlap=False), strategy)
    model = build_model(CASE, DEVICE)
    wrapper = FullyShardedDataParallel(model.config, config, model)
    assert wrapper.ddp_config is config
    assert (config.overlap_grad_reduce, config.overlap_param_gather) == (reduce, gather)


def test_signatures_that_megatron_calls() -> None:
    """Trap A7: a signature that has drifted from DDP's crashes the shared training loop."""
    parameters = {
        name: list(inspect.signature(getattr(FullyShardedDataParallel, name)).parameters)
        for name in ("__init__", "start_param_sync", "finish_grad_sync", "scale_gradients")
    }
    assert parameters == {
        "__init__": ["self", "config", "ddp_config", "module", "fsdp_unit_modules",
                     "disable_bucketing", "device", "pg_collection", "module_placements"],
        "start_param_sync": ["self", "unused", "force_sync", "force_dispatch"],
        "finish_grad_sync": ["self", "force_all_reduce"],
        "scale_gradients": ["self", "scaling_factor"],
    }  # fmt: skip


# The two identities of a parameter.


EVENTS: dict[str, tuple[Callable[[Trainer], Any], str]] = {
    "construction": (lambda t: None, "optimizer"),
    "forward": (lambda t: forward_step(CASE, iter(data()), t.wrapper), "raw"),
    "start_param_sync": (lambda t: t.wrapper.start_param_sync(), "raw"),
    "finish_grad_sync": (lambda t: (backward(t), t.wrapper.finish_grad_sync()), "optimizer"),
    "synchronize_param_gather": (
        lambda t: (backward(t), t.wrapper.synchronize_param_gather()), "optimizer"
    ),
    "stop_communication": (lambda t: (backward(t), t.wrapper.stop_communication()), "optimizer"),
    "state_dict of the wrapper": (lambda t: (backward(t), t.wrapper.state_dict()), "optimizer"),
    "state_dict of a layer": (
        lambda t: (backward(t), t.wrapper.module.module.decoder.layers[0].state_dict()),
        "optimizer",
    ),
    "optimizer step": (lambda t: train_step(t, data()), "raw"),
}  # fmt: skip


@pytest.mark.parametrize("event", EVENTS)
def test_identity_after_each_event(trainer: Trainer, event: str) -> None:
    act, expected = EVENTS[event]
    act(trainer)
    assert shown(trainer) == expected


def test_optimizer_parameters_are_made_once(trainer: Trainer) -> None:
    """Optimizer groups, name caches and state dicts go by object identity."""
    before = dict(trainer.wrapper.named_parameters())
    for number in range(2):
        train_step(trainer, data(number))
    trainer.wrapper.stop_communication()
    after = dict(trainer.wrapper.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    grouped = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert grouped == {id(param) for param in after.values()}


def test_tied_weights_are_one_object_under_both_names() -> None:
    """In either identity (traps S1, S3)."""
    wrapper = build_trainer(CASE.but(tied=True), "optim_grads_params", DEVICE).wrapper
    model = get_attr_wrapped_model(wrapper, "decoder", return_model_obj=True)
    for show in (wrapper.start_param_sync, wrapper.stop_communication):
        show()
        embedding = model.embedding.word_embeddings.weight
        assert model.shared_embedding_or_output_weight() is embedding
    names = [name for name, _ in wrapper.named_parameters()]
    assert len([name for name in names if "embedding" in name]) == 1
    assert not [name for name in names if "output_layer" in name]


def test_attributes_of_optimizer_parameters(trainer: Trainer) -> None:
    model = trainer.wrapper.module.module
    for name, param in model.named_parameters():
        raw = param.orig_param
        assert isinstance(param, nn.Parameter) and isinstance(param, DTensor), name
        assert param.shape == raw.shape and param.dtype == torch.float32, name
        assert param.requires_grad and param.is_leaf, name
        assert param.__fsdp_param__ is True
        assert param.megatron_fsdp_dist_index is trainer.wrapper.megatron_fsdp_dist_index
        assert param.megatron_fsdp_slice == slice(0, param.numel()), name
        kept = Replicate() if trainer.strategy == "no_shard" else Shard(0)
        assert list(param.placements) == [kept]
        assert param.device_mesh.mesh_dim_names == ("dp_cp",)
        assert param._local_tensor.is_contiguous()
        assert not hasattr(param, "main_grad"), "finalize_model_grads would prefer it to .grad"


def test_attributes_of_raw_parameters(trainer: Trainer) -> None:
    """`__fsdp_param__`, even False, would send core's fused weight gradients another way;
    `grad_added_to_main_grad` would make fused kernels return a placeholder as gradient."""
    trainer.wrapper.start_param_sync()
    for name, raw in trainer.wrapper.named_parameters():
        assert not isinstance(raw, DTensor) and not hasattr(raw, "__fsdp_param__"), name
        assert not hasattr(raw, "grad_added_to_main_grad"), name


MARKED = (
    "allreduce", "average_gradients_across_tp_domain", "expert_tp", "grad_norm_group",
    "is_embedding_or_output_parameter", "is_embedding_parameter", "is_qkv", "partition_dim",
    "partition_stride", "pipeline_parallel", "sequence_parallel", "shared", "shared_embedding",
    "tensor_model_parallel", "small_lr", "_no_weight_decay",
)  # fmt: skip
"""By Megatron, and the last two by a user."""


def test_what_was_marked_on_a_parameter_is_on_both_identities() -> None:
    """Without `average_gradients_across_tp_domain` a reduction is skipped in silence (trap T7)."""
    model = build_model(CASE, DEVICE)
    marked, unmarked = model.decoder.final_layernorm.weight, model.output_layer.weight
    for name in MARKED:
        setattr(marked, name, True if name == "allreduce" else f"value of {name}")
        if hasattr(unmarked, name):
            delattr(unmarked, name)
    FullyShardedDataParallel(model.config, ddp_config(CASE, "optim_grads_params"), model)
    copied = model.decoder.final_layernorm.weight
    assert copied.orig_param is marked
    for name in MARKED:
        assert getattr(copied, name) == getattr(marked, name)
        assert not hasattr(model.output_layer.weight, name), name


@pytest.mark.parametrize("strategy", ("no_shard", "optim_grads_params"))
def test_requires_grad_survives_wrapping(strategy: str) -> None:
    """In either identity, after construction and after a step."""

    def freeze(model: nn.Module) -> None:
        model.embedding.requires_grad_(False)
        model.decoder.layers[0].mlp.linear_fc1.weight.requires_grad_(False)

    model = build_model(CASE, DEVICE)
    freeze(model)
    expected = {name: param.requires_grad for name, param in model.named_parameters()}
    assert len(set(expected.values())) == 2
    trainer = build_trainer(CASE, strategy, DEVICE, freeze)
    for _ in range(2):
        for show in (trainer.wrapper.start_param_sync, trainer.wrapper.stop_communication):
            show()
            shown_now = trainer.wrapper.module.module.named_parameters()
            assert {name: param.requires_grad for name, param in shown_now} == expected
        train_step(trainer, data())


def test_weight_decay_exclusion_sees_the_original_shapes(trainer: Trainer) -> None:
    """Megatron decays what has more than one dimension; flat shards would all escape it."""
    decayed = {
        id(param)
        for group in trainer.optimizer.param_groups
        if group["wd_mult"] == 1.0
        for param in group["params"]
    }
    trainer.wrapper.stop_communication()
    for name, param in trainer.wrapper.named_parameters():
        assert (id(param) in decayed) == (param.dim() > 1), name


# Gradients.


def test_gradients_are_dtensors_that_alias_what_is_scaled(trainer: Trainer) -> None:
    """Trap: `finalize_model_grads` writes into `.grad` and then scales; both must be the values
    that the optimizer reads. A one-element tensor is what it scales by."""
    backward(trainer)
    trainer.wrapper.finish_grad_sync(force_all_reduce=False)
    params = dict(trainer.wrapper.named_parameters())
    before = {}
    for name, param in params.items():
        assert isinstance(param.grad, DTensor) and param.grad.dtype == torch.float32, name
        assert param.grad.shape == param.shape and param.grad.placements == param.placements
        param.grad._local_tensor.add_(1.0)  # as the embedding all-reduce does, in place
        before[name] = param.grad._local_tensor.clone()
    trainer.wrapper.scale_gradients(torch.tensor([0.25]))
    trainer.wrapper.scale_gradients(2.0)
    for name, param in params.items():
        assert torch.equal(param.grad._local_tensor, before[name] * 0.5), name


def test_the_optimizer_reads_the_scaled_gradients(trainer: Trainer) -> None:
    forward_backward(trainer, data())
    trainer.wrapper.scale_gradients(0.0)
    _, norm, _ = trainer.optimizer.step()
    assert norm == 0.0


def test_zero_grad_buffer_can_be_called_again(trainer: Trainer) -> None:
    """Megatron's loop calls it on the chunk and through the optimizer."""
    backward(trainer)
    trainer.wrapper.finish_grad_sync()
    params = list(trainer.wrapper.parameters())
    for _ in range(2):
        trainer.wrapper.zero_grad_buffer()
    assert all(param.grad is None and param.orig_param.grad is None for param in params)
    if "grads" in str(trainer.strategy):
        buffers = [group.grad.tensor for group in trainer.wrapper.engine.groups]
        assert all(buffer.untyped_storage().nbytes() == 0 for buffer in buffers)
    first = build_trainer(CASE, trainer.strategy, DEVICE)
    assert train_step(trainer, data(1)) == train_step(first, data(1))


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
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_force_all_reduce(trainer: Trainer) -> None:
    """Trap A7. Full gradients exist only where they are not sharded; elsewhere it is refused."""
    backward(trainer)
    if trainer.strategy == "no_shard":
        trainer.wrapper.finish_grad_sync(force_all_reduce=True)
        assert all(param.grad is not None for param in trainer.wrapper.parameters())
    else:
        with pytest.raises(ValueError, match=r"force_all_reduce=True.*Use 'no_shard'"):
            trainer.wrapper.finish_grad_sync(force_all_reduce=True)


def test_no_sync_is_a_fresh_context_each_time(trainer: Trainer) -> None:
    """Schedules enter and leave by hand, with nothing inside when there is one microbatch."""
    engine = trainer.wrapper.engine
    for _ in range(2):
        context = trainer.wrapper.no_sync()
        context.__enter__()
        assert engine.is_last_microbatch is False
        context.__exit__(None, None, None)
        assert engine.is_last_microbatch is True
    with pytest.raises(KeyError), trainer.wrapper.no_sync():
        raise KeyError
    assert engine.is_last_microbatch is True


def test_a_wrapped_model_is_not_wrapped_again(trainer: Trainer) -> None:
    """By neither front door, whichever parameters it shows."""
    model = trainer.wrapper.module.module
    for show in (trainer.wrapper.stop_communication, trainer.wrapper.start_param_sync):
        show()
        for wrap in (
            lambda: FullyShardedDataParallel(model.config, trainer.wrapper.ddp_config, model),
            lambda: fully_shard_model(model),
        ):
            with pytest.raises(ValueError, match="sharded already. Wrap a module once"):
                wrap()
    with pytest.raises(ValueError, match="Use get_megatron_optimizer"):
        trainer.wrapper.stop_communication()
        fully_shard_optimizer(torch.optim.AdamW(trainer.wrapper.parameters()))


def test_a_backward_inside_sync_ends_with_gradients(trainer: Trainer) -> None:
    """As in a plain loop; outside it `finish_grad_sync` is what attaches them."""
    trainer.wrapper.zero_grad_buffer()
    output, loss_func = forward_step(CASE, iter(data()), trainer.wrapper)
    with trainer.wrapper.sync():
        loss_func(output)[0].backward()
    params = list(trainer.wrapper.parameters())
    assert shown(trainer) == "optimizer"
    assert all(param.grad is param.decoupled_grad is not None for param in params)
    trainer.wrapper.zero_grad_buffer()
    assert all(param.grad is param.decoupled_grad is None for param in params)
    output, loss_func = forward_step(CASE, iter(data()), trainer.wrapper)
    loss_func(output)[0].backward()
    assert all(param.grad is None for param in params)
    trainer.wrapper.finish_grad_sync()
    assert all(param.grad is not None for param in params)


@pytest.mark.parametrize("strategy", ("no_shard", "optim"))
def test_a_backward_after_the_reduction_is_an_error(strategy: str) -> None:
    """It would add to gradients that have been averaged already."""
    trainer = build_trainer(CASE, strategy, DEVICE)
    backward(trainer)
    with pytest.raises(RuntimeError, match=r"no_sync\(\).*clear the gradients"):
        backward(trainer, 1)
    trainer.wrapper.zero_grad_buffer()
    backward(trainer, 2)


def test_gradients_of_one_rank_do_not_double_with_each_microbatch(trainer: Trainer) -> None:
    """Trap G8: in a group of one rank input and output of the reduction are one buffer."""
    single = _gradients(trainer)
    trainer.wrapper.zero_grad_buffer()
    for _ in range(3):
        with trainer.wrapper.no_sync():
            backward(trainer)
    backward(trainer)
    trainer.wrapper.finish_grad_sync()
    for name, param in trainer.wrapper.named_parameters():
        torch.testing.assert_close(param.grad._local_tensor, 4 * single[name], rtol=1e-6, atol=0)


# Resharded parameters and conversions.


def test_reading_a_resharded_parameter_names_unit_and_phase(sharded: Trainer) -> None:
    train_step(sharded, data())
    raw = get_attr_wrapped_model(sharded.wrapper, "decoder").layers[0].mlp.linear_fc1.weight
    for read in (lambda: raw + 1, lambda: raw.sum(), lambda: raw.data, lambda: raw.tolist()):
        with pytest.raises(RuntimeError, match=r"linear_fc1.weight of unit .*layers.0.*SHARDED"):
            read()
    assert raw.shape == (CASE.ffn, CASE.hidden) and raw.grad is None
    assert "linear_fc1.weight" in repr(raw)


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
    assert torch.equal(raw.detach(), _main_weight(trainer, raw))


def test_a_step_in_a_graph_is_an_error_as_its_replays_outdate_nothing(trainer: Trainer) -> None:
    buffer = trainer.wrapper.param_and_grad_buffer
    runtime = trainer.wrapper.engine.runtime
    with (
        mock.patch.object(runtime, "is_capturing", return_value=True),
        pytest.raises(RuntimeError, match="Take the step outside of the graph"),
    ):
        buffer.copy_main_weights_to_model_weights()


def _main_weight(trainer: Trainer, raw: nn.Parameter) -> torch.Tensor:
    pair = next(pair for pair in trainer.wrapper.engine.pairs if pair.unsharded is raw)
    return full_all({"": pair.sharded})[""]


def test_units_by_default_and_by_name() -> None:
    """Layers, and embedding and output layer unless their weights are tied."""
    units = {}
    for tied in (False, True):
        wrapper = build_trainer(CASE.but(tied=tied), "optim_grads_params", DEVICE).wrapper
        units[tied] = [unit.name for unit in wrapper.engine.units]
    assert units[False] == ["embedding", "decoder.layers.0", "output_layer", "root"]
    assert units[True] == ["decoder.layers.0", "root"]
    model = build_model(CASE, DEVICE)
    config = ddp_config(CASE, "optim_grads_params")
    chosen = FullyShardedDataParallel(model.config, config, model, [TransformerLayer])
    assert [unit.name for unit in chosen.engine.units] == ["decoder.layers.0", "root"]


def test_dtypes_can_be_read_under_megatrons_name() -> None:
    options = {"megatron_fsdp_grad_comm_dtype": torch.bfloat16}
    policy = build_trainer(CASE, "optim", DEVICE, ddp=options).wrapper.mp_policy
    assert (policy.main_params_dtype, policy.main_grads_dtype) == (torch.float32, None)
    assert policy.grad_comm_dtype == torch.bfloat16
    assert build_trainer(CASE, "optim", DEVICE).wrapper.mp_policy.grad_comm_dtype == torch.float32


# What is done to a wrapped module from outside: conversions, hooks, compilation.


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "to dtype": lambda module: module.to(torch.float16),
    "to meta": lambda module: module.to("meta"),
    "to empty memory": lambda module: module.to_empty(device="cpu"),
    "to_empty": lambda module: module.to_empty(device="meta"),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversion_after_wrapping_is_refused(trainer: Trainer, name: str) -> None:
    """Of the wrapper and of every module below: it would detach parameters from their buffers."""
    layer = get_attr_wrapped_model(trainer.wrapper, "decoder").layers[0]
    for module in (trainer.wrapper, trainer.wrapper.module, layer, layer.mlp.linear_fc1):
        with pytest.raises(RuntimeError, match="Convert the module before wrapping it"):
            CONVERSIONS[name](module)
    assert train_step(trainer, data())[0] > 0


def test_conversion_that_changes_nothing_passes(trainer: Trainer) -> None:
    for module in (trainer.wrapper, get_attr_wrapped_model(trainer.wrapper, "decoder")):
        assert module.float() is module
        assert module.to("cpu") is module
        assert module.to(torch.float32) is module
        assert module.cpu() is module


def test_hooks_of_the_user_on_the_model_run(trainer: Trainer) -> None:
    """Trap I3: calling `module.forward` would skip them. They see gathered weights."""
    model = get_attr_wrapped_model(trainer.wrapper, "decoder", return_model_obj=True)
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.register_forward_hook(lambda *_: seen.append("after"))
    layer: Any = model.decoder.layers[0]
    layer.register_forward_pre_hook(lambda m, _: seen.append(m.mlp.linear_fc1.weight.sum().item()))
    forward_step(CASE, iter(data()), trainer.wrapper)
    assert seen[0] == "before" and seen[-1] == "after" and isinstance(seen[1], float)


def test_compiling_the_wrapper_is_refused(trainer: Trainer) -> None:
    """An error raised while torch traces would make it run the module as it is, in silence."""
    compiled = torch.compile(trainer.wrapper, backend="eager")
    with pytest.raises(RuntimeError, match=r"torch\.compile of a wrapped model"):
        forward_step(CASE, iter(data()), compiled)


def _computes(model: Any) -> None:
    """The embedding becomes a subclass, whose backward reads the table."""

    class Own(type(model.embedding)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            table = nn.functional.normalize(self.word_embeddings.weight)
            hidden: torch.Tensor = super().forward(*args, **kwargs)
            return hidden + 0.1 * (hidden @ table.t()) @ table

    model.embedding.__class__ = Own


def test_an_embedding_that_computes_has_its_weights_in_backward() -> None:
    """In slots, which another unit would be in by then."""
    change: Any
    for change, reads in ((lambda model: None, False), (_computes, True)):
        slots = {"fsdp_double_buffer": True}
        trainer = build_trainer(CASE, "optim_grads_params", DEVICE, change, slots)
        [unit] = [one for one in trainer.wrapper.engine.units if "embedding" in one.name]
        assert unit.backward_reads_weights is reads
    plain = build_trainer(CASE, None, DEVICE, _computes)
    for step in range(3):
        numbers = [train_step(one, batches(CASE, step, 0, DEVICE)) for one in (trainer, plain)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)


# The wrapper's own first step shows a training loop that tested it against another class.


@pytest.fixture
def installed_wrapper() -> Iterator[None]:
    install()
    yield
    uninstall()


def unwired(strategy: str) -> Trainer:
    """As Megatron leaves it when its isinstance test fails."""
    trainer = build_trainer(CASE, strategy, DEVICE)
    trainer.wrapper.config.no_sync_func = None
    return trainer


@pytest.mark.parametrize("strategy", ("optim", "optim_grads_params"))
def test_an_unwired_loop_is_an_error_in_its_first_step(
    one_rank: torch.device, installed_wrapper: None, strategy: str
) -> None:
    trainer = unwired(strategy)
    with pytest.raises(RuntimeError, match=r"Call megatron_fsdp_adapter\.install\(\) after"):
        train_step(trainer, batches(CASE, 0, 0, DEVICE))


def test_a_wired_loop_trains(one_rank: torch.device, installed_wrapper: None) -> None:
    trainer = build_trainer(CASE, "optim", DEVICE)
    for step in range(2):
        train_step(trainer, batches(CASE, step, 0, DEVICE))


def test_whoever_did_not_install_may_leave_it_unwired(one_rank: torch.device) -> None:
    """ZeRO-2 and 3 reduce every microbatch anyway."""
    train_step(unwired("optim_grads_params"), batches(CASE, 0, 0, DEVICE))


def test_a_loop_of_ones_own_may_call_no_sync(
    one_rank: torch.device, installed_wrapper: None
) -> None:
    wrapper = unwired("optim").wrapper
    first, last = batches(CASE, 0, 0, DEVICE)

    def backward(tokens: torch.Tensor) -> None:
        losses, loss_func = forward_step(CASE, iter([tokens]), wrapper)
        loss_func(losses)[0].backward()

    wrapper.zero_grad_buffer()
    with wrapper.no_sync():
        backward(first)
    backward(last)
    wrapper.finish_grad_sync()
