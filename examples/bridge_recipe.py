"""Pretrains with a recipe of Megatron-Bridge, sharded over all GPUs, and resumes.

    pip install megatron-bridge
    torchrun --nproc-per-node 8 examples/bridge_recipe.py train.train_iters=1000
    torchrun --nproc-per-node 8 examples/bridge_recipe.py train.train_iters=2000    # goes on

Words behind the file are overrides of the recipe, as Megatron-Bridge reads them. One call is this
package's: `apply_fsdp_overrides`, after all other overrides. It prints what it changes, and the
wrapper prints its line: "FullyShardedDataParallel: strategy optim_grads_params over 8 ranks, ...".

megatron-core from PyPI lacks a file that Megatron-Bridge needs: see docs/bridge.md.

Run on two H200 with torch 2.11, Megatron-Bridge 0.6.2, megatron-core 0.19.2 and Transformer Engine
2.20.2, with two layers of the recipe's width, through and resumed. A test runs it with Bridge 0.3.1
and core 0.16.1 on two CPU processes, with a tiny model and replacements of what a CPU lacks.
"""

import sys

from megatron.bridge.recipes.llama import llama3
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

from megatron_fsdp_adapter import apply_fsdp_overrides

# The model's configuration is fetched from Hugging Face; weights are random, and data are mock.
cfg = llama3.llama32_1b_pretrain_config()
cfg.checkpoint.save = "runs/bridge"
cfg.checkpoint.load = "runs/bridge"  # a first run finds nothing there
cfg.checkpoint.save_interval = 500
cfg.train.train_iters = 1000
cfg.train.global_batch_size = 64
cfg.train.micro_batch_size = 1
cfg.logger.log_interval = 10
cfg = process_config_with_overrides(cfg, None, sys.argv[1:])
apply_fsdp_overrides(cfg, strategy="optim_grads_params")  # last
pretrain(config=cfg, forward_step_func=forward_step)
