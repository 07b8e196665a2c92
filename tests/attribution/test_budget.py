"""Shares of the variance, against closed forms, quadrature, and sums over permutations."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop import bayes

ROUNDING = 1e-12
"""Of some hundred terms of size one in float64, and of the standardising of a covariance."""
COVARIANCE = torch.tensor([[1.0, 0.6, 0.1], [0.6, 0.5, -0.2], [0.1, -0.2, 2.0]]).double()


def linear(*rows: list[float]) -> nn.Linear:
    layer = nn.Linear(len(rows[0]), len(rows)).double().requires_grad_(False)
    layer.weight.copy_(torch.tensor(rows))
    layer.bias.zero_()
    return layer


def shapley(value: dict[tuple[int, ...], float], count: int) -> list[float]:
    """By its definition: over all orders of the players."""
    orders = list(itertools.permutations(range(count)))
    return [
        sum(
            value[tuple(sorted(order[: order.index(i) + 1]))]
            - value[tuple(sorted(order[: order.index(i)]))]
            for order in orders
        )
        / len(orders)
        for i in range(count)
    ]


def subsets(count: int) -> list[tuple[int, ...]]:
    return [s for size in range(count + 1) for s in itertools.combinations(range(count), size)]


def close(found: Tensor, expected: object, tolerance: float = ROUNDING) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, expected.reshape(found.shape), rtol=0, atol=tolerance)


@pytest.mark.parametrize("method", ["gaussian-layers", "linearized", "unscented"])
def test_a_linear_model_has_the_budget_of_the_gum(method: str) -> None:
    stddev = torch.tensor([0.1, 0.2, 0.0, 0.4]).double()
    x = cp.Gaussian.diagonal(torch.ones(4).double(), stddev=stddev)
    model = linear([1.0, -2.0, 3.0, 0.5], [0.0, 1.0, 0.0, -1.0])
    budget = cp.uncertainty_budget(model, x, groups=["a", "b", "c", "d"], method=method)
    squares = (model.weight * stddev).square().T
    expected = squares / squares.sum(0)
    for found in (budget.first_order, budget.total, budget.share):
        close(found, expected)
    close(budget.stddev, stddev)
    close(budget.contribution, squares.sqrt())
    close(budget.coefficient[[0, 1, 3]], model.weight.T[[0, 1, 3]])
    assert budget.coefficient[2].isnan().all()  # nothing of it can be seen
    close(budget.noise, torch.zeros(2))


def test_a_linear_model_of_correlated_inputs_has_the_shapley_values_of_regressions() -> None:
    c, sigma = np.array([1.0, -1.0, 0.5]), COVARIANCE.numpy()
    total = c @ sigma @ c
    value = {}
    for s in subsets(3):
        across = sigma[:, s]
        known = across @ np.linalg.solve(sigma[np.ix_(s, s)], across.T)
        value[s] = c @ known @ c / total
    x = cp.Gaussian(torch.zeros(3).double(), COVARIANCE)
    budget = cp.uncertainty_budget(linear(c.tolist()), x, method="gaussian-layers")
    close(budget.share, shapley(value, 3))
    close(budget.first_order, [value[(i,)] for i in range(3)])
    close(budget.total, [1 - value[s] for s in ((1, 2), (0, 2), (0, 1))])
    close(budget.coefficient, c)


def quadrature(size: int) -> tuple[Tensor, Tensor]:
    """Nodes (size,) and weights of the standard normal density."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(size)
    return torch.tensor(nodes), torch.tensor(weights / math.sqrt(2 * math.pi))


def test_two_correlated_inputs_of_a_network_agree_with_quadrature() -> None:
    """One hidden layer: its moments are exact, whatever the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    mean, matrix = torch.tensor([0.3, -0.5]).double(), torch.tensor([[1.0, 0.7], [0.7, 0.8]])
    matrix = matrix.double()
    nodes, weights = quadrature(60)
    with torch.no_grad():
        model[0].weight.mul_(2)
        value = {(): 0.0}
        for i, j in ((0, 1), (1, 0)):
            slope = matrix[i, j] / matrix[i, i]
            spread = (matrix[j, j] - slope * matrix[i, j]).sqrt()
            points = torch.empty(60, 60, 2).double()
            points[..., i] = mean[i] + (matrix[i, i].sqrt() * nodes)[:, None]
            points[..., j] = mean[j] + slope * (points[..., i] - mean[i]) + spread * nodes
            y = model(points)[..., 0]
            inner = y @ weights
            centre = inner @ weights
            value[(i,)] = float((inner - centre).square() @ weights)
            variance = float(((y - centre).square() @ weights) @ weights)
        value = {s: v / variance for s, v in value.items()} | {(0, 1): 1.0}
    budget = cp.uncertainty_budget(model, cp.Gaussian(mean, matrix), method="gaussian-layers")
    # tanh has poles: 60 nodes are off by about exp(-2 sqrt(2 60) / width of the argument).
    close(budget.share, shapley(value, 2), 1e-6)
    close(budget.first_order, [value[(0,)], value[(1,)]], 1e-6)


def quadratic(x: Tensor) -> Tensor:
    """Main effects of all, an interaction of the first two."""
    return x[..., :1] + 2 * x[..., 1:2].square() + 3 * x[..., :1] * x[..., 1:2] - x[..., 2:3]


def test_a_polynomial_has_its_sobol_indices() -> None:
    """Variances of independent Gaussians of mean 0: s, 2 s^2 of a square, s t of a product."""
    s, t, u = 0.5, 0.3, 2.0
    x = cp.Gaussian.diagonal(torch.zeros(3).double(), variance=torch.tensor([s, t, u]).double())
    budget = cp.uncertainty_budget(quadratic, x, method="gaussian-layers")
    first, second, both, third = s, 4 * 2 * t**2, 9 * s * t, u
    total = first + second + both + third
    close(budget.first_order, torch.tensor([first, second, third]) / total, 1e-7)
    close(budget.total, torch.tensor([first + both, second + both, third]) / total, 1e-7)
    close(budget.share, torch.tensor([first + both / 2, second + both / 2, third]) / total, 1e-7)


def ishigami(x: Tensor) -> Tensor:
    """Sobol's test function (Ishigami & Homma 1990)."""
    a, b, c = x.unbind(-1)
    return torch.sin(a) + 7 * torch.sin(b).square() + 0.1 * c**4 * torch.sin(a)


def test_the_function_of_ishigami_is_right_within_the_estimated_error() -> None:
    nodes, weights = quadrature(60)
    y = ishigami(torch.stack(torch.meshgrid(nodes, nodes, nodes, indexing="ij"), -1))
    y = y - torch.einsum("abc,a,b,c", y, weights, weights, weights)
    value = {}
    for s in subsets(3):
        letters = "".join("abc"[i] for i in s)
        rest = ",".join("abc"[i] for i in range(3) if i not in s)
        inner = torch.einsum(f"abc,{rest}->{letters}", y, *[weights] * (3 - len(s))) if rest else y
        outer = ",".join(letters)
        squares = inner.square()
        value[s] = float(
            torch.einsum(f"{letters},{outer}", squares, *[weights] * len(s)) if s else 0
        )
    value = {s: v / value[0, 1, 2] for s, v in value.items()}
    x = cp.Gaussian.isotropic(torch.zeros(3).double(), stddev=1.0)
    budget = cp.uncertainty_budget(ishigami, x, method="quasimontecarlo:32768")
    assert float(budget.error.max()) < 0.1
    error = (budget.share - torch.tensor(shapley(value, 3)).double()).abs()
    assert bool((error <= budget.error).all())
    assert bool((error < 0.02).all())
    close(budget.share.sum(0), 1.0)


def pairs(x: Tensor) -> Tensor:
    """Main effects, and interactions of two: seven inputs are more than all sets are taken of."""
    return (x * torch.arange(1, 8).double() + x * x.roll(1, -1) + x.square()).sum(-1, keepdim=True)


def test_orders_with_their_reverses_are_exact_for_interactions_of_two() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(7).double(), stddev=0.5)
    budget = cp.uncertainty_budget(pairs, x, method="gaussian-layers", orders=2)
    v = 0.25
    main, both = torch.arange(1, 8).double().square() * v + 2 * v**2, v**2
    total = main.sum() + 7 * both
    close(budget.first_order, main / total, 1e-7)
    close(budget.total, (main + 2 * both) / total, 1e-7)
    close(budget.share, (main + both) / total, 1e-7)
    assert "2 orders" in str(budget)
    assert budget.error.isnan().all()  # this method estimates none


def test_chance_of_orders_is_part_of_the_error() -> None:
    """A product of three among seven inputs: orders differ in what they give to whom."""

    def product(x: Tensor) -> Tensor:
        return x[..., :1] * x[..., 1:2] * x[..., 2:3] + 0.1 * x.sum(-1, keepdim=True)

    x = cp.Gaussian.isotropic(torch.zeros(7).double(), stddev=1.0)
    budget = cp.uncertainty_budget(product, x, method="quasimontecarlo:512", orders=8)
    close(budget.share.sum(0), 1.0)
    expected = torch.tensor([1 / 3] * 3 + [0.0] * 4).double() + 0.01
    error = (budget.share - expected[:, None] / 1.07).abs()
    assert bool((error <= budget.error).all())


def deep(inputs: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(inputs, 12), nn.ReLU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 2)
    return nn.Sequential(*layers).double().requires_grad_(False)


def test_shares_of_a_batch_sum_to_one_and_are_those_of_its_elements() -> None:
    mean = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).double()
    root = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(2)).double()
    x = cp.Gaussian(mean, root @ root.mT)
    every = cp.uncertainty_budget(deep(3), x, method="gaussian-layers")
    assert every.share.shape == (3, 2, 2)
    close(every.share.sum(0), torch.ones(2, 2))
    for i in range(2):
        one = cp.uncertainty_budget(deep(3), x[i], method="gaussian-layers")
        close(every.share[:, i], one.share, 1e-9)  # float64 through four layers
        close(every.contribution[:, i], one.contribution, 1e-9)


def test_the_default_is_right_for_a_deep_network_within_its_estimated_error() -> None:
    """Strong noise, which layers that are taken as Gaussian have half of a variance wrong of."""
    x, model = cp.Gaussian.isotropic(torch.zeros(2).double(), stddev=2.0), deep(2)
    budget = cp.uncertainty_budget(model, x)
    first, second = torch.randn(2, 100_000, 2, generator=torch.Generator().manual_seed(0)).double()
    y = model(2 * first)
    for i in range(2):
        z = model(2 * torch.where(torch.arange(2) == i, second, first))
        squares = (y - z).square() / 2 / y.var(0)
        chance = 4 * squares.std(0) / 100_000**0.5
        error = (budget.total[i] - squares.mean(0)).abs()
        assert bool((error <= budget.error[i] + chance).all())
        assert bool((error < 0.02).all())


def test_several_gaussians_and_groups_of_their_elements() -> None:
    def model(a: Tensor, *, b: dict[str, Tensor]) -> Tensor:
        return a.sum(-1, keepdim=True) + 2 * b["c"]

    a = cp.Gaussian.isotropic(torch.zeros(2).double(), stddev=1.0)
    c = cp.Gaussian.isotropic(torch.zeros(1).double(), stddev=1.0)
    whole = cp.uncertainty_budget(model, a, b={"c": c})
    assert whole.names == ("input 0", "input 1")
    close(whole.share, [2 / 6, 4 / 6])
    close(whole.contribution, [2**0.5, 2.0])
    named = cp.uncertainty_budget(model, a, b={"c": c}, groups={"first": 0, "b": c})
    assert named.names == ("first", "b", "others")
    close(named.share, [1 / 6, 4 / 6, 1 / 6])
    across = cp.uncertainty_budget(model, a, b={"c": c}, groups={"x": (0, 2), "y": range(1, 2)})
    close(across.share, [5 / 6, 1 / 6])
    assert across.stddev.isnan().tolist() == [True, False]


def test_what_the_model_draws_has_a_share_of_its_own() -> None:
    """Behind a linear layer dropout of half of y = x doubles E[y^2], and so adds E[y^2]."""
    x = cp.Gaussian.isotropic(torch.zeros(2).double(), stddev=1.0)
    model = nn.Sequential(linear([1.0, 0.0], [0.0, 2.0]), nn.Dropout(0.5)).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cp.DropoutWarning)
        budget = cp.uncertainty_budget(model, x, method="gaussian-layers")
    close(budget.noise, [0.5, 0.5])
    close(budget.share, [[0.5, 0.0], [0.0, 0.5]])
    assert "(the model)" in str(budget)


def test_random_weights_have_a_share_of_their_own() -> None:
    layer = bayes.with_posterior(
        linear([3.0]),
        {"weight": torch.tensor([[3.0]]).double(), "bias": torch.zeros(1).double()},
        {"weight": torch.tensor([[2.0]]).double(), "bias": torch.ones(1).double()},
    )
    x = cp.Gaussian.isotropic(torch.ones(1).double(), stddev=1.0)
    budget = cp.uncertainty_budget(layer, x, method="gaussian-layers")
    # Var(w x + b) = E[w]^2 Var x + Var w E[x^2] + Var b.
    close(budget.share, 9 / (9 + 2 * 2 + 1), 1e-7)


def test_two_names_of_one_quantity_share_evenly() -> None:
    """A singular covariance: each tells all of the other."""
    x = cp.Gaussian(torch.zeros(2).double(), 4 * torch.ones(2, 2).double())
    budget = cp.uncertainty_budget(linear([1.0, 0.0]), x, method="gaussian-layers")
    close(budget.share, [0.5, 0.5])
    close(budget.first_order, [1.0, 1.0])
    close(budget.total, [0.0, 0.0])


def test_a_skewness_counts() -> None:
    """x - 1 of an exponential distribution: Var x^2 is 20, and 10 without third cumulants."""
    ones = torch.ones(2).double()
    x = cp.Skewed.gamma(ones, stddev=ones)
    assert isinstance(x, cp.Skewed)
    model = linear([1.0, 1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        budget = cp.uncertainty_budget(model, x, method="cumulants")
    close(budget.share, [0.5, 0.5])


def test_an_output_that_does_not_vary_has_no_shares() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(2).double(), stddev=1.0)
    budget = cp.uncertainty_budget(linear([1.0, 1.0], [0.0, 0.0]), x, method="gaussian-layers")
    assert budget.share[:, 1].isnan().all()
    close(budget.share[:, 0], [0.5, 0.5])
    nothing = cp.uncertainty_budget(linear([1.0, 1.0]), x * 0.0, method="gaussian-layers")
    assert nothing.share.isnan().all()


def test_the_table_is_that_of_the_gum() -> None:
    x = cp.Gaussian.diagonal(torch.zeros(2), stddev=torch.tensor([3.0, 4.0]))
    model = linear([1.0, -1.0]).float()
    budget = cp.uncertainty_budget(model, x, groups=["u", "v"], method="gaussian-layers")
    assert str(budget).splitlines()[:4] == [
        "input     uncertainty  sensitivity  contribution  first order  total  share",
        "u                   3            1             3         36 %   36 %   36 %",
        "v                   4           -1             4         64 %   64 %   64 %",
        "combined            5            -             -            -      -  100 %",
    ]
    record = budget.to_dict()
    assert record["names"] == ["u", "v"]
    assert record["coefficient"] == [[1.0], [-1.0]]


def test_a_rough_answer_warns() -> None:
    def cubed(x: Tensor) -> Tensor:
        return (x**3).sum(-1, keepdim=True)

    x = cp.Gaussian.isotropic(torch.zeros(2).double(), stddev=1.0)
    with pytest.warns(cp.ApproximationWarning, match="shares of this uncertainty budget may be"):
        cp.uncertainty_budget(cubed, x, method="quasimontecarlo:16")


def test_what_a_method_does_not_follow_from_one_evaluation_to_the_other_is_said() -> None:
    """Of a norm covariances are known to first order alone, and here that is zero."""

    def length(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=-1, keepdim=True)

    x = cp.Gaussian.isotropic(torch.zeros(2).double(), stddev=0.5)
    with pytest.warns(cp.ApproximationWarning, match="may be off by 100 %"):
        cp.uncertainty_budget(length, x, method="gaussian-layers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        budget = cp.uncertainty_budget(length, x, method="quasimontecarlo:4096")
    assert float((budget.share - 0.5).abs().max()) < 0.01


def test_what_does_not_fit_is_refused() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(40), stddev=1.0)
    model = nn.Linear(40, 1)
    with pytest.raises(ValueError, match="the input has 40 elements"):
        cp.uncertainty_budget(model, x)
    with pytest.raises(ValueError, match="in two groups"):
        cp.uncertainty_budget(model, x, groups={"a": range(3), "b": 2})
    with pytest.raises(ValueError, match="40 different names"):
        cp.uncertainty_budget(model, x, groups=["a", "b"])
    with pytest.raises(ValueError, match="orders is"):
        cp.uncertainty_budget(model, x, orders=0)
    small = cp.Gaussian.isotropic(torch.zeros(2), stddev=1.0)
    with pytest.raises(cp.UnsupportedOperation, match="returns one tensor"):
        cp.uncertainty_budget(lambda x: (x, x), small)
    with pytest.raises(cp.UnsupportedOperation, match="AssumedDensity"):
        cp.uncertainty_budget(nn.Linear(2, 1), small, method="assumed")
