"""The common state of a `torch_dist` folder, beside tensors and module objects: arguments,
iteration, scheduler, the optimizer's parameter groups.

    common.pt                  a file of its own (core 0.16.1)
    common_state/shard_0_1     an object among the others (core 0.19)
    metadata.json              names and versions of the formats, perhaps without this state's

Every supported core reads the file, so a conversion writes the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_adapter.checkpoint.convert.dcp_files import COMMON, CONFIG, DcpFolder, damage_of
from megatron_fsdp_adapter.checkpoint.unpickling import load_inert

OBJECT = "common_state/shard_0_1"
BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def check_config(folder: DcpFolder) -> None:
    """Raises ValueError if the folder is of another format or a newer version."""
    path = folder.folder / CONFIG
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{folder.folder} is no torch_dist checkpoint: it has no {CONFIG}. Name another format"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        found = {}
    wrong = []
    for name, known in BACKENDS.items():
        is_optional = name.startswith("common_") and _has_object(folder)
        if is_optional and name not in found:
            continue
        value = found.get(name)
        if value != known:
            wrong.append(f"{name}={value!r}, only {known!r} can be read")
    if wrong:
        raise ValueError(f"{path}: {'; '.join(wrong)}. A newer megatron_fsdp_adapter may read it")


def has_common(folder: DcpFolder) -> bool:
    """True if the folder has a common state in either form."""
    return (folder.folder / COMMON).is_file() or _has_object(folder)


def load_common(folder: DcpFolder) -> dict[str, Any]:
    """The common state, read by `load_inert` if the folder is not trusted. Raises ValueError if it
    is missing or damaged."""
    file = folder.folder / COMMON
    if file.is_file():
        where = str(file)
        common = _read_file(file, folder.trusted)
    elif _has_object(folder):
        where = f"{folder.folder}: {OBJECT}"
        common = folder.object(OBJECT)
        if isinstance(common, list) and len(common) == 1:
            common = common[0]  # core stores objects in lists of one
    else:
        raise ValueError(f"{folder.folder} is half-written: it has no {COMMON}")
    if isinstance(common, bytes):
        raise ValueError(
            f"{where} cannot be read without executing code that it names. Nothing was executed"
        )
    if not isinstance(common, dict):
        raise ValueError(f"{where} holds a {type(common).__name__}, not a dict")
    return common


def _has_object(folder: DcpFolder) -> bool:
    return OBJECT in folder.metadata.state_dict_metadata


def _read_file(path: Path, trusted: bool) -> Any:
    with damage_of(str(path)), path.open("rb") as file:
        if trusted:
            return torch.load(file, map_location="cpu", weights_only=False)
        return load_inert(file)
