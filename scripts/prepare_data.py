"""Converts a folder of text files to Megatron's IndexedDataset, one token per byte.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = 256
SPLITS = ("train", "valid")
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__", ".git")


def documents_of(corpus: argparse.Namespace) -> Iterator[bytes]:
    """The bytes of each matching text file, in the order of paths.

    Files in `SKIPPED_FOLDERS`, empty files, and files with a zero byte are skipped. Ends before the
    document that would exceed `max_bytes`.
    """
    total = 0
    for path in sorted(corpus.input.rglob(corpus.pattern)):
        folders = path.relative_to(corpus.input).parts[:-1]
        if not path.is_file() or not set(folders).isdisjoint(SKIPPED_FOLDERS):
            continue
        content = path.read_bytes()
        if not content or b"\0" in content:
            continue
        total += len(content)
        if corpus.max_bytes is not None and total > corpus.max_bytes:
            return
        yield content


def split_of(number: int, valid_share: float) -> str:
    """The split of document `number`: every (1 / `valid_share`)-th document is for validation."""
    before = int(number * valid_share)
    after = int((number + 1) * valid_share)
    return "valid" if after > before else "train"


def _temporary(prefix: Path, ending: str) -> Path:
    return prefix.with_name(f"{prefix.name}{ending}.{os.getpid()}.unfinished")


def _require_writable(prefix: Path) -> None:
    """Makes the folder of the prefix. Raises ValueError if it cannot be written to."""
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        probe = _temporary(prefix, "")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"--output-prefix {prefix}: cannot write there ({error}). Choose another folder"
        ) from error


def write_splits(corpus: argparse.Namespace) -> dict[Path, tuple[int, int]]:
    """Writes both splits under temporary names, then renames them. Returns prefix -> number of
    documents, and of tokens (ends of documents included).

    A crash leaves only files that end in ``.unfinished``; earlier data stays as it was. Raises
    ValueError if a split would be empty, or if the folder cannot be written to.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = corpus.output_prefix
    _require_writable(prefix)
    prefixes = {split: prefix.with_name(f"{prefix.name}_{split}") for split in SPLITS}
    names = [(path, end) for path in prefixes.values() for end in (".bin", ".idx")]
    temporary = {(path, end): _temporary(path, end) for path, end in names}
    builders = {
        path: IndexedDatasetBuilder(str(temporary[path, ".bin"]), dtype=np.uint16)
        for path in prefixes.values()
    }
    try:
        for number, document in enumerate(documents_of(corpus)):
            builder = builders[prefixes[split_of(number, corpus.valid_share)]]
            ids = np.frombuffer(document, dtype=np.uint8).astype(np.uint16)
            item = np.append(ids, np.uint16(END_OF_DOCUMENT))
            builder.add_item(torch.from_numpy(item))
            builder.end_document()
        lengths = {path: builder.sequence_lengths for path, builder in builders.items()}
        written = {path: (len(found), sum(found)) for path, found in lengths.items()}
        _require_documents(corpus, {path: count for path, (count, _) in written.items()})
        for path, builder in builders.items():
            builder.finalize(str(temporary[path, ".idx"]))
        for path, end in names:  # the index last: it makes the pair readable
            os.replace(temporary[path, end], f"{path}{end}")
    finally:
        for builder in builders.values():
            builder.data_file.close()
        for file in temporary.values():
            file.unlink(missing_ok=True)
    for path in prefixes.values():
        # GPTDataset caches its sample index here under a name that does not depend on the data, so
        # an index of earlier data with this prefix would be used.
        shutil.rmtree(path / "cache", ignore_errors=True)
    return written


def _require_documents(corpus: argparse.Namespace, counts: Mapping[Path, int]) -> None:
    """Raises ValueError if a split has no document."""
    empty = [path.name for path, count in counts.items() if count == 0]
    total = sum(counts.values())
    if total == 0:
        raise ValueError(
            f"--input {corpus.input}: no text file matches --pattern {corpus.pattern!r} within "
            f"--max-bytes {corpus.max_bytes}. Change one of them"
        )
    if empty:
        raise ValueError(
            f"--valid-share {corpus.valid_share}: of {total} documents none is left for "
            f"{', '.join(empty)}. Give more text or another share"
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--input", type=Path, help="folder of text files (default: Python's standard library)"
    )
    parser.add_argument(
        "--pattern", help="file names to read (default: *.py of the library, else all)"
    )
    parser.add_argument(
        "--output-prefix", type=Path, required=True, help="output path, without suffix"
    )
    parser.add_argument("--max-bytes", type=int, help="maximum bytes to read (default: all)")
    parser.add_argument(
        "--valid-share", type=float, default=0.05, help="share of documents for validation (0.05)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Writes the data and prints a summary. Returns 0, or 2 for invalid input."""
    given = parse(arguments)
    given.pattern = given.pattern or ("*" if given.input else "*.py")
    given.input = given.input or Path(sysconfig.get_path("stdlib"))
    try:
        if not given.input.is_dir():
            raise FileNotFoundError(f"--input {given.input}: no such folder. Correct the path")
        if given.max_bytes is not None and given.max_bytes < 1:
            raise ValueError(f"--max-bytes {given.max_bytes} must be at least 1")
        if not 0 < given.valid_share < 1:
            raise ValueError(f"--valid-share {given.valid_share} must be between 0 and 1")
        written = write_splits(given)
    except (ValueError, FileNotFoundError) as error:
        print(f"prepare_data.py: {error}", file=sys.stderr)
        return 2
    print(f"read {given.input} ({given.pattern})")
    for path, (documents, tokens) in written.items():
        print(f"{path}.bin, .idx: {documents:,} documents, {tokens:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
