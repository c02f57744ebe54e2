"""The optimizer's step in a graph: core's own wrapper captures and replays it, on the host, where
what is captured is noted operator by operator (`tests/engine/fake_graphs.py`)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_fsdp_adapter import release_memory
from megatron_fsdp_adapter.megatron import step_graphs
from megatron_fsdp_adapter.megatron.seams import core_api
from megatron_fsdp_adapter.sharding import local_optimizer, one_pass_adam, tensor_table
from tests.distributed.checks import check_same_bits
from tests.distributed.fused_adam import (
    HostKernel,
    precision_aware,
    transformer_engine_optimizer,
)
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    full_weights,
    train_step,
)
from tests.engine.fake_graphs import HostTorch
from tests.sharding.host_squares import HostSquares

CASE = Case(
    num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, seq=5, microbatches=2, bf16=True, clip=0.1
)
CPU = torch.device("cpu")
WARMUP, STEPS = 2, 6
GRAPHED = core_api.STEP_GRAPHS

pytestmark = pytest.mark.skipif(GRAPHED is None, reason="no optimizer_cuda_graph in this release")


def _scale_by_tensor(chunk: int, overflow: Any, lists: Any, factor: torch.Tensor) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


def _norm(chunk: int, overflow: Any, lists: Any, of_each: bool) -> tuple[torch.Tensor, None]:
    """Without the host, which what core has for the host asks."""
    return torch.stack([one.norm() for one in lists[0]]).norm().view(1), None


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostTorch]:
    """Transformer Engine's optimizer and norm, and graphs, all on the host."""
    asked = step_graphs.problems
    found = HostTorch()
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", _scale_by_tensor)
    monkeypatch.setattr(clip_grads, "l2_norm_impl", _norm)
    monkeypatch.setattr(
        step_graphs, "problems",
        lambda *args: [line for line in asked(*args) if "on the CPU" not in line],
    )  # fmt: skip
    module = __import__(GRAPHED.__module__, fromlist=["torch"])
    monkeypatch.setattr(module, "torch", found)
    for helper in ("get_graph_pool", "get_shared_capture_stream"):
        if hasattr(module, helper):
            monkeypatch.setattr(module, helper, lambda *unused: None)
    with transformer_engine_optimizer():
        yield found
    gc.collect()  # core's wrapper takes the graph with it, whosever it is
    GRAPHED.curr_iteration, GRAPHED.cuda_graph, GRAPHED.result = 0, None, None


def scheduled(trainer: Trainer) -> OptimizerParamScheduler:
    """Core's: a learning rate that changes with every step."""
    return OptimizerParamScheduler(
        trainer.optimizer, init_lr=0.0, max_lr=0.05, min_lr=0.0, lr_warmup_steps=3,
        lr_decay_steps=8, lr_decay_style="linear", start_wd=0.1, end_wd=0.1, wd_incr_steps=8,
        wd_incr_style="constant",
    )  # fmt: skip


def built(strategy: str, host: HostTorch | None, **options: Any) -> Trainer:
    """host: core captures the optimizer's step there; None: steps run."""
    trainer = build_trainer(
        CASE, strategy, CPU, optimizer={"optimizer_cuda_graph": True, "min_lr": 0.0, **options}
    )
    if host is not None:
        trainer.wrapper.engine.runtime.is_capturing = lambda: host.capturing
        trainer.optimizer.step = GRAPHED(trainer.optimizer.step, cuda_graph_warmup_steps=WARMUP)
    return trainer


def numbers(
    trainer: Trainer, steps: int = STEPS, between: Callable[[int], None] = lambda step: None
) -> Any:
    """Losses and norms of steps, losses of evaluations between them, the weights at the end."""
    schedule, found = scheduled(trainer), []
    schedule.step(increment=1)
    for step in range(steps):
        loss, norm = train_step(trainer, batches(CASE, step, 0, CPU))
        assert norm > 1.5 * CASE.clip
        found += [loss, norm]
        schedule.step(increment=1)
        between(step)
        if step % 2:
            with torch.no_grad():
                data = batches(CASE, 90 + step, 0, CPU)
                found.append(forward_backward(trainer, data, forward_only=True))
    return found, full_weights(trainer)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_replayed_step_trains_to_the_bits_of_one_that_runs(
    one_rank: torch.device, host: HostTorch, strategy: str
) -> None:
    expected, weights = numbers(built(strategy, None))
    trainer = built(strategy, host)
    ran: list[int] = []
    told = mock.Mock(side_effect=trainer.wrapper.engine.main_weights_changed)
    trainer.wrapper.engine.main_weights_changed = told
    inner = trainer.optimizer.optimizer
    inner.register_step_post_hook(lambda *unused: ran.append(1))
    found, mine = numbers(trainer)
    assert len(ran) == WARMUP + 1 and len(host.fakes.replays) == STEPS - WARMUP
    assert found == expected
    check_same_bits(mine, weights, strategy)
    assert told.call_args_list == [mock.call(stepped=True)] * STEPS
    assert {int(group["step"]) for group in inner.param_groups} == {STEPS}


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_with_adam_and_norm_in_one_pass_a_captured_step_has_the_bits_of_one_that_no_graph_may_have(
    one_rank: torch.device, host: HostTorch, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """The table that the graph reads is of the step before: gradients have stayed where they were.
    """
    kernel, squares = HostKernel(), HostSquares()
    monkeypatch.setattr(one_pass_adam, "kernel_of", lambda device: kernel)
    monkeypatch.setattr(local_optimizer, "kernel_of", lambda device: squares)
    monkeypatch.setattr(tensor_table, "is_capturing", lambda device: host.capturing)
    expected, weights = numbers(built(strategy, None, optimizer_cuda_graph=False))
    assert kernel.updates and not any(update.on_device for update in kernel.updates)
    trainer, before = built(strategy, host), len(kernel.updates)
    shards = trainer.optimizer.optimizer._fsdp_shards
    adam = shards.one_pass
    monkeypatch.setattr(clip_grads, "l2_norm_impl", None)  # core's norm is not asked
    adam._original = mock.Mock(side_effect=AssertionError("the optimizer's own function was run"))
    found, mine = numbers(trainer)
    told = kernel.updates[before:]
    assert told and all(update.on_device and update.clip is not None for update in told)
    assert adam.tables.in_graphs and shards.squares.tables.in_graphs
    assert found == expected
    check_same_bits(mine, weights, strategy)


def test_nothing_is_launched_for_the_next_forward_while_a_step_is_captured_but_after_each_replay(
    one_rank: torch.device, host: HostTorch
) -> None:
    trainer = built("optim_grads_params", host)
    pipeline = trainer.wrapper.engine.gather
    launched: list[bool] = []
    launch = pipeline.launch
    pipeline.launch = lambda *args: (launched.append(host.capturing), launch(*args))[1]
    for step in range(STEPS):
        forward_backward(trainer, batches(CASE, step, 0, CPU))
        launched.clear()
        trainer.optimizer.step()
        assert launched and not any(launched)
        assert all(unit.outdated or unit.gathered is not None for unit in pipeline.units)


def test_a_replay_is_behind_gathers_of_an_evaluation_that_raised_before_it(
    one_rank: torch.device, host: HostTorch
) -> None:
    """What orders them is no part of the graph."""
    trainer = built("optim_grads_params", host)
    waits: list[bool] = []
    pipeline = trainer.wrapper.engine.gather
    quiesce = pipeline.quiesce
    for step in range(STEPS):
        forward_backward(trainer, batches(CASE, step, 0, CPU))
        if step % 2:
            layer = trainer.wrapper.module.module.module.decoder.layers[0]
            raises = layer.register_forward_pre_hook(lambda *unused: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                forward_backward(trainer, batches(CASE, 90, 0, CPU), forward_only=True)
            raises.remove()
        waits.clear()
        pipeline.quiesce = lambda: (waits.append(host.capturing), quiesce())[1]
        trainer.optimizer.step()
        pipeline.quiesce = quiesce
        assert waits == ([False] if step % 2 else [])
    assert len(host.fakes.replays) == STEPS - WARMUP


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_gradients_that_a_replay_reads_never_lose_their_storage(
    one_rank: torch.device, host: HostTorch, strategy: str
) -> None:
    trainer = built(strategy, host)
    numbers(trainer, WARMUP + 1)
    trainer.wrapper.zero_grad_buffer()
    trained = [group for group in trainer.wrapper.engine.groups if group.key.requires_grad]
    assert trained and all(group.grad.allocated for group in trained)


def test_a_load_after_a_capture_fills_what_the_graph_reads(
    one_rank: torch.device, host: HostTorch
) -> None:
    """State of the fifth step, taken back to the third: replays go on from there."""
    trainer = built("optim_grads_params", host)
    saved: dict[int, Any] = {}

    def keep(step: int) -> None:
        if step == WARMUP + 1:
            state = trainer.optimizer.sharded_param_state_fsdp_dtensor()
            meta = next(iter(state["param_to_group_meta"].values()))
            assert type(meta["step"]) is int and type(meta["lr"]) is float
            saved[step] = {
                "state": {
                    name: {key: full_copy(value) for key, value in entry.items()}
                    for name, entry in state["state"].items()
                },
                "param_to_group_meta": state["param_to_group_meta"],
            }

    numbers(trainer, STEPS, keep)
    group = trainer.optimizer.param_groups[0]
    held = group["step"], group["lr"]
    trainer.optimizer.load_state_dict(saved[WARMUP + 1])
    assert (group["step"] is held[0]) and (group["lr"] is held[1])
    assert int(group["step"]) == WARMUP + 2
    train_step(trainer, batches(CASE, 7, 0, CPU))
    assert int(group["step"]) == WARMUP + 3


def full_copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def test_a_number_that_a_replay_would_not_follow_is_an_error(
    one_rank: torch.device, host: HostTorch
) -> None:
    trainer = built("optim", host)
    numbers(trainer, WARMUP + 1)
    forward_backward(trainer, batches(CASE, 7, 0, CPU))
    group = trainer.optimizer.param_groups[0]
    before, group["weight_decay"] = group["weight_decay"], 0.7
    with pytest.raises(RuntimeError, match=r"weight_decay was .* and is 0\.7; leave them alone"):
        trainer.optimizer.step()
    group["weight_decay"], rate = before, group["lr"]
    group["lr"] = rate.clone()
    with pytest.raises(RuntimeError, match="lr was a tensor at"):
        trainer.optimizer.step()
    group["lr"] = 0.1
    with pytest.raises(RuntimeError, match="go on with a number; set optimizer_cuda_graph=True"):
        trainer.optimizer.step()
    group["lr"] = rate
    trainer.optimizer.step()


def test_memory_that_the_graph_has_addresses_of_does_not_go(
    one_rank: torch.device, host: HostTorch
) -> None:
    trainer = built("optim", host)
    numbers(trainer, WARMUP + 1)
    with pytest.raises(RuntimeError, match="a CUDA graph of the optimizer's step has addresses"):
        release_memory(trainer.wrapper, trainer.optimizer)
    kinds = ("main_weights", "compute_weights", "gradients", "slots")
    with pytest.raises(RuntimeError, match="releasing the optimizer's state"):
        release_memory(trainer.wrapper, trainer.optimizer, keep=kinds)
    with pytest.raises(RuntimeError, match="releasing the optimizer's state"):
        trainer.optimizer.offload_to_cpu()


def test_a_step_that_somebody_else_captures_is_an_error(
    one_rank: torch.device, host: HostTorch
) -> None:
    trainer = built("optim", None)
    train_step(trainer, batches(CASE, 0, 0, CPU))
    forward_backward(trainer, batches(CASE, 1, 0, CPU))
    trainer.wrapper.engine.runtime.is_capturing = lambda: True
    with pytest.raises(RuntimeError, match="let megatron-core's OptimizerCudaGraphWrapper capture"):
        trainer.optimizer.step()


def test_what_a_captured_step_excludes_is_told_with_its_remedy(
    one_rank: torch.device, host: HostTorch
) -> None:
    plain = build_trainer(CASE, "optim", CPU).wrapper
    config: Any = SimpleNamespace(optimizer_cuda_graph=True)
    assert step_graphs.problems(SimpleNamespace(), [plain]) == []
    assert step_graphs.problems(config, [plain]) == []
    with mock.patch.object(plain.config, "cuda_graph_warmup_steps", 0):
        (said,) = step_graphs.problems(config, [plain])
    assert "set cuda_graph_warmup_steps=1" in said
    with mock.patch.object(clip_grads, "multi_tensor_scale_tensor_impl", None):
        (said,) = step_graphs.problems(config, [plain])
    assert "without Transformer Engine" in said
    late = {"fsdp_overlap_param_gather_with_optimizer_step": True}
    (said,) = step_graphs.problems(config, [build_trainer(CASE, "optim", CPU, ddp=late).wrapper])
    assert "gather_with_optimizer_step=False" in said
    narrow = build_trainer(
        CASE, "optim", CPU, ddp={"megatron_fsdp_main_grads_dtype": torch.bfloat16},
        optimizer=precision_aware,
    ).wrapper
    (said,) = step_graphs.problems(config, [narrow])
    assert "in float32 alone" in said
