"""Corrupt, truncated, foreign and too-new checkpoints: one clear error each; digests, `verify`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as torch_dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megatron_fsdp_adapter.__main__ import main
from megatron_fsdp_adapter.checkpoint import CheckpointError, digests, folders, record
from megatron_fsdp_adapter.checkpoint.dcp import load_checkpoint, save_checkpoint
from megatron_fsdp_adapter.checkpoint.unpickling import Reader
from megatron_fsdp_adapter.tools.inspection import describe, diff
from tests.lib.checkpoint.checkpoint_cases import same
from tests.lib.checkpoint.convert_cases import Evil

CHECKS = (
    "checkpoint/dcp.py",
    "checkpoint/digests.py",
    "checkpoint/record.py",
    "checkpoint/unpickling.py",
    "tools/cli/verify.py",
)

DATA = "__0_0.distcp"


def _state(number: float) -> dict[str, Any]:
    tensors = {"w": torch.full((64,), number), "b": torch.full((2, 3), number)}
    return {"model": tensors, "step": 1, "name": "x" * 50}


def _edited(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Damage: a file of the folder is rewritten."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def _flip_value(content: bytes) -> bytes:
    """One bit of one value of a tensor, where no reader of torch looks."""
    value = torch.full((64,), 2.0).numpy().tobytes()
    at = content.index(value) + 100
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def _half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _without_digests(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Damage: a folder of another program, with other metadata; bytes, or what is pickled."""

    def damage(folder: Path) -> None:
        (folder / digests.DIGESTS).unlink()
        path = folder / ".metadata"
        whole = change is _half
        given = change(path.read_bytes() if whole else pickle.loads(path.read_bytes()))
        path.write_bytes(given if whole else pickle.dumps(given))

    return damage


def _chunks(*blocks: tuple[tuple[int], tuple[int]]) -> Callable[[Any], Any]:
    """Metadata whose model.w has these blocks, each with data of its own."""

    def change(metadata: Any) -> Any:
        entry = metadata.state_dict_metadata["model.w"]
        entry.chunks = [
            ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in blocks
        ]
        index = MetadataIndex("model.w", torch.Size([0]))
        place = metadata.storage_data[index]
        half = place.length // 2
        for number, (at, _) in enumerate(blocks):
            info = dataclasses.replace(place, offset=place.offset + number * half, length=half)
            metadata.storage_data[MetadataIndex("model.w", torch.Size(at))] = info
        return metadata

    return change


def _record(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps({**json.loads(content), **changes}).encode()


def _foreign(*names: str) -> Callable[[Path], None]:
    """A folder that another program filled."""

    def damage(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(pickle.dumps({"not": "ours"}))

    return damage


@dataclass(frozen=True)
class Damage:
    """What is done to iteration 2 of a root, and what loads and `verify` say to it.

    load: words of the error of a load (None: it loads), which is of this kind; status, printed: of
    `verify`.
    """

    name: str
    do: Callable[[Path], None]
    load: tuple[str, ...] | None
    status: int
    printed: tuple[str, ...]
    kind: type[Exception] = ValueError


TABLE = (
    Damage(
        "a bit of a tensor",
        _edited(DATA, _flip_value),
        load=None,
        status=1,
        printed=("DAMAGED", DATA, "differs from its digest"),
    ),
    Damage(
        "data cut short",
        _edited(DATA, lambda c: c[:-1]),
        load=("half-written", DATA, "bytes"),
        status=1,
        printed=(DATA, "was saved with"),
    ),
    Damage(
        "data grown",
        _edited(DATA, lambda c: c + b"\0"),
        load=None,
        status=1,
        printed=(DATA, "was saved with"),
    ),
    Damage(
        "data gone",
        lambda folder: (folder / DATA).unlink(),
        load=("half-written", f"{DATA} is missing"),
        status=1,
        printed=(DATA, "missing"),
    ),
    Damage(
        "metadata gone",
        lambda folder: (folder / ".metadata").unlink(),
        load=("half-written", "no .metadata"),
        status=1,
        printed=(".metadata: missing",),
    ),
    Damage(
        "metadata cut short",
        _edited(".metadata", _half),
        load=("is damaged", ".metadata differs from its digest", "complete in"),
        status=1,
        printed=(".metadata", "bytes"),
    ),
    Damage(
        "metadata of something else",
        _edited(".metadata", lambda c: pickle.dumps({"a": 1})),
        load=("is damaged", ".metadata"),
        status=1,
        printed=(".metadata", "bytes"),
    ),
    Damage(
        "metadata of something else, without digests",
        _without_digests(lambda _: {"a": 1}),
        load=("is damaged", "holds a dict, not metadata"),
        status=2,
        printed=("has no digests.json",),
    ),
    Damage(
        "metadata cut short, without digests",
        _without_digests(_half),
        load=("is damaged", ".metadata cannot be read"),
        status=2,
        printed=("has no digests.json",),
    ),
    Damage(
        "a gap",
        _without_digests(_chunks(((0,), (32,)), ((33,), (31,)))),
        load=("model.w: the stored blocks overlap or leave a gap",),
        status=2,
        printed=("has no digests.json",),
    ),
    Damage(
        "a gap and an overlap",
        _without_digests(_chunks(((0,), (32,)), ((31,), (32,)))),
        load=("model.w: the stored blocks overlap or leave a gap",),
        status=2,
        printed=("has no digests.json",),
    ),
    Damage(
        "too new",
        _edited(
            record.RECORD, _record(format_version=2, versions={"megatron_fsdp_adapter": "9.9.9"})
        ),
        load=("format version 2", "9.9.9", "reads versions up to 1", "newer one"),
        status=2,
        printed=("format version 2", "9.9.9"),
    ),
    Damage(
        "version of no number",
        _edited(record.RECORD, _record(format_version="two")),
        load=("format version 'two'",),
        status=2,
        printed=("format version 'two'",),
    ),
    Damage(
        "record cut short",
        _edited(record.RECORD, _half),
        load=(record.RECORD, "is damaged"),
        status=2,
        printed=(record.RECORD, "is damaged"),
    ),
    Damage(
        "record of no table",
        _edited(record.RECORD, _record(versions="2.13")),
        load=(record.RECORD, "is damaged"),
        status=2,
        printed=("is damaged",),
    ),
    Damage(
        "too new, of no table",
        _edited(record.RECORD, _record(versions=[1], format_version=2)),
        load=(record.RECORD, "is damaged"),
        status=2,
        printed=("is damaged",),
    ),
    Damage(
        "record without a version",
        _edited(record.RECORD, lambda c: b"{}"),
        load=(record.RECORD, "is damaged", "format_version"),
        status=2,
        printed=("is damaged",),
    ),
    Damage(
        "digests gone",
        lambda folder: (folder / digests.DIGESTS).unlink(),
        load=None,
        status=2,
        printed=("has no digests.json", "cannot be verified"),
    ),
    Damage(
        "digests cut short",
        _edited(digests.DIGESTS, _half),
        load=(digests.DIGESTS, "is damaged", "Delete it to load"),
        status=2,
        printed=(digests.DIGESTS, "is damaged"),
    ),
    Damage(
        "digests by another method",
        _edited(digests.DIGESTS, lambda c: c.replace(b"crc32", b"sha9", 1)),
        load=("algorithm 'sha9' is unknown",),
        status=2,
        printed=("algorithm 'sha9'",),
    ),
    Damage(
        "torch_dist",
        _foreign("metadata.json", ".metadata", "common.pt"),
        load=("torch_dist", "not a checkpoint in the format fsdp_dtensor", "convert"),
        status=2,
        printed=("torch_dist", "convert"),
    ),
    Damage(
        "legacy torch",
        _foreign("mp_rank_00/model_optim_rng.pt"),
        load=("legacy format", "--ckpt-format torch_dist"),
        status=2,
        printed=("legacy format",),
    ),
    Damage(
        "safetensors",
        _foreign("config.json", "model-00001-of-00001.safetensors"),
        load=("folder of safetensors", "import_ckpt"),
        status=2,
        printed=("safetensors",),
    ),
    Damage(
        "folder gone",
        lambda folder: folder.rename(folder.with_name("elsewhere")),
        load=("iter_0000002 does not exist", "iteration 1"),
        status=2,
        printed=("does not exist",),
        kind=FileNotFoundError,
    ),
    Damage(
        "temporary name",
        lambda folder: folder.rename(folder.with_name("tmp.iter_0000002")),
        load=("half-written", "tmp.iter_0000002", "iteration 1"),
        status=2,
        printed=("does not exist",),
        kind=FileNotFoundError,
    ),
    Damage(
        "tracker gone",
        lambda folder: (folder.parent / folders.TRACKER).unlink(),
        load=(folders.TRACKER, "iteration 1, 2"),
        status=0,
        printed=("intact",),
        kind=FileNotFoundError,
    ),
    Damage(
        "tracker without a number",
        lambda folder: (folder.parent / folders.TRACKER).write_text("release"),
        load=(folders.TRACKER, "'release'"),
        status=0,
        printed=("intact",),
    ),
    Damage(
        "tracker cut short",
        lambda folder: (folder.parent / folders.TRACKER).write_text(""),
        load=(folders.TRACKER, "holds ''", "iteration 1, 2"),
        status=0,
        printed=("intact",),
    ),
    Damage(
        "something else",
        _foreign("notes.txt"),
        load=("half-written", "no .metadata"),
        status=2,
        printed=("has no digests.json",),
    ),
)


@pytest.fixture
def root(one_rank: None, tmp_path: Path) -> Path:
    for iteration in (1, 2):
        save_checkpoint(tmp_path / "root", iteration, _state(float(iteration)))
    return tmp_path / "root"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_verify_and_a_load_say_what_is_wrong(
    root: Path, row: Damage, capsys: pytest.CaptureFixture[str]
) -> None:
    row.do(root / "iter_0000002")
    assert main(["verify", str(root / "iter_0000002")]) == row.status
    output = capsys.readouterr()
    for word in row.printed:
        assert word in (output.err if row.status == 2 else output.out)
    if row.status == 1:
        assert output.out.splitlines()[-1] == "verify: DAMAGED (above)"
    assert main(["verify", str(root), "--iteration", "1"]) == 0
    target = _state(-1.0)
    if row.load is None:
        assert load_checkpoint(root, target)[0] == 2
        return
    with pytest.raises(row.kind) as error:
        load_checkpoint(root, target)
    for word in row.load:
        assert word in str(error.value)
    assert same(target, _state(-1.0)), "nothing may be touched before the error"
    iteration, loaded = load_checkpoint(root, target, iteration=1)
    assert iteration == 1
    assert same(loaded, _state(1.0))


def test_verify_of_a_good_checkpoint(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = root / "iter_0000002"
    for arguments in ([str(root)], [str(folder)], [str(root), "--iteration", "2"]):
        assert main(["verify", *arguments]) == 0
        output = capsys.readouterr()
        assert f"{folder}: 3 files, " in output.out
        assert output.out.splitlines()[-1] == "verify: intact"
    (folder / "run_config.yaml").write_text("by somebody else")
    assert main(["verify", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    sizes = [p.stat().st_size for p in folder.iterdir()]
    extra = (folder / "run_config.yaml").stat().st_size + (folder / digests.DIGESTS).stat().st_size
    assert report == {
        "folder": str(folder),
        "files": 3,
        "bytes": sum(sizes) - extra,
        "algorithm": "crc32",
        "intact": True,
        "problems": [],
        "without_digest": ["run_config.yaml"],
    }
    path = folder / digests.DIGESTS  # as earlier releases wrote it, with a digest for each item
    found = json.loads(path.read_text())
    for row in found["files"].values():
        row |= {"ends": [3, row["bytes"]], "crc32": ["89e8f5a1", *row["crc32"]]}
    found["files"]["empty"] = {"bytes": 0, "ends": [], "crc32": []}
    path.write_text(json.dumps(found))
    (folder / "empty").touch()
    assert main(["verify", str(folder)]) == 0
    found["files"][DATA]["crc32"].reverse()
    path.write_text(json.dumps(found))
    assert main(["verify", str(folder)]) == 1


def _overgrown(content: bytes) -> bool:
    """Whether the pickle has its reader set aside tables of gigabytes, as torch's own does."""
    try:
        return any(
            code.name == "LONG_BINPUT" and int(argument or 0) > 1 << 20
            for code, argument, _ in pickletools.genops(content)
        )
    except Exception:
        return b"r" in content


@pytest.mark.parametrize("ours", [True, False])
def test_no_flipped_bit_of_metadata_gives_other_values_or_a_traceback(
    root: Path, ours: bool
) -> None:
    """Without a digest what is read after all is what was saved. A digest is of all bytes alike:
    every 13th is enough to see that it is asked."""
    folder = root / "iter_0000002"
    if not ours:
        (folder / digests.DIGESTS).unlink()
    content = (folder / ".metadata").read_bytes()
    loads = 0
    if ours:
        readers = (describe, lambda path: diff(path, path))
    else:
        readers = ()
    for at in range(0, len(content), 13 if ours else 1):
        bit = 1 << at * 5 % 8
        damaged = content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
        if not ours and _overgrown(damaged):
            continue
        (folder / ".metadata").write_bytes(damaged)
        for read in readers:
            with pytest.raises(ValueError):
                read(folder)
        with contextlib.suppress(ValueError, CheckpointError):
            assert same(load_checkpoint(root, _state(-1.0))[1], _state(2.0)), (at, bit)
            loads += 1
    assert (loads == 0) is ours


def test_metadata_of_one_rank_are_not_read(one_rank: None, tmp_path: Path) -> None:
    """torch asks for them, with plain pickle, where it cannot read those of all ranks."""
    made = tmp_path / "made"
    folder = tmp_path / "iter_0000001"
    torch_dcp.save(_state(1.0), checkpoint_id=str(folder))
    evil = Evil(open, str(made), "w")
    for name in (".metadata", "__0.metadata"):
        (folder / name).write_bytes(pickle.dumps(evil))
    with pytest.raises(CheckpointException, match="it names"):
        torch_dcp.load(_state(0.0), storage_reader=Reader(folder))
    assert not made.exists()
