"""How far results may be off, as they say themselves."""

import copy
import itertools
import pickle
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop.error_estimate import in_percent
from tests.gaussians import gaussian


def network(*widths: int, seed: int = 0, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1]).double().requires_grad_(False)


@cache
def truth_of(model: nn.Module, x: cp.Gaussian) -> cp.Gaussian:
    """By a quarter of a million samples: standard deviations are known to 0.14 %."""
    return cp.propagate(model, x, cp.MonteCarlo(2**18, torch.Generator().manual_seed(0)))


def true_error(y: cp.Gaussian, model: nn.Module, x: cp.Gaussian) -> float:
    """The largest of means and standard deviations."""
    truth = truth_of(model, x)
    mean = ((y.mean - truth.mean).abs() / truth.stddev).max()
    return max(float(mean), float((y.stddev / truth.stddev - 1).abs().max()))


MODEL = network(12, 40, 40, 40, 3)
INPUTS = {
    noise: cp.Gaussian.isotropic(torch.zeros(12, dtype=torch.float64), stddev=noise)
    for noise in (0.1, 1.0)
}


@pytest.mark.parametrize("method", [cp.Exact(), cp.Cumulants(), cp.Series(4)])
@pytest.mark.parametrize("noise", INPUTS)
def test_errors_of_layerwise_results_are_found(method: cp.Exact, noise: float) -> None:
    model, x = MODEL, INPUTS[noise]
    y = cp.propagate(model, x, method)
    assert y.error is not None
    true = true_error(y, model, x)
    assert true < 2 * y.error.largest + 0.006  # of the truth
    assert y.error.largest < 20 * true + 0.01
    assert y.error.mean.shape == y.error.stddev.shape == y.mean.shape


def test_linear_networks_have_no_error() -> None:
    y = cp.propagate(nn.Linear(12, 3).double().requires_grad_(False), gaussian(12), cp.Exact())
    assert y.error is not None
    assert y.error.largest < 1e-12


def test_an_answer_that_is_off_by_a_factor_is_found_at_points() -> None:
    """Variances alone do not know that these cancel; third cumulants know it as well."""

    def model(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        return (torch.cat([y, -y], -1) + 0).sum(-1, keepdim=True) + 0.1 * x[..., :1]

    x = cp.Gaussian.isotropic(torch.zeros(20, dtype=torch.float64), stddev=1.0)
    y = cp.propagate(model, x, cp.AssumedDensity())
    assert float(y.stddev) > 10 * 0.1
    assert y.error is not None
    assert y.error.largest_stddev > 5


def test_the_error_is_estimated_once_and_when_it_is_asked_for() -> None:
    calls = 0

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return torch.relu(x)

    y = cp.propagate(Counting(), gaussian(12), cp.Exact())
    before = calls
    assert str(y) == repr(y)
    assert calls == before
    error = y.error
    assert error is not None
    assert calls > before
    after = calls
    assert y.error is error
    assert calls == after
    assert str(y) == f"{y!r}\n{error}"


def test_nothing_is_estimated_of_a_model_that_has_changed_since() -> None:
    model = network(12, 8, 2)
    y = cp.propagate(model, gaussian(12), cp.Exact())
    model[0].weight.add_(1)
    assert y.error is None


def test_errors_are_estimated_in_the_modes_of_the_call() -> None:
    """Dropout alone is exact; without it, a check at points would find a variance of zero."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 1)).double().eval()
    x = gaussian(4)
    with cp.dropout_active(model):
        y = cp.propagate(model.requires_grad_(False), x, cp.Exact())
    assert y.error is not None
    assert y.error.largest < 1e-12
    assert not model[1].training


def test_rounding_is_an_error_of_layers() -> None:
    """In float32, the last bit of 1 is an eighth of the standard deviation of 1 + 1e-6 z."""
    x = cp.Gaussian.isotropic(torch.zeros(2), stddev=1e-6)
    y = cp.propagate(lambda z: torch.relu(z + 1), x, cp.Exact())
    assert y.error is not None
    assert 0.1 < y.error.largest_mean < 1
    double = cp.propagate(lambda z: torch.relu(z + 1), x.to(torch.float64), cp.Exact())
    assert double.error is not None
    assert double.error.largest_mean < 1e-8


def test_errors_follow_the_elements() -> None:
    model = network(12, 8, 5)
    y = cp.propagate(model, gaussian(12, batch=(3,)), cp.Exact())
    part, one, single = y.marginal([4, 1]), y[2], y.to(torch.float32)
    assert y.error is not None
    assert part.error is not None
    assert one.error is not None
    assert single.error is not None
    assert torch.equal(part.error.stddev, y.error.stddev[..., [4, 1]])
    assert torch.equal(one.error.mean, y.error.mean[2])
    assert single.error.mean.dtype == torch.float32
    assert y.with_moments(mean=y.mean + 1).error is None


@pytest.mark.parametrize("asked", [False, True])
def test_results_are_copied_and_pickled(asked: bool) -> None:
    y = cp.propagate(network(12, 8, 2), gaussian(12), cp.Exact())
    if asked:
        assert y.error is not None
    saved = pickle.loads(pickle.dumps(y))
    assert (saved.error is not None) is asked
    copied = copy.deepcopy(y)
    assert copied.error is not None
    for again in (saved, copied):
        assert torch.equal(again.mean, y.mean)


def test_several_outputs_have_errors_of_their_own() -> None:
    def model(x: Tensor) -> dict[str, Tensor]:
        return {"linear": 2 * x, "other": torch.exp(torch.relu(x).sum(-1, keepdim=True))}

    y = cp.propagate(model, gaussian(12, scale=0.1), cp.Exact())
    assert y["linear"].error.largest < 1e-12
    assert y["other"].error.largest > 0.005


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (3.4e-4, "0.034 %"), (0.012, "1.2 %"), (0.12, "12 %"), (2.5, "250 %"),
     (31.0, "a factor of 31")],
)  # fmt: skip
def test_shares_are_printed_in_two_digits(share: float, text: str) -> None:
    assert in_percent(share) == text


def test_an_error_is_printed_on_two_short_lines_and_never_as_nothing() -> None:
    """A page of 1,000 pixels shows 120 characters of code; rounding alone is not 0 %."""
    error = cp.ErrorEstimate(torch.tensor([0.0, 1.74e-6]), torch.zeros(2), "from evaluations")
    assert str(error).splitlines() == [
        "estimated error: means up to 0.00017 % of a standard deviation, standard deviations up to "
        "0.0001 %",
        "(from evaluations)",
    ]
    assert error.sentence == str(error).replace("\n", " ")
    unknown = torch.full((2,), torch.nan)
    error = cp.ErrorEstimate(unknown, unknown, "nothing to compare with")
    assert error.sentence == "estimated error: not known (nothing to compare with)"


@pytest.mark.parametrize("stddev", [0.0, 0.1])
def test_a_constant_output_has_no_error(stddev: float) -> None:
    """It is rounded, and has no deviation that the rounding could be counted in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    model.eval().requires_grad_(requires_grad=False)
    model[2].weight[1] = 0  # type: ignore[index, operator]
    y = cp.propagate(model, cp.Gaussian.isotropic(torch.randn(3), stddev=stddev))
    assert y.error is not None
    assert y.error.mean[1] == y.error.stddev[1] == 0
    assert y.error.largest < 0.01
