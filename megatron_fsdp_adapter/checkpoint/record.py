"""The record of the run that saved a checkpoint: `adapter_metadata.json` in its folder.

Plain JSON, so that it can be read without torch and without unpickling. The schema is in
docs/contributing/checkpoint_format.md. A folder without it, from another program or an older
release, is read as well.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

RECORD = "adapter_metadata.json"
FORMAT = "fsdp_dtensor"
FORMAT_VERSION = 1
"""Incremented when a reader of the previous version would load wrong values, or none."""

TOPOLOGY_OPTIONS = (
    "data_parallel_sharding_strategy",
    "expert_data_parallel_sharding_strategy",
    "outer_dp_sharding_strategy",
    "expert_outer_dp_sharding_strategy",
    "num_distributed_optimizer_instances",
    "expert_num_distributed_optimizer_instances",
    "tensor_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
)
"""Names of Megatron's arguments and config fields that decide the placement of the state."""

_DISTRIBUTIONS = {
    "megatron_fsdp_adapter": "megatron-fsdp-adapter",
    "megatron.core": "megatron-core",
}


def write_record(
    folder: Path, world_size: int, iteration: int | None, topology: Mapping[str, Any]
) -> None:
    """Writes the record of a save by this process, now. Not forced to disk.

    world_size: ranks that saved; iteration: None if the folder's name has none; topology: the known
    values of `TOPOLOGY_OPTIONS`."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    record = {
        "world_size": world_size,
        "iteration": iteration,
        "topology": topology,
        "versions": versions(),
        "saved_at": now,
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2, default=str) + "\n")


def topology_of(options: object) -> dict[str, Any]:
    """The values of `TOPOLOGY_OPTIONS` in a namespace or config, without those that are None."""
    found = {name: getattr(options, name, None) for name in TOPOLOGY_OPTIONS}
    return {name: value for name, value in found.items() if value is not None}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages involved that are installed.

    The `__version__` of an imported module takes precedence: a checkout of Megatron-LM contains a
    megatron.core that differs from the installed one.
    """
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for module, distribution in _DISTRIBUTIONS.items():
        version = getattr(sys.modules.get(module), "__version__", None)
        if version is None:
            try:
                version = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        found[module.replace(".", "_")] = str(version)
    return found


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a checkpoint folder; None if it has none.

    Raises ValueError if the file is damaged, or if its format version is newer than
    `FORMAT_VERSION` or no integer.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        version = values["format_version"]
        saved_by = dict(values.get("versions", {}))
        dict(values.get("topology", {}))  # must be a table too
        release = saved_by.get("megatron_fsdp_adapter", "an unknown release")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if isinstance(version, int) and version <= FORMAT_VERSION:
        return values
    raise ValueError(
        f"{folder} has format version {version!r}, written by megatron_fsdp_adapter {release}; "
        f"this release ({versions().get('megatron_fsdp_adapter', 'unknown')}) reads versions up to "
        f"{FORMAT_VERSION}. Load it with that release, or a newer one"
    )
