"""Reading pickles of a checkpoint without running anything that they name.

A pickle calls whatever functions it names. Two kinds of it are in a checkpoint:

- `.metadata`, which torch DCP reads with plain pickle. It needs the classes of `_METADATA` and
  dtypes, and plans beside it are inert; any other name is an error (`read_metadata`, for every
  reader of ours, loads too).
- objects (arguments, generators), which torch.save wrote. A load needs the real ones; who only
  looks at them takes `load_inert`: torch's own `weights_only` reader, to which every class and
  function that it does not know is given as an inert stand-in.
"""

from __future__ import annotations

import functools
import io
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from .tensor_properties import PortableProperties


class RefusedName(pickle.UnpicklingError):
    """A pickle names what it has no business to name."""


class _CoreMetadata(Metadata):
    """In place of megatron-core's class in folders of 0.15 and before, with the same content."""


_DCP = (
    "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
    "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_METADATA: dict[tuple[str, str], Any] = {
    **{("torch.distributed.checkpoint.metadata", name): getattr(metadata, name) for name in _DCP},
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): PortableProperties,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): _CoreMetadata,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
}


_PLANS = {
    "torch.distributed.checkpoint.planner",
    "megatron.core.dist_checkpointing.strategies.torch",
}
"""Whose objects core keeps in its metadata: the plans of all ranks, for its next save. Nobody reads
them here, so they become inert."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA:
            return _METADATA[module, name]
        if module in _PLANS:
            return _stand_in(name)
        found = vars(torch).get(name) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise RefusedName(f"it names {module}.{name}, which metadata of torch DCP has no use for")


def read_metadata(path: Path) -> Any:
    """What a `.metadata` file holds.

    Raises OSError if it cannot be read, RefusedName if it names what metadata does not hold, and
    whatever damaged bytes happen to spell.
    """
    with path.open("rb") as file:
        return _MetadataUnpickler(file).load()


class Reader(FileSystemReader):
    """Torch's, but for metadata, which it reads as every reader of ours does."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises as the function does. Metadata of one rank, which we never write, torch reads."""
        if kwargs.get("rank") is not None:
            return super().read_metadata(*args, **kwargs)
        found: Metadata = read_metadata(Path(self.path) / ".metadata")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class Inert:
    """What a pickle makes of a class or function that is not known: its arguments and its state,
    kept and shown. Attributes of the object are attributes of this."""

    called: str

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        made = super().__new__(cls)
        made.__dict__["(arguments)"] = (*arguments, *keywords.items())
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """`__new__` has kept them."""

    def __setstate__(self, state: Any) -> None:
        named = isinstance(state, dict) and all(isinstance(name, str) for name in state)
        self.__dict__.update(state if named else {"(state)": state})

    def __repr__(self) -> str:
        arguments = self.__dict__["(arguments)"]
        return f"{type(self).called}({', '.join(map(repr, arguments))})"


@functools.cache
def _stand_in(name: str) -> type[Inert]:
    """One class for each name, so that two values can be compared."""
    return type("Inert", (Inert,), {"called": name})


@contextmanager
def _only_stand_ins(content: bytes) -> Iterator[None]:
    """torch's own list of what is safe, and stand-ins for the rest. What others have put on the
    list (Megatron does, when it is imported) is off it meanwhile, for the whole process: what is
    read must not depend on what was imported before."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
        torch.serialization.add_safe_globals([(_stand_in(name), name) for name in unknown])
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def load_inert(file: IO[bytes]) -> Any:
    """What torch.save wrote into `file`, with `Inert` values in place of all that is not plain
    data or tensors. Where it cannot be read like that, its bytes.

    Raises OSError, RuntimeError, EOFError or pickle.UnpicklingError if the file is damaged.
    """
    content = file.read()
    try:
        with _only_stand_ins(content):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return content
    except (OSError, RuntimeError, EOFError, MemoryError):
        raise
    except Exception as error:
        # What is no archive of torch.save, and whatever damaged bytes happen to spell.
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error
