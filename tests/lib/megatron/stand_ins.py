"""Modules that stand in for Megatron's, with the names that this package replaces."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_fsdp_adapter.checkpoint import folders
from megatron_fsdp_adapter.megatron.compat import patches


@contextmanager
def stand_ins(
    names: Mapping[str, Mapping[str, Any]], table: Sequence[patches.Patch]
) -> Iterator[dict[str, ModuleType]]:
    """Modules with these names, by the modules' own, in which `table` is installed."""
    made = {name: ModuleType(name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in made.items():
            vars(module).update(names[name])
            patch.setitem(sys.modules, name, module)
        patches.install(table)
        yield made
        patches.uninstall(table)


def save_as_megatron(module: Any, root: Path, iteration: int, state: dict[str, Any]) -> None:
    """What Megatron-LM's `save_checkpoint` does with files, by names of its module."""
    folder = folders.final_folder(root, iteration)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = module.torch.distributed.checkpoint
    checkpoint.save(state_dict=state, storage_writer=checkpoint.FileSystemWriter(str(folder)))
    with opener_of(module)(root / folders.TRACKER, "w") as file:
        file.write(str(iteration))


def opener_of(module: Any) -> Any:
    """The function by which a module opens the tracker: of Megatron-LM until 0.18, and from 0.19
    on; of Megatron-Bridge."""
    if hasattr(module, "maybe_msc"):
        return module.maybe_msc.open
    return module.open_file if hasattr(module, "open_file") else module.open
