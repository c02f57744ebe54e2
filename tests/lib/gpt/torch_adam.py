"""Makes core's distributed optimizer load its own checkpoints where Adam is torch's.

megatron-core 0.16.1 is written for the fused Adam of Transformer Engine or Apex. With torch's, as
on CPUs, saving works and loading does not: it describes the state to be loaded by the state there
is, of which there is none yet (distrib_optimizer.py:642); it looks for Adam's step counts, which
are in the parameter groups, among the stored tensors (:938); and it gives all parameters one
counter, which every step would then advance once for each (:825). For tests alone.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def make_loadable() -> None:
    """Changes the class for the rest of this process."""
    describe = DistributedOptimizer.sharded_state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    load = DistributedOptimizer.load_state_dict

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = self.ddp_config.use_megatron_fsdp
        if not ours and (kwargs.get("is_loading") or (len(args) > 1 and args[1])):
            make_state(self.optimizer)
        return describe(self, *args, **kwargs)

    def set_with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        with torch.no_grad():
            set_states(self, model_param, {"step": state["step"], **tensors})

    def load_state_dict(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        if self.ddp_config.use_megatron_fsdp:
            return
        for group in self.optimizer.param_groups:
            for param in group["params"] if "step" in group else ():
                self.optimizer.state[param]["step"] = torch.tensor(float(group["step"]))

    DistributedOptimizer.sharded_state_dict = sharded_state_dict
    DistributedOptimizer._set_main_param_and_optimizer_states = set_with_step
    DistributedOptimizer.load_state_dict = load_state_dict


def make_state(adam: torch.optim.Optimizer) -> None:
    """Zero moments for every parameter that has none."""
    for group in adam.param_groups:
        for param in group["params"]:
            if not adam.state.get(param):
                adam.state[param] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
