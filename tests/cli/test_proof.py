"""Certificates: what makes one, what is refused, and what `inspect` says of one."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from megatron_fsdp_adapter.__main__ import main
from megatron_fsdp_adapter.checkpoint.record import SaveRecord, write_record
from megatron_fsdp_adapter.prove.proof import (
    PROOF,
    Certificate,
    Comparison,
    digest_of_options,
    match,
    read_certificate,
    write_certificate,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))

from convert_cases import save_fsdp

Captured = pytest.CaptureFixture[str]

OPTIONS = {
    "data_parallel_sharding_strategy": "optim_grads_params",
    "tensor_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": None,
    "lr": 1e-3,
    "fsdp_unit_modules": ["Block"],
}
VERSIONS = {"torch": "2.13.0", "megatron_core": "0.16.1"}
SAVED = {"data_parallel_sharding_strategy": "optim_grads_params", "tensor_model_parallel_size": 2}


def certificate(result: float = 0.0, **changes: object) -> Certificate:
    comparisons = (
        Comparison("gradients", 1e-3, 2e-4), Comparison("main weights after 3 steps", 0.0, result)
    )  # fmt: skip
    return Certificate({**OPTIONS, **changes}, VERSIONS, comparisons, "2026-11-22T05:00:00+00:00")


def test_a_certificate_comes_back_from_its_file(tmp_path: Path) -> None:
    for one in (certificate(), certificate(fsdp_unit_modules=("Block", "Head"))):
        write_certificate(tmp_path / PROOF, one)
        assert read_certificate(tmp_path / PROOF) == one and one.holds


def test_a_result_beyond_its_bound_or_not_finite_does_not_hold() -> None:
    for result in (1e-9, math.inf, math.nan):
        one = certificate(result)
        back = Certificate.from_json(one.to_json())
        assert not one.holds and not back.holds, result


def test_the_digest_is_of_values_in_any_order() -> None:
    turned = dict(reversed(OPTIONS.items()))
    assert digest_of_options(turned) == digest_of_options(OPTIONS)
    assert digest_of_options({**OPTIONS, "lr": 1e-4}) != digest_of_options(OPTIONS)
    with pytest.raises(ValueError, match=r"option 'dtype'.*torch.bfloat16.*give its text"):
        digest_of_options({"dtype": torch.bfloat16})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("options", {"tensor_model_parallel_size": 4}, "edited.*options_digest"),
        ("holds", False, "edited.*holds"),
        ("schema_version", 2, "schema_version=2"),
        ("comparisons", [], "at least one"),
        ("proven_at", "yesterday", "yesterday.*not a time"),
        ("comparisons", [{"what": "x", "bound": -1, "result": 0}], "bound=-1"),
        ("versions", None, "not a certificate"),
    ],
)
def test_an_edited_certificate_is_refused(
    name: str, value: object, message: str, tmp_path: Path
) -> None:
    content = {**json.loads(certificate().to_json()), name: value}
    (tmp_path / PROOF).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        read_certificate(tmp_path / PROOF)
    assert str(tmp_path / PROOF) in str(caught.value)


def test_a_file_that_is_no_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="doctor --prove"):
        read_certificate(tmp_path / PROOF)
    for text in ("", "[]", "{}", "half"):
        with pytest.raises(ValueError, match="not a certificate"):
            Certificate.from_json(text)


def test_a_match_lists_every_difference() -> None:
    fits = match(certificate(), SaveRecord(8, topology=SAVED, versions=VERSIONS))
    assert fits.fits and set(fits.compared) == set(SAVED)
    assert not match(certificate(), SaveRecord(8, versions=VERSIONS)).fits, "nothing compared"
    topology = {"data_parallel_sharding_strategy": "optim", "context_parallel_size": 2}
    found = match(
        certificate(), SaveRecord(8, topology=topology, versions={"torch": "2.12.0", "python": "3"})
    )
    assert not found.fits
    assert found.options == (
        "data_parallel_sharding_strategy: proven with optim_grads_params, saved with optim",
    )
    assert set(found.unknown) == {
        "tensor_model_parallel_size: proven with 2, saved with unset",
        "context_parallel_size: proven with unset, saved with 2",
    }
    assert found.versions == (
        "megatron_core: proven with 0.16.1, saved with absent",
        "python: proven with absent, saved with 3",
        "torch: proven with 2.13.0, saved with 2.12.0",
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    root = save_fsdp(tmp_path / "saved", {"model": {"module.x": torch.ones(2)}})
    write_record(root / "iter_0000003", SaveRecord(2, 3, SAVED, VERSIONS, "2026"))
    return root


def test_inspect_shows_the_certificate_of_the_root_or_the_folder(
    saved: Path, capsys: Captured
) -> None:
    assert main(["inspect", str(saved)]) == 0
    assert "certificate" not in capsys.readouterr().out
    write_certificate(saved / PROOF, certificate())
    for path in (saved, saved / "iter_0000003"):
        assert main(["inspect", str(path)]) == 0
        text = capsys.readouterr().out
        for line in (
            f"{saved / PROOF}: holds, proven at 2026", certificate().options_digest,
            "options: those of the checkpoint (2 compared)",
            "versions: those of the checkpoint (2 compared)",
        ):  # fmt: skip
            assert line in text, text
    write_certificate(saved / "iter_0000003" / PROOF, certificate(result=1.0))
    assert main(["inspect", str(saved)]) == 0
    assert f"{saved / 'iter_0000003' / PROOF}: DOES NOT HOLD" in capsys.readouterr().out


def test_inspect_says_when_a_certificate_is_of_another_run(
    saved: Path, tmp_path: Path, capsys: Captured
) -> None:
    other = tmp_path / "other.json"
    write_certificate(other, certificate(tensor_model_parallel_size=1))
    assert main(["inspect", str(saved), "--proof", str(other)]) == 0
    text = capsys.readouterr().out
    assert "options: NOT those of the checkpoint" in text
    assert "tensor_model_parallel_size: proven with 1, saved with 2" in text
    assert main(["inspect", str(saved), "--proof", str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["certificate"]
    assert found["holds"] and not found["match"]["fits"] and found["path"] == str(other)
    (saved / "iter_0000003" / "adapter_metadata.json").unlink()
    assert main(["inspect", str(saved), "--proof", str(other)]) == 0
    assert "no record" in capsys.readouterr().out
    other.write_text("{}")
    assert main(["inspect", str(saved), "--proof", str(other)]) == 2
    assert f"inspect: {other}: not a certificate" in capsys.readouterr().err
