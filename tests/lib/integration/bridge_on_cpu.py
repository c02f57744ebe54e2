"""Runs a script for Megatron-Bridge, unmodified, on a CPU. For tests only, never for users.

    python tests/lib/integration/bridge_on_cpu.py scripts/pretrain_bridge.py --recipe ...

Beside what `on_cpu.py` does for Megatron-LM: Megatron-Bridge imports Transformer Engine without
asking whether it is there, and its recipes fetch a model's configuration from the network. Here
two of its modules see an empty Transformer Engine while they are imported, and recipes get a
configuration of a tiny Llama.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))  # as a script, its own folder is there

from tests.lib.integration import absent_packages, on_cpu, warm_start

NEEDS_TE = ("megatron.bridge.peft.lora", "megatron.bridge.peft.lora_layers")
TE = "transformer_engine"

BRIDGE_MODULES = (
    "megatron.bridge",
    "megatron.bridge.recipes",
    "megatron.bridge.recipes.llama.llama3",
    "megatron.bridge.models.model_provider",
    "megatron.bridge.training.checkpointing",
    "megatron.bridge.training.eval",
    "megatron.bridge.training.gpt_step",
    "megatron.bridge.training.initialize",
    "megatron.bridge.training.pretrain",
    "megatron.bridge.training.setup",
    "megatron.bridge.training.train",
)

TINY_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "architectures": ["LlamaForCausalLM"],
}


class _Loader(importlib.abc.Loader):
    """Executes a module while Transformer Engine seems to be there. Not longer: megatron-core asks
    for it in many places, and would believe it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        names = (TE, f"{TE}.pytorch", f"{TE}.pytorch.ops")
        sys.modules.update((name, absent_packages.Empty(name)) for name in names)
        try:
            self.loader.exec_module(module)
        finally:
            for name in names:
                sys.modules.pop(name, None)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in NEEDS_TE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class OfflineBridge:
    """In the place of AutoBridge: any name on the hub is a tiny Llama."""

    @staticmethod
    def from_hf_pretrained(name: str, *args: Any, **kwargs: Any) -> Any:
        from megatron.bridge import AutoBridge
        from transformers import LlamaConfig

        return AutoBridge.from_hf_config(LlamaConfig(**TINY_LLAMA))


def _on_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """Process groups that Megatron-Bridge makes by itself are of NCCL, whatever its config says."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        return original(*args, **kwargs)

    return make


def _contiguous(original: Callable[..., Any]) -> Callable[..., Any]:
    """0.3 scatters columns as they are: copies to a GPU are contiguous, those to the host none."""

    @functools.wraps(original)
    def scatter(tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        parts = scatter_list and [part.contiguous() for part in scatter_list]
        return original(tensor, parts, *args, **kwargs)

    return scatter


def prepare_bridge() -> None:
    """Makes the modules of Megatron-Bridge run on the CPU."""
    dist.scatter = _contiguous(dist.scatter)
    for name in ("new_group", "new_subgroups_by_enumeration"):
        setattr(dist, name, _on_gloo(getattr(dist, name)))
    if importlib.util.find_spec(TE) is None:
        sys.meta_path.insert(0, _Finder())
    on_cpu.prepare(BRIDGE_MODULES, ("megatron.bridge", "megatron.training"))
    from megatron.bridge.models import gpt_provider
    from megatron.bridge.peft import utils as peft_utils
    from megatron.bridge.training import initialize

    peft_utils.HAVE_TE = importlib.util.find_spec(TE) is not None  # core's import of it says so
    gpt_provider.transformer_engine_layer_spec = gpt_provider.local_layer_spec
    for name, module in list(sys.modules.items()):  # the recipe's, wherever a release has it
        if name.startswith("megatron.bridge.recipes.llama") and hasattr(module, "AutoBridge"):
            module.AutoBridge = OfflineBridge  # type: ignore[attr-defined]
    initialize.compile_helpers = lambda: None  # the wheel has them compiled


def run(argv: list[str]) -> None:
    """The script with its arguments."""
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def main(argv: list[str]) -> None:
    """The script, after the lie; with `SERVE` in front of it, for ranks to come."""
    prepare_bridge()
    if argv[0] == warm_start.SERVE:
        warm_start.serve(run)
    else:
        run(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
