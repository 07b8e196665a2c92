"""Control variates: unbiased whatever the base, honest about errors, better than plain samples."""

from typing import Any

import pytest
import torch
from torch import nn

import covprop as cp
from tests.oracles import assert_close
from tests.test_propagate import assert_same, gaussian

D = torch.float64
BASES = {
    "exact": cp.Exact(), "linearized": cp.Linearized(), "variances": cp.AssumedDensity(),
    "split": cp.Split(),
}  # fmt: skip
every_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 20), nn.GELU(), nn.Linear(20, 3)
    return nn.Sequential(*layers).to(D).requires_grad_(requires_grad=False)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@every_base
@pytest.mark.parametrize("batch", [(), (2,)])
def test_moments_are_those_of_many_samples(base: Any, batch: tuple[int, ...]) -> None:
    model, x = network(), gaussian(*batch)
    y = cp.propagate(model, x, cp.ControlVariate(4_000, base, seeded(0)))
    truth = cp.propagate(model, x, cp.MonteCarlo(200_000, seeded(1)))
    for found, wanted, errors in (
        (y.mean, truth.mean, (y.mean_stderr, truth.mean_stderr)),
        (
            y.covariance_matrix,
            truth.covariance_matrix,
            (y.covariance_stderr, truth.covariance_stderr),
        ),
    ):
        error = (errors[0].square() + errors[1].square()).sqrt()
        assert bool(((found - wanted).abs() < 5 * error).all())
    assert y.samples == 4_000
    assert torch.equal(y.covariance_matrix, y.covariance_matrix.mT)


@every_base
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_an_input_of_low_rank_is_its_matrix(
    base: Any, batch: tuple[int, ...], *, beside: bool
) -> None:
    model = network()
    mean, factor = torch.zeros(*batch, 4, dtype=D), torch.randn(*batch, 4, 2, dtype=D) / 3
    variance = torch.full_like(mean, 0.1) if beside else None
    x = cp.Gaussian.low_rank(mean, factor, variance, len(batch))
    y, z = (
        cp.propagate(model, given, cp.ControlVariate(4_000, base, seeded(0)))
        for given in (x, cp.Gaussian(mean, x.covariance_matrix))
    )
    assert bool(((y.mean - z.mean).abs() < 6 * y.mean_stderr).all())
    apart = (y.covariance_matrix - z.covariance_matrix).abs()
    assert bool((apart < 6 * y.covariance_stderr).all())


@every_base
def test_standard_errors_are_the_spread_over_seeds(base: Any) -> None:
    model, x = network(), gaussian()
    found = [cp.propagate(model, x, cp.ControlVariate(256, base, seeded(i))) for i in range(60)]
    for value, error in (("mean", "mean_stderr"), ("covariance_matrix", "covariance_stderr")):
        spread = torch.stack([getattr(y, value) for y in found]).std(0)
        told = torch.stack([getattr(y, error) for y in found]).mean(0)
        assert_close(told / spread, torch.ones_like(told), atol=0.4)


def test_a_linear_network_leaves_nothing_to_chance() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(D).requires_grad_(requires_grad=False)
    for x in (gaussian(2), gaussian(2, rank=1), cp.Gaussian.isotropic(gaussian(2).mean, 0.5, 1)):
        y = cp.propagate(model, x, cp.ControlVariate(128, generator=seeded(0)))
        assert_same(y, cp.propagate(model, x), 1e-9)
        assert float(y.covariance_stderr.abs().max()) < 1e-9


def test_nearly_linear_networks_need_far_fewer_samples() -> None:
    model, x = network(), gaussian()
    x = cp.Gaussian(x.mean, 0.01 * x.covariance_matrix)
    y = cp.propagate(model, x, cp.ControlVariate(1024, generator=seeded(0)))
    plain = cp.propagate(model, x, cp.MonteCarlo(1024, seeded(0)))
    assert float(y.mean_stderr.norm()) < 0.1 * float(plain.mean_stderr.norm())
    assert float(y.covariance_stderr.norm()) < 0.3 * float(plain.covariance_stderr.norm())


def test_several_inputs_nests_and_constants_pass() -> None:
    model, x, y = network(), gaussian(), cp.Gaussian.diagonal(gaussian().mean, gaussian().variance)

    def both(a: Any, b: Any) -> Any:
        return {"sum": model(a + b), "constant": torch.ones(2), "difference": a - b}

    found = cp.propagate(both, x, y, method=cp.ControlVariate(512, generator=seeded(0)))
    assert_close(found["constant"], torch.ones(2))
    assert_same(found["difference"], cp.propagate(lambda a, b: a - b, x, y), 1e-9)
    truth = cp.propagate(both, x, y, method=cp.MonteCarlo(50_000, seeded(1)))["sum"]
    error = (found["sum"].mean_stderr.square() + truth.mean_stderr.square()).sqrt()
    assert bool(((found["sum"].mean - truth.mean).abs() < 5 * error).all())


def test_a_seed_gives_the_same_and_leaves_the_global_one_alone() -> None:
    model, x = network(), gaussian()
    before = torch.random.get_rng_state()
    first, second = (
        cp.propagate(model, x, cp.ControlVariate(128, generator=seeded(3))) for _ in "ab"
    )
    assert torch.equal(first.covariance_matrix, second.covariance_matrix)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="from 128"):
        cp.ControlVariate(10)
    with pytest.raises(TypeError, match="base"):
        cp.ControlVariate(base="exact")
