"""Recipes of Megatron-Bridge that set `use_megatron_fsdp`, and what this package says to each. As a
script, in a process of its own:

    python -m tests.recipes.of_bridge                                   # a row of the table each
    python -m tests.recipes.of_bridge llama3_70b_pretrain_64gpu_b300_bf16    # options of a proof

Recipes are found by their source, through the functions that they call, and then called: what
counts is what the finished config says. They ask the hub for models' configurations; here these
are made, with the sizes that are published where something depends on them.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

SWITCH = "use_megatron_fsdp"
TE, TE_VERSION = "transformer_engine", "2.20.2"
FOLDERS = ("recipes", "perf_recipes", "diffusion/recipes")

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192,
}  # fmt: skip
HUB: Mapping[str, tuple[str, dict[str, Any]]] = {
    "meta-llama/Meta-Llama-3-70B": ("LlamaConfig", {
        **LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_hidden_layers": 80,
    }),
    "meta-llama/Meta-Llama-3.1-405B": ("LlamaConfig", {
        **LLAMA, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128,
        "num_hidden_layers": 126,
    }),
    "deepseek-ai/DeepSeek-V3": (
        "DeepseekV3Config", {"architectures": ["DeepseekV3ForCausalLM"]},
    ),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": (
        "NemotronHConfig", {"architectures": ["NemotronHForCausalLM"]},
    ),
    "Qwen/Qwen3.5-35B-A3B": (
        "Qwen3_5MoeConfig", {"architectures": ["Qwen3_5MoeForConditionalGeneration"]},
    ),
}  # fmt: skip
"""Name on the hub -> class of `transformers` and what it is told. Whatever else is its default."""


def bridge_folder() -> Path:
    """Of the installed Megatron-Bridge; not imported."""
    return Path(str(importlib.metadata.distribution("megatron-bridge").locate_file(
        "megatron/bridge")))  # fmt: skip


def recipes_with_fsdp(folder: Path) -> list[tuple[str, str]]:
    """(module, function) of the public functions whose source turns the switch on, itself or in
    functions that it calls."""
    called: dict[tuple[str, str], set[str]] = {}
    on: set[tuple[str, str]] = set()
    for path in sorted(path for part in FOLDERS for path in (folder / part).rglob("*.py")):
        module = ".".join(("megatron.bridge", *path.relative_to(folder).with_suffix("").parts))
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            called[module, node.name] = {
                call.func.id for call in ast.walk(node)
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
            }  # fmt: skip
            if any(map(_turns_on, ast.walk(node))):
                on.add((module, node.name))
    while True:
        names = {name for _, name in on}
        more = {key for key, of in called.items() if key not in on and of & names}
        if not more:
            return sorted(key for key in on if key[1].endswith("_config") and key[1][0] != "_")
        on |= more


def _turns_on(node: ast.AST) -> bool:
    """`x.use_megatron_fsdp = True`, or the same as an argument."""
    is_true = isinstance(getattr(node, "value", None), ast.Constant) and node.value.value is True  # type: ignore[attr-defined]
    if isinstance(node, ast.Assign):
        targets = [at for at in node.targets if isinstance(at, ast.Attribute)]
        return is_true and any(at.attr == SWITCH for at in targets)
    return is_true and isinstance(node, ast.keyword) and node.arg == SWITCH


def made(module: str, function: str) -> Any:
    """The finished config of a recipe."""
    from megatron.bridge import AutoBridge

    imported = importlib.import_module(module)
    for other in list(sys.modules.values()):  # another stand-in of it, in a test harness
        if getattr(other, "__name__", "").startswith("megatron.bridge.recipes") and hasattr(
            other, "AutoBridge"
        ):
            other.AutoBridge = AutoBridge  # type: ignore[attr-defined]
    with mock.patch.object(AutoBridge, "from_hf_pretrained", classmethod(_from_hub)):
        return getattr(imported, function)()


def _from_hub(bridge: Any, name: str, *positional: Any, **named: Any) -> Any:
    import transformers

    kind, said = HUB[str(name)]
    return bridge.from_hf_config(getattr(transformers, kind)(**said))


class _FusedAdam:
    """With the arguments that core looks for in Transformer Engine's."""

    def __init__(self, store_param_remainders: Any, master_weight_dtype: Any, exp_avg_dtype: Any,
                 exp_avg_sq_dtype: Any, use_decoupled_grad: Any) -> None:  # fmt: skip
        raise NotImplementedError("configs are validated with it, nothing is trained")


@contextmanager
def seeming_transformer_engine() -> Iterator[None]:
    """While it lasts, core's configs find the Transformer Engine that they ask for when they are
    validated: its version and names, and nothing that works."""
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    optimizers = ModuleType(f"{TE}.pytorch.optimizers")
    optimizers.FusedAdam = _FusedAdam  # type: ignore[attr-defined]
    modules = {TE: ModuleType(TE), f"{TE}.pytorch": ModuleType(f"{TE}.pytorch"),
               optimizers.__name__: optimizers}  # fmt: skip
    fused = {name: object() for name in vars(moe_utils) if name.startswith("fused_")}
    with (
        mock.patch.object(utils, "_te_version", Version(TE_VERSION)),
        mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb", object()),
        mock.patch.multiple(moe_utils, **fused),
        mock.patch.dict(sys.modules, modules),
    ):
        yield


def world_size(name: str) -> int:
    """Ranks of a recipe: said in the names of those that are for more than one node."""
    ranks = re.search(r"_(\d+)gpu", name)
    return int(ranks[1]) if ranks else 8


def proof_options(cfg: Any) -> dict[str, Any]:
    """A finished config by the names that `doctor --prove` knows: plain values, and dtypes as
    Megatron-LM's flags name them."""
    from torch.nn.functional import silu

    from megatron_fsdp_adapter.megatron.options.validation import DTYPES

    names = {value: name for name, value in DTYPES.items() if value is not None}
    found: dict[str, Any] = {}
    for config in (cfg.optimizer, cfg.model, cfg.ddp):
        for name, value in vars(config).items():
            plain = names.get(value, value) if name.endswith("_dtype") else value
            is_plain = plain is None or isinstance(plain, (bool, int, float, str, list))
            if is_plain and not name.startswith("_"):
                found[name] = plain
    return {
        **found,
        "swiglu": bool(cfg.model.gated_linear_unit and cfg.model.activation_func is silu),
        "group_query_attention": cfg.model.num_query_groups is not None,
        "untie_embeddings_and_output_weights": not cfg.model.share_embeddings_and_output_weights,
        "micro_batch_size": cfg.train.micro_batch_size,
        "global_batch_size": cfg.train.global_batch_size,
        "optimizer": cfg.optimizer.optimizer,
        "ckpt_format": cfg.checkpoint.ckpt_format,
    }


def overridden(name: str, cfg: Any) -> tuple[list[str], dict[str, str]]:
    """Makes of a recipe what a run makes of it: `apply_fsdp_overrides`, and what Megatron-Bridge
    does when training starts. Returns what is refused before that, and the environment."""
    from megatron.bridge.training import config as bridge_config
    from megatron.bridge.utils import common_utils

    from megatron_fsdp_adapter import apply_fsdp_overrides
    from megatron_fsdp_adapter.launch import installation
    from megatron_fsdp_adapter.megatron.options import validation
    from tests.recipes import classify

    world = world_size(name)
    environment = {k: str(v) for k, v in (getattr(cfg, "env_vars", None) or {}).items()}
    early: list[str] = []
    with (
        classify.on_hopper({"RANK": "1", "WORLD_SIZE": str(world), **environment}),
        mock.patch.object(installation, "install"),
        mock.patch.object(common_utils, "get_world_size_safe", lambda: world),
        mock.patch.object(bridge_config, "get_world_size_safe", lambda: world),
        seeming_transformer_engine(),
    ):
        try:
            apply_fsdp_overrides(cfg, cfg.ddp.data_parallel_sharding_strategy,
                                 environment=environment)  # fmt: skip
        except ValueError:
            early = validation.bridge_problems(cfg, environment)
        bridge_config.runtime_config_update(cfg)  # validates the config too
    return early, environment


def classified(name: str, cfg: Any, source: str) -> dict[str, Any]:
    """A row: what `apply_fsdp_overrides` says, and what the wrapper would say of the configs that
    Megatron-Bridge makes of mixed precision and overlaps when training starts. AssertionError if
    that is more: the user would see it too late."""
    from megatron_fsdp_adapter.megatron.options import support, validation
    from megatron_fsdp_adapter.megatron.seams import core_api
    from tests.recipes import classify

    early, environment = overridden(name, cfg)
    with classify.on_hopper(environment):
        late = [
            *validation.wrapper_problems(cfg.model, cfg.ddp),
            *support.problems(cfg.optimizer, support.OPTIMIZER_CONFIG_RULES),
            *classify.construction_lines(cfg.model, cfg.ddp, core_api.asks_tokens_on_the_host()),
        ]
        waits = classify.waits_for(cfg.model)
    refused = classify.by_option([*early, *late])
    only_late = sorted(set(refused) - set(classify.by_option(early)))
    if only_late:
        raise AssertionError(f"{name}: apply_fsdp_overrides lets {only_late} pass")
    on = classify.turned_on(refused, cfg.ddp, cfg.model, cfg.optimizer, cfg.checkpoint)
    return classify.result(name, source, on, refused, waits)


def recipes() -> Iterator[tuple[str, Any]]:
    """(name, config) of each recipe that, once it is made, has the switch on."""
    from tests.integration import bridge_on_cpu

    bridge_on_cpu.prepare_bridge()
    logging.disable(logging.CRITICAL)
    for module, function in recipes_with_fsdp(bridge_folder()):
        cfg = made(module, function)
        if cfg.ddp.use_megatron_fsdp or cfg.dist.use_megatron_fsdp:
            yield function.removesuffix("_config"), cfg


def main(wanted: Sequence[str]) -> None:
    """Prints rows of the table, or the options of one recipe."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    source = "Megatron-Bridge " + importlib.metadata.version("megatron-bridge")
    if not wanted:
        print("ROWS" + json.dumps([classified(name, cfg, source) for name, cfg in recipes()]))
        return
    cfg = next(cfg for name, cfg in recipes() if name == wanted[0])
    overridden(wanted[0], cfg)
    print("OPTIONS" + json.dumps(proof_options(cfg)))


if __name__ == "__main__":
    main(sys.argv[1:])
