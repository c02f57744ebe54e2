"""What torch has only since some release that is newer than the oldest one that is supported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_common

DataParallelMeshDims: Any = getattr(fsdp, "DataParallelMeshDims", None)
"""None before torch 2.12."""
ShardPlacementResult: Any = getattr(_fsdp_common, "ShardPlacementResult", None)
"""None before torch 2.12."""

IS_OLDEST = torch.__version__ < (2, 12)  # type: ignore[operator]
"""True for torch 2.11, the oldest one that is supported."""

_JOINS_MESHES = torch.__version__ >= (2, 13)  # type: ignore[operator]
joins_meshes = pytest.mark.skipif(not _JOINS_MESHES, reason="torch joins no meshes")
has_places = pytest.mark.skipif(ShardPlacementResult is None, reason="needs torch 2.12")
