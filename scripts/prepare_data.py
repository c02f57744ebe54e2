"""Turn a folder of text files into Megatron's IndexedDataset, one token per byte.

    python scripts/prepare_data.py --output-prefix data/stdlib
    python scripts/prepare_data.py --input my_texts --output-prefix data/mine --max-bytes 50000000

Without --input the corpus is the source code of this machine's Python standard library. Writes
PREFIX_train.{bin,idx} and PREFIX_valid.{bin,idx}: ids 0 to 255 are the bytes of a file, 256 ends
a document (a file). Train on them with

    --train-data-path PREFIX_train --valid-data-path PREFIX_valid

and the default --tokenizer-type ByteLevelTokenizer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = 256
SPLITS = ("train", "valid")
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__", ".git")


@dataclass(frozen=True)
class Corpus:
    """Which files are read: those under `folder` that match `pattern`, up to `max_bytes`."""

    folder: Path
    pattern: str
    max_bytes: int | None
    valid_share: float

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise FileNotFoundError(f"--input {self.folder}: no such folder; correct the path")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"--max-bytes {self.max_bytes} must be at least 1")
        if not 0 < self.valid_share < 1:
            raise ValueError(f"--valid-share {self.valid_share} must be between 0 and 1")


@dataclass(frozen=True)
class Written:
    """One finished split: its prefix, documents and tokens (ends of documents included)."""

    prefix: Path
    documents: int
    tokens: int


def files_of(corpus: Corpus) -> list[Path]:
    """Matching files in the order of their path, other packages and caches left out."""
    return [
        path
        for path in sorted(corpus.folder.rglob(corpus.pattern))
        if path.is_file()
        and not set(path.relative_to(corpus.folder).parts[:-1]) & set(SKIPPED_FOLDERS)
    ]


def documents_of(corpus: Corpus) -> Iterator[bytes]:
    """The bytes of each text file: not empty, and without a zero byte (which no text has).

    Stops before the document that would exceed `max_bytes`.
    """
    total = 0
    for path in files_of(corpus):
        content = path.read_bytes()
        if not content or b"\0" in content:
            continue
        total += len(content)
        if corpus.max_bytes is not None and total > corpus.max_bytes:
            return
        yield content


def split_of(number: int, valid_share: float) -> str:
    """The split of document `number`: every (1/share)-th is for validation, spread evenly."""
    before, after = int(number * valid_share), int((number + 1) * valid_share)
    return "valid" if after > before else "train"


def split_prefix(prefix: Path, split: str) -> Path:
    """Where a split is written, without the endings."""
    return prefix.with_name(f"{prefix.name}_{split}")


def tokens_of(document: bytes) -> np.ndarray:
    """uint16 ids: the bytes and the end of the document."""
    ids = np.frombuffer(document, dtype=np.uint8).astype(np.uint16)
    return np.append(ids, np.uint16(END_OF_DOCUMENT))


def _temporary(prefix: Path, ending: str) -> Path:
    return prefix.with_name(f"{prefix.name}{ending}.{os.getpid()}.unfinished")


def _require_writable(prefix: Path) -> None:
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        probe = _temporary(prefix, "")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"--output-prefix {prefix}: cannot write there ({error}); choose another folder"
        ) from error


def write_splits(corpus: Corpus, prefix: Path) -> list[Written]:
    """Writes both splits and gives them their names when all of them are whole.

    A crash leaves only files that end in ``.unfinished``; earlier data stays as it was. Raises
    ValueError if a split would be empty, or if the folder cannot be written to.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    _require_writable(prefix)
    prefixes = {split: split_prefix(prefix, split) for split in SPLITS}
    names = [(split, end) for split in SPLITS for end in (".bin", ".idx")]
    temporary = {(split, end): _temporary(prefixes[split], end) for split, end in names}
    builders = {
        split: IndexedDatasetBuilder(str(temporary[split, ".bin"]), dtype=np.uint16)
        for split in SPLITS
    }
    try:
        for number, document in enumerate(documents_of(corpus)):
            builder = builders[split_of(number, corpus.valid_share)]
            builder.add_item(torch.from_numpy(tokens_of(document)))
            builder.end_document()
        written = [
            Written(
                prefixes[split],
                len(builder.sequence_lengths),
                sum(builder.sequence_lengths),
            )
            for split, builder in builders.items()
        ]
        _require_documents(corpus, written)
        for split, builder in builders.items():
            builder.finalize(str(temporary[split, ".idx"]))
        for split, end in names:  # the index last: it makes the pair readable
            os.replace(temporary[split, end], f"{prefixes[split]}{end}")
    finally:
        for builder in builders.values():
            builder.data_file.close()
        for path in temporary.values():
            path.unlink(missing_ok=True)
    for path in prefixes.values():
        _forget_sample_index(path)
    return written


def _require_documents(corpus: Corpus, written: list[Written]) -> None:
    empty = [item.prefix.name for item in written if item.documents == 0]
    total = sum(item.documents for item in written)
    if total == 0:
        raise ValueError(
            f"--input {corpus.folder}: no text file matches --pattern {corpus.pattern!r} within "
            f"--max-bytes {corpus.max_bytes}; change one of them"
        )
    if empty:
        raise ValueError(
            f"--valid-share {corpus.valid_share}: of {total} documents none is left for "
            f"{', '.join(empty)}; give more text or another share"
        )


def _forget_sample_index(prefix: Path) -> None:
    # GPTDataset keeps its sample index here under a name that does not depend on the content of
    # the data, so an index of earlier data with this prefix would be taken for ours.
    shutil.rmtree(prefix / "cache", ignore_errors=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--input", type=Path, help="folder of text files (default: Python's standard library)"
    )
    parser.add_argument(
        "--pattern", help="file names that are read (default: *.py of the library, else all)"
    )
    parser.add_argument(
        "--output-prefix", type=Path, required=True, help="where to write, without endings"
    )
    parser.add_argument(
        "--max-bytes", type=int, help="read no more than this (default: everything)"
    )
    parser.add_argument(
        "--valid-share", type=float, default=0.05, help="share of documents for validation (0.05)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, or 2 for input that cannot be used."""
    given = parse(arguments)
    library = given.input is None
    folder = Path(sysconfig.get_path("stdlib")) if library else given.input
    pattern = given.pattern or ("*.py" if library else "*")
    try:
        corpus = Corpus(folder, pattern, given.max_bytes, given.valid_share)
        written = write_splits(corpus, given.output_prefix)
    except (ValueError, FileNotFoundError) as error:
        print(f"prepare_data.py: {error}", file=sys.stderr)
        return 2
    print(f"read {folder} ({pattern})")
    for item in written:
        print(f"{item.prefix}.bin, .idx: {item.documents:,} documents, {item.tokens:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
