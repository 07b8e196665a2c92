"""Dependence between branches: sums, differences and concatenations of tensors of one origin."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.flow.lineage import UNRELEASED, Lineage
from covprop.methods.call import in_flight
from tests.gaussians import gaussian, weight
from tests.layers import joint, propagate
from tests.oracles import assert_close
from tests.registry import WITHOUT_RULE, registry_kept


def assert_linear(function: Callable[..., Any], *inputs: cp.Gaussian) -> cp.Gaussian:
    """J S J^T with the Jacobian of the plain function, block by block of the inputs."""
    y = propagate(function, *inputs)
    means = tuple(x.mean for x in inputs)
    assert_close(y.mean, function(*means), atol=1e-13)
    slopes = torch.autograd.functional.jacobian(function, means)
    size = y.mean.numel()
    expected = torch.zeros(size, size, dtype=torch.float64)
    for x, slope in zip(inputs, slopes, strict=True):
        flat = slope.reshape(size, -1)
        expected += flat @ x.covariance_matrix @ flat.mT
    assert_close(y.covariance_matrix, expected, atol=1e-13 * max(1.0, float(expected.abs().max())))
    return y


ZEROS: dict[str, Callable[[Any], Any]] = {
    "operator": lambda x: x - x,
    "function": lambda x: torch.sub(x, x),
    "method": lambda x: x.sub(x),
    "view": lambda x: x - x.reshape(2, 3).flatten(),
    "shifted": lambda x: (x + 3) - (x - 1),
    "weighted": lambda x: torch.add(x, x, alpha=-1),
    "copy": lambda x: x.clone() - x,
}


@pytest.mark.parametrize("name", ZEROS)
def test_a_difference_with_itself_is_exactly_zero(name: str) -> None:
    x = gaussian(6)
    y = propagate(ZEROS[name], x)
    assert_close(y.mean, ZEROS[name](x.mean), rtol=0.0)
    assert not y.covariance_matrix.any()


@pytest.mark.parametrize("batch", [(), (2,)])
def test_columns_of_a_root_are_carried_to_the_covariance_with_the_input(
    batch: tuple[int, ...],
) -> None:
    """Cov(y, x) = E[J] L L^T; what is carried is the first factor, of other columns another."""
    first, second = weight(5, 4), weight(3, 5, seed=2)
    x, other = gaussian(4, batch=batch), gaussian(3, batch=batch, seed=5)
    lineage = Lineage(cp.Exact())
    other_in, begun = (in_flight(g, lineage) for g in (other, x))
    inner = F.linear(begun.clone(), first)
    y = F.linear(F.relu(inner), second) * torch.sigmoid(F.linear(inner, second)) + other_in
    columns = torch.linalg.cholesky(x.covariance_matrix)
    carried = y.carrier.expected_jvp(begun.carrier, columns)
    cross = y.carrier.cross(begun.carrier)
    assert carried is not None
    assert cross is not None
    assert_close(carried @ columns.mT, cross)
    some = y.carrier.expected_jvp(begun.carrier, columns[..., 1:3])
    assert some is not None
    assert_close(some, carried[..., 1:3])
    assert other_in.carrier.expected_jvp(begun.carrier, columns) is None


@pytest.mark.parametrize("structure", ["dense", "diagonal"])
def test_a_sum_with_itself_is_twice_itself(structure: str) -> None:
    x = gaussian(4)
    if structure == "diagonal":
        x = cp.Gaussian.diagonal(x.mean, variance=x.variance)
    for double in (lambda x: x + x, lambda x: torch.add(x, x), lambda x: x.clone().add_(x)):
        y = propagate(double, x)
        assert_close(y.mean, 2 * x.mean, rtol=0.0)
        assert_close(y.covariance_matrix, 4 * x.covariance_matrix, rtol=0.0)


def test_what_stands_side_by_side_with_itself_is_singular() -> None:
    x = gaussian(3)
    whole = x.covariance_matrix.repeat(2, 2)
    for join in (torch.cat, torch.concat, torch.stack, torch.vstack, torch.hstack):
        y = propagate(lambda x, f=join: f([x, x]), x)
        assert_close(y.mean, join([x.mean, x.mean]), rtol=0.0)
        assert_close(y.covariance_matrix, whole, atol=1e-15)
        assert int(torch.linalg.matrix_rank(y.covariance_matrix)) == 3


A, B = weight(4, 6), weight(4, 6, seed=2)
KERNEL = weight(2, 2, 3, 3, seed=3)

LINEAR: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "sum": (lambda x: F.linear(x, A) + F.linear(x, B), (6,)),
    "difference": (lambda x: F.linear(x, A) - 2 * F.linear(x, B), (6,)),
    "alpha": (lambda x: torch.sub(F.linear(x, A), F.linear(x, B), alpha=3), (6,)),
    "skip": (lambda x: x + F.linear(F.linear(x, A), A.mT), (6,)),
    "two skips": (lambda x: x + (x + F.linear(x, A.mT @ B)).flip(-1), (6,)),
    "broadcast": (lambda x: F.linear(x, A)[:, None] + x[None, :], (6,)),
    "broadcast difference": (lambda x: x.reshape(2, 3) - x.reshape(2, 3).mean(1, True), (6,)),
    "in place": (lambda x: F.linear(x, A).add_(F.linear(x, B), alpha=2), (6,)),
    "cat": (lambda x: torch.cat([x, F.linear(x, A), 3 - x]), (6,)),
    "cat of a constant": (lambda x: torch.cat([x, torch.ones(2).double(), -x]), (6,)),
    "stack": (lambda x: torch.stack([F.linear(x, A), F.linear(x, B)], dim=1), (6,)),
    "chunk": (lambda x: torch.cat(torch.chunk(x, 3)[::-1]) - x, (6,)),
    "split": (lambda x: sum(p.sum() for p in torch.split(x, [1, 2, 3])) + x, (6,)),
    "halves": (lambda x: torch.add(*x.chunk(2, dim=0)), (6,)),
    "view": (lambda x: x.reshape(2, 3).mT.reshape(6) + F.linear(x, A.mT @ B), (6,)),
    "permute": (lambda x: x + x.permute(0, 2, 1), (2, 3, 3)),
    "unbind": (lambda x: torch.stack([*x.unbind(0), x[0] + x[1]]), (2, 3)),
    "index": (lambda x: x[::2] - x[1::2] + x[:3], (6,)),
    "convolution": (
        lambda x: torch.cat([x, F.conv2d(x, KERNEL, padding=1)], 1) + F.pad(x, [0, 0, 0, 0, 1, 1]),
        (1, 2, 4, 4),
    ),
    "pooling": (lambda x: x + F.interpolate(F.avg_pool2d(x, 2), scale_factor=2), (1, 2, 4, 4)),
    "diamond": (
        lambda x: (lambda a, b: torch.cat([a + b, a - b]) - F.linear(a, weight(8, 4)))(
            F.linear(x, A), F.linear(x, B)
        ),
        (6,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINEAR)
def test_linear_branches_are_exact_to_rounding(name: str) -> None:
    function, shape = LINEAR[name]
    assert_linear(function, gaussian(*shape))


def test_reversed_subtraction_keeps_its_sign_and_weight() -> None:
    x, w = gaussian(4), gaussian(4, seed=1)
    assert_linear(lambda x, w: torch.rsub(x, w) - w, x, w)
    assert_linear(lambda x, w: torch.rsub(x, w, alpha=3), x, w)
    assert_linear(lambda x, w: torch.sub(other=w, input=x) - x, x, w)


def random_graph(seed: int) -> Callable[[Tensor], Tensor]:
    """Ten linear operations on randomly chosen earlier results, all of them of six elements."""

    def run(x: Any) -> Any:
        generator = torch.Generator().manual_seed(seed)
        pool = [x]
        for step in range(10):
            first, second, kind = torch.randint(0, 1000, (3,), generator=generator).tolist()
            u, v = pool[first % len(pool)], pool[second % len(pool)]
            made = (
                lambda u=u, v=v: u + v,
                lambda u=u, v=v: u - 0.5 * v,
                lambda u=u, s=step: F.linear(u, weight(6, 6, seed=s) / 2),
                lambda u=u, v=v: torch.cat([u[:3], v.flip(0)[3:]]),
            )[kind % 4]()
            pool.append(made)
            if len(pool) > 3:  # forget one, so that covariances are dropped
                pool.pop(first % len(pool))
        return torch.cat(pool)

    return run


@pytest.mark.parametrize("seed", range(20))
def test_random_linear_graphs_are_exact_whatever_is_forgotten(seed: int) -> None:
    assert_linear(random_graph(seed), gaussian(6))


def test_different_inputs_are_independent() -> None:
    x, w = gaussian(6), gaussian(4, seed=5)
    y = assert_linear(lambda x, w: torch.cat([F.linear(x, A) + w, w, x]), x, w)
    assert not y.covariance_matrix[4:8, 8:].any()
    assert_linear(lambda x, w: F.linear(x, A) - w.flip(0) + F.linear(x, B), x, w)


def test_inputs_come_by_position_by_keyword_and_beside_plain_tensors() -> None:
    x, w, shift = gaussian(4), gaussian(4, seed=5), weight(4)

    class Model(nn.Module):
        def forward(self, x: Any, shift: Any, *, other: Any, scale: float) -> Any:
            return x + shift + scale * other

    y = propagate(Model(), x, shift, other=w, scale=2.0)
    assert_close(y.mean, x.mean + shift + 2 * w.mean, atol=1e-15)
    assert_close(y.covariance_matrix, x.covariance_matrix + 4 * w.covariance_matrix, atol=1e-14)
    nested = propagate(lambda pair, last: pair[0] - pair["b"] + last, {0: x, "b": w}, shift)
    assert_close(nested.covariance_matrix, x.covariance_matrix + w.covariance_matrix, atol=1e-14)


def test_the_same_gaussian_twice_and_differing_batches_are_refused() -> None:
    x, batch = gaussian(4), gaussian(4, batch=(2,))
    with pytest.raises(ValueError, match="given twice"):
        propagate(torch.add, x, x)
    with pytest.raises(ValueError, match="given twice"):
        propagate(lambda x, other: x + other, x, other=x)
    with pytest.raises(ValueError, match="one batch shape"):
        propagate(torch.add, x, batch)


MIXES: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "cat": (lambda x: torch.cat([x, x[:1]]), (3,)),
    "sum": (lambda x: x + x.sum(-1), (3, 3)),
    "maximum": (lambda x: torch.maximum(x, x.sum(-1)), (3, 3)),
    "product": (lambda x: x * x.sum(-1), (3, 3)),
}


@pytest.mark.parametrize("name", MIXES)
def test_a_join_that_mixes_the_batch_is_refused(name: str) -> None:
    function, shape = MIXES[name]
    with pytest.raises(cp.BatchDimensionError):
        propagate(function, gaussian(*shape, batch=(3,)))


@pytest.fixture
def _the_registry_is_as_before() -> Iterator[None]:
    with registry_kept():
        yield


@pytest.mark.usefixtures("_the_registry_is_as_before")
def test_a_rule_that_does_not_say_how_it_depends_cannot_be_joined() -> None:
    @cp.rule(WITHOUT_RULE)
    def opaque(function: Any, x: cp.GaussianTensor, dim: int) -> cp.GaussianTensor:
        return x.replace(function(x.loc, dim), x.covariance)

    x = gaussian(3)
    assert_close(propagate(lambda x: WITHOUT_RULE(x, 0) * 2, x).mean, 2 * WITHOUT_RULE(x.mean, 0))
    for join in (lambda x: x + WITHOUT_RULE(x, 0), lambda x: torch.cat([WITHOUT_RULE(x, 0), -x])):
        with pytest.raises(cp.UnsupportedOperation, match=r"through\(mean, linear\)"):
            propagate(join, x)


def test_joins_of_an_empty_batch_are_empty() -> None:
    empty = cp.Gaussian.isotropic(torch.zeros(0, 3, dtype=torch.float64), stddev=1.0, batch_dims=1)
    for function in (lambda x: x + x.relu(), lambda x: torch.cat([x, x.exp()], -1)):
        assert propagate(function, empty).mean.shape[0] == 0
    assert joint(torch.relu, empty).mean.shape == (0, 6)


def test_a_plain_chain_does_not_compute_expected_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a chain needs no slope")

    monkeypatch.setattr("covprop.activations.piecewise.Piecewise.coefficients", refuse)
    propagate(lambda x: torch.relu(torch.relu(x) * 2), gaussian(3))


def test_a_vector_product_of_gaussians_is_not_taken_for_a_covariance() -> None:
    with pytest.raises(cp.UnsupportedOperation, match=r"torch\.Tensor\.cross"):
        propagate(lambda x: x.cross(x, dim=-1), gaussian(3))


class Residual(nn.Module):
    """A chain of residual blocks, of which two in a row share a skip."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Any) -> Any:
        skip = x
        for i, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) + (skip if i % 2 else 0)
            skip = skip if i % 2 else x
        return x


@torch.no_grad()
@pytest.mark.parametrize("method", [cp.GaussianLayers(), cp.Series(4)])
def test_small_covariances_that_pile_up_change_no_number(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = Residual(6, 8).double(), gaussian(6)
    y = cp.propagate(model, x, method)
    monkeypatch.setattr("covprop.flow.lineage.UNRELEASED", 0)
    at_once = cp.propagate(model, x, method)
    assert torch.equal(y.mean, at_once.mean)
    assert torch.equal(y.covariance_matrix, at_once.covariance_matrix)


@torch.no_grad()
def test_small_covariances_pile_up_to_a_limit() -> None:
    width, most = 40, 0
    nbytes = 8 * width**2

    class Count(nn.Module):
        def forward(self, x: Any) -> Any:
            nonlocal most
            found = [t for t in gc.get_objects() if type(t) is Tensor and t.numel() == width**2]
            most = max(most, nbytes * len({t.data_ptr() for t in found}))
            return x

    layers: list[nn.Module] = []
    for i in range(200):
        layers += [nn.Linear(width, width), nn.ReLU(), *([Count()] if i % 8 == 0 else [])]
    model = nn.Sequential(*layers).double()
    gc.collect()
    gc.freeze()
    try:
        propagate(model, gaussian(width))
    finally:
        gc.unfreeze()
    made = 2 * 200 * nbytes
    assert made > 4 * UNRELEASED
    assert UNRELEASED / 2 < most < 1.2 * UNRELEASED
