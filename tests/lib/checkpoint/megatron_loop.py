"""A loop that saves in the background by Megatron-LM's calls, around stand-ins for its modules."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron_fsdp_adapter.checkpoint import folders

LM = "megatron.training.checkpointing"
QUEUES = "megatron.training.async_utils"


def table_of(strategy: str = "nvrx", module: str | None = None) -> Any:
    """As `get_async_strategy` where the package that nvrx asks for is missing."""
    if strategy != "mcore":
        raise ModuleNotFoundError("nvidia-resiliency-ext")
    names = {"AsyncRequest": AsyncRequest, "AsyncCallsQueue": None, "FileSystemWriterAsync": None}
    return strategy, names if module is None else names[module]


TABLE = {"get_async_strategy": table_of}
NAMES = {
    LM: {
        "torch": torch,
        "open_file": open,
        **TABLE,
        "get_args": lambda: SimpleNamespace(tensor_model_parallel_size=2),
    },
    QUEUES: TABLE,
}
"""What matters of Megatron-LM's two modules."""


class Loop:
    """A training loop that saves to `root`: the calls of Megatron-LM 0.17 to 0.19."""

    def __init__(self, root: Path, modules: dict[str, Any]) -> None:
        self.root = root
        self.saving = modules[LM]
        _, table = modules[QUEUES].get_async_strategy("nvrx")
        self.queue = table["AsyncCallsQueue"](persistent=True)

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        folder = folders.final_folder(self.root, iteration)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        _, table = self.saving.get_async_strategy("nvrx")
        writer = table["FileSystemWriterAsync"](str(folder), thread_count=2, use_msc=False)
        planned = table["save_state_dict_async_plan"](
            state, writer, None, 0, planner=object(), enable_cache=False
        )
        function, preload, arguments = writer.get_save_function_and_args()
        finish = functools.partial(table["save_state_dict_async_finalize"], *planned)
        request = table["AsyncRequest"](
            function, arguments, [finish], async_fn_kwargs={}, preload_fn=preload
        )
        if dist.get_rank() == 0:
            request.finalize_fns.append(functools.partial(self._track, iteration))
        self.queue.schedule_async_request(request)

    def _track(self, iteration: int) -> None:
        with self.saving.open_file(self.root / folders.TRACKER, "w") as file:
            file.write(str(iteration))

    @property
    def tracked(self) -> int | None:
        path = self.root / folders.TRACKER
        return int(path.read_text()) if path.exists() else None
