"""What a comparison takes for the truth by default: as exact as plain samples, and sooner."""

from typing import Any

import pytest
import torch
from torch import nn

import covprop as cp
from covprop.diagnostics.compare import LEAST, SAMPLES
from tests.diagnostics.test_compare import gaussian, generator, network, relu_network
from tests.layers import propagate

COMPARE = "covprop.diagnostics.compare"


def compared(model: Any, x: cp.Gaussian, **options: Any) -> cp.Comparison:
    options = {"methods": cp.Linearized(), "generator": generator(3)} | options
    return cp.compare(model, x, show=False, **options)


def smooth() -> nn.Sequential:
    return network(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize("stddev", [0.03, 0.1, 0.2])
def test_a_control_variate_has_the_standard_errors_of_many_more_plain_samples(
    stddev: float,
) -> None:
    model, x = smooth(), gaussian(stddev=stddev)
    comparison = compared(model, x)
    truth = comparison.reference.gaussian
    assert isinstance(truth.method, cp.ControlVariate)
    assert LEAST <= comparison.reference.samples <= SAMPLES / 2
    plain = propagate(model, x, cp.MonteCarlo(SAMPLES, generator()))
    assert bool((truth.mean_stderr <= plain.mean_stderr).all())
    of_variance, of_plain = (y.covariance_stderr.diagonal() for y in (truth, plain))
    assert bool((of_variance <= of_plain).all())
    error = (truth.covariance_stderr.square() + plain.covariance_stderr.square()).sqrt()
    assert bool(((truth.covariance_matrix - plain.covariance_matrix).abs() < 5 * error).all())


def test_it_is_what_propagate_gives_and_no_method_has_a_part_in_it() -> None:
    model, x = smooth(), gaussian(stddev=0.1)
    first = compared(model, x).reference
    method = first.gaussian.method
    assert method == cp.ControlVariate(first.samples)
    expected = propagate(model, x, cp.ControlVariate(first.samples, generator=generator(3)))
    assert torch.equal(first.gaussian.covariance_matrix, expected.covariance_matrix)
    other = compared(model, x, methods=[cp.Exact(), cp.Wu2019()]).reference
    assert torch.equal(first.gaussian.covariance_matrix, other.gaussian.covariance_matrix)


def test_a_truth_with_a_wrong_method_as_control_finds_that_method_out() -> None:
    """Its tanh is 3 % too large."""
    large = cp.activations.Quadrature(lambda y: 1.03 * torch.tanh(y))
    wrong = cp.Exact(activations={torch.tanh: large})
    model = network(nn.Linear(3, 3), nn.Tanh())
    truth = cp.ControlVariate(20_000, wrong, generator())
    methods = {"wrong": wrong, "right": cp.Exact()}
    found = compared(model, gaussian(stddev=0.1), methods=methods, reference=truth)
    verdicts = [row.agreement.verdict for row in found.rows if row.agreement is not None]
    assert "standard deviations 3" in verdicts[0]
    assert verdicts[1] == "within sampling error"


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_bent_network_is_sampled_as_it_is(batch: tuple[int, ...]) -> None:
    model, x = relu_network(), gaussian(*batch, stddev=3.0)
    reference = compared(model, x).reference
    expected = propagate(model, x, cp.MonteCarlo(SAMPLES, generator(3)))
    assert torch.equal(reference.gaussian.covariance_matrix, expected.covariance_matrix)
    assert compared(model, x).reference.reason == (
        "plain samples, as a control variate by cp.GaussianLayers() would save less than half"
    )


def test_samples_of_the_users_own_number_are_plain_ones() -> None:
    comparison = compared(smooth(), gaussian(stddev=0.1), samples=500)
    assert comparison.reference.name == "MonteCarlo(500)"
    assert comparison.reference.reason == ""


def test_where_exact_costs_as_much_as_samples_the_jacobian_at_the_mean_has_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = smooth(), gaussian(stddev=0.1)
    monkeypatch.setattr(f"{COMPARE}.WIDEST", 7)
    monkeypatch.setattr(cp.Exact, "activate", lambda *_: pytest.fail("it was propagated"))
    comparison = compared(model, x)
    method = comparison.reference.gaussian.method
    assert isinstance(method, cp.ControlVariate)
    assert method.base == cp.Linearized()
    assert comparison.reference.reason.startswith(
        "a control variate by cp.Linearized(), unbiased even where that is wrong"
    )


def test_an_operation_without_a_rule_has_a_control_variate_all_the_same() -> None:
    x = cp.Gaussian.isotropic(torch.tensor([2.0, 3.0]).double(), stddev=0.05)
    method = compared(torch.lgamma, x).reference.gaussian.method
    assert isinstance(method, cp.ControlVariate)
    assert method.base == cp.Linearized()


def test_where_nothing_can_be_linearised_samples_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no derivative")

    monkeypatch.setattr("covprop.methods.linearized.linearize", fail)
    monkeypatch.setattr(f"{COMPARE}.WIDEST", 0)
    comparison = compared(smooth(), gaussian(stddev=0.1), methods=cp.Exact())
    assert comparison.reference.name == "MonteCarlo(75,000)"
    assert "as neither cp.GaussianLayers() nor cp.Linearized()" in comparison.reference.reason


def test_what_few_samples_never_saw_is_looked_for_with_all() -> None:
    """A unit that is active once in 3,000 samples: a pilot that missed it would trust itself."""
    x = cp.Gaussian(torch.tensor([3.0, -3.4]).double(), torch.eye(2).double())
    reference = compared(torch.relu, x).reference
    assert reference.name == "MonteCarlo(75,000)"
    assert reference.reason.startswith("plain samples, as few do not tell")


def test_few_outputs_of_fewer_inputs_keep_a_proper_covariance() -> None:
    model = network(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 3))
    x = cp.Gaussian.isotropic(torch.zeros(1).double(), stddev=0.3)
    reference = compared(model, x).reference
    values = torch.linalg.eigvalsh(reference.gaussian.covariance_matrix)
    assert float(values.min()) > -1e-12 * float(values.max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_that_never_vary_are_compared(dtype: torch.dtype) -> None:
    x = gaussian(stddev=0.1).to(dtype)
    for function in (lambda x: 0 * x, lambda x: torch.relu(x - 100)):
        comparison = compared(function, x, methods=cp.Exact())
        assert comparison.reference.name == "MonteCarlo(75,000)"
        assert comparison.rows[0].agreement is not None
        assert comparison.rows[0].agreement.verdict == "within sampling error"


def test_nothing_global_is_drawn_with_a_generator() -> None:
    model, x = smooth(), gaussian(stddev=0.1)
    state = torch.get_rng_state()
    compared(model, x)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_network_that_draws_itself_is_sampled_with_what_it_draws() -> None:
    dropping = nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.2), nn.Linear(40, 2)).double()
    dropping = dropping.requires_grad_(requires_grad=False).eval()
    torch.manual_seed(0)
    with cp.dropout_active(dropping):
        (row,) = compared(dropping, gaussian(stddev=0.3), methods=cp.Exact()).rows
    assert row.agreement is not None
    assert row.agreement.verdict == "within sampling error"


def test_warnings_of_a_rough_base_are_not_of_interest() -> None:
    """Softmax by the delta method warns, and Linearized, which is compared, knows no rules."""
    x = cp.Gaussian.isotropic(torch.zeros(3).double(), stddev=2.0)
    with pytest.warns(cp.ApproximationWarning):
        propagate(torch.nn.Softmax(-1), x)
    assert compared(torch.nn.Softmax(-1), x).rows[0].refusal == ""
