"""Fine-tunes a recipe of Megatron-Bridge with adapters (LoRA): as scripts/pretrain_bridge.py, and

--ddp       with Megatron's own DDP instead
"""

from __future__ import annotations

import sys

import megatron.bridge.recipes as recipes
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

from megatron_fsdp_adapter import apply_fsdp_overrides
from scripts.pretrain_bridge import parser


def main(argv: list[str]) -> None:
    given = parser().parse_args([word for word in argv if word != "--ddp"])
    recipe = getattr(recipes, given.recipe)()
    cfg = process_config_with_overrides(recipe, given.config_file, given.overrides)
    cfg.peft = LoRA(dim=4, alpha=8)
    if "--ddp" not in argv:
        apply_fsdp_overrides(cfg, strategy=given.strategy)
    finetune(config=cfg, forward_step_func=forward_step)


if __name__ == "__main__":
    main(sys.argv[1:])
