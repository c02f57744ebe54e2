"""Makes Megatron-Bridge's own FSDP tests, unmodified, small enough for gloo ranks. For tests only.

    PYTHONPATH=tests/integration:. torchrun --nproc_per_node 2 -m pytest -p bridge_tests_on_cpu FILE

in a checkout of Megatron-Bridge, with absolute paths. Beside what `bridge_on_cpu.py` does: the
tests' own modules see its torch, process groups are gloo, and the configs that they make are tiny
and without kernels.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = str(Path(__file__).parents[2])
_PATH = sys.path
# Without the checkout of Megatron-Bridge, which has a package `tests` too.
sys.path = [ROOT, *(p for p in _PATH if Path(p or ".").resolve() != Path.cwd())]

from megatron_fsdp_adapter import install  # noqa: E402
from tests.integration import on_cpu  # noqa: E402
from tests.integration.bridge_on_cpu import prepare_bridge  # noqa: E402

SMALL: dict[str, dict[str, Any]] = {
    "model": {
        "transformer_impl": "local", "apply_rope_fusion": False, "cross_entropy_loss_fusion": False,
        "masked_softmax_fusion": False, "bias_activation_fusion": False, "seq_length": 32,
        "bias_dropout_fusion": False, "persist_layer_norm": False, "hidden_size": 64,
        "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2, "bf16": False,
        "params_dtype": torch.float32, "pipeline_dtype": torch.float32, "autocast_dtype": None,
    },
    "optimizer": {"bf16": False},
    "dataset": {"sequence_length": 32, "seq_length": 32, "num_workers": 0},
    "tokenizer": {"vocab_size": 500},
    "dist": {"distributed_backend": "gloo"},
}  # fmt: skip
"""Options of a `ConfigContainer`."""

prepare_bridge()
sys.path = [p for p in _PATH if p != ROOT]
for _name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
    del sys.modules[_name]


def pytest_configure(config: Any) -> None:
    """Installs, before any test module is imported."""
    install()


def pytest_collection_finish(session: Any) -> None:
    """Installs in what is imported now; changes what the tests' modules make and see."""
    install()
    own = {item.module.__name__ for item in session.items}
    on_cpu.put_views(("tests.functional_tests", "conftest", *own))
    for module in {item.module for item in session.items}:
        module.create_fsdp_config_container = _small(module.create_fsdp_config_container)
        module.initialize_distributed = _initialize


def _small(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        cfg = make(*args, **kwargs)
        for section, options in SMALL.items():
            for option, value in options.items():
                if hasattr(getattr(cfg, section), option):
                    setattr(getattr(cfg, section), option, value)
        return cfg

    return made


def _initialize() -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
