"""Reads pickles of a checkpoint without executing code that they name.

Unpickling calls the functions that a pickle names. A checkpoint has two kinds of pickles:

- `.metadata`, which torch DCP reads with plain pickle. It needs the classes of `_METADATA` and
  dtypes. Plans in it become inert, and any other name is an error (`read_metadata`, used by every
  reader here, loads included). Its bytes are first compared with their digest if there is one.
- objects (arguments, generators), which torch.save wrote. A load needs the real ones. Inspection
  uses `load_inert`: torch's `weights_only` reader with an inert stand-in for every class and
  function that it does not know.
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

from . import digests
from .tensor_properties import PortableProperties


class RefusedName(pickle.UnpicklingError):
    """A pickle names a class or function that is not allowed in it."""


_DCP = "torch.distributed.checkpoint.metadata"
_METADATA: dict[tuple[str, str], Any] = {
    (_DCP, "Metadata"): Metadata,
    (_DCP, "MetadataIndex"): metadata.MetadataIndex,
    (_DCP, "StorageMeta"): StorageMeta,
    (_DCP, "TensorStorageMetadata"): metadata.TensorStorageMetadata,
    (_DCP, "BytesStorageMetadata"): metadata.BytesStorageMetadata,
    (_DCP, "ChunkStorageMetadata"): metadata.ChunkStorageMetadata,
    (_DCP, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    (_DCP, "TensorProperties"): PortableProperties,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,  # to 0.15
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
"""Modules of the plans that core stores in its metadata for its next save. They are not read here,
so they become inert."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA:
            return _METADATA[module, name]
        if module in _PLANS:
            return _stand_in(name)
        if module == "torch":
            found = vars(torch).get(name)
            if isinstance(found, torch.dtype):
                return found
        raise RefusedName(f"it names {module}.{name}, which metadata of torch DCP does not contain")


def read_metadata(path: Path) -> Metadata:
    """The content of a `.metadata` file.

    Raises OSError if it cannot be read, ValueError if it differs from its digest or is something
    else, RefusedName if it names other classes than metadata has, and any other error on damaged
    bytes.
    """
    content = path.read_bytes()
    digests.check_bytes(path, content)
    found = _MetadataUnpickler(io.BytesIO(content)).load()
    if not isinstance(found, Metadata):
        raise ValueError(f"{path.name} holds a {type(found).__name__}, not metadata of torch DCP")
    return found


class Reader(FileSystemReader):
    """torch's reader, with metadata read by `read_metadata`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises as the function does, and ValueError for metadata of one rank. Our saves write
        none, and torch requests it only if it cannot read the metadata of all ranks."""
        if kwargs.get("rank") is not None:
            raise ValueError(f"{self.path}: metadata of one rank are not read")
        found = read_metadata(Path(self.path) / ".metadata")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class Inert:
    """Stand-in for an object of an unknown class or function. It keeps and shows the arguments and
    the state; attributes of the object are its attributes."""

    called: str

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        made = super().__new__(cls)
        made.__dict__["(arguments)"] = (*arguments, *keywords.items())
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """No-op: `__new__` has kept the arguments."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict) and all(isinstance(name, str) for name in state):
            self.__dict__.update(state)
        else:
            self.__dict__["(state)"] = state

    def __repr__(self) -> str:
        arguments = ", ".join(map(repr, self.__dict__["(arguments)"]))
        return f"{type(self).called}({arguments})"


@functools.cache
def _stand_in(name: str) -> type[Inert]:
    """One class for each name, so that two values can be compared."""
    return type("Inert", (Inert,), {"called": name})


@contextmanager
def _only_stand_ins(content: bytes) -> Iterator[None]:
    """Restricts torch's list of safe globals to its defaults, and adds stand-ins for unknown names.

    Entries added by other code (Megatron adds some on import) are removed meanwhile, for the whole
    process: the result must not depend on earlier imports."""
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
    """The content of a torch.save file, with `Inert` values for everything except plain data and
    tensors; its bytes if it cannot be read like that.

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
        # The file is no archive of torch.save, or damaged bytes raised an arbitrary error.
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error
