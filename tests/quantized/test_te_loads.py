"""Every way to load weights into a model whose weights are in Transformer Engine's classes: their
bytes and scales are those of the loaded values, by TE's own function."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from megatron_fsdp_adapter import export_weights, release_memory, return_memory
from megatron_fsdp_adapter.core.runtime.device import storage_bytes
from megatron_fsdp_adapter.quantized.e4m3 import write_scales
from megatron_fsdp_adapter.state.names import FP8_SCALING
from tests.lib.gpt.checkpoints import loaded, saved
from tests.lib.gpt.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    init_megatron,
    plain_name,
    train_step,
)
from tests.lib.megatron.bridge_stand_in import standing_in
from tests.lib.quantized.arithmetic import e4m3
from tests.lib.quantized.te_checks import same
from tests.lib.quantized.te_extension import FOLDERS, RELEASES, WITHOUT, run_te
from tests.lib.quantized.te_models import check_weights
from tests.lib.quantized.te_scaling import quantize_layers, scale_layers
from tests.lib.quantized.te_weights import KNOWS, gathered

CHECKS = ("quantized/weights.py", "rollout/release.py", "megatron/frameworks/bridge_weights.py")

CASE = Case(hidden=32, heads=2, ffn=64, bf16=True, microbatches=2, lr=3e-3)
RECIPES = ("current", "block128")
LAYER = "decoder.layers.1."
Weights = dict[str, torch.Tensor]

pytestmark = pytest.mark.skipif(not FOLDERS, reason=WITHOUT)


def model_of(trainer: Trainer) -> Any:
    """The GPT itself, below both wrappers and the Float16Module."""
    return trainer.wrapper.module.module.module


def one_layer(trainer: Trainer, weights: Weights) -> None:
    named = {n.removeprefix(LAYER): w for n, w in weights.items() if n.startswith(LAYER)}
    model_of(trainer).decoder.layers[1].load_state_dict(named, strict=False)


def with_torch(trainer: Trainer, weights: Weights) -> None:
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model_of(trainer), dict(weights), options=options)


def in_place(trainer: Trainer, weights: Weights) -> None:
    """A write of this rank's rows, as torch DCP's, and what Megatron then calls."""
    engine = trainer.wrapper.engine
    engine.to_sharded()
    for pair in engine.pairs:
        name = pair.managed.fqns[0].removeprefix("module.")
        local = pair.sharded._local_tensor.detach()  # type: ignore[attr-defined]
        rows = pair.sharded.megatron_fsdp_slice  # type: ignore[attr-defined]
        local.copy_(weights[name].view(-1)[rows].view(local.shape))
    trainer.wrapper.module.install_optimized_model_weights()


def given(weights: Weights) -> Callable[[str, Any], torch.Tensor]:
    return lambda name, shape: weights[plain_name(name)]


def through_bridge(trainer: Trainer, weights: Weights) -> None:
    with standing_in() as module:
        bridge = module.MegatronModelBridge()
        bridge.load_weights_hf_to_megatron(given(weights), [trainer.wrapper])
        trainer.wrapper.start_param_sync(force_sync=True)
        exported = bridge.stream_weights_megatron_to_hf(
            [trainer.wrapper], None, weight_dtype=torch.float32
        )
        for name, value in exported:
            same(value, weights[plain_name(name)], f"{name}, exported")


PATHS = {
    "the wrapper": Trainer.load,
    "the module that was wrapped": lambda t, w: model_of(t).load_state_dict(w, strict=False),
    "one layer": one_layer,
    "torch's set_model_state_dict": with_torch,
    "in place": in_place,
    "Megatron-Bridge": through_bridge,
}


def others(weights: Weights, number: int) -> Weights:
    generator = torch.Generator().manual_seed(number)
    return {
        name: value * 0.5 + torch.randn(value.shape, generator=generator) * 0.03
        for name, value in weights.items()
    }


def check_mains(trainer: Trainer, expected: Weights, path: str) -> None:
    found = trainer.params()
    checked = 0
    for name, value in expected.items():
        if path != "one layer" or name.startswith(LAYER):
            same(found[name], value, f"{path}, {name}")
            checked += 1
    assert checked


def _loads(rank: int, world: int, strategy: str) -> None:
    device = init_megatron()
    for recipe in RECIPES:
        change = partial(quantize_layers, recipe=f"te {recipe}")
        trainer = build_trainer(CASE, strategy, device, change)
        for number, (path, load) in enumerate(PATHS.items()):
            # Made while sharded parameters are shown, and while raw ones are.
            for raw in (False, True):
                train_step(trainer, batches(CASE, number, rank, device))
                wanted = others(trainer.params(), 2 * number + raw)
                if raw:
                    trainer.wrapper.start_param_sync(force_sync=True)
                load(trainer, wanted)
                check_mains(trainer, wanted, path)
                where = f"{recipe}, {strategy}, {path}, {'raw' if raw else 'shown'}"
                assert check_weights(trainer, recipe, where) == 4 * CASE.num_layers
        trainer.wrapper.stop_communication()


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("folder", RELEASES)
def test_bytes_are_those_of_what_was_loaded_whatever_loads_it(folder: Path, strategy: str) -> None:
    run_te(folder, _loads, 2, strategy)


def check_found_scales(trainer: Trainer, where: str) -> None:
    """Each scale is 448 over the largest of its weight, rounded as the weight is; TE's too."""
    mains = trainer.params()
    for name, param in gathered(trainer.wrapper.engine):
        rounded = mains[name].bfloat16().float()
        scale, inverse = torch.empty(2, 1).unbind()
        write_scales(rounded.abs().max().view(1), scale, inverse)
        assert scale > 100
        same(param._quantizer.scale.view(1), scale, f"{where}, {name}, scale")
        same(KNOWS.scales(param)[0].view(1), inverse, f"{where}, {name}, its inverse")
        rows = KNOWS.fields(param)["rowwise"]
        same(rows, e4m3(rounded * scale), f"{where}, {name}, bytes")


def _without_state(rank: int, world: int, root: str) -> None:
    device = init_megatron()
    for strategy in ("no_shard", "optim_grads_params"):
        trainer = build_trainer(CASE, strategy, device, scale_layers)
        for number, (path, load) in enumerate(PATHS.items()):
            wanted = others(trainer.params(), number)
            load(trainer, wanted)
            if path not in ("one layer", "in place"):
                check_found_scales(trainer, path)
        # A checkpoint of a run in bf16.
        plain = build_trainer(CASE.but(seed=77), strategy, device)
        train_step(plain, batches(CASE, 0, rank, device))
        saved(plain, f"{root}/{strategy}")
        with redirect_stdout(io.StringIO()) as told:
            state = loaded(trainer, f"{root}/{strategy}")
        assert not any(key.endswith(FP8_SCALING) for key in state["model"])
        line = "no delayed scaling state for 8 FP8 weights"
        assert told.getvalue().count(line) == (rank == 0)
        check_mains(trainer, plain.params(), "a checkpoint in bf16")
        check_found_scales(trainer, "a checkpoint in bf16")
        # And back.
        train_step(trainer, batches(CASE, 1, rank, device))
        back = f"{root}/{strategy}, back"
        saved(trainer, back)
        loaded(plain, back)
        check_mains(plain, trainer.params(), "back in bf16")
        train_step(plain, batches(CASE, 2, rank, device))


@pytest.mark.parametrize("folder", RELEASES)
def test_what_says_nothing_of_delayed_scales_has_them_set_from_its_values(
    folder: Path, tmp_path: Path
) -> None:
    run_te(folder, _without_state, 2, str(tmp_path))


OF_WRAPPER = {
    "_fsdp_engine", "_is_param", "_mcore_tp", "_tensor_parallel_mode", "_tp_duplicated",
    "_tp_partition_dim",
}  # fmt: skip
"""Attributes that it, or torch, puts on both identities."""


def _left_alone(rank: int, world: int, root: str) -> None:
    """Ranks begin differently: the first one's weights count."""
    device = init_megatron()

    def change(model: Any) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + rank)
        quantize_layers(model, "te delayed")
        model.module.decoder.layers[1].requires_grad_(False)
        for param in model.parameters():
            param.small_lr = True
            param._mine = True

    trainer = build_trainer(
        CASE,
        "optim_grads_params",
        device,
        change,
        module_placements={"decoder.layers.1": "leave"},
    )
    train_step(trainer, batches(CASE, 0, rank, device))
    for pair in trainer.wrapper.engine.pairs:
        assert pair.sharded.small_lr
        private = {n for n in vars(pair.sharded) if n.startswith("_") and n in vars(pair.unsharded)}
        assert private - OF_WRAPPER == {"_mine"}, f"of TE: {private}"
    state = trainer.wrapper.state_dict_for_save_checkpoint()
    alone: dict[str, Any] = {
        name: param
        for name, param in model_of(trainer).named_parameters()
        if name.startswith(LAYER) and hasattr(param, "_quantizer")
    }
    assert len(alone) == 4
    before = {}
    for name, param in alone.items():
        bytes_ = before[name] = KNOWS.fields(param)["rowwise"].clone()
        scale = KNOWS.scales(param)[0]
        everyone = [torch.empty_like(bytes_) for _ in range(world)]
        dist.all_gather(everyone, bytes_)
        same(everyone[1], everyone[0], f"{name}, bytes")
        found = state[f"module.{name}"]
        assert type(found) is torch.Tensor
        assert found.dtype == torch.bfloat16
        value = bytes_.view(torch.float8_e4m3fn).float() * scale
        same(found, value.bfloat16(), f"{name}, in a checkpoint")
    release_memory(trainer.wrapper, trainer.optimizer)
    assert not any(storage_bytes(KNOWS.fields(param)["rowwise"]) for param in alone.values())
    return_memory(trainer.wrapper, trainer.optimizer)
    exported = dict(export_weights(trainer.wrapper, dtype=None))
    for name, param in alone.items():
        same(KNOWS.fields(param)["rowwise"], before[name], f"{name}, returned")
        same(exported[name], state[f"module.{name}"], f"{name}, exported")
    saved(trainer, root)
    for param in alone.values():
        KNOWS.fields(param)["rowwise"].zero_()
    loaded(trainer, root)
    for name, param in alone.items():
        same(KNOWS.fields(param)["rowwise"], before[name], f"{name}, loaded")


@pytest.mark.parametrize("folder", RELEASES)
def test_quantized_weights_that_are_left_alone(folder: Path, tmp_path: Path) -> None:
    run_te(folder, _left_alone, 2, str(tmp_path))


def _before_wrapping(rank: int, world: int) -> None:
    device = init_megatron()
    wanted: Weights = {}

    def written(model: Any) -> None:
        scale_layers(model)
        wanted.update(others(dict(model.module.named_parameters()), 5))
        with torch.no_grad():
            for name, param in model.module.named_parameters():
                param.copy_(wanted[name])

    with pytest.raises(ValueError, match=r"linear_qkv\.weight: its bytes were written after"):
        build_trainer(CASE, "optim", device, written)

    def loaded(model: Any) -> None:
        scale_layers(model)
        params = dict(model.module.named_parameters())
        wanted.update({n: v.bfloat16() for n, v in others(params, 5).items()})
        with standing_in() as module:
            bridge = module.MegatronModelBridge()
            bridge.load_weights_hf_to_megatron(given(wanted), [model.module])
        assert not any("copy_" in param.__dict__ for param in model.parameters())

    trainer = build_trainer(CASE, "optim", device, loaded)
    check_mains(trainer, {n: v.float() for n, v in wanted.items()}, "Bridge, before wrapping")


@pytest.mark.parametrize("folder", RELEASES)
def test_weights_that_are_written_before_wrapping_are_what_main_weights_begin_as_or_an_error(
    folder: Path,
) -> None:
    run_te(folder, _before_wrapping, 1)
