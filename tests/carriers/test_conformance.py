"""What every carrier promises, on the same small programs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jacrev

import covprop as cp
from covprop import bayes
from covprop.carriers import Full, Ledger, Planned, Tangents, Variances
from covprop.covariance import Dense, Diagonal, Streamed
from covprop.flow.lineage import Lineage
from covprop.flow.tensor import GaussianTensor
from tests.covariance import test_structures as structures
from tests.layers import propagate
from tests.oracles import assert_close

D = torch.float64
BATCH, SIZE, SMALL = 2, 6, 1e-6
FULL = [cp.Exact(), cp.Series(order=3), cp.Exact(independent_maxima=True)]
METHODS = [*FULL, cp.AssumedDensity(), cp.Sketched(16, exact=0), cp.Cumulants()]


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


WEIGHT, FACTOR, NARROW = _random(5, SIZE), _random(SIZE, seed=1), _random(2, SIZE, seed=2)

Program = Callable[[Any, Any], Any]
"""Of two tensors (batch, SIZE) that are independent of each other."""

SMOOTH: dict[str, Program] = {
    "linear": lambda x, _: F.linear(x, WEIGHT),
    "narrow linear": lambda x, _: F.linear(x, NARROW),
    "movement": lambda x, _: x.flip(-1),
    "selection": lambda x, _: x[:, 1:4],
    "repetition": lambda x, _: x[:, torch.tensor([2, 0, 2, 5])],
    "scale": lambda x, _: FACTOR * x,
    "shift": lambda x, _: x + FACTOR,
    "sum": lambda x, y: x - y,
    "sum of one": lambda x, _: x + x,
    "concatenation": lambda x, y: torch.cat([x, y], -1),
    "stack": lambda x, y: torch.stack([x, y], 1),
    "product": lambda x, y: x * y,
    "square": lambda x, _: x * x,
    "einsum": lambda x, y: torch.einsum("bi,bj->bij", x, y),
    "matmul": lambda x, y: x.unflatten(-1, (2, 3)) @ y.unflatten(-1, (3, 2)),
    "activation": lambda x, _: torch.tanh(x),
    "composition": lambda x, _: torch.exp(-x.square()),
    "maximum": torch.maximum,
    "pooling": lambda x, _: F.max_pool1d(x.unsqueeze(1), 2),
    "softmax": lambda x, _: x.softmax(-1),
    "logsumexp": lambda x, _: x.logsumexp(-1),
    "layer norm": lambda x, _: F.layer_norm(x, (SIZE,)),
    "groups": lambda x, _: F.layer_norm(x.unflatten(-1, (2, 3)), (3,)),
    "length": lambda x, _: x.norm(dim=-1, keepdim=True),
    "lengths": lambda x, _: x.unflatten(-1, (2, 3)).norm(dim=-1),
}
"""Functions that have a Jacobian at the mean."""

_LAYER = bayes.BayesLinear(SIZE, 3, dtype=D)
_CONVOLUTION = bayes.BayesConv1d(1, 2, 3, dtype=D)
NOISY: dict[str, Program] = {
    "dropout": lambda x, _: F.dropout(x, 0.3),
    "channels": lambda x, _: F.dropout1d(x.unflatten(-1, (2, 3)), 0.3),
    "Bayesian layer": lambda x, _: _LAYER(x),
    "Bayesian convolution": lambda x, _: _CONVOLUTION(x.unsqueeze(1)),
}
"""Functions that draw random numbers."""

NETWORKS: dict[str, Program] = {
    "residual": lambda x, y: F.linear(torch.relu(x + y), WEIGHT[:, :SIZE])[:, :3] + x[:, :3],
    "gate": lambda x, y: torch.sigmoid(x) * F.linear(torch.tanh(y), NARROW).repeat(1, 3),
    "branches": lambda x, y: torch.cat([torch.relu(x), x * y, y], -1).softmax(-1),
}
PROGRAMS = {**SMOOTH, **NOISY, **NETWORKS}

STRUCTURES: dict[str, Callable[[Tensor], cp.covariance.Covariance]] = {
    "dense": lambda values: Dense(_matrix(values)),
    "diagonal": Diagonal,
}
"""Those of known numbers; a plan is checked for all of `tests/covariance/test_structures.py`."""


def _matrix(values: Tensor) -> Tensor:
    size = values.shape[-1]
    factor = _random(*values.shape[:-1], size, size, seed=3) / size**0.5
    correlated = factor @ factor.mT + torch.eye(size, dtype=D)
    return correlated * (values.sqrt()[..., :, None] * values.sqrt()[..., None, :])


def inputs(scale: float = SMALL, structure: str = "dense") -> tuple[cp.Gaussian, cp.Gaussian]:
    """Means that are far from each other, and from zero, for such small noise."""
    values = scale * (1 + torch.rand(BATCH, SIZE, dtype=D, generator=torch.Generator()))
    means = _random(BATCH, SIZE, seed=4), _random(BATCH, SIZE, seed=5)
    if structure in STRUCTURES:
        covariance = STRUCTURES[structure](values)
    else:
        covariance = structures.STRUCTURES[structure]((BATCH,)).scale(values.sqrt())
    x, y = (cp.Gaussian(mean, covariance, validate_args=False) for mean in means)
    return x, y


def in_flight(gaussians: Sequence[cp.Gaussian], method: Any) -> list[GaussianTensor]:
    lineage = Lineage(method)
    return [GaussianTensor(x.mean, method.carrier(x, lineage)) for x in gaussians]


def planned(gaussians: Sequence[cp.Gaussian], method: Any) -> list[GaussianTensor]:
    lineage, ledger = Lineage(method), Ledger()
    return [GaussianTensor(x.mean, method.planned_carrier(x, lineage, ledger)) for x in gaussians]


def run(program: Program, tensors: Sequence[Any]) -> Any:
    out = program(*tensors)
    out.evaluate()
    return out


def held(carrier: Any) -> int:
    """Bytes that a carrier with numbers holds."""
    if isinstance(carrier, Tangents):  # which has no covariance
        return carrier.sketch.tangents.nbytes
    structure = carrier.covariance
    if isinstance(structure, Streamed):
        return structure.half.nbytes
    return structures.held(structure)


# Full covariances: the oracle is the Jacobian, or sampling.


@pytest.mark.parametrize("method", FULL, ids=repr)
@pytest.mark.parametrize("name", [*SMOOTH, *NETWORKS])
def test_small_noise_goes_by_the_jacobian(name: str, method: Any) -> None:
    program, (x, y) = PROGRAMS[name], inputs()
    result = propagate(program, x, y, method=method)
    expected = torch.zeros_like(result.covariance_matrix)
    for i in range(BATCH):
        of_one = lambda a, b: program(a[None], b[None]).flatten()  # noqa: E731
        parts = jacrev(of_one, argnums=(0, 1))(x.mean[i], y.mean[i])
        for part, given in zip(parts, (x, y), strict=True):
            expected[i] += part @ given.covariance_matrix[i] @ part.mT
    matrix, size = result.covariance_matrix, expected.diagonal(dim1=-2, dim2=-1).amax()
    if name == "pooling" and method.independent_maxima:  # also of one winner and another
        matrix, expected = (m.diagonal(dim1=-2, dim2=-1) for m in (matrix, expected))
    assert_close(result.mean, program(x.mean, y.mean), rtol=1e-4, atol=1e-4)
    assert_close(matrix, expected, rtol=1e-2, atol=1e-3 * float(size))


@pytest.mark.parametrize("name", NOISY)
def test_random_functions_go_by_sampling(name: str) -> None:
    torch.manual_seed(0)
    program, (x, y) = NOISY[name], inputs(0.1)
    found = propagate(program, x, y)
    sampled = propagate(program, x, y, cp.MonteCarlo(20_000))
    for one, other, error in (
        (found.mean, sampled.mean, sampled.mean_stderr),
        (found.covariance_matrix, sampled.covariance_matrix, sampled.covariance_stderr),
    ):
        assert bool(((one - other).abs() <= 6 * error + 1e-12).all())


# A structure is its matrix, to every method.

METHODS_OF_STRUCTURES = [*FULL, cp.AssumedDensity(), cp.Sketched(16)]


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS_OF_STRUCTURES, ids=repr)
@pytest.mark.parametrize("structure", structures.KNOWN)
def test_a_structure_goes_as_its_matrix(structure: str, method: Any) -> None:
    given = inputs(structure=structure)
    parts = given[0].covariance.factor_and_noise()
    if isinstance(method, cp.Sketched) and parts is not None and parts[1] is not None:
        pytest.skip("it estimates the noise beside a factor")
    written = [cp.Gaussian(x.mean, Dense(x.covariance.matrix())) for x in given]
    for name in ("activation", "groups", "residual"):
        found, expected = (propagate(PROGRAMS[name], *x, method=method) for x in (given, written))
        size = float(expected.covariance.diagonal().amax())
        assert_close(found.mean, expected.mean, rtol=1e-9)
        assert_close(found.covariance_matrix, expected.covariance_matrix, atol=1e-6 * size)


# Variances of one operation on independent features are exact.


@torch.no_grad()
@pytest.mark.parametrize("name", [*SMOOTH, *NOISY])
def test_variances_are_those_of_one_operation(name: str) -> None:
    given = inputs(1e-4, "diagonal")
    exact, alone = (run(PROGRAMS[name], in_flight(given, m)) for m in (cp.Exact(), METHODS[3]))
    assert isinstance(alone.carrier, Variances)
    size = float(exact.variances.max())
    if name in ("sum of one", "pooling"):  # one tensor as two terms; a maximum of its own
        assert alone.variances.shape == exact.variances.shape
        return
    assert_close(alone.loc, exact.loc, rtol=1e-5, atol=1e-7)
    assert_close(alone.variances, exact.variances, rtol=1e-3, atol=1e-4 * size)


# Tangents are an estimate of the same.


@pytest.mark.parametrize(
    "name", [name for name in PROGRAMS if name not in ("channels", "Bayesian convolution")]
)
@torch.no_grad()
def test_many_tangents_are_close(name: str) -> None:
    given, generator = inputs(1e-3), torch.Generator().manual_seed(0)
    sketched = cp.Sketched(4096, generator=generator, exact=0)
    exact = propagate(PROGRAMS[name], *given)
    found = propagate(PROGRAMS[name], *given, method=sketched)
    size = exact.covariance.diagonal().amax()
    assert_close(found.mean, exact.mean, rtol=1e-2, atol=1e-3)
    assert_close(found.covariance_matrix, exact.covariance_matrix, atol=0.08 * float(size))


# A plan knows the bytes of what is carried, whatever the structure.


def check_planned(program: Program, given: Sequence[cp.Gaussian], method: Any) -> None:
    counted, real = run(program, planned(given, method)), run(program, in_flight(given, method))
    assert isinstance(counted.carrier, Planned)
    assert (counted.shape, counted.dtype) == (real.shape, real.dtype)
    assert (counted.carrier.size, counted.carrier.batch_shape) == (
        real.carrier.size, real.carrier.batch_shape,
    )  # fmt: skip
    assert counted.carrier.planned.nbytes == held(real.carrier)
    if isinstance(real.carrier, Full):
        origins = [len({parent for parent, _ in one.carrier.edges}) for one in (counted, real)]
        assert (counted.carrier.depth, origins[0]) == (real.carrier.depth, origins[1])


@torch.no_grad()
@pytest.mark.parametrize("structure", structures.KNOWN)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_has_the_bytes_of_the_real_structure(name: str, structure: str) -> None:
    check_planned(PROGRAMS[name], inputs(structure=structure), cp.Exact())


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS[1:], ids=repr)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_of_every_method_has_its_bytes(name: str, method: Any) -> None:
    if isinstance(method, cp.Sketched) and name in ("channels", "Bayesian convolution"):
        pytest.skip("it has no rule for them")
    check_planned(PROGRAMS[name], inputs(), method)


WIDE: dict[str, Callable[[Any], Any]] = {
    "linear": lambda x: x,
    "activation": torch.relu,
    "scale": lambda x: 2 * x,
    "two activations": lambda x: torch.tanh(torch.relu(x) + 1).sigmoid(),
    "selection": lambda x: x[:, :20],
    "dtype": lambda x: x.float(),
    "sum": lambda x: x + x.flip(-1),
}


@torch.no_grad()
@pytest.mark.parametrize("name", WIDE)
def test_a_plan_streams_where_the_real_one_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covprop.covariance.dense.WIDE", 2**9)
    wider = nn.Linear(SIZE, 40, dtype=D)
    check_planned(lambda x, _: WIDE[name](wider(x)), inputs(), cp.Exact())
