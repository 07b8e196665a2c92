"""A Gaussian by the names of torch.distributions: every structure against MultivariateNormal."""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import covprop as cp
from covprop.covariance import Dense, Sharded, Zero
from covprop.gaussian_files import NOT_ESTIMATED
from tests.covariance.test_structures import BATCHES, STRUCTURES, Batch, N, alone, made, matrix_of
from tests.gaussians import covariance_matrix, gaussian, numbers, seeded
from tests.oracles import assert_close

D = torch.float64
EVENT = (2, 3)
SINGULAR = ["a factor alone", "deflated", "zero", "streamed"]
"""Of fewer directions than elements: N = 6 from 2 or 4."""
REGULAR = [name for name in STRUCTURES if name not in SINGULAR]
every_batch = pytest.mark.parametrize("batch", BATCHES)


@pytest.fixture(scope="module", autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        alone.cache_clear()
        dist.destroy_process_group()


def structured(name: str, batch: Batch) -> cp.Gaussian:
    """Events that are matrices of two rows."""
    return cp.Gaussian(numbers(*batch, *EVENT, seed=3), made(name, batch), validate_args=False)


def oracle(x: cp.Gaussian) -> MultivariateNormal:
    """The same over the flattened event."""
    return MultivariateNormal(x.mean.flatten(len(x.batch_shape)), matrix_of(x.covariance))


@every_batch
@pytest.mark.parametrize("name", REGULAR)
def test_density_and_entropy_are_those_of_a_multivariate_normal(name: str, batch: Batch) -> None:
    x = structured(name, batch)
    truth = oracle(x)
    value = numbers(5, *batch, *EVENT, seed=4)
    found = x.log_prob(value)
    assert found.shape == (5, *batch)
    # Both solve with the same matrix, whose condition multiplies rounding.
    condition = float(torch.linalg.cond(matrix_of(x.covariance)).max())
    slack = 100 * N * torch.finfo(D).eps * condition
    assert_close(found, truth.log_prob(value.flatten(-2)), rtol=slack)
    assert_close(x.log_prob(value[0]), found[0], rtol=slack)
    single = value.flatten(0, -3)[0]  # which broadcasts over the batch
    assert_close(x.log_prob(single), truth.log_prob(single.flatten()), rtol=slack)
    assert x.entropy().shape == batch
    assert_close(x.entropy(), truth.entropy(), rtol=slack)
    assert_close(x.loc, x.mean, rtol=0.0)


@every_batch
@pytest.mark.parametrize("name", SINGULAR)
def test_what_is_singular_has_no_density_and_says_so(name: str, batch: Batch) -> None:
    x = structured(name, batch)
    for ask in (x.to_torch, x.entropy, lambda: x.log_prob(x.mean)):
        with pytest.raises(cp.InvalidGaussian, match=r"no density.*singular.*\.sample\(\) works"):
            ask()


def test_what_is_sharded_names_the_way_out() -> None:
    x = structured("sharded", ())
    assert isinstance(x.covariance, Sharded)
    for ask in (x.sample, x.rsample, x.entropy, lambda: x.log_prob(x.mean)):
        with pytest.raises(cp.UnsupportedOperation, match=r"gather it with .covariance.to_dense"):
            ask()
    with pytest.raises(cp.UnsupportedOperation, match=r"gather it with .covariance.to_dense"):
        x.save("nowhere.safetensors")
    whole = cp.Gaussian(x.mean, x.covariance.to_dense())
    assert_close((2 * x + 1.0).mean, (2 * whole + 1.0).mean, rtol=0.0)
    assert_close(
        matrix_of((weights(4, 2) @ x).covariance), (weights(4, 2) @ whole).covariance_matrix
    )


@every_batch
@pytest.mark.parametrize("name", STRUCTURES)
def test_samples_have_the_shape_asked_for_and_the_moments(name: str, batch: Batch) -> None:
    x = structured(name, batch)
    assert x.sample().shape == (*batch, *EVENT)
    assert x.sample(4).shape == x.sample((4,)).shape == (4, *batch, *EVENT)
    assert x.sample(torch.Size((2, 5))).shape == x.rsample([2, 5]).shape == (2, 5, *batch, *EVENT)
    assert x.sample(0).shape == (0, *batch, *EVENT)
    assert torch.equal(x.sample((2, 5), seeded(1)).flatten(0, 1), x.sample(10, seeded(1)))
    count = 20_000
    centred = (x.sample((count,), seeded(2)) - x.mean).flatten(1 + len(batch))
    error = (x.variance.flatten(len(batch)) / count).sqrt()
    assert bool((centred.mean(0).abs() <= 5 * error + 1e-12).all())
    squares = centred[..., :, None] * centred[..., None, :]
    beyond = (squares.mean(0) - matrix_of(x.covariance)).abs() - 5 * squares.std(0) / count**0.5
    assert float(beyond.max()) <= 1e-12


@pytest.mark.parametrize("shape", ["ten", 2.5, -1, (2, -1), (1.5,), None, torch.ones(2)])
def test_a_number_of_samples_that_is_none_is_refused(shape: Any) -> None:
    with pytest.raises(TypeError, match=r"as in x.sample\(10\) or x.sample\(\(10, 2\)\), not"):
        gaussian(3).sample(shape)


def test_gradients_pass_through_rsample_and_not_through_sample() -> None:
    mean, factor = numbers(3).requires_grad_(), numbers(3, 3, seed=1).requires_grad_()

    def drawn(mean: Tensor, factor: Tensor) -> Tensor:
        x = cp.Gaussian(mean, factor @ factor.mT, validate_args=False)
        assert not x.sample(2).requires_grad
        return x.rsample((4,), seeded(5))

    assert torch.autograd.gradcheck(drawn, (mean, factor))


def test_gradients_of_a_density_are_those_of_differences() -> None:
    value = numbers(2, 3, seed=2)

    def density(mean: Tensor, factor: Tensor) -> Tensor:
        return cp.Gaussian(mean, factor @ factor.mT, validate_args=False).log_prob(value)

    inputs = (
        numbers(3).requires_grad_(),
        (numbers(3, 3, seed=1) + 2 * torch.eye(3)).requires_grad_(),
    )
    assert torch.autograd.gradcheck(density, inputs)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (4, 2, 3)])
def test_a_value_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    x = structured("dense", (2,))
    with pytest.raises(
        cp.InvalidGaussian, match=r"with the batch \(2,\) and the event \(2, 3\), not"
    ):
        x.log_prob(torch.zeros(shape))


def test_an_event_without_dimensions_and_float32() -> None:
    for x in (cp.Gaussian(torch.tensor(0.5), torch.tensor([[0.04]])),
              cp.Gaussian.isotropic(torch.tensor(0.5), stddev=0.2)):  # fmt: skip
        truth = torch.distributions.Normal(0.5, 0.2)
        value = torch.tensor([0.1, 0.5, 2.0])
        assert x.log_prob(value).dtype == torch.float32
        assert_close(x.log_prob(value), truth.log_prob(value), rtol=1e-5)
        assert_close(x.entropy(), truth.entropy(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("size", [3, 10, 30, 100])
def test_a_matrix_that_only_rounding_keeps_from_singular_has_no_density(
    size: int, dtype: torch.dtype
) -> None:
    """F F^T of fewer columns than rows, in any units: Cholesky finds many of them positive."""
    units = (10.0 ** torch.linspace(-3, 3, size)).to(dtype)
    for columns in (1, size // 2, size - 1):
        for seed in range(20):
            factor = units[:, None] * numbers(size, columns, seed=seed, dtype=dtype)
            x = cp.Gaussian(torch.zeros(size, dtype=dtype), factor @ factor.mT, validate_args=False)
            with pytest.raises(cp.InvalidGaussian, match="singular"):
                x.to_torch()


@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_rounding_of_a_wide_layer_is_not_taken_for_variance(dtype: torch.dtype) -> None:
    """Two inputs have two directions, whatever sums over a thousand features leave of a third."""
    for seed in range(10):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 1000), nn.Linear(1000, 3)).to(dtype)
        x = cp.Gaussian(torch.zeros(2, dtype=dtype), torch.eye(2, dtype=dtype))
        with torch.no_grad():
            y = cp.propagate(model, x, cp.GaussianLayers())
        with pytest.raises(cp.InvalidGaussian, match="singular"):
            y.to_torch()


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1e-4), (D, 1e-10)])
def test_little_noise_beside_a_factor_has_a_density_or_none(
    dtype: torch.dtype, least: float
) -> None:
    """By Woodbury in 60 digits; below what torch's formula can do it is refused."""
    mp = pytest.importorskip("mpmath")
    mean, factor = torch.zeros(5, dtype=dtype), numbers(5, 2, dtype=dtype)
    value = factor @ torch.ones(2, dtype=dtype)
    noise = torch.full((5,), least, dtype=dtype)
    found = cp.Gaussian.low_rank(mean, factor, variance=noise).log_prob(value)
    with mp.workdps(60):
        columns, point = mp.matrix(factor.tolist()), mp.matrix(value.tolist())
        matrix = columns * columns.T + float(noise[0]) * mp.eye(5)
        square = (point.T * matrix**-1 * point)[0]
        truth = float(-(square + mp.log(mp.det(matrix)) + 5 * mp.log(2 * mp.pi)) / 2)
    # A difference of numbers that are factor^2 / noise times larger.
    size = float(factor.square().sum()) / least
    assert abs(float(found) - truth) <= 10 * torch.finfo(dtype).eps * size
    with pytest.raises(cp.InvalidGaussian, match="singular"):
        cp.Gaussian.low_rank(mean, factor, variance=noise * 1e-4).log_prob(value)


def weights(*shape: int) -> Tensor:
    return numbers(*shape, seed=9)


@every_batch
@pytest.mark.parametrize("name", STRUCTURES)
def test_arithmetic_with_constants_is_that_of_the_moments(name: str, batch: Batch) -> None:
    x = structured(name, batch)
    mean, matrix = x.mean, matrix_of(x.covariance)
    shift, scale = weights(3), weights(2, 1)
    for y in (x + shift, shift + x):
        assert_close(y.mean, mean + shift, rtol=0.0)
        assert_close(y.covariance_matrix, matrix, rtol=0.0)
    factor = scale.expand(EVENT).flatten()
    scaled = matrix * factor[:, None] * factor
    for y, expected in ((x * scale, mean * scale), (scale * x, mean * scale),
                        (x / (1 / scale), mean * scale), (1.0 - x * scale, 1 - mean * scale),
                        (-x * scale - 2, -mean * scale - 2)):  # fmt: skip
        assert_close(y.mean, expected, rtol=1e-14, atol=1e-14)
        assert_close(y.covariance_matrix, scaled, rtol=1e-12, atol=1e-12)
    left, right = weights(4, 2), weights(3, 5)
    for y, expected, jacobian in (
        (left @ x, left @ mean, torch.kron(left, torch.eye(3, dtype=D))),
        (x @ right, mean @ right, torch.kron(torch.eye(2, dtype=D), right.mT.contiguous())),
        (
            x @ right[:, 0],
            mean @ right[:, 0],
            torch.kron(torch.eye(2, dtype=D), right[:, :1].mT.contiguous()),
        ),
        (left[0] @ x, left[0] @ mean, torch.kron(left[:1], torch.eye(3, dtype=D))),
    ):
        assert y.mean.shape == expected.shape
        assert_close(y.mean, expected, rtol=1e-13, atol=1e-13)
        assert_close(y.covariance_matrix, jacobian @ matrix @ jacobian.mT, rtol=1e-12, atol=1e-12)


@every_batch
def test_a_matrix_maps_each_vector_of_a_batch(batch: Batch) -> None:
    x = gaussian(4, batch=batch)
    matrix = weights(3, 4)
    for y in (matrix @ x, x @ matrix.mT):
        assert_close(y.mean, x.mean @ matrix.mT, rtol=1e-13, atol=1e-13)
        assert_close(y.covariance_matrix, matrix @ x.covariance_matrix @ matrix.mT, rtol=1e-12)
    one = matrix[0] @ x
    assert (one.batch_shape, one.event_shape) == (batch, ())
    assert_close(one.variance, matrix[0] @ x.covariance_matrix @ matrix[0], rtol=1e-12)


def test_skewness_follows_constants() -> None:
    """Third cumulants of independent elements add, each by the cube of its weight."""
    x = cp.Skewed(numbers(3), stddev=numbers(3, seed=1).abs(), skewness=numbers(3, seed=2))
    assert isinstance(2 - x, cp.Skewed)
    assert_close((2 - 3 * x).skewness, -x.skewness, rtol=0.0)
    assert_close((x + 1).skewness, x.skewness, rtol=0.0)
    matrix = weights(2, 3)
    y = matrix @ x
    third = matrix**3 @ (x.skewness * x.stddev**3)
    assert type(y) is cp.Gaussian
    assert y.skewness is not None
    assert_close(y.skewness, third / y.stddev**3, rtol=1e-12)
    by_rule = cp.propagate(lambda v: v @ matrix.mT, x, cp.Cumulants())
    assert_close(y.skewness, by_rule.skewness, rtol=1e-10)


def test_what_is_no_constant_is_refused_with_what_to_do() -> None:
    x = gaussian(3)
    with pytest.raises(TypeError, match=r"cp.propagate\(lambda a, b: a \+ b, first, second\)"):
        x + gaussian(3)  # type: ignore[operator]
    with pytest.raises(TypeError, match="takes a number or a tensor, not str"):
        x * "2"  # type: ignore[operator]
    with pytest.raises(cp.InvalidGaussian, match=r"\(2, 3\) does not broadcast to the mean"):
        x + torch.zeros(2, 3)
    for matrix in (torch.zeros(2, 4), torch.zeros(2, 2, 3), torch.tensor(1.0)):
        with pytest.raises(cp.InvalidGaussian, match="@ takes a matrix or a vector"):
            matrix @ x
    with pytest.raises(cp.InvalidGaussian, match="@ takes a matrix or a vector"):
        torch.zeros(2, 3) @ cp.Gaussian.isotropic(torch.tensor(1.0), stddev=1.0)


def same(x: cp.Gaussian, y: cp.Gaussian) -> None:
    assert type(x) is type(y)
    assert (x.dtype, x.batch_shape, x.event_shape) == (y.dtype, y.batch_shape, y.event_shape)
    assert torch.equal(x.mean, y.mean)
    assert torch.equal(x.covariance_matrix, y.covariance_matrix)
    assert y.notes in (x.notes, (*x.notes, NOT_ESTIMATED))


@every_batch
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_file_holds_every_structure(name: str, batch: Batch, tmp_path: Path) -> None:
    x = structured(name, batch)
    x.save(tmp_path / "x.safetensors")
    again = cp.Gaussian.load(tmp_path / "x.safetensors")
    same(x, again)
    written = Dense if "streamed" in name else type(x.covariance)
    assert type(again.covariance) is written


def results() -> dict[str, cp.Gaussian]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).requires_grad_(False)
    x = cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)
    return {
        "auto": cp.propagate(model, x),
        "sampled": cp.propagate(model, x, cp.MonteCarlo(10)),
        "cumulants": cp.propagate(model, x, cp.Cumulants()),
        "split": cp.propagate(model, x, cp.Split(3)),
        "skewed": cp.Skewed.gamma(torch.ones(3), stddev=0.2),
    }


@pytest.mark.parametrize("name", results())
def test_a_file_holds_what_is_known_of_a_result(name: str, tmp_path: Path) -> None:
    y = results()[name]
    y.save(tmp_path / "y.safetensors")
    again = type(y).load(tmp_path / "y.safetensors")
    same(y, again)
    assert again.method == (None if y.method is None else str(y.method))
    assert again.samples == y.samples
    for one, other in ((y.skewness, again.skewness), (y.mean_stderr, again.mean_stderr)):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)  # type: ignore[arg-type]
    if name == "auto":
        assert y.error is not None
        assert again.error is not None
        assert torch.equal(y.error.stddev, again.error.stddev)
        assert y.error.basis == again.error.basis


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    cp.Skewed.gamma(torch.ones(3), stddev=0.2).save(tmp_path / "x.safetensors")
    with pytest.raises(cp.InvalidFile, match=r"not a file of Gaussian\.save: it is of a Skewed"):
        cp.Gaussian.load(tmp_path / "x.safetensors")
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(cp.InvalidFile, match=r"not a file of Gaussian\.save"):
        cp.Gaussian.load(tmp_path / "text")
    with pytest.raises(FileNotFoundError, match=r"write one with Gaussian.save\(path\)"):
        cp.Gaussian.load(tmp_path / "nothing")


@pytest.mark.parametrize("name", results())
def test_results_are_read_by_pickle_and_by_torch_load(name: str) -> None:
    y = results()[name]
    same(y, pickle.loads(pickle.dumps(y)))
    file = io.BytesIO()
    torch.save({"y": y}, file)
    file.seek(0)
    same(y, torch.load(file, weights_only=True)["y"])


@pytest.mark.parametrize("name", KNOWN := [n for n in STRUCTURES if "streamed" not in n])
def test_structures_are_read_by_torch_load(name: str) -> None:
    x, file = structured(name, (2,)), io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    same(x, torch.load(file, weights_only=True))


def test_a_new_structure_is_read_by_torch_load_without_being_listed_anywhere() -> None:
    with torch.serialization.safe_globals([]):  # which forgets it again
        kind = type("Own", (cp.covariance.Covariance,), {})
        assert kind in torch.serialization.get_safe_globals()


def test_a_figure_has_the_mean_the_intervals_and_the_correlations() -> None:
    pytest.importorskip("matplotlib")
    x = cp.Gaussian(numbers(2, 3), covariance_matrix(size=6))
    figure = x.plot()
    intervals, picture = figure.axes[:2]
    assert list(intervals.lines[0].get_ydata()) == pytest.approx(x.mean.flatten().tolist())
    low, high = x.interval()
    ends = [path.vertices[:, 1].tolist() for path in intervals.collections[0].get_paths()]
    expected = torch.stack([low.flatten(), high.flatten()], -1).tolist()
    assert ends == [pytest.approx(pair) for pair in expected]
    assert_close(torch.as_tensor(picture.images[0].get_array()), x.correlation_matrix, rtol=1e-12)
    many = cp.Gaussian.isotropic(torch.zeros(501), stddev=1.0)
    assert len(many.plot().axes) == 1
    with pytest.raises(ValueError, match=r"choose one, as in y\[0\].plot\(\)"):
        gaussian(3, batch=(2,)).plot()


def test_a_constant_is_zero_in_a_file(tmp_path: Path) -> None:
    cp.Gaussian.constant(torch.ones(4, 1000), batch_dims=1).save(tmp_path / "x.safetensors")
    again = cp.Gaussian.load(tmp_path / "x.safetensors")
    assert isinstance(again.covariance, Zero)
    assert again.batch_shape == (4,)
