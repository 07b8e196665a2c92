"""torch.distributions in and out of a propagation."""

from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.distributions import (
    Categorical,
    Distribution,
    Independent,
    LowRankMultivariateNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    kl_divergence,
)

import covprop as cp
from tests.layers import propagate
from tests.oracles import assert_close

D = torch.float64
SIZE, OUTPUTS = 4, 3
SAMPLES = 100_000


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def covariances(*batch: int) -> Tensor:
    root = numbers(*batch, SIZE, SIZE, seed=1)
    return 0.05 * (root @ root.mT + torch.eye(SIZE, dtype=D))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, 30), nn.GELU(), nn.Linear(30, OUTPUTS))
    return model.double().requires_grad_(requires_grad=False)


Maker = Callable[[Tensor], Distribution]
MAKERS: dict[str, Maker] = {
    "covariance": lambda mean: MultivariateNormal(mean, covariances(*mean.shape[:-1])),
    "precision": lambda mean: MultivariateNormal(
        mean, precision_matrix=torch.linalg.inv(covariances(*mean.shape[:-1]))
    ),
    "scale": lambda mean: MultivariateNormal(
        mean, scale_tril=torch.linalg.cholesky(covariances(*mean.shape[:-1]))
    ),
    "expanded": lambda mean: MultivariateNormal(mean[..., :1, :], covariances()).expand(
        mean.shape[:-1]
    ),
    "low rank": lambda mean: LowRankMultivariateNormal(
        mean, 0.2 * numbers(*mean.shape, 2), 0.1 + numbers(*mean.shape).square() / 50
    ),
    "independent": lambda mean: Independent(
        Normal(mean, 0.1 + numbers(*mean.shape).square() / 9), 1
    ),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@every_maker
def test_a_distribution_goes_through_a_linear_layer_as_linear_algebra_says(make: Maker) -> None:
    given = make(numbers(2, SIZE))
    layer = nn.Linear(SIZE, OUTPUTS).double().requires_grad_(requires_grad=False)
    out = propagate(layer, cp.Gaussian.from_torch(given)).to_torch()
    assert isinstance(out, MultivariateNormal)
    if isinstance(given, Independent):
        full = torch.diag_embed(given.variance)
    else:
        full = given.covariance_matrix
    assert_close(out.mean, layer(given.mean), rtol=1e-12)
    assert_close(out.covariance_matrix, layer.weight @ full @ layer.weight.mT, rtol=1e-10)


@every_maker
def test_samples_of_the_distribution_have_the_moments_that_come_out(make: Maker) -> None:
    """Torch draws them and torch runs the network; within 5 standard errors."""
    model, given = network(), make(numbers(1, SIZE))
    y = propagate(model, cp.Gaussian.from_torch(given))
    torch.manual_seed(0)
    drawn = model(given.sample((SAMPLES,)))[:, 0]
    centred = drawn - drawn.mean(0)
    product = centred[:, :, None] * centred[:, None, :]
    error = product.std(0) / SAMPLES**0.5
    assert float(((drawn.mean(0) - y.mean[0]) / (drawn.std(0) / SAMPLES**0.5)).abs().max()) < 5
    assert float(((product.mean(0) - y.covariance_matrix[0]) / error).abs().max()) < 5
    assert float((error.diagonal() / y.variance[0]).max()) < 0.01


def test_the_density_and_entropy_that_come_out_are_scipys() -> None:
    x = cp.Gaussian.from_torch(MultivariateNormal(numbers(SIZE), covariances()))
    y = propagate(network(), x)
    ours, theirs = y.to_torch(), stats.multivariate_normal(y.mean, y.covariance_matrix)
    points = y.sample(5, torch.Generator().manual_seed(0))
    assert_close(ours.log_prob(points), torch.as_tensor(theirs.logpdf(points)), rtol=1e-9)
    assert_close(ours.entropy(), torch.as_tensor(theirs.entropy(), dtype=D), rtol=1e-12)


def test_divergences_of_torch_are_those_of_covprop() -> None:
    x = MultivariateNormal(numbers(2, SIZE), covariances(2))
    narrow = MultivariateNormal(x.mean, x.covariance_matrix / 2)
    y, z = (propagate(network(), cp.Gaussian.from_torch(each)) for each in (x, narrow))
    assert_close(kl_divergence(y.to_torch(), z.to_torch()), cp.kl_divergence(y, z), rtol=1e-9)


def test_a_batch_is_the_components_of_a_mixture() -> None:
    """Each component is Gaussian, so that a bimodal input needs no more than a batch of two."""
    model, weights = network(), Categorical(probs=torch.tensor([0.3, 0.7], dtype=D))
    components = MultivariateNormal(3 * numbers(2, SIZE), covariances(2))
    before = MixtureSameFamily(weights, components)
    y = propagate(model, cp.Gaussian.from_torch(components))
    after = MixtureSameFamily(weights, y.to_torch())
    torch.manual_seed(0)
    drawn = model(before.sample((SAMPLES,)))
    assert float(((drawn.mean(0) - after.mean) / (drawn.std(0) / SAMPLES**0.5)).abs().max()) < 5
    spread = (drawn - drawn.mean(0)).square()
    error = spread.std(0) / SAMPLES**0.5
    assert float(((spread.mean(0) - after.variance) / error).abs().max()) < 5
    # One Gaussian with the moments of the mixture is another input, with another answer.
    between = before.mean - components.mean
    second = components.covariance_matrix + between[:, :, None] * between[:, None, :]
    whole = (weights.probs[:, None, None] * second).sum(0)
    lumped = propagate(model, cp.Gaussian(before.mean, whole))
    assert float(((spread.mean(0) - lumped.variance) / error).abs().max()) > 50


def test_parameters_of_the_distribution_that_comes_in_are_trained_by_the_one_that_goes_out() -> (
    None
):
    """The gradient of a log-density, against differences."""
    model, target = network(), torch.zeros(OUTPUTS, dtype=D)
    covariance = covariances()

    def density(mean: Tensor, log_scale: Tensor) -> Tensor:
        given = MultivariateNormal(mean, covariance * log_scale.exp())
        out: Distribution = propagate(model, cp.Gaussian.from_torch(given)).to_torch()
        return out.log_prob(target)

    inputs = (numbers(SIZE).requires_grad_(), torch.zeros((), dtype=D, requires_grad=True))
    assert torch.autograd.gradcheck(density, inputs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_with_independent_pixels_keep_their_shape_and_type(dtype: torch.dtype) -> None:
    image = Independent(Normal(torch.zeros(2, 1, 5, 5, dtype=dtype), 0.5), 3)
    x = cp.Gaussian.from_torch(image)
    assert (x.batch_shape, x.event_shape, x.dtype) == ((2,), (1, 5, 5), dtype)
    y = propagate(nn.Identity(), x).to_torch()
    assert isinstance(y, Independent)
    assert (y.batch_shape, y.event_shape) == (image.batch_shape, image.event_shape)
    value = image.sample()
    assert value.dtype == dtype
    assert_close(y.log_prob(value), image.log_prob(value), rtol=1e-6)
