"""Newton-Schulz in half precision, beside the same polynomials in float64; symmetric products."""

from __future__ import annotations

import pytest
import torch

from megatron_fsdp_adapter.optim.muon.newton_schulz import (
    COEFFICIENTS,
    Coefficients,
    coefficients_of,
    cost,
    orthogonalized,
    restarts_of,
)

CHECKS = ("optim/muon/newton_schulz.py",)


def plain(x: torch.Tensor, coefficients: tuple[Coefficients, ...]) -> torch.Tensor:
    """Step by step, as K. Jordan wrote them, in the dtype of `x`."""
    x = x / x.norm()
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def inputs(rows: int, columns: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    noise = torch.randn(rows, columns, generator=generator)
    turned = torch.linalg.qr(torch.randn(rows, rows, generator=generator))[0]
    decades = noise * torch.logspace(0, -4, rows)[:, None]
    low_rank = torch.randn(rows, 4, generator=generator) @ noise[:4]
    one_element = torch.zeros(rows, columns)
    one_element[3, 5] = 1e-5
    return {
        "noise": noise,
        "rows over four decades": decades,
        "singular values over four decades": turned @ decades,
        "four directions and noise": low_rank + 1e-3 * noise,
        "one direction": low_rank[:, :1] @ noise[:1],
        "one element": one_element,
        "large": 1e15 * noise,
    }


@pytest.mark.parametrize("name", sorted(COEFFICIENTS))
@pytest.mark.parametrize("steps", [2, 5, 8])
@pytest.mark.parametrize("shape", [(192, 192), (128, 700), (700, 128)])
def test_half_precision_is_as_near_to_float64_as_plain_steps_in_bf16(
    shape: tuple[int, int], steps: int, name: str
) -> None:
    coefficients = coefficients_of(name, steps)
    tall = shape[0] > shape[1]
    for kind, matrix in inputs(*sorted(shape)).items():
        x = matrix.bfloat16()
        exact = plain(x.double(), coefficients)
        theirs = (plain(x, coefficients) - exact).norm()
        given = x.T.contiguous() if tall else x
        ours = orthogonalized(given[None], coefficients)[0]
        if tall:
            ours = ours.T
        error = (ours - exact).norm()
        # 0.3% is what bf16's rounding of the result alone comes to.
        assert error <= max(1.1 * theirs, 3e-3 * exact.norm()), (kind, error, theirs)


@pytest.mark.parametrize("ratio", [1, 3])
def test_a_tall_matrix_is_as_exact_as_its_transpose(ratio: int) -> None:
    """Polynomials are applied to either in the order of the steps: in another, what a step made
    small meets errors that the next ones multiply."""
    coefficients = coefficients_of("quintic", 5)
    x = inputs(128, 128 * ratio)["one direction"].bfloat16()
    wide = orthogonalized(x[None], coefficients)[0]
    tall = orthogonalized(x.T.contiguous()[None], coefficients)[0].T
    exact = plain(x.double(), coefficients)
    assert (tall - exact).norm() <= 1.02 * (wide - exact).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 130), (130, 96)])
def test_a_matrix_has_the_same_result_in_every_batch(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Which matrices share a batch depends on the number of ranks."""
    torch.manual_seed(1)
    x = torch.randn(5, *shape).to(dtype)
    steps = coefficients_of("quintic", 5)
    alone = torch.cat([orthogonalized(one[None], steps) for one in x])
    assert torch.equal(orthogonalized(x, steps), alone)


def test_what_is_given_is_kept_unless_its_memory_may_be_written() -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 9, 20).bfloat16()
    steps = coefficients_of("simple", 5)
    kept = x.clone()
    found = orthogonalized(x, steps)
    assert torch.equal(x, kept)
    assert torch.equal(orthogonalized(x, steps, in_place=True), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 4, 6, dtype=dtype)
    steps = coefficients_of("simple", 5)
    assert not orthogonalized(x, steps).any()
    x[0, 1, 1] = float("nan")
    assert orthogonalized(x, steps).isnan().any()


def test_costs_are_those_of_the_products_that_are_computed() -> None:
    n = 64
    found = [restarts_of(steps, n, 7 * n) for steps in (3, 5, 8)]
    assert found == [(), (3,), (2, 4, 6)]
    # Nearly square, step by step: of each half a Gram matrix and a polynomial, and X.
    assert restarts_of(5, n, n) == (1, 2, 3, 4)
    assert cost(n, n) == 5 * (1 + 1 + 2) * n**3
    # Half of two Gram matrices and of 11 products of their size, all of three; X twice.
    assert cost(n, 7 * n) == cost(7 * n, n) == (2 * 7 + 11 + 3 * 2 + 2 * 2 * 7) * n**3
