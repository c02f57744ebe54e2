"""record.py: its shape by the number of GPUs, and the command line that it makes of it."""

from __future__ import annotations

import benchmark
import pytest
import record
from lib.bench_report import flops_per_token
from lib.check import Machine

CHECKS = ()  # of scripts/record.py

GPUS = Machine(world_size=8, cuda=True, transformer_engine=True)


@pytest.mark.parametrize(
    ("ranks", "layers", "microbatches"),
    [(8, 32, 16), (5, 32, 8), (4, 32, 8), (2, 24, 8), (1, 14, 8)],
)
def test_fewer_gpus_get_fewer_layers_and_microbatches(
    ranks: int, layers: int, microbatches: int
) -> None:
    given = record.parsed([f"--ranks={ranks}"])
    assert (given.layers, given.microbatches) == (layers, microbatches)
    assert ("Scaled: " in record.heading(given)) is (ranks != 8)


def test_the_point_is_that_which_was_published() -> None:
    """With 16 microbatches of one sequence on each of 8 ranks, the global batch is 128; and as many
    FLOPs for a token as its two numbers have."""
    words = record.words_of(record.parsed(["--ranks=8"]))
    given = benchmark.parse_arguments(words, GPUS)
    options = given.options
    assert (options.num_layers, options.seq_length, options.micro_batch_size) == (32, 8192, 1)
    assert given.num_microbatches * given.machine.world_size == 128
    assert flops_per_token(options) == pytest.approx(744e12 / 14_451, rel=1e-3)
    again = benchmark.parse_subjects("ddp-recompute")[0].options()
    assert again["recompute_num_layers"] == 5
    assert [one.name for one in given.subjects] == list(record.ROWS)


def test_a_machine_without_gpus_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="2"):
        record.parsed([])
    assert "there is no GPU" in capsys.readouterr().err
