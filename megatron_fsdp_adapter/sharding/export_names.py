"""Under which names, and cut into which tensors, weights are exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch

from ..checkpoint.convert.architecture import Architecture
from ..checkpoint.convert.hugging_face import CONFIG, Rows, rows_of
from ..checkpoint.convert.safetensors_files import read_json
from ..checkpoint.convert.training_state import common_name
from .export_families import architecture_and_names

Shape = tuple[int, ...]


class WeightNames(Protocol):
    """Of whole tensors of the model, under its own names, to those of an export."""

    def problems(self, name: str, shape: Shape) -> list[str]:
        """Why a tensor of this name and shape cannot be exported; none if it can."""

    def cut_problems(self, name: str, shape: Shape, block: tuple[int, int]) -> list[str]:
        """The same for scales of blocks of a tensor."""

    def cut(
        self, name: str, tensor: torch.Tensor, rows: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that one is cut into: a weight of so many `rows`, or what it has one element
        of for each block."""

    def overlaps(
        self, name: str, rows: int, start: int, stop: int
    ) -> Iterator[tuple[str, int, int, int, int]]:
        """Where rows `start` to `stop` of a weight of so many `rows` go: name, its rows, the first
        of them that is meant, and the rows of the weight that go there."""


class OwnNames:
    """The model's own."""

    def problems(self, name: str, shape: Shape) -> list[str]:
        return []

    def cut_problems(self, name: str, shape: Shape, block: tuple[int, int]) -> list[str]:
        return []

    def cut(
        self, name: str, tensor: torch.Tensor, rows: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensor

    def overlaps(
        self, name: str, rows: int, start: int, stop: int
    ) -> Iterator[tuple[str, int, int, int, int]]:
        yield name, rows, start, start, stop


@dataclass(frozen=True)
class HuggingFaceNames:
    """Of the families of Llama, Mixtral and `export_families.py`. family: Hugging Face's
    `model_type`; names: by ours (`training_state.py`), Hugging Face's."""

    family: str
    model: Architecture
    names: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, config: Any) -> HuggingFaceNames:
        """Of a config of Hugging Face: a mapping, the path of a folder or file, or an object with
        `to_dict`. ValueError for another family."""
        if isinstance(config, str | Path):
            path = Path(config)
            config = read_json(path / CONFIG if path.is_dir() else path)
        elif hasattr(config, "to_dict"):
            config = config.to_dict()
        if not isinstance(config, Mapping):
            raise ValueError(
                f"hf_config: a {type(config).__name__}; give a mapping, the path of a model's "
                "folder, or a config of transformers"
            )
        model, names = architecture_and_names(config)
        return cls(config["model_type"], model, names)

    def problems(self, name: str, shape: Shape) -> list[str]:
        if common_name(name) not in self.names:
            return [
                f"{name}: {self.family} models of Hugging Face have no such weight; "
                "leave hf_config out for the model's own names, or use which='trained' without it "
                "for adapters"
            ]
        try:
            self._rows(name, shape[0])
        except ValueError as error:
            return [str(error)]
        return []

    def cut_problems(self, name: str, shape: Shape, block: tuple[int, int]) -> list[str]:
        cuts = {n for row in self._rows(name, shape[0]) for n in (row.start, row.at, row.count)}
        if len(self._rows(name, shape[0])) == 1 or not any(cut % block[0] for cut in cuts):
            return []
        return [
            f"quantised=True: {name} is cut between rows inside of blocks of {block[0]}; export it "
            "in another dtype"
        ]

    def _rows(self, name: str, rows: int) -> tuple[Rows, ...]:
        ours = common_name(name)
        return rows_of(self.model, ours, self.names[ours], rows)

    def cut(
        self, name: str, tensor: torch.Tensor, rows: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for told, runs in groupby(self._rows(name, rows), lambda row: row.name):
            if tensor.numel() == 1 and rows > 1:
                yield told, tensor  # one scale for all of them
                continue
            block = -(-rows // tensor.shape[0])
            pieces = [
                tensor[row.start // block : -(-(row.start + row.count) // block)] for row in runs
            ]
            yield told, pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def overlaps(
        self, name: str, rows: int, start: int, stop: int
    ) -> Iterator[tuple[str, int, int, int, int]]:
        for row in self._rows(name, rows):
            low, high = max(start, row.start), min(stop, row.start + row.count)
            if low < high:
                yield row.name, row.total, row.at + low - row.start, low, high
