"""Sampling: its moments, its standard errors and how often they hold."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop.methods.montecarlo import Moments, Replicates
from tests.layers import propagate
from tests.oracles import assert_close, normal_rule
from tests.test_propagate import assert_same, gaussian

D = torch.float64
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "antithetic": {"antithetic": True}, "sobol": {"sobol": True}
}  # fmt: skip
every = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bent(x: Any) -> Any:
    return torch.stack([torch.relu(x[..., 0]), x[..., 0] + x[..., 1].exp()], -1)


def pair() -> cp.Gaussian:
    matrix = torch.tensor([[1, 0.3], [0.3, 0.25]], dtype=D)
    return cp.Gaussian(torch.tensor([0.2, -0.5], dtype=D), matrix)


def repeated(count: int, method: cp.MonteCarlo) -> list[Tensor]:
    """Means, covariances and their standard errors (count, ...) of `bent` in repeated runs."""
    x = pair()
    if method.sobol:  # a sequence is the same for all Gaussians of a batch
        runs = [propagate(bent, x, method) for _ in range(count)]
        rows = [(y.mean, y.covariance_matrix, y.mean_stderr, y.covariance_stderr) for y in runs]
        return [torch.stack(column) for column in zip(*rows, strict=True)]
    many = cp.Gaussian(x.mean.expand(count, 2), x.covariance_matrix.expand(count, 2, 2))
    y = propagate(bent, many, method)
    return [y.mean, y.covariance_matrix, y.mean_stderr, y.covariance_stderr]


def bent_moments() -> tuple[Tensor, Tensor]:
    """Mean and covariance of `bent` of `pair` on a grid of nodes, cut where it bends."""
    z, u = normal_rule(0.2, 1.0, kinks=(0.0,))
    v, w = normal_rule(0.0, 0.4)
    first = torch.from_numpy(0.2 + z)[:, None].expand(len(z), len(v))
    second = -0.5 + 0.3 * torch.from_numpy(z)[:, None] + 0.4 * torch.from_numpy(v)
    y = bent(torch.stack([first, second], -1))
    weight = torch.from_numpy(u)[:, None] * torch.from_numpy(w)
    mean = (weight[..., None] * y).sum((0, 1))
    d = y - mean
    return mean, torch.einsum("ij,ijk,ijl->kl", weight, d, d)


@every
def test_standard_errors_cover_the_truth(options: dict[str, Any]) -> None:
    """|estimate - truth| <= 1.96 standard errors in 95 % of all repetitions.

    With 32 replicates the errors themselves are uncertain, Student's distribution has 94.1 %; and
    each needs some hundred points, or its skewness shows (4096 samples: down to 92 %).
    """
    mean, covariance = bent_moments()
    count, repetitions = (16_384, 100) if options.get("sobol") else (4_096, 600)
    method = cp.MonteCarlo(count, generator(7), **options)
    means, matrices, *errors = repeated(repetitions, method)
    in_mean = (means - mean).abs() <= 1.96 * errors[0]
    in_covariance = (matrices - covariance).abs() <= 1.96 * errors[1]
    share = torch.cat([in_mean, in_covariance.flatten(1)], 1).to(D).mean(0)
    nominal = 0.941 if options.get("sobol") else 0.95
    slack = 3 * math.sqrt(nominal * (1 - nominal) / repetitions)
    assert nominal - slack < float(share.min())
    assert float(share.max()) < nominal + slack


@every
def test_a_standard_error_is_the_spread_of_repetitions(options: dict[str, Any]) -> None:
    count = 100 if options.get("sobol") else 200  # whose spread is known to 7 or 5 %
    means, matrices, *errors = repeated(count, cp.MonteCarlo(1024, generator(1), **options))
    for values, told in zip((means, matrices), errors, strict=True):
        assert_close(told.square().mean(0).sqrt(), values.std(0), rtol=0.2)


def test_short_sequences_know_that_their_means_differ() -> None:
    """Of two points each: half of what a covariance is lies between the replicates."""
    method = cp.MonteCarlo(64, generator(1), sobol=True)
    x = cp.Gaussian.isotropic(torch.zeros(1, dtype=D), stddev=1.0)
    runs = [propagate(lambda x: x.square(), x, method) for _ in range(80)]
    spread = torch.stack([y.covariance_matrix for y in runs]).std(0)
    claimed = torch.stack([y.covariance_stderr for y in runs]).square().mean(0).sqrt()
    assert_close(claimed, spread, rtol=0.2)


@every
def test_chunks_change_nothing(options: dict[str, Any]) -> None:
    x = gaussian(2)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).to(D)
    runs = [
        propagate(model, x, cp.MonteCarlo(1000, generator(), chunk=chunk, **options))
        for chunk in (None, 1000, 77, 1)
    ]
    for other in runs[1:]:
        assert_same(other, runs[0], 1e-13)
        assert_close(other.covariance_stderr, runs[0].covariance_stderr, atol=1e-13)


@every
def test_the_model_sees_no_more_than_a_chunk(options: dict[str, Any]) -> None:
    seen = []

    def model(x: Any) -> Any:
        seen.append(torch.func.debug_unwrap(x).shape)
        return 2 * x

    propagate(model, gaussian(), cp.MonteCarlo(640, generator(), chunk=9, **options))
    assert max(shape[0] for shape in seen[2:]) == 9


def test_a_chunk_is_found_from_the_largest_tensor_on_the_way() -> None:
    sizes = []

    def model(x: Any) -> Any:
        wide = x.repeat(50_000)
        sizes.append(torch.func.debug_unwrap(wide).numel())
        return wide.sum()

    propagate(model, gaussian(), cp.MonteCarlo(20, generator()))
    assert max(sizes) <= 2**20
    assert len(sizes) < 2 + 20  # several at a time, all the same


@every
def test_the_generator_is_the_only_randomness(options: dict[str, Any]) -> None:
    x = gaussian(2)
    state = torch.get_rng_state()
    first, second, third = (
        propagate(bent, x, cp.MonteCarlo(500, generator(seed), **options)) for seed in (1, 1, 2)
    )
    assert_same(first, second)
    assert not torch.equal(first.mean, third.mean)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    one = propagate(bent, x, cp.MonteCarlo(500, **options))
    torch.manual_seed(3)
    assert_same(propagate(bent, x, cp.MonteCarlo(500, **options)), one)


def errors_of_the_mean(options: dict[str, Any], model: Any) -> float:
    source = generator(5)
    runs = [propagate(model, pair(), cp.MonteCarlo(2048, source, **options)) for _ in range(30)]
    return float(torch.stack([y.mean for y in runs]).var(0).sum().sqrt())


def test_pairs_and_sequences_have_smaller_errors_of_nearly_linear_functions() -> None:
    def model(x: Any) -> Any:
        return x + 0.05 * x.square()

    plain, antithetic, sobol = (errors_of_the_mean(options, model) for options in KINDS.values())
    assert antithetic < plain / 8
    assert sobol < plain / 10
    for name, size in zip(KINDS, (plain, antithetic, sobol), strict=True):
        y = propagate(model, pair(), cp.MonteCarlo(2048, generator(), **KINDS[name]))
        assert float(y.mean_stderr.square().sum().sqrt()) == pytest.approx(size, rel=0.5)


@every
def test_the_number_of_samples_is_rounded_up_to_whole_groups(options: dict[str, Any]) -> None:
    y = propagate(bent, pair(), cp.MonteCarlo(999, generator(), **options))
    size = {"antithetic": 2, "sobol": 32}.get(next(iter(options), ""), 1)
    assert y.samples == -(-999 // size) * size


def test_other_gaussians_have_no_sampling_error() -> None:
    for y in (
        pair(),
        propagate(bent, pair(), cp.Linearized()),
        propagate(torch.relu, pair()),
    ):
        assert (y.samples, y.mean_stderr, y.covariance_stderr) == (None, None, None)


def test_sampling_errors_follow_indices_dtypes_and_marginals() -> None:
    y = propagate(lambda x: x.reshape(3, 2, 2), gaussian(3), cp.MonteCarlo(100, generator()))
    assert y.mean_stderr.shape == (3, 2, 2)
    assert y.covariance_stderr.shape == (3, 4, 4)
    assert torch.equal(y[1].mean_stderr, y.mean_stderr[1])
    assert torch.equal(y[1:].covariance_stderr, y.covariance_stderr[1:])
    assert y[0].samples == 100
    assert y.to(torch.float32).mean_stderr.dtype == torch.float32
    assert torch.equal(y.detach().covariance_stderr, y.covariance_stderr)
    some = y.marginal([3, 0])
    assert torch.equal(some.mean_stderr, y.mean_stderr.reshape(3, 4)[:, [3, 0]])
    assert torch.equal(some.covariance_stderr, y.covariance_stderr[:, [3, 0]][:, :, [3, 0]])
    assert y.condition([0], torch.zeros(3, 1, dtype=D)).mean_stderr is None


def test_gaussians_of_a_batch_are_sampled_apart() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(2, 3, dtype=D), stddev=1.0, batch_dims=1)
    y = propagate(torch.tanh, x, cp.MonteCarlo(50, generator()))
    assert not torch.equal(y.mean[0], y.mean[1])
    same = propagate(torch.tanh, x, cp.MonteCarlo(64, generator(), sobol=True))
    assert_close(same.mean[0], same.mean[1], atol=1e-15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 1}, "samples is a whole number from 2"),
        ({"samples": 1e4}, "samples is a whole number from 2"),
        ({"chunk": 0}, "chunk is a whole number from 1"),
        ({"antithetic": True, "sobol": True}, "not both"),
    ],
)
def test_numbers_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cp.MonteCarlo(**arguments)


@pytest.mark.parametrize("source", [0, "cpu", torch.Generator])
def test_a_generator_is_a_generator(source: Any) -> None:
    with pytest.raises(TypeError, match=r"generator is a torch\.Generator"):
        cp.MonteCarlo(10, source)


def test_a_sequence_of_too_many_dimensions_is_refused() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(30_000, dtype=D), stddev=1.0)
    with pytest.raises(cp.UnsupportedOperation, match="up to 21201 dimensions"):
        propagate(lambda x: x[:2], x, cp.MonteCarlo(64, sobol=True))


# Moments from blocks against the same moments from everything at once.


def draws(count: int = 60, batch: tuple[int, ...] = (2,), offset: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn((count, *batch, 3), dtype=D, generator=generator)
    return offset + normal @ torch.tensor([[1, 2, 0], [0, 1, 0.5], [0, 0, 1]], dtype=D).exp() / 3


def in_blocks(values: Tensor, sizes: list[int], opposite: Tensor | None = None) -> Moments:
    parts = values.split(sizes)
    others = [None] * len(parts) if opposite is None else opposite.split(sizes)
    total = Moments()
    for both in zip(parts, others, strict=True):
        total.add(*both)
    return total


def expected(groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, covariance and standard errors of independent groups (count, size, *batch, m)."""
    count = len(groups)
    centre = groups.mean((0, 1))
    d = groups - centre
    w = (d[..., :, None] * d[..., None, :]).mean(1)  # of each group
    inner = groups.mean(1) - centre
    of_mean = (inner[..., :, None] * inner[..., None, :]).sum(0) / (count * (count - 1))
    covariance = w.mean(0) + of_mean
    mean_error = of_mean.diagonal(dim1=-2, dim2=-1).sqrt()
    return centre, covariance, mean_error, (w.var(0, correction=0) / (count - 1)).sqrt()


@pytest.mark.parametrize("sizes", [[60], [1] * 60, [7, 50, 3], [59, 1]])
@pytest.mark.parametrize("offset", [0.0, 3.0, 1e6])
def test_single_samples(sizes: list[int], offset: float) -> None:
    values = draws(offset=offset)
    mean, covariance, error = in_blocks(values, sizes).result()
    want = expected(values[:, None])
    rounding = 1e-12 if offset < 10 else 1e-7  # what the samples themselves have lost
    assert error.samples == 60
    for got, value in zip((mean, covariance, error.mean, error.covariance), want, strict=True):
        assert_close(got, value, rtol=rounding)
    flat = values[:, 0]
    assert_close(covariance[0], torch.cov(flat.mT), rtol=rounding)


@pytest.mark.parametrize("sizes", [[60], [1] * 60, [7, 50, 3]])
def test_antithetic_pairs(sizes: list[int]) -> None:
    values = draws()
    opposite = 6.5 - values + 0.1 * values.square()
    mean, covariance, error = in_blocks(values, sizes, opposite).result()
    want = expected(torch.stack([values, opposite], 1))
    assert error.samples == 120
    for got, value in zip((mean, covariance, error.mean, error.covariance), want, strict=True):
        assert_close(got, value, rtol=1e-11)


@pytest.mark.parametrize("length", [2, 6, 30])
@pytest.mark.parametrize("offset", [0.0, 3.0, 1e6])
def test_replicates(length: int, offset: float) -> None:
    groups = draws(offset=offset).reshape(-1, length, 2, 3)
    tally = Replicates()
    for group in groups:
        for block in group.split([1, length - 1]):
            tally.add(block)
        tally.close()
    mean, covariance, error = tally.result()
    rounding = 1e-11 if offset < 10 else 1e-7
    assert error.samples == 60
    for got, value in zip(
        (mean, covariance, error.mean, error.covariance), expected(groups), strict=True
    ):
        assert_close(got, value, rtol=rounding)


def test_replicates_that_hardly_differ_have_small_errors() -> None:
    one = draws(count=40)
    change = draws(count=10, offset=0.0)[:, None]
    groups = one * (1 + 1e-9 * change)  # (10, 40, 2, 3)
    tally = Replicates()
    for group in groups:
        tally.add(group)
        tally.close()
    error = tally.result()[2]
    want = expected(groups)
    assert_close(error.covariance, want[3], rtol=1e-3)
    assert_close(error.mean, want[2], rtol=1e-3)


def test_the_mean_of_the_covariance_is_the_covariance() -> None:
    """Unbiased also for groups of a few, whose mean is uncertain."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn((4, 20_000, 1), dtype=D, generator=generator)
    for sign, truth in ((1.0, 1.0), (-1.0, 1.0)):  # pairs that move together, and against
        moments = Moments()
        moments.add(z, sign * z)
        found = moments.result()[1][:, 0, 0]
        error = found.std() / len(found) ** 0.5
        assert abs(float(found.mean() - truth)) < 5 * float(error)
