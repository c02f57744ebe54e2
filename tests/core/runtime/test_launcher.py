"""Ranks that refuse end with the message of one of them, whichever of them refuse."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_fsdp_adapter.core.runtime import launcher
from tests.lib.ranks.one_rank import world_of_one

CHECKS = ("core/runtime/launcher.py",)

LIMIT = 0.01
"""Seconds that a rank waits for the first one."""


@dataclass(frozen=True)
class Row:
    """variables: of the launcher; has_group: if there is a process group; first_printed: if its
    store says that rank 0 has printed; prints: if this rank does; naps: its waits, but for those
    for the store."""

    variables: dict[str, str]
    has_group: bool = False
    first_printed: bool = False
    prints: bool = False
    naps: tuple[float, ...] = ()


BESIDE = {"RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
"""A rank on the host of rank 0, under torchrun."""
FIRST = {**BESIDE, "RANK": "0", "LOCAL_RANK": "0"}
ELSEWHERE = {**BESIDE, "RANK": "8", "LOCAL_RANK": "0", "GROUP_RANK": "1"}
OTHER_LAUNCHER = {"RANK": "1", "LOCAL_RANK": "1"}
ROWS = {
    "alone": Row({}, prints=True),
    "rank 0": Row(FIRST, prints=True),
    "rank 0 of a group": Row(FIRST, has_group=True, prints=True),
    # Rank 0, if it refuses too, ends while they wait.
    "beside": Row(BESIDE, prints=True, naps=(2 * LIMIT,)),
    "elsewhere": Row(ELSEWHERE, prints=True, naps=(LIMIT,)),
    "beside, told": Row(BESIDE, has_group=True, first_printed=True, naps=(LIMIT,)),
    "elsewhere, told": Row(ELSEWHERE, has_group=True, first_printed=True),
    "beside, alone in it": Row(BESIDE, has_group=True, prints=True),
    "elsewhere, alone in it": Row(ELSEWHERE, has_group=True, prints=True),
    "other launcher": Row(OTHER_LAUNCHER),
    "other launcher, told": Row(OTHER_LAUNCHER, has_group=True, first_printed=True),
    "other launcher, alone in it": Row(OTHER_LAUNCHER, has_group=True, prints=True),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_a_rank_prints(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = ROWS[name]
    report = tmp_path / "error.json"
    for variable in BESIDE:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {**row.variables, launcher.REPORT: str(report)}.items():
        monkeypatch.setenv(variable, value)
    naps: list[float] = []
    monkeypatch.setattr(launcher, "SECONDS_FOR_RANK_0", LIMIT)
    monkeypatch.setattr(launcher.time, "sleep", naps.append)

    def ends() -> None:
        with pytest.raises(SystemExit) as end:
            launcher.refuse("lr=1: is 2")
        assert end.value.code == 2

    if row.has_group:
        with world_of_one():
            store = dist.distributed_c10d._get_default_store()
            if row.first_printed:
                store.set(launcher.TOLD, "")
            ends()
            is_first = row.variables["RANK"] == "0"
            assert store.check([launcher.TOLD]) == (row.first_printed or is_first)
    else:
        ends()
    assert capsys.readouterr().err == ("lr=1: is 2\n" if row.prints else "")
    assert report.is_file() == row.prints
    if row.prints:
        assert json.loads(report.read_text())["message"]["message"] == "lr=1: is 2"
    assert tuple(naps) == row.naps
