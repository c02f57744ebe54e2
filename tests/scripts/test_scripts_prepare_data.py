from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import prepare_data
import pytest
from lib.data import SampleOrder
from megatron.core.datasets.indexed_dataset import IndexedDataset

CHECKS = ()  # of scripts/prepare_data.py


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty text files in nested folders, and what must be left out."""
    accented = "\N{LATIN SMALL LETTER E WITH ACUTE}"
    files = {}
    for number in range(20):
        line = f"text {number} {accented}\r\n"
        files[f"part{number % 3}/file{number:02d}.txt"] = line.encode() * 9
    files["empty.txt"] = b""
    files["binary.txt"] = b"a\0b"
    files["other.log"] = b"not matched"
    files["site-packages/x.txt"] = b"not ours"

    root = tmp_path / "texts"
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def _documents(prefix: Path, split: str) -> list[np.ndarray]:
    dataset = IndexedDataset(f"{prefix}_{split}")
    # Copies: the file is unmapped with the dataset.
    return [np.array(dataset[number]) for number in range(len(dataset))]


def _run(*arguments: object) -> int:
    return prepare_data.main([str(argument) for argument in arguments])


def test_bytes_in_are_bytes_out(folder: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "d"
    arguments = ("--pattern", "*.txt", "--output-prefix", prefix, "--valid-share", 0.2)
    assert _run("--input", folder, *arguments) == 0

    train = []
    valid = []
    for number, path in enumerate(sorted(folder.rglob("file*.txt"))):
        expected = valid if number % 5 == 4 else train
        expected.append(path.read_bytes())
    assert len(train) == 16
    assert len(valid) == 4
    for split, expected in (("train", train), ("valid", valid)):
        back = []
        for ids in _documents(prefix, split):
            content = ids[:-1]
            assert ids.dtype == np.uint16
            assert ids[-1] == 256
            assert (content < 256).all()
            back.append(bytes(content.astype(np.uint8)))
        assert back == expected
    assert not [path for path in prefix.parent.iterdir() if "unfinished" in path.name]


def test_new_data_makes_an_old_sample_index_void(folder: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "d"
    arguments = ("--input", folder, "--output-prefix", prefix, "--valid-share", 0.3)
    assert _run(*arguments) == 0
    stale = tmp_path / "d_train/cache/GPTDataset_indices/x.npy"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert _run(*arguments) == 0
    assert not stale.exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--input=/no/where"], "--input /no/where: no such folder"),
        (["--pattern=*.none"], "no text file matches --pattern '*.none'"),
        (["--max-bytes=0"], "--max-bytes 0 must be at least 1"),
        (["--max-bytes=1"], "within --max-bytes 1"),
        (["--valid-share=1"], "--valid-share 1.0 must be between 0 and 1"),
        (["--valid-share=0.01"], "none is left for d_valid"),
        (["--output-prefix={folder}/empty.txt/d"], "cannot write there"),
    ],
)
def test_bad_input(
    arguments: list[str],
    text: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [argument.format(folder=folder) for argument in arguments]
    assert _run(f"--input={folder}", f"--output-prefix={tmp_path / 'd'}", *given) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.glob("d_*"))


def _order(consumed: int, rank: int, ranks: int, count: int, length: int = 100) -> list[list[int]]:
    order = iter(SampleOrder(length, consumed, 2, rank, ranks))
    return [next(order) for _ in range(count)]


def test_order_of_samples_depends_on_nothing_but_their_number() -> None:
    alone = _order(0, 0, 1, 12)
    assert sorted(chain(*alone)) == list(range(24))
    # Two ranks and two microbatches each, against one rank and four: the same global batches.
    first = _order(0, 0, 2, 6)
    second = _order(0, 1, 2, 6)
    for batch in range(3):
        of_ranks = []
        for microbatch in (2 * batch, 2 * batch + 1):
            of_ranks += [first[microbatch], second[microbatch]]
        assert of_ranks == alone[4 * batch : 4 * batch + 4]
    assert _order(8, 1, 2, 4) == second[2:]
    assert _order(99, 0, 1, 1) == [[99, 0]]
