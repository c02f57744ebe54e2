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


def _with_flipped_bits(content: bytes, at: int, bits: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= bits
    return bytes(changed)


def _flip_value(content: bytes) -> bytes:
    """One bit of one value of a tensor, where no reader of torch looks."""
    value = torch.full((64,), 2.0).numpy().tobytes()
    at = content.index(value) + 100
    return _with_flipped_bits(content, at, 1)


def _half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _last_byte_lost(content: bytes) -> bytes:
    return content[:-1]


def _byte_added(content: bytes) -> bytes:
    return content + b"\0"


def _pickle_of_something_else(content: bytes) -> bytes:
    return pickle.dumps({"a": 1})


def _empty_record(content: bytes) -> bytes:
    return b"{}"


def _unknown_algorithm(content: bytes) -> bytes:
    return content.replace(b"crc32", b"sha9", 1)


def _data_gone(folder: Path) -> None:
    (folder / DATA).unlink()


def _metadata_gone(folder: Path) -> None:
    (folder / ".metadata").unlink()


def _digests_gone(folder: Path) -> None:
    (folder / digests.DIGESTS).unlink()


def _folder_gone(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def _temporary_name(folder: Path) -> None:
    folder.rename(folder.with_name("tmp.iter_0000002"))


def _tracker_gone(folder: Path) -> None:
    (folder.parent / folders.TRACKER).unlink()


def _tracker_without_a_number(folder: Path) -> None:
    (folder.parent / folders.TRACKER).write_text("release")


def _tracker_cut_short(folder: Path) -> None:
    (folder.parent / folders.TRACKER).write_text("")


def _without_digests(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Damage: a folder of another program, with other metadata."""
    edit = _edited(".metadata", change)

    def damage(folder: Path) -> None:
        _digests_gone(folder)
        edit(folder)

    return damage


def _chunks(*blocks: tuple[tuple[int], tuple[int]]) -> Callable[[bytes], bytes]:
    """Metadata whose model.w has these blocks, each with data of its own."""

    def change(content: bytes) -> bytes:
        metadata = pickle.loads(content)
        entry = metadata.state_dict_metadata["model.w"]
        entry.chunks = []
        for at, sizes in blocks:
            entry.chunks.append(ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)))
        index = MetadataIndex("model.w", torch.Size([0]))
        place = metadata.storage_data[index]
        half = place.length // 2
        for number, (at, _) in enumerate(blocks):
            info = dataclasses.replace(place, offset=place.offset + number * half, length=half)
            metadata.storage_data[MetadataIndex("model.w", torch.Size(at))] = info
        return pickle.dumps(metadata)

    return change


def _record(**changes: Any) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        held = json.loads(content)
        held.update(changes)
        return json.dumps(held).encode()

    return change


def _foreign(*names: str) -> Callable[[Path], None]:
    """A folder that another program filled."""

    def damage(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        for name in names:
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(pickle.dumps({"not": "ours"}))

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
        _edited(DATA, _last_byte_lost),
        load=("half-written", DATA, "bytes"),
        status=1,
        printed=(DATA, "was saved with"),
    ),
    Damage(
        "data grown",
        _edited(DATA, _byte_added),
        load=None,
        status=1,
        printed=(DATA, "was saved with"),
    ),
    Damage(
        "data gone",
        _data_gone,
        load=("half-written", f"{DATA} is missing"),
        status=1,
        printed=(DATA, "missing"),
    ),
    Damage(
        "metadata gone",
        _metadata_gone,
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
        _edited(".metadata", _pickle_of_something_else),
        load=("is damaged", ".metadata"),
        status=1,
        printed=(".metadata", "bytes"),
    ),
    Damage(
        "metadata of something else, without digests",
        _without_digests(_pickle_of_something_else),
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
        _edited(record.RECORD, _empty_record),
        load=(record.RECORD, "is damaged", "format_version"),
        status=2,
        printed=("is damaged",),
    ),
    Damage(
        "digests gone",
        _digests_gone,
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
        _edited(digests.DIGESTS, _unknown_algorithm),
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
        _folder_gone,
        load=("iter_0000002 does not exist", "iteration 1"),
        status=2,
        printed=("does not exist",),
        kind=FileNotFoundError,
    ),
    Damage(
        "temporary name",
        _temporary_name,
        load=("half-written", "tmp.iter_0000002", "iteration 1"),
        status=2,
        printed=("does not exist",),
        kind=FileNotFoundError,
    ),
    Damage(
        "tracker gone",
        _tracker_gone,
        load=(folders.TRACKER, "iteration 1, 2"),
        status=0,
        printed=("intact",),
        kind=FileNotFoundError,
    ),
    Damage(
        "tracker without a number",
        _tracker_without_a_number,
        load=(folders.TRACKER, "'release'"),
        status=0,
        printed=("intact",),
    ),
    Damage(
        "tracker cut short",
        _tracker_cut_short,
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
    root = tmp_path / "root"
    for iteration in (1, 2):
        save_checkpoint(root, iteration, _state(float(iteration)))
    return root


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_verify_and_a_load_say_what_is_wrong(
    root: Path, row: Damage, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = root / "iter_0000002"
    row.do(folder)
    status = main(["verify", str(folder)])
    output = capsys.readouterr()
    told = output.err if row.status == 2 else output.out

    assert status == row.status
    for word in row.printed:
        assert word in told
    if row.status == 1:
        assert output.out.splitlines()[-1] == "verify: DAMAGED (above)"
    assert main(["verify", str(root), "--iteration", "1"]) == 0

    target = _state(-1.0)
    if row.load is None:
        iteration, _ = load_checkpoint(root, target)
        assert iteration == 2
        return
    with pytest.raises(row.kind) as error:
        load_checkpoint(root, target)
    message = str(error.value)
    for word in row.load:
        assert word in message
    if "complete in" in message and folder.name in message:
        assert "iteration 1 (name" in message, "the broken one is not among the complete ones"
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

    digests_file = folder / digests.DIGESTS
    of_another = folder / "run_config.yaml"
    of_another.write_text("by somebody else")
    assert main(["verify", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    nbytes = 0
    for path in folder.iterdir():
        if path not in (digests_file, of_another):
            nbytes += path.stat().st_size
    assert report == {
        "folder": str(folder),
        "files": 3,
        "bytes": nbytes,
        "algorithm": "crc32",
        "intact": True,
        "problems": [],
        "without_digest": ["run_config.yaml"],
    }

    # As earlier releases wrote it, with a digest for each item.
    found = json.loads(digests_file.read_text())
    rows = found["files"]
    for row in rows.values():
        row["ends"] = [3, row["bytes"]]
        row["crc32"].insert(0, "89e8f5a1")
    rows["empty"] = {"bytes": 0, "ends": [], "crc32": []}
    digests_file.write_text(json.dumps(found))
    (folder / "empty").touch()
    assert main(["verify", str(folder)]) == 0
    rows[DATA]["crc32"].reverse()
    digests_file.write_text(json.dumps(found))
    assert main(["verify", str(folder)]) == 1


def _overgrown(content: bytes) -> bool:
    """Whether the pickle has its reader set aside tables of gigabytes, as torch's own does."""
    try:
        for code, argument, _ in pickletools.genops(content):
            if code.name == "LONG_BINPUT" and int(argument or 0) > 1 << 20:
                return True
    except Exception:
        return b"r" in content
    return False


def _compared_with_itself(folder: Path) -> Any:
    return diff(folder, folder)


@pytest.mark.parametrize("ours", [True, False])
def test_no_flipped_bit_of_metadata_gives_other_values_or_a_traceback(
    root: Path, ours: bool
) -> None:
    """Without a digest what is read after all is what was saved. A digest is of all bytes alike:
    every 13th is enough to see that it is asked."""
    folder = root / "iter_0000002"
    metadata = folder / ".metadata"
    content = metadata.read_bytes()
    if ours:
        readers = (describe, _compared_with_itself)
        step = 13
    else:
        _digests_gone(folder)
        readers = ()
        step = 1

    loads = 0
    for at in range(0, len(content), step):
        bit = 1 << at * 5 % 8
        damaged = _with_flipped_bits(content, at, bit)
        if not ours and _overgrown(damaged):
            continue
        metadata.write_bytes(damaged)
        for read in readers:
            with pytest.raises(ValueError):
                read(folder)
        with contextlib.suppress(ValueError, CheckpointError):
            _, loaded = load_checkpoint(root, _state(-1.0))
            assert same(loaded, _state(2.0)), (at, bit)
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
