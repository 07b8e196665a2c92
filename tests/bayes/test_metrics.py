"""Measures of predictions against uncertainty-toolbox, scikit-learn, and what must come out."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import uncertainty_toolbox as uct
from scipy import stats
from sklearn.metrics import brier_score_loss, roc_auc_score
from torch import Tensor

import covprop as cp
from covprop.bayes import HeteroskedasticGaussian, HomoskedasticGaussian, Prediction, metrics
from tests.oracles import assert_close

SCALES = [0.4, 1.0, 2.5]  # overconfident, calibrated, underconfident


def predictions(scale: float, count: int = 400) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, deviation and target; the deviations are told `scale` times too large."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(count, generator=generator, dtype=torch.float64)
    stddev = 0.2 + torch.rand(count, generator=generator, dtype=torch.float64)
    target = mean + stddev * torch.randn(count, generator=generator, dtype=torch.float64)
    return mean, scale * stddev, target


def number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


@pytest.mark.parametrize("scale", SCALES)
def test_regression_agrees_with_uncertainty_toolbox(scale: float) -> None:
    mean, stddev, target = predictions(scale)
    numbers = [tensor.numpy() for tensor in (mean, stddev, target)]
    assert_close(
        metrics.crps(mean, stddev, target), number(uct.crps_gaussian(*numbers)), rtol=1e-12
    )
    assert_close(metrics.sharpness(stddev), number(uct.sharpness(numbers[1])), rtol=1e-12)
    accuracy = uct.prediction_error_metrics(numbers[0], numbers[2])["rmse"]
    assert_close(metrics.rmse(mean, target), number(accuracy), rtol=1e-12)
    # They count mean - target below a quantile, which is ours from the other side. Their levels
    # are 0, 1 / (n - 1), ... 1, of which the ends are always right.
    options = {"num_bins": 101, "prop_type": "quantile"}
    expected, observed = uct.get_proportion_lists_vectorized(*numbers, **options)
    probability = metrics.gaussian_cumulative(mean, stddev, target)
    curve = metrics.calibration_curve(1 - probability)
    assert_close(curve.expected, torch.from_numpy(expected[1:-1]), rtol=1e-12)
    assert_close(curve.observed, torch.from_numpy(observed[1:-1]), atol=1e-12)
    theirs = uct.mean_absolute_calibration_error(*numbers, vectorized=True, **options)
    assert_close(curve.error * 99, number(theirs * 101), rtol=1e-9)
    intervals = uct.get_proportion_lists_vectorized(*numbers, num_bins=101, prop_type="interval")
    for place in (10, 50, 90):
        level, share = float(intervals[0][place]), intervals[1][place]
        assert_close(metrics.coverage(probability, level), number(share), rtol=1e-12)


@pytest.mark.parametrize("scale", SCALES)
def test_log_density_agrees_with_uncertainty_toolbox(scale: float) -> None:
    mean, stddev, target = predictions(scale)
    output = cp.Gaussian.diagonal(
        mean[:, None], variance=(stddev.square() - 1e-4)[:, None], batch_dims=1
    )
    noise = HomoskedasticGaussian(torch.tensor(0.01, dtype=torch.float64), learned=False)
    found = metrics.log_predictive_density(noise, output, target)
    theirs = uct.nll_gaussian(mean.numpy(), stddev.numpy(), target.numpy())
    assert_close(found, number(-theirs), rtol=1e-9)


@pytest.mark.parametrize("scale", SCALES)
def test_coverage_is_the_share_within_the_interval(scale: float) -> None:
    mean, stddev, target = predictions(scale)
    probability = metrics.gaussian_cumulative(mean, stddev, target)
    for level in (0.5, 0.9, 0.95):
        low, high = stats.norm(mean.numpy(), stddev.numpy()).interval(level)
        share = np.mean((target.numpy() >= low) & (target.numpy() <= high))
        assert_close(metrics.coverage(probability, level), number(share), rtol=1e-12)
    with pytest.raises(ValueError, match="level"):
        metrics.coverage(probability, 95.0)


def test_calibrated_predictions_are_found_so_and_others_are_not() -> None:
    errors = {}
    for scale in SCALES:
        mean, stddev, target = predictions(scale, 20_000)
        errors[scale] = float(
            metrics.calibration_error(metrics.gaussian_cumulative(mean, stddev, target))
        )
    assert errors[1.0] < 0.01
    assert errors[0.4] > 0.05
    assert errors[2.5] > 0.05
    mean, stddev, target = predictions(1.0, 20_000)
    shares = metrics.coverage(metrics.gaussian_cumulative(mean, stddev, target), 0.9)
    assert float(shares) == pytest.approx(0.9, abs=5 * math.sqrt(0.09 / 20_000))


def test_crps_is_its_integral_and_has_its_limit() -> None:
    """The integral of (F(x) - [x >= t])^2."""
    x = np.linspace(-30, 30, 600_001)
    step = (stats.norm(0.3, 1.7).cdf(x) - (x >= 2.0)) ** 2
    exact = np.trapezoid(step, x)
    one = [torch.tensor([value], dtype=torch.float64) for value in (0.3, 1.7, 2.0)]
    assert_close(metrics.crps(*one), number(exact), atol=2e-4)
    still = torch.zeros(1, dtype=torch.float64)
    assert_close(metrics.crps(one[0], still, one[2]), number(1.7), rtol=1e-12)
    assert_close(metrics.crps(one[0], still + 1e-9, one[2]), number(1.7), rtol=1e-8)


def test_members_are_measured_one_by_one() -> None:
    sets = [predictions(scale) for scale in SCALES]
    mean, stddev, target = (torch.stack(column) for column in zip(*sets, strict=True))
    probability = metrics.gaussian_cumulative(mean, stddev, target)
    for measure, arguments in (
        (metrics.crps, (mean, stddev, target)),
        (metrics.rmse, (mean, target)),
        (metrics.sharpness, (stddev,)),
        (metrics.coverage, (probability,)),
        (metrics.calibration_error, (probability,)),
    ):
        rows = torch.stack([measure(*(a[i] for a in arguments)) for i in range(3)])
        assert_close(measure(*arguments), rows, rtol=1e-12)
    with pytest.raises(ValueError, match="shape of the targets"):
        metrics.rmse(mean[0][:, None], target[0])


@pytest.mark.parametrize("likelihood", [HeteroskedasticGaussian(), HomoskedasticGaussian(0.5)])
def test_cumulative_probability_is_the_integral_of_the_density(likelihood) -> None:
    t = torch.linspace(-40, 40, 16_001, dtype=torch.float64)
    size = likelihood.outputs(1)
    mean = torch.tensor([0.2, -0.4], dtype=torch.float64)[:size].expand(len(t), size)
    matrix = torch.tensor([[0.5, -0.3], [-0.3, 0.8]], dtype=torch.float64)[:size, :size]
    output = cp.Gaussian(mean, matrix.expand(len(t), size, size))
    density = likelihood.log_predictive(output, t).exp().detach()
    middle = (density[1:] + density[:-1]) / 2 * (t[1] - t[0])
    found = likelihood.cumulative(output, t)[1:, 0].detach()
    assert_close(found, middle.cumsum(0), atol=1e-6)  # the error of the trapezoidal rule


@pytest.mark.parametrize(
    ("spread", "correlation", "error"),
    [
        (2.0, 0.0, 1e-12),
        (10.0, 0.0, 1e-8),
        (50.0, 0.0, 1e-3),
        (4.0, 0.99, 1e-12),
        (4.0, 0.999, 1e-5),
    ],
)
@pytest.mark.parametrize("size", [-20.0, 0.0])
def test_cumulative_probability_is_as_near_as_it_says(spread, correlation, error, size) -> None:
    """m ~ N(0, 1) and l ~ N(size, spread^2), correlated; on a grid far finer than its own."""
    z = np.linspace(-10, 10, 200_001)
    t = np.linspace(-3, 3, 13) * (1 if correlation else np.exp((size + spread) / 2))
    own = 1.0 if correlation else 0.0  # a mean that is known shows the noise alone
    noise = own * (1 - correlation**2) + np.exp(size + spread * z)
    inside = stats.norm.cdf((t[:, None] - own * correlation * z) / np.sqrt(noise))
    expected = np.trapezoid(inside * stats.norm.pdf(z), z)
    cross = own * correlation * spread
    matrix = torch.tensor([[own, cross], [cross, spread**2]], dtype=torch.float64)
    mean = torch.tensor([0.0, size], dtype=torch.float64).expand(len(t), 2)
    output = cp.Gaussian(mean, matrix.expand(len(t), 2, 2))
    found = HeteroskedasticGaussian().cumulative(output, torch.from_numpy(t))[:, 0].numpy()
    assert abs(found - expected).max() < error


def test_noise_of_unknown_size_has_tails_that_its_own_cumulative_knows() -> None:
    """Targets drawn from the model: its cumulative is calibrated, a Gaussian's is not."""
    count = 20_000
    generator = torch.Generator().manual_seed(0)
    mean = torch.zeros(count, 2, dtype=torch.float64)
    matrix = torch.tensor([[0.1, 0.0], [0.0, 2.0]], dtype=torch.float64).expand(count, 2, 2)
    output, likelihood = cp.Gaussian(mean, matrix), HeteroskedasticGaussian()
    drawn = output.sample(1, generator)[0]
    noise = torch.randn(count, generator=generator, dtype=torch.float64)
    target = drawn[:, 0] + (drawn[:, 1] / 2).exp() * noise
    own = metrics.calibration_error(likelihood.cumulative(output, target)[:, 0])
    found = likelihood.predict(output)
    gaussian = metrics.gaussian_cumulative(found.mean[:, 0], found.stddev[:, 0], target)
    assert float(own) < 0.01
    assert float(metrics.calibration_error(gaussian)) > 0.03


def classes(count: int = 500) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(count, 4, generator=generator, dtype=torch.float64)
    p = logits.softmax(-1)
    return p, torch.multinomial(p, 1, generator=generator)[:, 0]


def test_classification_measures() -> None:
    p, t = classes()
    confidence, predicted = p.max(-1)
    expected, edges = 0.0, np.linspace(0, 1, 11)
    for low, high in pairwise(edges):
        inside = (confidence.numpy() > low) & (confidence.numpy() <= high)
        if inside.any():
            right = (predicted == t).numpy()[inside].mean()
            expected += inside.mean() * abs(right - confidence.numpy()[inside].mean())
    assert_close(metrics.expected_calibration_error(p, t, bins=10), number(expected), rtol=1e-12)
    assert_close(metrics.accuracy(p, t), number((predicted == t).double().mean()), rtol=1e-12)
    theirs = brier_score_loss(t.numpy(), p.numpy(), labels=range(4), scale_by_half=False)
    assert_close(metrics.brier_score(p, t), number(theirs), rtol=1e-12)
    assert_close(
        metrics.predictive_entropy(p),
        torch.from_numpy(stats.entropy(p.numpy(), axis=1)),
        rtol=1e-12,
    )
    two = metrics.expected_calibration_error(torch.stack([p, p]), t.expand(2, -1), bins=10)
    assert_close(two, torch.full((2,), expected, dtype=torch.float64), rtol=1e-12)


def test_calibrated_classes_are_found_so_and_overconfident_ones_are_not() -> None:
    p, t = classes(50_000)
    sure = (p.log() * 3).softmax(-1)
    assert float(metrics.expected_calibration_error(p, t)) < 0.01
    assert float(metrics.expected_calibration_error(sure, t)) > 0.1
    certain = torch.nn.functional.one_hot(t, 4).double()
    assert float(metrics.expected_calibration_error(certain, t)) == 0


def test_a_confidence_between_two_bins_is_in_the_lower() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [0.51, 0.49, 0.0]], dtype=torch.float64)
    bins = metrics.reliability(p, torch.tensor([0, 0, 1]), bins=4)
    assert bins.share.tolist() == [0.0, 1 / 3, 1 / 3, 1 / 3]
    assert bins.accuracy[1:].tolist() == [1.0, 0.0, 1.0]
    assert bool(bins.accuracy[0].isnan())
    assert float(bins.error) == pytest.approx((0.5 + 0.51) / 3)


def test_auroc_agrees_with_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    unknown = torch.randn(300, generator=generator).add(0.5).mul(4).round()  # with ties
    known = torch.randn(200, generator=generator).mul(4).round()
    labels = np.r_[np.ones(300), np.zeros(200)]
    expected = roc_auc_score(labels, torch.cat([unknown, known]).numpy())
    assert_close(metrics.auroc(unknown, known), number(expected), rtol=1e-12)
    assert float(metrics.auroc(known + 100, known)) == 1
    assert float(metrics.auroc(known, known)) == 0.5
    with pytest.raises(ValueError, match="vectors"):
        metrics.auroc(known, known[:0])
    with pytest.raises(ValueError, match="nan"):
        metrics.auroc(torch.tensor([float("nan"), 1.0]), known)


def test_figures_show_what_they_were_given() -> None:
    mean, stddev, target = predictions(0.4)
    curve = metrics.calibration_curve(metrics.gaussian_cumulative(mean, stddev, target))
    (axis,) = metrics.plot_calibration({"too sure": curve}).axes
    line = axis.lines[-1]
    assert line.get_label() == "too sure"
    assert list(line.get_ydata()[1:-1]) == curve.observed.tolist()
    p, t = classes()
    bins = metrics.reliability(p, t)
    upper, lower = metrics.plot_reliability(bins).axes
    assert len(lower.patches) == 15
    assert np.array_equal(upper.lines[-1].get_ydata(), bins.accuracy.numpy(), equal_nan=True)
    x = torch.tensor([2.0, 0.0, 1.0])
    column = torch.tensor([[1.0], [3.0], [2.0]])
    prediction = Prediction(column, column, column)
    (axis,) = metrics.plot_intervals(x, prediction, (x, column)).axes
    assert list(axis.lines[0].get_ydata()) == [3.0, 2.0, 1.0]
    top = axis.collections[0].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(3 + 2 * math.sqrt(6))
    with pytest.raises(ValueError, match="one curve"):
        metrics.plot_calibration(metrics.calibration_curve(torch.rand(2, 50)))
