"""Trains a recipe of Megatron-Bridge with this package's FullyShardedDataParallel.

    torchrun --nproc_per_node 8 scripts/pretrain_bridge.py --recipe llama32_1b_pretrain_config \
        --config-file configs/bridge-fsdp.yaml train.train_iters=100 checkpoint.save=checkpoints

Only the call of `apply_fsdp_overrides` is specific to this package. The rest is as in any script
for Megatron-Bridge: a recipe, overrides from a YAML file, overrides from the command line
(`section.field=value`), `pretrain`.
"""

from __future__ import annotations

import argparse
import sys

import megatron.bridge.recipes as recipes
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

from megatron_fsdp_adapter import apply_fsdp_overrides


def parser() -> argparse.ArgumentParser:
    """The parser of the script's options. All other words are overrides of the recipe."""
    result = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    result.add_argument("--recipe", required=True, help="a function of megatron.bridge.recipes")
    result.add_argument("--config-file", help="YAML file of overrides")
    result.add_argument("--strategy", default="optim_grads_params", help="ZeRO 0 to 3 by name")
    result.add_argument("overrides", nargs="*", help="section.field=value")
    return result


def main(argv: list[str]) -> None:
    given = parser().parse_args(argv)
    make = getattr(recipes, given.recipe, None)
    if make is None:
        raise SystemExit(f"--recipe {given.recipe}: megatron.bridge.recipes has no such recipe")
    cfg = process_config_with_overrides(make(), given.config_file, given.overrides)
    apply_fsdp_overrides(cfg, strategy=given.strategy)
    pretrain(config=cfg, forward_step_func=forward_step)


if __name__ == "__main__":
    main(sys.argv[1:])
