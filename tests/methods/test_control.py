"""Control variates: right whatever the base, honest about errors, no worse than plain samples."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import covprop as cp
from covprop.diagnostics.compare import footprint
from covprop.methods import control
from covprop.text_table import in_bytes
from tests.layers import propagate
from tests.oracles import assert_close
from tests.test_propagate import assert_same, gaussian

D = torch.float64
BASES = {
    "exact": cp.Exact(), "linearized": cp.Linearized(), "variances": cp.AssumedDensity(),
    "split": cp.Split(),
}  # fmt: skip
every_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)


class Sine(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.sin(x)


def network(first: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, 20), first or nn.Tanh(), nn.Linear(20, 20), nn.GELU(), nn.Linear(20, 3)
    return nn.Sequential(*layers).to(D).requires_grad_(requires_grad=False)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@every_base
@pytest.mark.parametrize("batch", [(), (2,)])
def test_moments_are_those_of_many_samples(base: Any, batch: tuple[int, ...]) -> None:
    model, x = network(), gaussian(*batch)
    y = propagate(model, x, cp.ControlVariate(4_000, base, seeded(0)))
    truth = propagate(model, x, cp.MonteCarlo(200_000, seeded(1)))
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
    x = cp.Gaussian.low_rank(mean, factor, variance=variance, batch_dims=len(batch))
    y, z = (
        propagate(model, given, cp.ControlVariate(4_000, base, seeded(0)))
        for given in (x, cp.Gaussian(mean, x.covariance_matrix))
    )
    assert bool(((y.mean - z.mean).abs() < 6 * y.mean_stderr).all())
    apart = (y.covariance_matrix - z.covariance_matrix).abs()
    assert bool((apart < 6 * y.covariance_stderr).all())


@pytest.mark.parametrize(
    ("base", "groups"),
    [*((base, 1) for base in BASES.values()), (BASES["exact"], 3)],
    ids=[*BASES, "exact, in three groups"],
)
def test_standard_errors_are_the_spread_over_runs(
    base: Any, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 600 runs, as a batch of one Gaussian: variances within 5 of their own standard errors.

    These are at most 7 %, so that a standard error that is a fifth off fails.
    """
    runs, samples = 600, 384
    monkeypatch.setattr(control, "HELD", samples * runs * 3 // groups)
    x = gaussian()
    many = cp.Gaussian(x.mean.expand(runs, 4), x.covariance_matrix.expand(runs, 4, 4))
    model = network(Sine())  # closed forms, where all runs need them
    y = propagate(model, many, cp.ControlVariate(samples, base, seeded(0)))
    assert y.samples == samples
    for values, told in (
        (y.mean, y.mean_stderr),
        (y.covariance_matrix, y.covariance_stderr),
    ):
        apart = (values - values.mean(0)).square() * runs / (runs - 1)
        expected, found = told.square().mean(0), apart.mean(0)
        error = (apart.var(0) / runs + told.square().var(0) / runs).sqrt()
        assert bool(((expected - found).abs() < 5 * error).all())
        assert float((error / found).max()) < 0.07


def test_a_linear_network_leaves_nothing_to_chance() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(D).requires_grad_(requires_grad=False)
    for x in (
        gaussian(2),
        gaussian(2, rank=1),
        cp.Gaussian.isotropic(gaussian(2).mean, stddev=0.5, batch_dims=1),
    ):
        y = propagate(model, x, cp.ControlVariate(128, generator=seeded(0)))
        assert_same(y, propagate(model, x), 1e-9)
        assert float(y.covariance_stderr.abs().max()) < 1e-9


def test_nearly_linear_networks_need_far_fewer_samples() -> None:
    model, x = network(), gaussian()
    x = cp.Gaussian(x.mean, 0.01 * x.covariance_matrix)
    y = propagate(model, x, cp.ControlVariate(1024, generator=seeded(0)))
    plain = propagate(model, x, cp.MonteCarlo(1024, seeded(0)))
    assert float(y.mean_stderr.norm()) < 0.1 * float(plain.mean_stderr.norm())
    assert float(y.covariance_stderr.norm()) < 0.3 * float(plain.covariance_stderr.norm())


def controller(seed: int) -> nn.Sequential:
    """Five layers of 20 ReLUs that are fitted to a steep ramp, clipped at +-1."""
    torch.manual_seed(seed)
    widths = [2, 20, 20, 20, 20, 20]
    layers = [m for n, k in pairwise(widths) for m in (nn.Linear(n, k), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(20, 1)).to(D)
    fit = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(150):
        points = 4 * torch.rand(128, 2, dtype=D) - 2
        wanted = (20 * points.sum(-1, keepdim=True)).clamp(-1, 1)
        loss = (model(points) - wanted).square().mean()
        fit.zero_grad()
        loss.backward()
        fit.step()
    return model.requires_grad_(requires_grad=False)


def against_plain_samples(model: Any, x: Any, base: Any, runs: int = 8) -> tuple[Any, Any, Any]:
    """Root mean square errors of variances, of controlled and of plain samples; all results."""
    count = 2_000
    truth = propagate(model, x, cp.MonteCarlo(200_000, seeded(99))).variance
    found = [propagate(model, x, cp.ControlVariate(count, base, seeded(i))) for i in range(runs)]
    plain = [propagate(model, x, cp.MonteCarlo(count, seeded(i))) for i in range(runs)]
    ours, theirs = (
        torch.stack([(y.variance - truth).square() for y in results]).mean(0).sqrt()
        for results in (found, plain)
    )
    return ours, theirs, found


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_a_base_that_is_off_is_no_worse_than_none(noise: float) -> None:
    """Where it is off by a factor of its own, 1.5 is 2 standard errors of a ratio of 8 runs."""
    x = cp.Gaussian.isotropic(torch.tensor([0.2, -0.1], dtype=D), stddev=noise)
    ours, theirs, _ = against_plain_samples(controller(0), x, cp.Exact())
    assert bool((ours < 1.5 * theirs).all())


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("steep", [30.0, 1e4])
def test_a_base_that_is_far_off_is_left_away(
    steep: float, dtype: torch.dtype, batch: tuple[int, ...]
) -> None:
    """The tangent of a step at its middle: samples of its square would drown those of the step."""

    def model(x: Any) -> Any:
        return torch.tanh(steep * x)

    x = cp.Gaussian.isotropic(
        torch.zeros(*batch, 2, dtype=dtype), stddev=1.0, batch_dims=len(batch)
    )
    ours, theirs, found = against_plain_samples(model, x, cp.Linearized())
    assert bool((ours < 1.5 * theirs + 1e-4).all())
    for y in found:
        assert float(y.variance.min()) > 0.9
        assert float(y.covariance_stderr.diagonal(dim1=-2, dim2=-1).max()) < 0.02


def test_the_covariance_is_positive_semi_definite() -> None:
    """Of nearly dependent outputs, whose small differences no coefficient of single pairs sees."""
    turn = torch.randn(3, 40, dtype=D, generator=seeded(5))

    def model(x: Any) -> Any:
        return torch.sin(3 * x[..., :3]) @ turn + 1e-3 * torch.relu(x[..., :1])

    for seed in range(10):
        y = propagate(model, gaussian(), cp.ControlVariate(128, generator=seeded(seed)))
        values = torch.linalg.eigvalsh(y.covariance_matrix)
        assert float(values.min()) > -1e-12 * float(values.max())


def test_several_inputs_nests_and_constants_pass() -> None:
    model, x, y = (
        network(),
        gaussian(),
        cp.Gaussian.diagonal(gaussian().mean, variance=gaussian().variance),
    )

    def both(a: Any, b: Any) -> Any:
        return {"sum": model(a + b), "constant": torch.ones(2), "difference": a - b}

    found = propagate(both, x, y, method=cp.ControlVariate(512, generator=seeded(0)))
    assert_close(found["constant"], torch.ones(2))
    assert_same(found["difference"], propagate(lambda a, b: a - b, x, y), 1e-9)
    truth = propagate(both, x, y, method=cp.MonteCarlo(50_000, seeded(1)))["sum"]
    error = (found["sum"].mean_stderr.square() + truth.mean_stderr.square()).sqrt()
    assert bool(((found["sum"].mean - truth.mean).abs() < 5 * error).all())


def test_a_seed_gives_the_same_and_leaves_the_global_one_alone() -> None:
    model, x = network(), gaussian()
    before = torch.random.get_rng_state()
    first, second = (propagate(model, x, cp.ControlVariate(128, generator=seeded(3))) for _ in "ab")
    assert torch.equal(first.covariance_matrix, second.covariance_matrix)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="from 128"):
        cp.ControlVariate(10)
    with pytest.raises(TypeError, match="base"):
        cp.ControlVariate(base="exact")


def test_a_model_without_rules_is_offered_a_base_without_them() -> None:
    def model(x: Any) -> Any:
        return torch.special.bessel_j0(x)

    for method in (cp.ControlVariate(128), cp.Split(), cp.Split(base=cp.ControlVariate(128))):
        with pytest.raises(
            cp.UnsupportedOperation, match=r"; or .* base=cp.Linearized\(\)"
        ) as told:
            propagate(model, gaussian(), method)
        assert str(told.value).count("base=") == 1
    with pytest.raises(cp.UnsupportedOperation, match="no rule") as told:
        propagate(model, gaussian())
    assert "base=" not in str(told.value)


def test_what_no_base_can_do_is_not_blamed_on_it() -> None:
    with pytest.raises(cp.UnsupportedOperation, match=r"have no Gaussian") as told:
        propagate(lambda x: x > 0, gaussian(), cp.ControlVariate(128))
    assert "base=" not in str(told.value)


@pytest.mark.parametrize("repaired", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_memory_is_checked_for_all_that_is_held(
    dtype: torch.dtype, repaired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices of the outputs in float64, and their linear functions of the inputs.

    The covariance is of rank one: whether it counts as indefinite is a matter of rounding, and
    the memory that is asked for must do for both.
    """
    monkeypatch.setattr(control, "_leaves_enough", lambda *_: not repaired)
    size = 1000
    weight = torch.ones(4, size, dtype=dtype)
    x = cp.Gaussian.isotropic(torch.zeros(4, dtype=dtype), stddev=1.0)
    method = cp.ControlVariate(128, cp.Linearized(), seeded(0))

    def wide(x: Any) -> Any:
        return x @ weight

    with torch.no_grad():
        call = footprint(lambda: propagate(wide, x, method), x.device)
    held = control.MATRICES * 8 * size**2 + 8 * 4 * size
    assert 0.8 * held < call.peak_bytes < 1.2 * held  # and the samples themselves
    monkeypatch.setattr("covprop.methods.call.LARGE", 0)
    monkeypatch.setattr("covprop.methods.call.free_bytes", lambda _: held - 1)
    with pytest.raises(cp.TooLarge, match=f"1,000 outputs would need {in_bytes(held)}"):
        propagate(wide, x, method)


def test_memory_is_planned_for_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covprop.flow.lineage.LARGE", 1000)
    monkeypatch.setattr("covprop.methods.planning.free_bytes", lambda _: 1000)
    with pytest.raises(cp.TooLarge, match="The plan:"):
        propagate(network(), gaussian(), cp.ControlVariate(128))


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("batch", [(), (2,)])
@torch.no_grad()
@pytest.mark.parametrize("base", [cp.Exact(), cp.Split()], ids=["exact", "split"])
def test_what_no_sample_has_seen_is_what_the_base_knows(
    dtype: torch.dtype, batch: tuple[int, ...], base: Any
) -> None:
    """A rare event: P(t > 4.7) = 1e-6, which no sample of 1000 has, nor a component of three."""
    x = cp.Gaussian.isotropic(
        torch.zeros(*batch, 2, dtype=dtype), stddev=1.0, batch_dims=len(batch)
    )

    def function(t: Any) -> Any:
        return torch.cat([torch.relu(t - 4.7) + 1.3, torch.tanh(t)], -1)

    y = propagate(function, x, cp.ControlVariate(1000, base, generator=seeded(0)))
    known = propagate(function, x, base)
    assert isinstance(base, cp.Split) or bool((known.variance[..., :2] > 0).all())
    assert torch.equal(y.mean[..., :2], known.mean[..., :2])
    block = y.covariance_matrix[..., :2, :2]
    assert torch.equal(block, known.covariance_matrix[..., :2, :2])
    cp.Gaussian(y.mean, y.covariance_matrix)
    assert bool((y.mean_stderr > 0).all())
    variance_errors = y.covariance_stderr.diagonal(dim1=-2, dim2=-1)
    assert bool((variance_errors[..., :2] >= y.variance[..., :2]).all())
    assert bool((y.covariance_stderr > 0).all())
    seen = propagate(torch.tanh, x, cp.ControlVariate(1000, base, seeded(0)))
    # Sums of 1000 products below one, in another order, and rounded to the dtype.
    rounding = 1000 * torch.finfo(D).eps + torch.finfo(dtype).eps
    rest = y.covariance_matrix[..., 2:, 2:] - seen.covariance_matrix
    assert float(rest.abs().max()) <= rounding


def test_an_output_that_the_base_takes_for_constant_is_one() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(2, dtype=D), stddev=1.0)
    y = propagate(lambda t: 0 * t + 1, x, cp.ControlVariate(128, generator=seeded(0)))
    assert torch.equal(y.mean, torch.ones(2, dtype=D))
    assert not bool(y.covariance_matrix.any())
    assert not bool(y.covariance_stderr.any())
