"""The checkpoints of one model of core by stock DDP and by ours, and conversions between them.

In one process, a world of one that stands for a rank of many. Nothing runs forward: gradients are
the weights, as no kernel of Mamba or of Transformer Engine is needed for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.utils import unwrap_model

from megatron_fsdp_adapter.checkpoint.convert import convert
from tests.lib.checkpoint.convert_cases import differences, load_all
from tests.lib.checkpoint.core_models import CoreModel
from tests.lib.gpt import gpt
from tests.lib.gpt.checkpoints import loaded, saved, stock_state

STEPS = 2
FOLDER = f"iter_{STEPS:07d}"


def trainer_of(row: CoreModel, strategy: str | None, seed: int) -> gpt.Trainer:
    """The model with random weights under ours, or under stock DDP (strategy None)."""
    case = gpt.Case(bf16=row.bf16)

    def configure(config: Any) -> Any:
        for name, value in row.optimizer.items():
            setattr(config, name, value)
        return config

    ddp = {} if strategy else {"bucket_size": None}
    return gpt.make_trainer(row.build(seed), case, strategy, ddp, configure)


def step(trainer: gpt.Trainer) -> None:
    """An optimizer step of ours with the weights as gradients."""
    trainer.wrapper.stop_communication()
    for param in trainer.wrapper.parameters():
        param.grad = param.detach().clone()
    trainer.optimizer.step()


def save_stock(trainer: gpt.Trainer, root: Path, args: Any) -> None:
    """A checkpoint as `--dist-ckpt-optim-fully-reshardable` writes it."""
    trainer.wrapper.start_param_sync(force_sync=True)
    folder = root / FOLDER
    folder.mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    state = {**stock_state(trainer, is_loading=False), "iteration": STEPS, "args": args}
    dist_checkpointing.save(state, str(folder))


def load_stock(trainer: gpt.Trainer, root: Path) -> None:
    """Loads as Megatron does by default: missing keys are an error, unexpected ones are not."""
    state = dist_checkpointing.load(
        stock_state(trainer, is_loading=True),
        str(root / FOLDER),
        strict=StrictHandling.ASSUME_OK_UNEXPECTED,
    )
    unwrap_model(trainer.wrapper).load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])


def tensors(root: Path) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint, by key."""
    found = load_all(root / FOLDER)
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


def trip(row: CoreModel, root: Path) -> list[str]:
    """What differs after conversions of a checkpoint of this model: to `torch_dist` and back, and
    there through a load and a save of stock."""
    args = row.saved_arguments()
    ours = trainer_of(row, "optim_grads_params", seed=1)
    step(ours)
    saved(ours, root / "ours", STEPS, iteration=STEPS, args=args, checkpoint_version=3.0)
    weights = gpt.full_weights(ours)
    convert(root / "ours", root / "plain", "torch_dist")
    convert(root / "plain", root / "back", "fsdp_dtensor")
    before = load_all(root / "ours" / FOLDER)
    problems = _named("there and back", differences(before, load_all(root / "back" / FOLDER)))

    stock = trainer_of(row, None, seed=2)
    load_stock(stock, root / "plain")
    problems += _named("stock's weights", _different(weights, gpt.full_weights(stock)))
    save_stock(stock, root / "stock", args)
    found = differences(tensors(root / "plain"), tensors(root / "stock"))
    problems += _named("stock's checkpoint", found)

    convert(root / "stock", root / "again", "fsdp_dtensor")
    found = differences(_older(tensors(root / "ours")), _older(tensors(root / "again")))
    problems += _named("from stock", found)
    other = trainer_of(row, "optim_grads", seed=3)
    loaded(other, root / "again", iteration=0, args=None)
    problems += _named("our weights", _different(weights, gpt.full_weights(other)))
    saved(other, root / "other", STEPS, iteration=STEPS, args=args, checkpoint_version=3.0)
    found = differences(tensors(root / "ours"), tensors(root / "other"))
    return problems + _named("ours from stock", found)


def trip_of_weights(row: CoreModel, root: Path) -> list[str]:
    """What differs after conversions of the weights alone of the checkpoints that `trip` left."""
    found = []
    for source, target in (("ours", "torch_dist"), ("stock", "fsdp_dtensor")):
        folder = root / f"{source}_weights"
        convert(root / source, folder, target, weights_only=True)
        full = tensors(root / {"ours": "plain", "stock": "again"}[source])
        wanted = {}
        for key, value in full.items():
            if not key.startswith("optimizer.") and (source == "ours" or key.startswith("model.")):
                wanted[key] = value
        got = tensors(folder)
        keys = set(wanted) ^ set(got)
        keys |= {key for key in wanted if key in got and wanted[key].dtype != got[key].dtype}
        found += _named(f"weights of {source}", sorted(keys))
    other = trainer_of(row, "optim", seed=4)
    loaded(other, root / "stock_weights", with_optimizer=False, iteration=0, args=None)
    return found


def _named(where: str, found: list[str]) -> list[str]:
    return [f"{where}: {text}" for text in found]


def _different(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in {**a, **b} if name not in a or not _same(a[name], b.get(name))]


def _same(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    return b is not None and torch.equal(a, b)


def _older(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names of older releases, which `torch_dist` has in all."""
    renamed = {}
    for key, value in found.items():
        if "mtp_model_layer.layers." not in key:
            key = key.replace("mtp_model_layer", "transformer_layer")
        renamed[key.replace("mixer.conv1d_", "mixer.conv1d.")] = value
    return renamed
