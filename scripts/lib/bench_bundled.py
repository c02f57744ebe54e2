"""megatron-core's FSDP, for comparison. Only this module imports it."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from lib.distributed import Place, side_stream

_PACKAGE = "megatron.core.distributed.fsdp"
_MODULES = (
    "mcore_fsdp_adapter",
    "src.megatron_fsdp.megatron_fsdp",
    "src.megatron_fsdp.mixed_precision",
    "src.megatron_fsdp.param_and_grad_buffer",
    "src.megatron_fsdp.utils",
)


def _let_run_on_cpu() -> None:
    """Gives core's FSDP what `enable_cpu_mode` gives the rest of core: no-op streams and CPU
    devices; and a CPU device mesh. Idempotent."""
    from megatron_fsdp_adapter.launch.cpu_mode import CUDA_ANSWERS, make_view
    from megatron_fsdp_adapter.megatron.compat.patches import ModuleView

    view = make_view()
    # It uses the current device in names such as "cuda:0", which it only compares.
    cuda = ModuleView(torch.cuda, {**CUDA_ANSWERS, "current_device": lambda: 0})
    view.__dict__["cuda"] = cuda
    for name in _MODULES:
        importlib.import_module(f"{_PACKAGE}.{name}").torch = view  # type: ignore[attr-defined]
    adapter = importlib.import_module(f"{_PACKAGE}.mcore_fsdp_adapter")
    adapter.DeviceMesh = ModuleView(  # type: ignore[attr-defined]
        torch.distributed.DeviceMesh, {"from_group": _mesh_of_cpus}
    )


@functools.wraps(torch.distributed.DeviceMesh.from_group)
def _mesh_of_cpus(*args: Any, **kwargs: Any) -> Any:
    return torch.distributed.DeviceMesh.from_group(*args, **{**kwargs, "device_type": "cpu"})


def bundled_wrapper(
    config: Any, ddp_config: Any, module: Any, place: Place, version: int = 1
) -> Any:
    """`module` in core's FullyShardedDataParallel.

    version: 2 for its rewrite. ValueError if this core has none."""
    arguments: dict[str, Any] = {}
    if version == 2:
        arguments["pg_collection"] = _groups_of_rewrite(ddp_config)
    if place.device.type != "cuda":
        _let_run_on_cpu()
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    with side_stream(place):
        wrapped = FullyShardedDataParallel(
            config=config,
            ddp_config=ddp_config,
            module=module,
            device=place.device,
            **arguments,
        )
    if place.device.type == "cuda":
        torch.cuda.synchronize()
    return wrapped


def _groups_of_rewrite(ddp_config: Any) -> Any:
    """Selects the rewrite in `ddp_config`, and returns the process groups that it asks for."""
    from megatron.core import __version__
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not hasattr(ddp_config, "megatron_fsdp_version"):
        raise ValueError(
            f"bundled-v2: megatron-core {__version__} has no megatron_fsdp_version. Use 0.20 or "
            "Megatron-LM's main branch"
        )
    ddp_config.megatron_fsdp_version = 2
    return ProcessGroupCollection.use_mpu_process_groups()
