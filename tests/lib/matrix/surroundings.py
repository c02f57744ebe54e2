"""What is around the training of a cell: what a machine lacks, a user's hooks on what is saved,
and the export of weights behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from megatron_fsdp_adapter import export_weights
from tests.lib.engine.engine_cases import buffers_of
from tests.lib.engine.host_copies import HostCopies
from tests.lib.gpt.topologies import TopologyTrainer, plain_name

from .table import Cell


def memories(cell: Cell) -> contextlib.AbstractContextManager[Any]:
    """Where there is no GPU tensors are on no stream."""
    if cell["ep_overlap"] == "on" and not torch.cuda.is_available():
        return mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: None)
    return contextlib.nullcontext()


@contextlib.contextmanager
def activations_kept(cell: Cell, trainer: TopologyTrainer) -> Iterator[None]:
    """Inside, if the cell asks for it, hooks of a user's keep copies of what autograd saves. With
    recompute they are on in forward alone: a part of a unit that is recomputed in backward is
    called without its unit, and shows them weights."""
    if cell["offload"] != "activations":
        yield
        return
    buffers = [b for chunk in trainer.chunks for _, b in buffers_of(chunk.engine)]
    storages = {buffer.untyped_storage()._cdata for buffer in buffers}
    copies = HostCopies(storages, spoils=cell["ep_overlap"] == "off")
    with contextlib.ExitStack() as stack:
        if cell["recompute"] == "none":
            stack.enter_context(copies.hooks())
        else:
            for chunk in trainer.chunks:
                hooked = copies.hooks()(chunk.forward)
                stack.enter_context(mock.patch.object(chunk, "forward", hooked))
        yield
    assert copies.packed and not copies.found, (copies.packed, copies.found)


def check_export(trainer: TopologyTrainer) -> None:
    """Every weight comes once, as it is; collective. What tensor parallelism splits has its own
    tests."""
    names = [name for name, _ in export_weights(trainer.chunks, dtype=torch.bfloat16)]
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)
    exported = dict(export_weights(trainer.chunks, dtype=None, scope="stage"))
    whole = trainer.params()
    sources = [chunk.export_source() for chunk in trainer.chunks]
    for number, source in enumerate(sources):
        for pair in source.engine.pairs:
            described = source.describe(pair)
            if described.parts == 1:
                expected = whole[f"{number}.{plain_name(pair.managed.fqns[0])}"]
                found = exported[described.name]
                found = found.to(expected.device)  # main weights may be in host memory
                assert torch.allclose(found, expected, rtol=0, atol=0, equal_nan=True), described
