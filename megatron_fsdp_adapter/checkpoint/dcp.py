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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from megatron_fsdp_adapter.checkpoint import digests, folders
from megatron_fsdp_adapter.checkpoint.coordination import Coordinator, coordination
from megatron_fsdp_adapter.checkpoint.names import EXTRA_STATE, FP8_SCALING
from megatron_fsdp_adapter.checkpoint.scaling import fit_scaling
from megatron_fsdp_adapter.checkpoint.state import (
    Mismatch,
    compare,
    flatten,
    from_stored,
    general_keys,
    keys_of_all,
    merge,
    problems_of,
    to_stored,
)
from megatron_fsdp_adapter.checkpoint.storage import SafeWriter
from megatron_fsdp_adapter.checkpoint.vocabulary import fit_vocabulary

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class _View:
    """The summary of an opened checkpoint that ranks exchange."""

    iteration: int
    digest: str
    mismatch: Mismatch


@dataclass(frozen=True)
class _Opened:
    """A checkpoint opened by this rank.

    keys: the general keys that it loads; stored: the state to read them into; read: the planned
    read (None: the state does not fit)."""

    folder: Path
    metadata: Metadata
    keys: tuple[str, ...]
    view: _View
    stored: dict[str, Any]
    read: _Read | None = None


@dataclass(frozen=True)
class _Read:
    """This rank's blocks, as torch DCP plans and reads them."""

    reader: StorageReader
    planner: LoadPlanner
    plan: LoadPlan


def save_checkpoint(
    root: PathLike,
    iteration: int,
    state: Mapping[str, Any],
    keep_last: int | None = None,
    *,
    topology: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Writes `state` as the checkpoint of `iteration` and makes it the newest one of `root`.

    Called by all ranks of `group` (a CPU group; None: all ranks) with the same arguments except the
    state. state: nested dicts and lists with string keys; leaves are DTensors with chunks, tensors
    and picklable objects; see `checkpoint.state`. keep_last: how many complete checkpoints up to
    this one to keep (None: all). topology: plain values for the checkpoint's record
    (`record.topology_of`).

    Whenever a process dies, the previous newest checkpoint stays loadable, even one of the same
    iteration. Returns the folder. Raises on every rank: ValueError for bad arguments or an unusable
    state, CheckpointError if writing fails on any rank or if another job saves the same iteration
    meanwhile; the written files are then deleted.
    """
    root = Path(root)
    with coordination(group) as ranks:
        stored = begin_save(ranks, root, iteration, state, keep_last)
        writer = make_writer(root, iteration, keep_last, topology)
        ranks.run("writing the checkpoint", lambda: _write(stored, writer, ranks))
    return folders.final_folder(root, iteration)


def load_checkpoint(
    root: PathLike,
    state: Mapping[str, Any],
    iteration: int | None = None,
    *,
    ignore_unexpected: Sequence[str] = (),
    vocab_size: int | None = None,
    check_digests: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[int, dict[str, Any]]:
    """Loads into the tensors of `state`, in place, and returns (iteration, loaded state).

    state: the structure passed to `save_checkpoint`, with any values; only its keys are loaded.
    Tensors and DTensors are overwritten in place. The returned state has the same structure and the
    same tensors, and the stored values for everything else; the containers of `state` are not
    changed. iteration: None for the newest. ignore_unexpected: prefixes of keys that may be in the
    checkpoint and not in `state`. vocab_size: number of real tokens; with it vocabulary tables may
    have another number of padding rows than the stored ones. check_digests: first compare this
    rank's blocks with the recorded digests; torch itself does not notice damaged tensor values.

    Raises on every rank, before a tensor is touched: FileNotFoundError if root, tracker or folder
    is missing, ValueError if the checkpoint is half-written, of a newer format, of another program
    or (with check_digests) damaged, or if any rank's keys, shapes or dtypes differ from it (one
    error lists all). CheckpointError if reading fails on any rank; the tensors then hold a mixture
    of old and new values.
    """
    root = Path(root)
    with coordination(group) as ranks:
        opened, views = ranks.run(
            "opening the checkpoint",
            lambda: _open(root, iteration, state, ranks.rank, vocab_size),
            tell=lambda opened: opened.view,
        )
        mismatch = _mismatch_of_all(ranks, opened, views, tuple(ignore_unexpected))
        if mismatch:
            raise ValueError(f"the state does not fit {opened.folder}:\n{mismatch.describe()}")
        if check_digests:
            ranks.run("checking the checkpoint", lambda: _check(opened))
        loaded, _ = ranks.run(
            "reading the checkpoint", lambda: _loaded(opened, state, ranks.rank)
        )
        return opened.view.iteration, loaded


def latest_iteration(root: PathLike) -> int:
    """Number of the newest checkpoint of `root`, from its tracker file. Local, no collective.

    Raises FileNotFoundError if root or tracker is missing, ValueError if the tracker is damaged.
    """
    return folders.read_tracker(Path(root))


def begin_save(
    ranks: Coordinator, root: Path, iteration: int, state: Mapping[str, Any], keep_last: int | None
) -> dict[str, Any]:
    """The state as torch DCP stores it. One exchange; nothing is written.

    Raises ValueError on every rank if the arguments are invalid on any rank or differ between
    ranks, and CheckpointError if a value of one rank cannot be pickled.
    """

    def begin() -> tuple[tuple[str, int, int | None], dict[str, Any]]:
        return _checked_call(root, iteration, state, keep_last), to_stored(state, ranks.rank)

    (_, stored), calls = ranks.run("starting to save", begin, tell=lambda begun: begun[0])
    if len(set(calls)) > 1:
        different = ", ".join(sorted(map(repr, set(calls))))
        raise ValueError(f"ranks disagree on (root, iteration, keep_last): {different}")
    return stored


def make_writer(
    root: Path, iteration: int, keep_last: int | None, topology: Mapping[str, Any] | None
) -> SafeWriter:
    """The writer of a save. It publishes the complete checkpoint as the newest of `root`."""

    def publish(temporary: Path, _: Path) -> None:
        folders.publish(root, iteration, temporary, keep_last)

    folder = folders.final_folder(root, iteration)
    return SafeWriter(folder, dict(topology or {}), iteration, publish)


def _write(stored: dict[str, Any], writer: SafeWriter, ranks: Coordinator) -> None:
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


def _checked_call(
    root: Path, iteration: int, state: Mapping[str, Any], keep_last: int | None
) -> tuple[str, int, int | None]:
    if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0:
        raise ValueError(f"iteration={iteration!r} must be an integer, 0 or more")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last={keep_last} must be at least 1, or None to keep all")
    if root.exists() and not root.is_dir():
        raise ValueError(f"root={root} is a file. Name a folder for checkpoints")
    problems = problems_of(state)
    if problems:
        raise ValueError("the state cannot be saved:\n" + "\n".join(f"  {p}" for p in problems))
    return str(root), iteration, keep_last


def _open(
    root: Path, iteration: int | None, state: Mapping[str, Any], rank: int, vocab_size: int | None
) -> _Opened:
    stored = to_stored(state, rank, is_loading=True)
    number = folders.read_tracker(root) if iteration is None else iteration
    folder, metadata = folders.open_checkpoint(root, number)
    problems = problems_of(stored)
    if problems:
        view = _View(number, "", Mismatch(unusable=problems))
        return _Opened(folder, metadata, (), view, stored)
    if vocab_size is not None:
        fit_vocabulary(stored, metadata, vocab_size)
    fit_scaling(stored, metadata)
    leaves = flatten(stored)
    keys = general_keys(leaves, rank)
    digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()
    view = _View(number, digest, compare(leaves, metadata))
    read = None if view.mismatch else _plan_read(folder, metadata, stored)
    return _Opened(folder, metadata, keys, view, stored, read)


def _mismatch_of_all(
    ranks: Coordinator, opened: _Opened, views: Sequence[_View | None], ignored: tuple[str, ...]
) -> Mismatch:
    """The mismatches of all ranks, and the keys that no rank loads; the same on every rank."""
    known = [view for view in views if view is not None]
    if len({view.iteration for view in known}) > 1:
        newest = [view.iteration for view in known]
        raise ValueError(
            f"ranks see different newest iterations: {newest}. Check that root is a shared folder"
        )
    digests = [view.digest for view in known]
    general: set[str] = set(opened.keys)
    if len(set(digests)) > 1:
        # One rank sends each different set of keys; most ranks have the same set.
        speaks = digests.index(opened.view.digest) == ranks.rank
        _, told = ranks.run("comparing keys", lambda: opened.keys if speaks else (), tell=tuple)
        general = {key for keys in told for key in keys or ()}
    wanted = keys_of_all(general, ranks.size)
    stored = opened.metadata.state_dict_metadata
    merged = merge([view.mismatch for view in known])
    unexpected = tuple(
        key
        for key in stored
        if key not in wanted
        and not key.startswith(ignored)
        and not key.endswith((EXTRA_STATE, FP8_SCALING))
    )
    # The keys of an unusable state are unknown, so unexpected keys cannot be determined.
    return merged if merged.unusable else replace(merged, unexpected=unexpected)


def _plan_read(folder: Path, metadata: Metadata, stored: dict[str, Any]) -> _Read:
    """Plans the read of this rank's blocks with DCP's planner and reader.

    DCP's `load` would also exchange the plans, which no rank needs, and read the metadata again."""
    reader = torch_dcp.FileSystemReader(folder)
    planner = torch_dcp.DefaultLoadPlanner()
    planner.set_up_planner(stored, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
    return _Read(reader, planner, planner.finish_plan(plan))


def _loaded(opened: _Opened, state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Runs the planned read; returns the loaded state."""
    assert opened.read is not None
    with torch.no_grad():
        opened.read.reader.read_data(opened.read.plan, opened.read.planner).wait()
    return from_stored(opened.stored, state, rank)


def _check(opened: _Opened) -> None:
    """Raises ValueError if the bytes to be read differ from their digests."""
    assert opened.read is not None
    recorded = digests.read_digests(opened.folder)
    if recorded is None:
        raise ValueError(
            f"{opened.folder} has no {digests.DIGESTS}, which check_digests=True needs. Load it "
            "without check_digests"
        )
    starts: dict[str, set[int]] = {}
    for item in opened.read.plan.items:
        place = opened.metadata.storage_data[item.storage_index]
        starts.setdefault(place.relative_path, set()).add(place.offset)
    unknown = digests.FileDigest((), ())
    damage: list[digests.Problem] = []
    for name in sorted(starts):
        digest = recorded.get(name, unknown)
        damage += digests.check_file(opened.folder / name, digest, starts=starts[name])
    if damage:
        lines = "\n".join(f"  {line}" for line in digests.described(damage, opened.metadata))
        raise ValueError(
            f"{opened.folder} is damaged. Load another iteration:\n"
            f"{lines}"
        )
