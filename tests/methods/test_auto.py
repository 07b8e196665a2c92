"""The default: what it chooses, how good that is, and what it says of it."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import covprop as cp
from covprop.carriers.third_cumulant import PARTLY
from covprop.methods import Network, accuracy, choice
from tests.gaussians import gaussian, numbers
from tests.methods.test_accuracy import network, true_error


def isotropic(size: int, noise: float) -> cp.Gaussian:
    return cp.Gaussian.isotropic(numbers(size, seed=3), stddev=noise)


class Cancelling(nn.Module):
    """x / 100 + relu(1 relu(x)) - relu(x), summed: layers that cancel, which are not Gaussian."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.same = nn.Linear(inputs, inputs, bias=False).double().requires_grad_(False)
        self.same.weight[:] = torch.eye(inputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(x)
        return (x / 100 + torch.relu(self.same(hidden)) - hidden).sum(-1, keepdim=True)


def test_a_single_number_without_a_batch() -> None:
    y = cp.propagate(lambda x: (x[0] / x[1]).square(), isotropic(2, 0.001))
    assert y.mean.shape == ()
    assert y.error is not None
    assert y.error.largest < choice.GOOD


@pytest.mark.parametrize("tolerance", [None, 0.01])
def test_a_batch_of_single_numbers(tolerance: float | None) -> None:
    """What a regressor of one output returns behind `squeeze(-1)`."""
    x = gaussian(3, batch=(2,), scale=0.3)
    for model in (lambda x: x.sum(-1).tanh(), lambda x: (x * x).sum(-1).sin()):
        y = cp.propagate(model, x, cp.Auto(tolerance))
        assert y.mean.shape == (2,)
        for i, element in enumerate(x):
            alone = cp.propagate(model, element, cp.Auto(tolerance))
            assert_close(y[i].mean, alone.mean, rtol=0.0, atol=0.01 * float(alone.stddev))
            assert_close(y[i].stddev, alone.stddev, rtol=0.01, atol=0.0)


@pytest.mark.parametrize(
    "method",
    [cp.Auto(), cp.Auto(0.01), cp.GaussianLayers(), cp.Cumulants(), cp.Sketched(16), cp.Split(),
     cp.AssumedDensity(), cp.Linearized(), cp.Unscented(), cp.QuasiMonteCarlo(256),
     cp.MonteCarlo(10), cp.ControlVariate(128)],
)  # fmt: skip
def test_a_batch_of_no_elements_gives_one(method: cp.Auto) -> None:
    mean = torch.zeros(0, 3, dtype=torch.float64)
    x = cp.Gaussian(mean, torch.zeros(0, 3, 3, dtype=torch.float64))
    for model in (network(3, 5, 2), lambda x: x.tanh().sum(-1)):
        y = cp.propagate(model, x, method)
        assert y.mean.shape == model(mean).shape
        if y.error is not None:
            assert not y.error.mean.numel()
            assert "inf" not in str(y)


def test_indices_of_means_beside_a_result_are_warned_of() -> None:
    """They have no estimate, so that nothing else would tell that they are random."""
    with pytest.warns(cp.ApproximationWarning, match="in the order of their means"):
        values, indices = cp.propagate(lambda x: x.topk(2, -1), isotropic(4, 1.0))
    assert isinstance(values, cp.Gaussian)
    assert torch.equal(indices, numbers(4, seed=3).topk(2).indices)


def test_few_inputs_are_evaluated_at_points() -> None:
    y = cp.propagate(network(4, 30, 30, 30, 2), isotropic(4, 2.0))
    assert isinstance(y.method, cp.QuasiMonteCarlo)
    assert y.error is not None
    assert y.error.largest <= choice.GOOD
    assert any("evaluat" in note for note in y.notes)
    assert "estimated error" in str(y)


def test_a_covariance_of_low_rank_counts_as_few_inputs() -> None:
    factor = numbers(30, 2)
    x = cp.Gaussian(numbers(30, seed=1), factor @ factor.mT)
    model = network(30, 20, 20, 20, 2)
    assert isinstance(cp.propagate(model, x).method, cp.QuasiMonteCarlo)
    low = cp.Gaussian.low_rank(numbers(30, seed=1), factor)
    assert isinstance(cp.propagate(model, low).method, cp.QuasiMonteCarlo)


@pytest.mark.parametrize("inputs", [1, 4, 20])
def test_one_hidden_layer_is_exact(inputs: int) -> None:
    """Its input is Gaussian, so that there is nothing to approximate."""
    model, x = network(inputs, 30, 2), isotropic(inputs, 2.0)
    y = cp.propagate(model, x)
    exact = cp.propagate(model, x, cp.GaussianLayers())
    assert_close(y.mean, exact.mean, rtol=1e-9, atol=1e-12)
    assert_close(y.covariance_matrix, exact.covariance_matrix, rtol=1e-9, atol=1e-12)
    assert y.error is not None
    assert y.error.largest < 1e-9


def test_many_inputs_go_from_layer_to_layer() -> None:
    y = cp.propagate(network(20, 40, 40, 3), isotropic(20, 0.1))
    assert isinstance(y.method, cp.Cumulants)
    assert y.error is not None
    assert y.error.largest <= choice.GOOD


@pytest.mark.parametrize("method", [cp.Exact, cp.Sketched])
def test_what_takes_too_much_is_replaced(monkeypatch: pytest.MonkeyPatch, method: type) -> None:
    work = cp.plan(network(20, 40, 40, 3), isotropic(20, 0.1), method=cp.Exact()).work
    for module in (choice, accuracy):
        monkeypatch.setattr(module, "LAYER_WORK", work if method is cp.Exact else 0.0)
    monkeypatch.setattr(choice, "POINT_WORK", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cp.ApproximationWarning)
        y = cp.propagate(network(20, 40, 40, 3), isotropic(20, 0.1))
    assert isinstance(y.method, cp.ControlVariate)  # the check, which is better
    assert isinstance(y.method.base, method)
    assert y.error is not None
    assert 0 < y.error.largest < 0.05
    again = cp.propagate(network(20, 40, 40, 3), isotropic(20, 0.1))
    assert torch.equal(y.covariance_matrix, again.covariance_matrix)


@pytest.mark.parametrize("inputs", [3, 12])
def test_networks_that_cancel_are_right(inputs: int) -> None:
    model, x = Cancelling(inputs), isotropic(inputs, 1.0)
    layers = cp.propagate(model, x, cp.Exact())
    assert true_error(layers, model, x) > 1
    assert layers.error is not None
    assert layers.error.largest > 1
    y = cp.propagate(model, x)
    assert true_error(y, model, x) < 0.01


@pytest.mark.parametrize("inputs", [3, 20])
@pytest.mark.parametrize("tolerance", [0.05, 0.01, 0.002])
def test_tolerances_are_kept(inputs: int, tolerance: float) -> None:
    model, x = network(inputs, 40, 40, 2), isotropic(inputs, 1.0)
    y = cp.propagate(model, x, cp.Auto(tolerance))
    assert y.error is not None
    assert y.error.largest <= tolerance
    assert true_error(y, model, x) <= tolerance + 0.007  # of the truth


def test_a_tolerance_out_of_reach_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "TOLERANCE_WORK", 2.0**26)
    with pytest.warns(cp.ApproximationWarning, match="may be off: .* more than 0.01 %"):
        y = cp.propagate(network(4, 30, 30, 2), isotropic(4, 1.0), cp.Auto(1e-4))
    assert y.error is not None
    assert y.error.largest > 1e-4


def test_rough_results_are_warned_of_each_time_at_the_users_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "POINT_WORK", 0.0)
    model, x = nn.Sequential(nn.Identity(), Cancelling(12)), isotropic(12, 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            cp.propagate(model, x)
    found = [one for one in caught if "may be off" in str(one.message)]
    assert [one.filename for one in found] == [__file__] * 2
    assert "from module 1 on; " in str(found[0].message)
    assert "compare with cp.MonteCarlo()" in str(found[0].message)


class LastStep(nn.Module):
    """A recurrent layer, of which the last step counts."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.GRU(3, 4, batch_first=True, dtype=torch.float64).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)[0][:, -1]


def test_rough_recurrent_layers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Third cumulants go through such a layer in other steps than Gaussians do."""
    monkeypatch.setattr(Network, "_takes_larger_batches", lambda *_: False)  # layers alone
    x = cp.Gaussian.isotropic(numbers(2, 4, 3), stddev=10.0, batch_dims=1)
    with pytest.warns(cp.ApproximationWarning, match="may be off: .* from module layer on"):
        cp.propagate(LastStep(), x)


def test_where_rounding_is_the_error_no_more_points_are_taken() -> None:
    """Their error could not fall to the tolerance; here it is a tenth."""
    model = network(4, 30, 30, 2).float()
    model[-1].bias.fill_(100)
    x = cp.Gaussian.isotropic(torch.ones(4), stddev=1e-4)
    with warnings.catch_warnings(record=True):
        y = cp.propagate(model, x, cp.Auto(tolerance=1e-3))
    assert y.error is not None
    assert y.error.largest > 1e-3
    assert y.samples is None or y.samples < choice.FIRST_POINTS


def test_the_same_call_gives_the_same_numbers() -> None:
    model, x = network(4, 30, 30, 30, 2), isotropic(4, 2.0)
    first, again = cp.propagate(model, x), cp.propagate(model, x)
    assert torch.equal(first.covariance_matrix, again.covariance_matrix)
    other = cp.propagate(model, x, cp.Auto(seed=1))
    assert not torch.equal(first.covariance_matrix, other.covariance_matrix)


@pytest.mark.parametrize("inputs", [4, 20])
def test_a_batch_is_its_elements(inputs: int) -> None:
    model, x = network(inputs, 20, 2), gaussian(inputs, batch=(3,), scale=0.01)
    y = cp.propagate(model, x)
    for i, element in enumerate(x):
        alone = cp.propagate(model, element)
        assert_close(y[i].mean, alone.mean)
        assert_close(y[i].covariance_matrix, alone.covariance_matrix)
        assert y[i].method == alone.method


def test_values_do_not_depend_on_autograd_and_gradients_are_those_of_layers() -> None:
    model, variance = network(4, 20, 2), torch.full((4,), 0.1, dtype=torch.float64)
    expected = cp.propagate(
        model, cp.Gaussian.diagonal(torch.zeros_like(variance), variance=variance)
    )
    gradients = []
    for method in (cp.Auto(), cp.Cumulants()):
        leaf = variance.clone().requires_grad_()
        y = cp.propagate(model, cp.Gaussian.diagonal(torch.zeros_like(leaf), variance=leaf), method)
        gradients += torch.autograd.grad(y.variance.sum() + y.mean.sum(), leaf)
        if isinstance(method, cp.Auto):
            assert_close(y.covariance_matrix, expected.covariance_matrix)
            assert y.error is not None
    assert_close(*gradients)


def test_operations_without_a_rule_are_evaluated() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(x.reshape(*x.shape[:-1], 4, 4), ord="nuc")[..., None]

    x = isotropic(16, 0.1)
    with pytest.raises(cp.UnsupportedOperation):
        cp.propagate(model, x, cp.Exact())
    y = cp.propagate(model, x)
    assert isinstance(y.method, cp.QuasiMonteCarlo)
    assert any("no other way" in note for note in y.notes)
    assert y.error is not None
    assert y.error.largest <= choice.GOOD


def test_what_cannot_be_evaluated_either_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "POINT_WORK", 0.0)
    with pytest.raises(cp.UnsupportedOperation, match="nuc"):
        cp.propagate(lambda x: torch.linalg.matrix_norm(x.reshape(4, 4), ord="nuc"),
                     isotropic(16, 0.1))  # fmt: skip


def test_nests_names_and_constant_outputs() -> None:
    def model(x: Tensor, *, shift: Tensor) -> dict[str, Any]:
        return {"y": torch.relu(x) + shift, "two": (x, 3), "shape": torch.ones(2)}

    y = cp.propagate(model, isotropic(3, 0.2), shift=gaussian(3))
    assert isinstance(y["y"], cp.Gaussian)
    assert y["two"][1] == 3
    assert isinstance(y["shape"], Tensor)
    assert y["two"][0].error.largest < 1e-12


def test_dropout_and_inputs_that_do_not_vary() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 1)).double()
    x = cp.Gaussian.constant(numbers(4))
    with cp.dropout_active(model):
        y = cp.propagate(model.requires_grad_(False), x)
        exact = cp.propagate(model, x, cp.Exact())
    assert_close(y.variance, exact.variance)
    still = cp.propagate(torch.relu, cp.Gaussian.constant(numbers(4)))
    assert torch.equal(still.variance, torch.zeros(4, dtype=torch.float64))


def test_small_noise_in_float32_is_not_left_to_rounding() -> None:
    """Evaluations round by 1e-7 of the output, which is all of the noise here."""
    model = network(4, 30, 2).float()
    x = cp.Gaussian.isotropic(torch.ones(4), stddev=1e-7)
    y = cp.propagate(model, x)
    double = cp.propagate(
        network(4, 30, 2), cp.Gaussian.isotropic(torch.ones(4).double(), stddev=1e-7)
    )
    assert_close(y.stddev.double(), double.stddev, rtol=1e-2, atol=0)


@pytest.mark.parametrize("inputs", [8, 12])
def test_what_points_miss_and_layers_know_is_said(inputs: int) -> None:
    """1e-12 of the inputs are behind the kink, and have nearly all of the variance."""
    unit = torch.ones(inputs, dtype=torch.float64) / inputs**0.5

    def model(x: Tensor) -> Tensor:
        return x[..., :1] + 1e8 * torch.relu((x @ unit)[..., None] - 7)

    x = cp.Gaussian.isotropic(torch.zeros(inputs, dtype=torch.float64), stddev=1.0)
    with pytest.warns(cp.ApproximationWarning, match="may be off"):
        y = cp.propagate(model, x)
    exact = cp.propagate(model, x, cp.GaussianLayers())
    assert_close(y.variance, exact.variance, rtol=1e-6, atol=0)


def test_evaluations_that_round_away_the_noise_are_doubted() -> None:
    """In float32, 1e6 has no digits left for noise of 0.01."""
    model = nn.Linear(2, 1, bias=False).requires_grad_(False)
    model.weight[:] = torch.tensor([[1.0, -1.0]])
    with pytest.warns(cp.ApproximationWarning, match="may be off"):
        y = cp.propagate(model, cp.Gaussian.isotropic(torch.full((2,), 1e6), stddev=0.01))
    assert abs(float(y.stddev) / (0.01 * 2**0.5) - 1) < 1e-5


def test_what_is_constant_at_all_points_is_left_to_layers() -> None:
    def model(x: Tensor) -> Tensor:
        return 0.1 + (x.sum(-1, keepdim=True) / 3 > 7.5).double()

    x = cp.Gaussian.isotropic(torch.zeros(9, dtype=torch.float64), stddev=1.0)
    exact = cp.propagate(model, x, cp.GaussianLayers())
    assert_close(cp.propagate(model, x).variance, exact.variance)


def test_orders_that_agree_by_symmetry_are_not_taken_as_exact() -> None:
    """Third cumulants of tanh(u) and v are zero, and Var(tanh(u) v) has a fourth one."""
    weight = torch.tensor([0.8, 0.6], dtype=torch.float64)

    def model(z: Tensor) -> Tensor:
        return torch.tanh(z[:1]) * (z @ weight)[None]

    u = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    density = torch.exp(-(u**2) / 2)
    density = density / density.sum()
    mean = (density * torch.tanh(u) * 0.8 * u).sum()
    square = (density * torch.tanh(u) ** 2 * ((0.8 * u) ** 2 + 0.36)).sum()
    stddev = (square - mean**2).sqrt()
    x = cp.Gaussian.isotropic(torch.zeros(2, dtype=torch.float64), stddev=1.0)
    layers = cp.propagate(model, x, cp.Cumulants())
    assert PARTLY in layers.notes
    assert abs(float(layers.stddev) - float(stddev)) > 0.03 * stddev
    y = cp.propagate(model, x)
    assert isinstance(y.method, cp.QuasiMonteCarlo)
    assert y.error is not None
    assert y.error.largest < 0.005
    assert abs(float(y.mean) - float(mean)) < 0.005 * stddev
    assert abs(float(y.stddev) - float(stddev)) < 0.005 * stddev


def test_an_output_that_does_not_vary_costs_the_others_nothing() -> None:
    model, x = network(4, 30, 30, 30, 2), isotropic(4, 2.0)
    alone = cp.propagate(model, x)
    both = cp.propagate(lambda z: torch.cat([model(z), 0 * z[..., :1]], -1), x)
    assert_close(both.stddev[:2], alone.stddev)
    assert both.error is not None
    assert both.error.largest <= choice.GOOD


def test_gradients_of_rough_layers_are_warned_of() -> None:
    model = Cancelling(3)
    mean = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    with pytest.warns(cp.ApproximationWarning, match="gradients of this result come from"):
        y = cp.propagate(model, cp.Gaussian.isotropic(mean, stddev=1.0))
    assert y.mean.requires_grad


def test_small_directions_of_a_factor_count() -> None:
    factor = torch.tensor([[1.0, 1e-8], [1.0, -1e-8]], dtype=torch.float64)
    x = cp.Gaussian.low_rank(torch.zeros(2, dtype=torch.float64), factor)
    y = cp.propagate(lambda z: 1e8 * (z[..., :1] - z[..., 1:]), x, cp.QuasiMonteCarlo(64))
    assert abs(float(y.stddev) - 2) < 1e-6


@pytest.mark.parametrize("tolerance", [0, 1, -0.1, 5])
def test_tolerances_that_cannot_be_are_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance is a share"):
        cp.Auto(tolerance)


class Counting(nn.Module):
    """A small network that counts its evaluations; vmap cannot do one with a choice by number."""

    def __init__(self, choosing: bool) -> None:
        super().__init__()
        self.inner, self.choosing, self.calls = network(3, 20, 20, 1), choosing, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.choosing and not isinstance(x, cp.GaussianTensor) and float(x.sum()) > 1e9:
            return -self.inner(x)
        result: Tensor = self.inner(x)
        return result


def test_a_small_network_is_evaluated_three_times() -> None:
    """At the means, beside them, and at all points together."""
    model = Counting(choosing=False)
    with torch.no_grad():
        y = cp.propagate(model, isotropic(3, 0.1), cp.Auto(0.05))
    assert isinstance(y.method, cp.QuasiMonteCarlo)
    assert model.calls == 3


def test_models_that_vmap_cannot_do_are_not_evaluated_point_by_point() -> None:
    model = Counting(choosing=True)
    y = cp.propagate(model, isotropic(3, 0.1), cp.Auto(0.05))
    assert isinstance(y.method, cp.Cumulants)
    assert model.calls < 2 * accuracy.FEW_POINTS


def test_points_without_a_check_say_how_far_they_reach() -> None:
    model, x = network(3, 20, 20, 1), isotropic(3, 0.1)
    y = cp.propagate(model, x, cp.Auto(0.05))
    assert isinstance(y.method, cp.QuasiMonteCarlo)
    assert any("standard deviations from the mean is not seen" in note for note in y.notes)
    assert 4 < y.method.furthest(3) < 12
    assert not any("is not seen" in note for note in cp.propagate(model, x).notes)


@pytest.mark.parametrize("tolerance", [None, 0.002])
@pytest.mark.parametrize(
    "error", [cp.QuadratureError, cp.TooLarge, cp.InconsistentBranches, cp.UnsupportedOperation]
)
@pytest.mark.parametrize("inputs", [3, 12])
def test_where_layers_fail_points_are_the_answer(
    monkeypatch: pytest.MonkeyPatch, inputs: int, error: type[Exception], tolerance: float | None
) -> None:
    def fails(*_: object) -> None:
        raise error("this is why")

    model, x = network(inputs, 30, 30, 2), isotropic(inputs, 1.0)
    for method in (cp.Cumulants, cp.GaussianLayers):
        monkeypatch.setattr(method, "passes", fails)
    y = cp.propagate(model, x, cp.Auto(tolerance))
    assert isinstance(y.method, cp.QuasiMonteCarlo)
    assert true_error(y, model, x) < 0.01
    assert any("is not seen" in note for note in y.notes)
    if tolerance is None:
        assert any("no answer from layer to layer: this is why" in note for note in y.notes)
    monkeypatch.setattr(choice, "POINT_WORK", 0.0)
    monkeypatch.setattr(choice, "TOLERANCE_WORK", 0.0)
    with pytest.raises(error, match="this is why"):
        cp.propagate(model, x, cp.Auto(tolerance))


def test_where_third_cumulants_fail_gaussian_layers_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise cp.QuadratureError("this is why")

    monkeypatch.setattr(cp.Cumulants, "passes", fails)
    y = cp.propagate(network(20, 40, 40, 3), isotropic(20, 0.01))
    assert isinstance(y.method, cp.ControlVariate)  # the check, which is better
    assert isinstance(y.method.base, cp.GaussianLayers)
    assert any("third cumulants cannot be followed: this is why" in note for note in y.notes)


@pytest.mark.parametrize("inputs", [2, 12])
def test_points_outside_the_domain_of_a_function_leave_it_to_layers(inputs: int) -> None:
    """Points of two directions reach beyond ten deviations, where a logarithm is not defined."""
    mean = torch.full((inputs,), 3.0, dtype=torch.float64)
    y = cp.propagate(torch.log, cp.Gaussian.isotropic(mean, stddev=0.3))
    assert abs(float(y.stddev[0]) - 0.1014) < 0.002  # by quadrature
    with pytest.raises(cp.UnsupportedOperation, match="bound its argument"):
        cp.propagate(torch.log, cp.Gaussian.isotropic(mean, stddev=1.0))


def test_an_expansion_that_no_point_can_check_has_no_known_error() -> None:
    """Both orders expand a logarithm alike, and points reach its pole: 5 % off, not 0."""
    x = cp.Gaussian.isotropic(torch.ones(1, dtype=torch.float64), stddev=0.19)
    with pytest.warns(cp.ApproximationWarning, match="is not known"):
        y = cp.propagate(torch.log, x)
    z = torch.linspace(0.01, 3, 100_001, dtype=torch.float64)
    density = torch.exp(-(((z - 1) / 0.19) ** 2) / 2)
    density = density / density.sum()
    mean = (density * z.log()).sum()
    stddev = (density * (z.log() - mean) ** 2).sum().sqrt()
    assert abs(float(y.stddev) - float(stddev)) > 0.04 * stddev
    assert y.error is not None
    assert math.isnan(y.error.largest)


@pytest.mark.parametrize("inputs", [5, 50])
@pytest.mark.parametrize("method", [cp.Auto(), cp.Auto(0.05)])
def test_heavy_tails_do_not_refute_layers_that_are_exact(inputs: int, method: cp.Auto) -> None:
    """The variance of exp(4 z) is due to z = 8: no point has seen it."""
    unit = torch.ones(inputs, dtype=torch.float64) / inputs**0.5
    x = cp.Gaussian.isotropic(torch.zeros_like(unit), stddev=1.0)
    y = cp.propagate(lambda z: torch.exp(4 * (z @ unit))[..., None], x, method)
    expected = torch.tensor([(16 + math.log(math.expm1(16))) / 2], dtype=torch.float64).exp()
    assert_close(y.stddev, expected)


def test_a_variance_that_does_not_exist_is_said() -> None:
    x = cp.Gaussian.isotropic(torch.full((2,), 3.0, dtype=torch.float64), stddev=1.0)
    with pytest.warns(cp.ApproximationWarning, match="a few evaluations have most of a variance"):
        y = cp.propagate(torch.reciprocal, x)
    assert y.error is not None
    assert y.error.largest_stddev == math.inf


def test_points_for_a_batch_are_those_that_most_of_it_needs() -> None:
    model = network(2, 30, 30, 1)
    noise = torch.full((40,), 0.01, dtype=torch.float64)
    noise[7] = 30.0
    x = cp.Gaussian.isotropic(0.3 * numbers(40, 2, seed=1), stddev=noise, batch_dims=1)
    y, hard = cp.propagate(model, x), cp.propagate(model, x[7])
    assert y.error is not None
    assert hard.samples is not None
    assert (y.samples or 0) < hard.samples
    assert float(y.error.stddev[7]) == y.error.largest_stddev > choice.GOOD
    within = cp.propagate(model, x, cp.Auto(0.005))
    assert within.error is not None
    assert within.error.largest <= 0.005
