"""Inputs with a skewness: their moments, their samples, and what each method makes of them."""

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import covprop as cp
from covprop.covariance import Diagonal
from covprop.robustness.budget import scaled
from tests.gaussians import numbers, seeded
from tests.layers import propagate
from tests.oracles import assert_close


def example(*batch: int, dtype: torch.dtype = torch.float64) -> cp.Skewed:
    """Elements (2, 2), of which one is not skewed."""
    shape = (*batch, 2, 2)
    skewness = numbers(*shape, seed=5, dtype=dtype)
    skewness[..., 0, 0] = 0
    variance = numbers(*shape, seed=6, dtype=dtype).square()
    return cp.Skewed(
        numbers(*shape, dtype=dtype), variance=variance, skewness=skewness, batch_dims=len(batch)
    )


def skewness_of(x: cp.Gaussian) -> Tensor:
    assert x.skewness is not None
    return x.skewness


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_are_those_of_scipy(dtype: torch.dtype) -> None:
    def of(*values: float) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    sigma = math.sqrt(math.log1p(0.3**2 / 4))
    cases: list[tuple[cp.Skewed, list[Any]]] = [
        (
            cp.Skewed.triangular(of(-1.0, 2.0, 0.0), of(0.0, 2.0, 3.0), 3.0),
            [stats.triang(c, low, w) for c, low, w in ((0.25, -1, 4), (0, 2, 1), (1, 0, 3))],
        ),
        (cp.Skewed.uniform(of(-1.0, 2.0), 5.0), [stats.uniform(-1, 6), stats.uniform(2, 3)]),
        (cp.Skewed.log_normal(of(2.0), stddev=0.3),
         [stats.lognorm(sigma, 0, 2 / math.exp(sigma**2 / 2))]),
        (cp.Skewed.gamma(of(2.0, 0.5), stddev=of(1.0, 0.8)), [
            stats.gamma(4, 0, 0.5), stats.gamma((0.5 / 0.8) ** 2, 0, 0.8**2 / 0.5),
        ]),
        (cp.Skewed.poisson(of(0.5, 40.0)), [stats.poisson(0.5), stats.poisson(40)]),
    ]  # fmt: skip
    rtol = 1e-12 if dtype == torch.float64 else 1e-6
    for x, truth in cases:
        assert x.dtype == dtype
        for found, letter in ((x.mean, "m"), (x.variance, "v"), (skewness_of(x), "s")):
            moments = torch.tensor([float(t.stats(letter)) for t in truth], dtype=torch.float64)
            assert_close(found.double(), moments, rtol=rtol, atol=rtol)


def test_read_noise_adds_variance_and_no_third_cumulant() -> None:
    rate = torch.tensor([0.0, 3.0, 100.0], dtype=torch.float64)
    for gain in (0.5, -0.5):
        x = cp.Skewed.poisson(rate, gain, 0.7)
        assert_close(x.mean, gain * rate, rtol=1e-15)
        assert_close(x.variance, gain**2 * rate + 0.49, rtol=1e-14)
        assert_close(skewness_of(x) * x.stddev**3, gain**3 * rate, rtol=1e-13)
    dark = cp.Skewed.poisson(rate)
    assert dark.stddev[0] == 0
    assert skewness_of(dark)[0] == 0


def test_parts_keep_the_type_and_the_moments() -> None:
    x = example(2, 3)
    assert isinstance(x.covariance, Diagonal)
    assert (x.batch_shape, x.event_shape) == ((2, 3), (2, 2))
    assert repr(x).startswith("Skewed(batch_shape=(2, 3)")
    s = skewness_of(x)
    parts = [
        (x.marginal([3, 0]), s.reshape(2, 3, 4)[..., [3, 0]]),
        (x.to(torch.float32), s.float()),
        (x.reshape_batch((6,)), s.reshape(6, 2, 2)),
        (x[1], s[1]),
        (x.detach(), s),
        (copy.deepcopy(x), s),
        (pickle.loads(pickle.dumps(x)), s),
        (x.with_moments(mean=x.mean + 1), s),
        (scaled(x, torch.full((2, 3), 2.0)), s),
    ]
    for part, expected in parts:
        assert type(part) is cp.Skewed
        assert torch.equal(skewness_of(part), expected)
    assert_close(x.marginal([3, 0]).variance, x.variance.reshape(2, 3, 4)[..., [3, 0]], rtol=0.0)


def test_independent_elements_tell_nothing_of_each_other() -> None:
    x = example()
    rest = x.condition([1, 2], torch.zeros(2, dtype=torch.float64), variance=0.1)
    assert isinstance(rest, cp.Skewed)
    assert torch.equal(skewness_of(rest), skewness_of(x).flatten()[[0, 3]])
    assert torch.equal(rest.mean, x.mean.flatten()[[0, 3]])


def test_samples_have_the_moments() -> None:
    x, count = example(), 300_000
    drawn = x.sample(count, seeded(1))
    assert drawn.shape == (count, 2, 2)
    z = (drawn - x.mean) / x.stddev
    for values, expected in ((z, torch.zeros(2, 2)), (z**2, torch.ones(2, 2)), (z**3, x.skewness)):
        error = values.std(0) / count**0.5
        assert bool(((values.mean(0) - expected).abs() < 4.5 * error).all())
    assert torch.equal(x.sample(3, seeded(2)), x.sample(3, seeded(2)))
    single = example(4, dtype=torch.float32)
    assert single.sample(5, seeded()).dtype == torch.float32
    assert single.sample(5, seeded()).shape == (5, 4, 2, 2)


def test_samples_are_differentiable_in_mean_and_variance() -> None:
    mean, variance = numbers(3).requires_grad_(), numbers(3).square().requires_grad_()
    x = cp.Skewed(mean, variance=variance, skewness=0.5)
    one, other = torch.autograd.grad(x.rsample(7, seeded()).sum(), (mean, variance))
    assert_close(one, torch.full((3,), 7.0).double(), rtol=0.0)
    assert bool((other != 0).all())


def test_intervals_of_a_log_normal_are_close_to_its_own() -> None:
    """Three moments of it: better than two, and within the error that its fourth one leaves."""
    sigma = math.sqrt(math.log1p(0.2**2))
    truth = stats.lognorm(sigma, 0, 1 / math.exp(sigma**2 / 2))
    x = cp.Skewed.log_normal(torch.ones(1, dtype=torch.float64), stddev=0.2)
    ends = [float(end) for end in x.interval(0.95)]
    normal = [
        float(end) for end in cp.Gaussian.diagonal(x.mean, variance=x.variance).interval(0.95)
    ]
    for found, plain, expected in zip(ends, normal, truth.interval(0.95), strict=True):
        assert abs(found - expected) < 0.15 * abs(plain - expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: cp.Skewed(t, variance=-t - 1, skewness=t), "negative variance"),
        (
            lambda t: cp.Skewed(t, variance=t[:2], skewness=t),
            r"variances have the shape of the mean \(3,\), not",
        ),
        (
            lambda t: cp.Skewed(t, variance=t, skewness=t[:2]),
            r"the skewness has the shape of the mean \(3,\), not",
        ),
        (
            lambda t: cp.Skewed(t, variance=t + 1, skewness=math.nan),
            "the skewness has NaN or infinite",
        ),
        (
            lambda t: cp.Skewed(t, variance=t, skewness=t, batch_dims=2),
            "cannot have 2 batch dimensions",
        ),
        (lambda t: cp.Skewed(t.int(), variance=t, skewness=t), "the mean has dtype torch.int32"),
        (lambda t: cp.Skewed([0.0], variance=t, skewness=t), "the mean must be a tensor, not list"),
        (lambda t: cp.Skewed.triangular(t, 2.0, 1.0), "low <= mode <= high"),
        (lambda _: cp.Skewed.triangular(0.0, 0.5, 1.0), "one of low, mode, high must be a tensor"),
        (lambda t: cp.Skewed.uniform(t, -1.0), "low <= high"),
        (lambda t: cp.Skewed.uniform(t, t.double()), "low is torch.float32 on cpu and high"),
        (lambda t: cp.Skewed.uniform(t, torch.ones(2)), r"broadcast .*: low \(3,\), high \(2,\)"),
        (lambda t: cp.Skewed.uniform(t.int(), 1.0), "low has dtype torch.int32"),
        (lambda t: cp.Skewed.uniform(t, math.inf), "high has NaN or infinite entries"),
        (
            lambda t: cp.Skewed.log_normal(t, stddev=1.0),
            "a log-normal distribution has a positive mean",
        ),
        (lambda t: cp.Skewed.gamma(t, stddev=1.0), "a gamma distribution has a positive mean"),
        (lambda t: cp.Skewed.gamma(t + 1, stddev=-1.0), "a standard deviation cannot be negative"),
        (lambda t: cp.Skewed.poisson(t - 1), "the rate of a Poisson distribution cannot be"),
        (lambda t: cp.Skewed.poisson(t, 1.0, -0.1), "read_noise is a standard deviation"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(cp.InvalidGaussian, match=message):
        make(torch.zeros(3))


def test_torch_has_no_such_distribution() -> None:
    x = example()
    with pytest.raises(cp.UnsupportedOperation, match="torch has no distribution"):
        x.to_torch()
    even = cp.Skewed.uniform(torch.zeros(3), 1.0)
    assert_close(even.to_torch().variance, even.variance, rtol=1e-6)


class _Square(nn.Module):
    """Its mean is that of the variance, its covariance that of the third and fourth moments."""

    def forward(self, x: Any) -> Any:
        return torch.stack([x[..., 0] + x[..., 0] ** 2 / 2, x[..., 1] ** 2 - x[..., 0]], -1)


@pytest.mark.parametrize(
    "method",
    [
        cp.MonteCarlo(200_000, seeded(3)),
        cp.MonteCarlo(60_000, seeded(3), antithetic=True),
        cp.MonteCarlo(20_000, seeded(3), sobol=True),
        cp.ControlVariate(100_000, cp.Exact(), seeded(3)),
        cp.ControlVariate(100_000, cp.Linearized(), seeded(3)),
    ],
    ids=lambda method: str(method)[:40],
)
def test_sampling_uses_the_skewness(method: cp.MonteCarlo | cp.ControlVariate) -> None:
    """Of a gamma distribution with shape a, k_2 = 1, k_3 = s and k_4 = 3 s^2 / 2."""
    s = torch.tensor([1.2, -0.8], dtype=torch.float64)
    x = cp.Skewed(torch.zeros(2).double(), variance=torch.ones(2).double(), skewness=s)
    with warnings.catch_warnings():
        warnings.simplefilter("error", cp.ApproximationWarning)
        y = propagate(_Square(), x, method)
    fourth = 2 + 1.5 * s.square()  # Var(x^2)
    expected = torch.tensor(
        [[1 + s[0] + fourth[0] / 4, -1 - s[0] / 2], [-1 - s[0] / 2, 1 + fourth[1]]],
        dtype=torch.float64,
    )
    assert y.mean_stderr is not None
    assert y.covariance_stderr is not None
    mean = torch.tensor([0.5, 1.0], dtype=torch.float64)
    assert bool(((y.mean - mean).abs() < 4.5 * y.mean_stderr).all())
    assert bool(((y.covariance_matrix - expected).abs() < 4.5 * y.covariance_stderr).all())


IGNORING = [
    cp.Exact(), cp.Series(order=2), cp.AssumedDensity(), cp.Linearized(), cp.Unscented(),
    cp.Sketched(16),
]  # fmt: skip


@pytest.mark.parametrize("method", IGNORING, ids=lambda method: type(method).__name__)
def test_a_method_that_ignores_the_skewness_says_so(method: Any) -> None:
    assert not method.uses_skewness
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = example().marginal(slice(None))
    name = type(method).__name__
    with pytest.warns(cp.ApproximationWarning, match=rf"cp\.{name}\(\) ignores the skew") as seen:
        propagate(model, x, method)
    assert [item.filename for item in seen if "skewness" in str(item.message)] == [__file__]
    even = cp.Skewed.uniform(torch.zeros(4).double(), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", cp.ApproximationWarning)
        propagate(model, even, method)


def test_a_split_of_a_skewed_input_is_refused() -> None:
    for base in (cp.Exact(), cp.MonteCarlo(100)):
        with pytest.raises(cp.UnsupportedOperation, match="which would lose its skewness"):
            propagate(torch.relu, example(), cp.Split(3, base=base))
    propagate(torch.relu, cp.Skewed.uniform(torch.zeros(3), 1.0), cp.Split(3))


@pytest.mark.parametrize("method", [cp.Exact(), cp.MonteCarlo(100)])
def test_a_skewed_result_as_an_input_is_taken_as_gaussian_with_a_warning(method: Any) -> None:
    x = cp.Gaussian(torch.zeros(2), torch.eye(2) + 1, skewness=torch.tensor([0.6, 0.0]))
    with pytest.warns(cp.ApproximationWarning, match="propagate both in one call"):
        propagate(torch.relu, x, method)
    slightly = cp.Gaussian(torch.zeros(2), torch.eye(2) + 1, skewness=torch.tensor([0.4, 0.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", cp.ApproximationWarning)
        propagate(torch.relu, slightly, method)


def test_bayesian_predictions_traces_and_comparisons_say_it_too() -> None:
    x = cp.Skewed.gamma(torch.ones(5, 3), stddev=0.4, batch_dims=1)
    with pytest.warns(cp.ApproximationWarning, match="ignores the skewness"):
        cp.bayes.predict(cp.bayes.BayesLinear(3, 2), x)
    with pytest.warns(cp.ApproximationWarning, match="ignores the skewness"):
        trace = cp.trace(nn.Linear(3, 2), x, keep=True, samples=2000, generator=seeded())
    first = trace.steps[0]
    assert isinstance(first.gaussian, cp.Skewed)
    with pytest.warns(cp.ApproximationWarning, match="cp.Linearized.. ignores the skewness"):
        comparison = cp.compare(
            nn.Sequential(nn.Linear(3, 2), nn.Softplus()), x, methods=[cp.Linearized()], show=False
        )
    assert comparison.rows[0].refusal == ""


def test_the_truth_of_a_comparison_has_the_skewness() -> None:
    x = cp.Skewed.gamma(torch.ones(1).double(), stddev=1.0)  # an exponential distribution
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cp.ApproximationWarning)
        comparison = cp.compare(torch.square, x, methods=[cp.Exact()], show=False, samples=200_000)
    truth = comparison.reference.gaussian
    assert truth.covariance_stderr is not None
    assert abs(float(truth.variance) - 20) < 4.5 * float(truth.covariance_stderr)  # 24 - 4


def test_robustness_keeps_the_skewness() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    x = cp.Skewed.gamma(torch.ones(4).double(), stddev=0.4)
    with pytest.warns(cp.ApproximationWarning, match="ignores the skewness"):
        cp.robustness.sensitivity(model, x)
    with pytest.warns(cp.ApproximationWarning, match="ignores the skewness"):
        worst = cp.robustness.worst_noise(model, x, steps=1)
    assert isinstance(worst.gaussian, cp.Skewed)
    # P(x < 1) of a shifted exponential variable is 1 - 1/e, and not one half.
    one = nn.Linear(1, 2).double()
    with torch.no_grad():
        one.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        one.bias.copy_(torch.tensor([-1.0, 1.0]))
    wait = cp.Skewed.gamma(torch.ones(1).double(), stddev=1.0)
    shares = cp.robustness.sampled_probabilities(one, wait, 20_000, seeded())
    assert abs(float(shares.probability[1]) - (1 - math.exp(-1))) < 4.5 * float(shares.stderr[1])


def test_a_mixture_has_the_skewness_of_its_components_and_of_their_distances() -> None:
    means = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    variance = torch.tensor([[[0.5]], [[1.0]], [[0.2]]], dtype=torch.float64)
    own = torch.tensor([[0.3], [-1.0], [0.0]], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    parts = cp.Gaussian(means, variance, skewness=own, notes=("a note",))
    y = cp.Mixture(weights, parts).moments()
    mean, second = (weights[:, None] * means).sum(0), variance[:, 0]
    apart = means - mean
    third = own * second**1.5 + 3 * apart * second + apart**3
    total = (weights[:, None] * (second + apart**2)).sum(0)
    assert_close(skewness_of(y), (weights[:, None] * third).sum(0) / total**1.5, rtol=1e-13)
    assert y.notes == ("a note",)
    assert cp.Mixture(weights, cp.Gaussian(means, variance)).moments().skewness is None
