"""Saving and loading `fsdp_dtensor` checkpoints through torch.distributed.checkpoint (DCP).

The folder is an ordinary DCP checkpoint, as Megatron-LM's `--ckpt-format fsdp_dtensor` writes it:
the keys are those of the nested state joined by dots.

Collectives: a save has two exchanges of small objects, plus DCP's exchange of plans and results.
DCP needs every rank's plan to write one metadata file, and the result exchange publishes the
checkpoint (`storage.py`). A load has two or three exchanges and none by DCP, because every rank
reads the metadata file and then exactly its own blocks. No exchange is per tensor, and all run on
the CPU.

Loading unpickles values that are not tensors: load only checkpoints that you trust.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp_adapter.checkpoint import folders, publishing, running
from megatron_fsdp_adapter.checkpoint.coordination import Coordinator, coordination
from megatron_fsdp_adapter.checkpoint.fitting import fit, renamed_like
from megatron_fsdp_adapter.checkpoint.state import (
    Mismatch,
    StateDict,
    StateMapping,
    compare,
    entries,
    flatten,
    from_stored,
    general_keys,
    keys_of_all,
    merge,
    problems_of,
    to_stored,
)
from megatron_fsdp_adapter.checkpoint.storage import SafeWriter
from megatron_fsdp_adapter.core.problems import RefusedByAllRanks
from megatron_fsdp_adapter.state.names import EXTRA_STATE, FP8_SCALING

PathLike = str | os.PathLike[str]

OPTIONAL = (EXTRA_STATE, FP8_SCALING)
"""Ends of keys that a checkpoint may have and a state may lack."""


@dataclass(frozen=True)
class _Opened:
    """A checkpoint opened by this rank.

    stored: the state to read into, as `to_stored` returns it, by the names of the checkpoint;
    mismatch: its differences from the checkpoint; keys: its `general_keys`, () if it is
    unusable."""

    folder: Path
    iteration: int
    metadata: Metadata
    stored: StateDict
    mismatch: Mismatch
    keys: tuple[str, ...] = ()

    def summary(self) -> _Summary:
        """The summary that ranks exchange."""
        return self.iteration, digest_of(self.keys), self.mismatch


_Summary = tuple[int, str, Mismatch]
"""Iteration, digest of the general keys, and the differences of a rank's state."""


def save_checkpoint(
    root: PathLike,
    iteration: int,
    state: StateMapping,
    keep_last: int | None = None,
    *,
    topology: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Writes a checkpoint, and makes it the newest one of a folder.

    Collective: all ranks of `group` call it with the same arguments, but for the state. It waits
    for background saves of this process into `root`. If a process dies during the save, the
    previous checkpoint stays the newest, also if it has the same iteration.

    Examples:
        >>> model = fully_shard_model(nn.Linear(8, 4))
        >>> state = {"model": model.state_dict(), "samples": 640}
        >>> saved = save_checkpoint(folder, 10, state)
        >>> saved.name
        'iter_0000010'
        >>> state["samples"] = 0
        >>> iteration, loaded = load_checkpoint(folder, state)
        >>> iteration, loaded["samples"]
        (10, 640)

    Args:
        root: the folder of all checkpoints of a run.
        iteration: the number of this checkpoint.
        state: nested dicts and lists with string keys. Values are sharded parameters, tensors, and
            objects that can be pickled. Rank 0 writes a tensor or an object; `PerRank` marks one
            that each rank has.
        keep_last: number of complete checkpoints to keep, up to this one. None keeps all.
        topology: plain values for the record of the checkpoint, such as sizes of parallelism.
        group: a group on the CPU. None: all ranks.

    Returns:
        The folder of this checkpoint.

    Raises:
        ValueError: on every rank: invalid arguments, or a state that cannot be saved.
        CheckpointError: on every rank: a rank failed to write, or another job saves the same or a
            later iteration. Written files are deleted.
    """
    root = Path(root)
    running.begin(root, iteration)
    running.wait(root)
    with coordination(group) as ranks:
        stored = begin_save(ranks, root, iteration, state, keep_last)
        writer = make_writer(root, iteration, keep_last, topology)
        ranks.run("writing the checkpoint", lambda: write(stored, writer, ranks))
    return folders.final_folder(root, iteration)


def load_checkpoint(
    root: PathLike,
    state: StateMapping,
    iteration: int | None = None,
    *,
    ignore_unexpected: Sequence[str] = (),
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[int, StateDict]:
    """Loads a checkpoint into the tensors of a state, in place.

    The checkpoint may be of any number of ranks. Tensors and DTensors of `state` are overwritten.
    Its dicts and lists are not changed: other values are in the returned state. Lengths of files
    are checked; the command `verify` also checks all bytes. Collective over `group`.

    Examples:
        >>> model = fully_shard_model(nn.Linear(8, 4, bias=False))
        >>> _ = save_checkpoint(folder, 10, {"model": model.state_dict()})
        >>> with torch.no_grad():
        ...     _ = model.module.weight.zero_()
        >>> iteration, loaded = load_checkpoint(folder, {"model": model.state_dict()})
        >>> _ = model.load_state_dict(loaded["model"])
        >>> iteration, bool(model.module.weight.to_local().any())
        (10, True)

    Args:
        root: the folder of all checkpoints of a run.
        state: the structure that was given to `save_checkpoint`, with any values. Its keys are
            loaded.
        iteration: the number of the checkpoint. None: the newest.
        ignore_unexpected: prefixes of keys that may be in the checkpoint and not in `state`.
        vocab_size: number of tokens without padding. With it, vocabulary tables may have another
            number of padding rows than in the checkpoint.
        group: a group on the CPU. None: all ranks.

    Returns:
        The iteration, and the loaded state: `state` with the values of the checkpoint.

    Raises:
        FileNotFoundError: on every rank: there is no such checkpoint. No tensor is changed.
        ValueError: on every rank: the checkpoint is half-written, of a newer format or of another
            program, or keys, shapes or dtypes differ. One message lists all. No tensor is changed.
        CheckpointError: on every rank: a rank failed to read. Tensors have old and new values.
    """
    root = Path(root)
    with coordination(group) as ranks:
        opened, summaries = ranks.run(
            "opening the checkpoint",
            lambda: _open(root, iteration, state, ranks.rank, vocab_size),
            share=_Opened.summary,
        )
        mismatch = _mismatch_of_all(ranks, opened, summaries, tuple(ignore_unexpected))
        if mismatch:
            found = f"the state does not fit {opened.folder}:\n{mismatch.describe()}"
            raise RefusedByAllRanks(found)

        loaded, _ = ranks.run("reading the checkpoint", lambda: _loaded(opened, state, ranks.rank))
        return opened.iteration, loaded


def latest_iteration(root: PathLike) -> int:
    """Returns the number of the newest checkpoint of a folder. Not collective.

    Examples:
        >>> _ = save_checkpoint(folder, 10, {"samples": 640})
        >>> latest_iteration(folder)
        10

    Args:
        root: the folder of all checkpoints of a run.

    Raises:
        FileNotFoundError: there is no such folder, or no checkpoint in it.
        ValueError: the file that has the number is damaged.
    """
    return folders.read_tracker(Path(root))


def begin_save(
    ranks: Coordinator, root: Path, iteration: int, state: StateMapping, keep_last: int | None
) -> StateDict:
    """The state as torch DCP stores it. One exchange; nothing is written.

    Raises ValueError on every rank if the arguments are invalid on any rank or differ between
    ranks, and CheckpointError if a value of one rank cannot be pickled.
    """

    call = str(root), iteration, keep_last

    def begin() -> StateDict:
        _check_call(root, iteration, state, keep_last)
        return to_stored(state, ranks.rank)

    stored, calls = ranks.run("starting to save", begin, share=lambda _: call)
    different = set(calls)
    if len(different) > 1:
        listed = ", ".join(sorted(map(repr, different)))
        raise ValueError(f"ranks disagree on (root, iteration, keep_last): {listed}")
    return stored


def make_writer(
    root: Path, iteration: int, keep_last: int | None, topology: Mapping[str, Any] | None
) -> SafeWriter:
    """The writer of a save. It publishes the complete checkpoint as the newest of `root`."""

    def publish(temporary: Path, _: Path) -> None:
        publishing.publish(root, iteration, temporary, keep_last)

    return SafeWriter(folders.final_folder(root, iteration), dict(topology or {}), publish)


def write(stored: StateDict, writer: SafeWriter, ranks: Coordinator) -> None:
    """Writes a state, as torch DCP stores it; deletes the files of a failed save. Collective."""
    try:
        torch_dcp.save(
            stored,
            storage_writer=writer,
            planner=torch_dcp.DefaultSavePlanner(),
            process_group=ranks.group,
        )
    except BaseException:
        # Before the exchange, so that the space is free when the ranks raise.
        writer.discard()
        raise


def _check_call(root: Path, iteration: int, state: StateMapping, keep_last: int | None) -> None:
    """Raises ValueError for arguments of a save that are wrong on this rank."""
    if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0:
        raise ValueError(f"iteration={iteration!r} must be an integer, 0 or more")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last={keep_last} must be at least 1, or None to keep all")
    if root.exists() and not root.is_dir():
        raise ValueError(f"root={root} is a file. Name a folder for checkpoints")
    problems = problems_of(state)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"the state cannot be saved:\n{listed}")


def _open(
    root: Path, iteration: int | None, state: StateMapping, rank: int, vocab_size: int | None
) -> _Opened:
    # Opens the checkpoint and compares this rank's state with it. Differences are returned, so
    # that one error can list those of all ranks.
    stored = to_stored(state, rank, is_loading=True)
    number = folders.read_tracker(root) if iteration is None else iteration
    folder, metadata = folders.open_checkpoint(root, number)
    problems = problems_of(stored)
    if problems:
        return _Opened(folder, number, metadata, stored, Mismatch(unusable=problems))
    stored = renamed_like(stored, metadata.state_dict_metadata)
    fit(stored, metadata, vocab_size)
    leaves = flatten(stored)
    mismatch = compare(leaves, metadata)
    return _Opened(folder, number, metadata, stored, mismatch, general_keys(leaves, rank))


def _mismatch_of_all(
    ranks: Coordinator,
    opened: _Opened,
    summaries: Sequence[_Summary | None],
    ignored: tuple[str, ...],
) -> Mismatch:
    """The mismatches of all ranks, and the keys that no rank loads; the same on every rank.

    summaries: of all ranks, in rank order. ignored: prefixes of keys that need not be loaded. One
    exchange if keys differ. Raises ValueError if ranks have opened different iterations."""
    newest, digests, mismatches = zip(*filter(None, summaries), strict=True)
    if len(set(newest)) > 1:
        raise ValueError(
            f"ranks see different newest iterations: {list(newest)}. Check that root is a shared "
            "folder"
        )
    general = keys_of_ranks(ranks, opened.keys, digests)
    merged = merge(mismatches)
    if merged.unusable:
        # The keys of an unusable state are unknown, so unexpected keys cannot be determined.
        return merged
    wanted = keys_of_all(general, ranks.size)
    unexpected = []
    for key in opened.metadata.state_dict_metadata:
        is_ignored = key.startswith(ignored) or key.endswith(OPTIONAL)
        if key not in wanted and not is_ignored:
            unexpected.append(key)
    return replace(merged, unexpected=tuple(unexpected))


def digest_of(keys: Sequence[str]) -> str:
    """A short text that is equal for equal keys."""
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()


def keys_of_ranks(ranks: Coordinator, keys: Sequence[str], digests: Sequence[str]) -> set[str]:
    """The keys of all ranks together. One exchange if they differ.

    keys: of this rank; digests: `digest_of` of each rank's keys, in rank order."""
    if len(set(digests)) == 1:
        return set(keys)
    # Only the first rank with a set of keys sends it; most ranks have the same set.
    is_sender = digests.index(digest_of(keys)) == ranks.rank
    to_send = tuple(keys) if is_sender else ()
    _, sent = ranks.run("comparing keys", lambda: to_send, share=tuple)
    return {key for part in sent for key in part or ()}


def _loaded(opened: _Opened, state: StateMapping, rank: int) -> StateDict:
    """Reads this rank's blocks with DCP's planner and reader; returns the loaded state.

    DCP's `load` would also exchange the plans, which no rank needs, and read the metadata again."""
    reader = torch_dcp.FileSystemReader(opened.folder)
    planner = torch_dcp.DefaultLoadPlanner()
    planner.set_up_planner(opened.stored, opened.metadata, is_coordinator=False)
    reader.set_up_storage_reader(opened.metadata, is_coordinator=False)
    local = reader.prepare_local_plan(planner.create_local_plan())
    [plan] = reader.prepare_global_plan(planner.create_global_plan([local]))
    with torch.no_grad():
        reader.read_data(planner.finish_plan(plan), planner).wait()
    own = renamed_like(opened.stored, (key for _, _, key in entries(state)))
    return from_stored(own, state, rank)
