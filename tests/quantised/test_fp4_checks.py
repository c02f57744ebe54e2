"""What runs on GPUs for NVFP4 and MXFP8 runs on the host, with Transformer Engine stood in for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.quantised.fp4_table import CHECKS, table
from tests.quantised.te_extension import FOLDERS, standing_in

pytestmark = pytest.mark.skipif(
    not FOLDERS, reason="TRANSFORMER_ENGINE_PYTHON names no folder with Transformer Engine's files"
)


def _run(rank: int, world: int, folder: str) -> dict[str, str]:
    with standing_in(Path(folder)):
        return {
            name: str(function(rank, world, *fewer(arguments)))
            for name, (function, arguments) in CHECKS.items()
        }


def fewer(arguments: tuple) -> tuple:
    """With one case in the place of several."""
    return tuple(1 if isinstance(argument, int) else argument for argument in arguments)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_check_passes_and_has_a_line(folder: Path) -> None:
    (found,) = run_ranks(_run, 1, str(folder), timeout=300)
    lines = table(found).splitlines()
    assert len(lines) == 2 + len(CHECKS)
    assert lines[2].startswith("| nvfp4 | our kernels | float64 | usual | 1 cases, ")
    assert all(len(line.split(" | ")) == 5 for line in lines[2:])
