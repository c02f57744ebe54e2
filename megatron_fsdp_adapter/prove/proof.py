"""The certificate of a proof: which options were proven, with which releases, by what comparisons.

It is a JSON file, `proof.json`, beside the checkpoints that it speaks of. It proves nothing by
itself: what counts is that the options and releases of a run are those that it names.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fsdp_adapter.checkpoint.record import TOPOLOGY_OPTIONS, SaveRecord

PROOF = "proof.json"
SCHEMA_VERSION = 1
"""Raised when a reader of the version before would take a certificate for something else."""


@dataclass(frozen=True)
class Comparison:
    """One thing that was compared, such as "main weights after 3 steps".

    bound: the largest difference allowed, 0 for equal bits; result: the largest one found, in the
    same unit; nan, or anything that is not finite, holds for no bound. Raises ValueError if `bound`
    is negative or not finite, or nothing says what was compared.
    """

    what: str
    bound: float
    result: float

    def __post_init__(self) -> None:
        if not self.what:
            raise ValueError("what=''; say what was compared")
        if not (math.isfinite(self.bound) and self.bound >= 0):
            raise ValueError(f"bound={self.bound} of {self.what!r} must be a number, 0 or more")

    @property
    def holds(self) -> bool:
        """Whether the result is within the bound."""
        return math.isfinite(self.result) and self.result <= self.bound


@dataclass(frozen=True)
class Certificate:
    """What was proven.

    options: plain values (what JSON has) by name of the option; versions: of the packages, by name,
    as `record.versions()` gives them; comparisons: all that were made, also those that do not hold;
    proven_at: time in UTC, ISO 8601. Raises ValueError for options that are no plain values, no
    comparison, or a time that cannot be read.
    """

    options: Mapping[str, Any]
    versions: Mapping[str, str]
    comparisons: tuple[Comparison, ...]
    proven_at: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", json.loads(_canonical(self.options)))
        object.__setattr__(self, "versions", dict(self.versions))
        object.__setattr__(self, "comparisons", tuple(self.comparisons))
        if not self.comparisons:
            raise ValueError("comparisons=(); a certificate needs at least one")
        try:
            datetime.datetime.fromisoformat(self.proven_at)
        except (TypeError, ValueError) as error:
            raise ValueError(f"proven_at={self.proven_at!r} is not a time (ISO 8601)") from error

    @property
    def options_digest(self) -> str:
        """`digest_of_options` of the options."""
        return digest_of_options(self.options)

    @property
    def holds(self) -> bool:
        """Whether all comparisons do."""
        return all(comparison.holds for comparison in self.comparisons)

    def to_json(self) -> str:
        """The certificate's file. A result that is not finite is null there."""
        fields = dataclasses.asdict(self)
        for row in fields["comparisons"]:
            row["result"] = row["result"] if math.isfinite(row["result"]) else None
        content = {
            "schema_version": SCHEMA_VERSION, **fields,
            "options_digest": self.options_digest, "holds": self.holds,
        }  # fmt: skip
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """Reads what `to_json` gave.

        Raises ValueError if the text is not that: damaged, of a newer schema version, or edited so
        that options and their digest, or results and the verdict, no longer belong together.
        """
        try:
            content = json.loads(text)
            version = content["schema_version"]
            if version != SCHEMA_VERSION:
                raise ValueError(f"schema_version={version!r}, this release reads {SCHEMA_VERSION}")
            found = cls(
                content["options"],
                content["versions"],
                tuple(_comparison(row) for row in content["comparisons"]),
                content["proven_at"],
            )
            stated = content["options_digest"], content["holds"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a certificate ({type(error).__name__}: {error})") from error
        for name, value in zip(("options_digest", "holds"), stated, strict=True):
            if value != getattr(found, name):
                raise ValueError(
                    f"the certificate was edited: it states {name}={value!r}, but what it lists "
                    f"makes {getattr(found, name)!r}; prove anew"
                )
        return found


@dataclass(frozen=True)
class Match:
    """How a certificate fits the record of a checkpoint; one line for each difference.

    compared: names of the options that both have; unknown: those that decide who holds what and
    that only one of them has.
    """

    compared: tuple[str, ...]
    options: tuple[str, ...]
    unknown: tuple[str, ...]
    versions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the checkpoint is of a run that the certificate speaks of."""
        return bool(self.compared) and not (self.options or self.unknown or self.versions)


def digest_of_options(options: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of options with plain values: the same in whatever order they come.

    Raises ValueError for a value that JSON does not have.
    """
    return hashlib.sha256(_canonical(options).encode()).hexdigest()


def match(certificate: Certificate, record: SaveRecord) -> Match:
    """Compares options and versions. Of a record's options, None and one that is not there are the
    same: `record.topology_of` leaves out what is None."""
    proven = {name: value for name, value in certificate.options.items() if value is not None}
    saved = {name: value for name, value in record.topology.items() if value is not None}
    known = [name for name in (*saved, *TOPOLOGY_OPTIONS) if name in proven or name in saved]
    known = list(dict.fromkeys(known))
    both = [name for name in known if name in proven and name in saved]
    one = [name for name in known if name not in both]
    packages = sorted({*certificate.versions, *record.versions})
    ours, theirs = certificate.versions, record.versions
    return Match(
        tuple(both),
        tuple(_line(n, proven[n], saved[n]) for n in both if proven[n] != saved[n]),
        tuple(_line(n, proven.get(n, "unset"), saved.get(n, "unset")) for n in one),
        tuple(
            _line(name, ours.get(name, "absent"), theirs.get(name, "absent"))
            for name in packages
            if ours.get(name) != theirs.get(name)
        ),
    )


def write_certificate(path: Path, certificate: Certificate) -> None:
    """Writes a certificate's file."""
    path.write_text(certificate.to_json())


def read_certificate(path: Path) -> Certificate:
    """Reads a certificate's file. Raises FileNotFoundError, or ValueError as `from_json` does."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; `doctor --prove` writes a certificate")
    try:
        return Certificate.from_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def find_certificate(folder: Path) -> Path | None:
    """Of a checkpoint: in its folder, or else beside it, in the root."""
    places = (folder / PROOF, folder.resolve().parent / PROOF)
    return next((path for path in places if path.is_file()), None)


def _canonical(options: Mapping[str, Any]) -> str:
    for name, value in options.items():
        try:
            json.dumps({name: value}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"option {name!r} has the value {value!r}, which JSON does not have ({error}); "
                "give its text"
            ) from error
    return json.dumps(dict(options), sort_keys=True, separators=(",", ":"))


def _comparison(row: Mapping[str, Any]) -> Comparison:
    result = math.nan if row["result"] is None else float(row["result"])
    return Comparison(str(row["what"]), float(row["bound"]), result)


def _line(name: str, proven: Any, saved: Any) -> str:
    return f"{name}: proven with {proven}, saved with {saved}"
