"""Calls as people write them: by keyword, by name, and by mistake."""

import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop.methods import as_method
from covprop.methods.names import METHODS
from tests.gaussians import covariance_matrix, gaussian, numbers
from tests.oracles import assert_close

MEAN = numbers(2, 3)
WIDTH = numbers(2, 3, seed=1).abs()


def deprecated(call: Callable[[], cp.Gaussian], text: str) -> cp.Gaussian:
    """What a former call returns; its warning is of the line of the call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = call()
    (item,) = found
    lines, first = inspect.getsourcelines(call)
    assert item.category is DeprecationWarning
    assert text in str(item.message)
    assert item.filename == __file__
    assert first <= item.lineno < first + len(lines)
    return result


FORMER: dict[str, tuple[Callable[[], cp.Gaussian], Callable[[], cp.Gaussian], str]] = {
    "isotropic": (
        lambda: cp.Gaussian.isotropic(MEAN, 0.1, 1),
        lambda: cp.Gaussian.isotropic(MEAN, stddev=0.1, batch_dims=1),
        "cp.Gaussian.isotropic takes stddev and batch_dims by keyword: write stddev=...",
    ),
    "diagonal": (
        lambda: cp.Gaussian.diagonal(MEAN, WIDTH),
        lambda: cp.Gaussian.diagonal(MEAN, variance=WIDTH),
        "cp.Gaussian.diagonal takes variance by keyword: write variance=...",
    ),
    "low rank": (
        lambda: cp.Gaussian.low_rank(MEAN, MEAN[..., None], WIDTH, batch_dims=1),
        lambda: cp.Gaussian.low_rank(MEAN, MEAN[..., None], variance=WIDTH, batch_dims=1),
        "write variance=...",
    ),
    "skewed": (
        lambda: cp.Skewed(MEAN, WIDTH, 0.5),
        lambda: cp.Skewed(MEAN, variance=WIDTH, skewness=0.5),
        "cp.Skewed takes variance and skewness by keyword",
    ),
    "log-normal": (
        lambda: cp.Skewed.log_normal(WIDTH, 0.1),
        lambda: cp.Skewed.log_normal(WIDTH, variance=0.1**2),
        "write stddev=...",
    ),
    "gamma": (
        lambda: cp.Skewed.gamma(WIDTH, 0.1),
        lambda: cp.Skewed.gamma(WIDTH, stddev=0.1),
        "write stddev=...",
    ),
    "observation, variance": (
        lambda: gaussian(3).condition([0], torch.zeros(1), 0.1),
        lambda: gaussian(3).condition([0], torch.zeros(1), stddev=0.1**0.5),
        "write variance=...",
    ),
    "observation, covariance": (
        lambda: gaussian(3).condition([0, 1], torch.zeros(2), noise=0.1 * torch.eye(2)),
        lambda: gaussian(3).condition([0, 1], torch.zeros(2), covariance=0.1 * torch.eye(2)),
        "write covariance=...",
    ),
}


@pytest.mark.parametrize("name", FORMER)
def test_noise_by_position_still_works_and_says_what_to_write(name: str) -> None:
    before, now, text = FORMER[name]
    former, expected = deprecated(before, text), now()
    assert_close(former.mean, expected.mean, rtol=1e-14)
    assert_close(former.covariance_matrix, expected.covariance_matrix, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("make", [cp.Gaussian.isotropic, cp.Gaussian.diagonal])
def test_noise_is_given_once(make: Any) -> None:
    with pytest.raises(cp.InvalidGaussian, match=r"stddev=... or as variance=..., one of them"):
        make(MEAN)
    with pytest.raises(cp.InvalidGaussian, match="not both"):
        make(MEAN, stddev=WIDTH, variance=WIDTH)
    with pytest.raises(cp.InvalidGaussian, match="one of them"):
        gaussian(3).condition([0], torch.zeros(1), stddev=0.1, variance=0.1)


def test_standard_deviations_are_squared() -> None:
    for x in (cp.Gaussian.diagonal(MEAN, stddev=WIDTH), cp.Skewed(MEAN, stddev=WIDTH, skewness=0.0),
              cp.Gaussian.low_rank(MEAN, 0 * MEAN[..., None], stddev=WIDTH)):  # fmt: skip
        assert_close(x.variance, WIDTH**2, rtol=1e-14)
    each = torch.tensor([0.1, 0.2], dtype=torch.float64)
    x = cp.Gaussian.isotropic(MEAN, variance=each, batch_dims=1)
    assert_close(x.variance, each[:, None].expand(2, 3), rtol=1e-14)
    with pytest.raises(cp.InvalidGaussian, match="cannot be negative"):
        cp.Gaussian.diagonal(MEAN, stddev=-WIDTH)
    with pytest.raises(cp.InvalidGaussian, match=r"for one number use cp.Gaussian.isotropic"):
        cp.Gaussian.diagonal(MEAN, stddev=0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="positional argument"):
        cp.Gaussian.isotropic(MEAN, 0.1, 1, 2)  # type: ignore[call-arg,misc]


OBSERVED: dict[str, tuple[dict[str, Any], str]] = {
    "three values of two": ({"value": torch.zeros(3)},
                            r"2 elements are observed, so the value has the shape \(2,\)"),
    "a matrix": ({"value": torch.zeros(4, 2)}, r"and not \(4, 2\)"),
    "no number": ({"value": torch.tensor([0.0, torch.nan])}, "observed value has NaN"),
    "three variances": ({"variance": torch.ones(3)}, r"has the shape \(2,\), not \(3,\)"),
    "three widths": ({"stddev": torch.ones(3)}, r"has the shape \(2,\), not \(3,\)"),
    "another matrix": ({"covariance": torch.eye(3)}, r"has the shape \(2, 2\), not \(3, 3\)"),
    "an infinite noise": ({"variance": torch.inf}, "noise of an observation has NaN or infinite"),
}  # fmt: skip


@pytest.mark.parametrize("name", OBSERVED)
def test_an_observation_of_another_shape_is_refused(name: str) -> None:
    given, text = OBSERVED[name]
    with pytest.raises(cp.InvalidGaussian, match=text):
        gaussian(4).condition([1, 2], **{"value": torch.zeros(2)} | given)


def test_an_observation_may_be_a_list_or_one_number_for_all() -> None:
    x = gaussian(4)
    expected = x.condition([1, 2], torch.full((2,), 0.5, dtype=torch.float64)).mean
    for value in ([0.5, 0.5], 0.5, torch.tensor(0.5)):
        assert_close(x.condition([1, 2], value).mean, expected, rtol=0.0)  # type: ignore[arg-type]


MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().requires_grad_(False)
X = cp.Gaussian.isotropic(torch.zeros(3, dtype=torch.float64), stddev=0.1)

NAMED: dict[str, Any] = {
    "auto": cp.Auto(), "auto:0.01": cp.Auto(0.01), "cumulants": cp.Cumulants(),
    "gaussian-layers": cp.GaussianLayers(), "Exact": cp.GaussianLayers(), "split:3": cp.Split(3),
    "series:6": cp.Series(order=6), "series:1e-3": cp.Series(tolerance=1e-3),
    "montecarlo:1000": cp.MonteCarlo(1000), "quasimontecarlo:64": cp.QuasiMonteCarlo(64),
    "controlvariate": cp.ControlVariate(), "sketched:16": cp.Sketched(16),
    "linearized": cp.Linearized(), "unscented": cp.Unscented(), "wu2019": cp.Wu2019(),
    "piecewise:1": cp.PiecewiseLinear(1), "assumed": cp.AssumedDensity(),
}  # fmt: skip


def test_every_name_of_the_command_line_is_a_method() -> None:
    assert {name: as_method(name) for name in NAMED} == NAMED
    assert {name.partition(":")[0].lower() for name in NAMED} - {"exact"} == set(METHODS)


def test_methods_are_taken_by_name_wherever_one_is_taken() -> None:
    by_name, expected = (cp.propagate(MODEL, X, method=m) for m in ("cumulants", cp.Cumulants()))
    assert torch.equal(by_name.mean, expected.mean)
    assert by_name.method == cp.Cumulants()
    assert cp.plan(MODEL, X, method="series").steps == cp.plan(MODEL, X, method=cp.Series()).steps
    assert cp.joint(MODEL, X, "linearized").method == cp.Linearized()
    assert cp.trace(MODEL, X, method="series:4").output.method == cp.Series(order=4)
    by_name = cp.robustness.sensitivity(MODEL, X, method="series")
    assert_close(by_name, cp.robustness.sensitivity(MODEL, X, method=cp.Series()), rtol=1e-9)
    budget = cp.robustness.noise_budget(MODEL, X, method="linearized", generator=seeded())
    other = cp.robustness.noise_budget(MODEL, X, method=cp.Linearized(), generator=seeded())
    assert torch.equal(budget.level, other.level)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_sampling_method_by_name_draws_from_torchs_generator() -> None:
    def drawn() -> Tensor:
        torch.manual_seed(3)
        return cp.propagate(MODEL, X, method="montecarlo:10").mean

    assert torch.equal(drawn(), drawn())
    assert not torch.equal(drawn(), cp.propagate(MODEL, X, method="montecarlo:10").mean)


@pytest.mark.parametrize("name", ["quasi-monte-carlo:64", "QuasiMonteCarlo:64"])
def test_names_of_methods_have_any_case_and_hyphens(name: str) -> None:
    assert cp.propagate(MODEL, X, method=name).method == cp.QuasiMonteCarlo(64)


@pytest.mark.parametrize(
    ("method", "error", "text"),
    [
        (cp.Cumulants, TypeError, r"cp.Cumulants is a class: write cp.Cumulants\(\)"),
        ("cumulant", ValueError, "'cumulant' is no method; there are auto"),
        ("cumulants:3", ValueError, "cumulants takes no option, so '3' says nothing"),
        ("split:many", ValueError, "'split:many' is no method: 'many' is no whole number"),
        (0.01, TypeError, r"a method is an object such as .* or a name such as 'cumulants'"),
    ],
)
def test_what_is_no_method_gets_a_sentence(method: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cp.propagate(MODEL, X, method=method)
    with pytest.raises(error, match=text):
        cp.robustness.analyse(MODEL, X, method=method)


def test_a_class_in_the_place_of_a_method_gets_a_sentence() -> None:
    with pytest.raises(TypeError, match=r"write cp.Cumulants\(\)"):
        cp.propagate(MODEL, X, cp.Cumulants)


TAKES_A_GAUSSIAN: dict[str, Callable[[Any], Any]] = {
    "propagate": lambda x: cp.propagate(MODEL, x),
    "plan": lambda x: cp.plan(MODEL, x),
    "joint": lambda x: cp.joint(MODEL, x),
    "trace": lambda x: cp.trace(MODEL, x),
    "compare": lambda x: cp.compare(MODEL, x, show=False),
    "analyse": lambda x: cp.robustness.analyse(MODEL, x),
    "sensitivity": lambda x: cp.robustness.sensitivity(MODEL, x),
    "sensitivity, label": lambda x: cp.robustness.sensitivity(MODEL, x, 1),
    "worst noise": lambda x: cp.robustness.worst_noise(MODEL, x),
    "sampled probabilities": lambda x: cp.robustness.sampled_probabilities(MODEL, x),
}


@pytest.mark.parametrize("name", TAKES_A_GAUSSIAN)
def test_a_tensor_in_the_place_of_a_gaussian_gets_a_sentence(name: str) -> None:
    with pytest.raises(
        TypeError, match=r"cp.Gaussian, not Tensor; make one .* cp.Gaussian.isotropic\(x, stddev="
    ):
        TAKES_A_GAUSSIAN[name](torch.zeros(3))


def test_advice_suits_what_is_given_in_the_place_of_a_gaussian() -> None:
    normal = torch.distributions.MultivariateNormal(torch.zeros(3), torch.eye(3))
    with pytest.raises(TypeError, match=r"Gaussian.from_torch\(x\) makes one"):
        cp.propagate(MODEL, normal)
    space = cp.filters.StateSpace(torch.sin, torch.cos, measurement_stddev=0.1)
    state = cp.Gaussian.isotropic(torch.zeros(2), stddev=1.0)
    updated = space.update(state, torch.ones(2))
    with pytest.raises(TypeError, match=r"not Update; pass its \.state"):
        space.predict(updated)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", [cp.Auto(), cp.GaussianLayers(), cp.MonteCarlo(10)])
def test_half_precision_gets_a_sentence(dtype: torch.dtype, method: Any) -> None:
    x = X.to(torch.float32)
    with pytest.raises(ValueError, match=r"float32 or float64; convert the model with .float\(\)"):
        cp.propagate(nn.Linear(3, 2).to(dtype), x, method=method)
    with pytest.raises(cp.InvalidGaussian, match=r"convert it with .float\(\) or .double\(\)"):
        cp.Gaussian.isotropic(torch.zeros(3, dtype=dtype), stddev=0.1)


@pytest.mark.parametrize(
    "lower", [lambda x: x.half(), lambda x: x.bfloat16(), lambda x: x.to(torch.float16)]
)
def test_a_model_that_goes_to_half_precision_gets_a_sentence(lower: Any) -> None:
    with pytest.raises(cp.UnsupportedOperation, match=r"computes in float32 .* with .float\(\)"):
        cp.propagate(lambda x: torch.tanh(lower(x)).float(), X, method="gaussian-layers")


@pytest.mark.parametrize("method", ["auto", "gaussian-layers", "montecarlo:10", "linearized"])
def test_autocast_gets_a_sentence(method: str) -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(cp.UnsupportedOperation, match=r"call it outside of torch\.autocast"),
    ):
        cp.propagate(MODEL, X, method=method)


def test_autocast_within_a_model_gets_a_sentence() -> None:
    model = nn.Linear(3, 2).requires_grad_(False)

    def lowered(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    with pytest.raises(cp.UnsupportedOperation, match=r"leave torch\.autocast out"):
        cp.propagate(lowered, X.to(torch.float32), method="gaussian-layers")


@cp.activation
def sloped(x: Tensor, slope: Any = 1.0) -> Tensor:
    return torch.tanh(slope * x)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (10,)])
def test_an_activation_with_parameters_for_each_channel_gets_a_sentence(
    shape: tuple[int, ...],
) -> None:
    slopes = torch.ones(shape, dtype=torch.float64)
    with pytest.raises(cp.UnsupportedOperation, match=r"sloped has .* as in tanh\(slopes \* x\)"):
        cp.propagate(lambda x: sloped(x, slopes), X, method="gaussian-layers")
    closed = cp.activation(lambda x: torch.tanh(slopes * x))
    with pytest.raises(cp.UnsupportedOperation, match="one function for all elements"):
        cp.propagate(closed, X, method="gaussian-layers")
    one = cp.propagate(lambda x: sloped(x, torch.tensor(2.0)), X, method="gaussian-layers")
    outside = cp.propagate(lambda x: sloped(2.0 * x), X, method="gaussian-layers")
    assert_close(one.covariance_matrix, outside.covariance_matrix, rtol=1e-6, atol=1e-9)


MODULES = [
    cp, cp.activations, cp.bayes, cp.covariance, cp.extending, cp.filters, cp.report, cp.robustness,
]  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_completion_lists_the_public_names_and_nothing_else(module: ModuleType) -> None:
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_completion_has_estimators_and_the_report_and_no_internals() -> None:
    assert {"BayesClassifier", "BayesRegressor"} <= set(dir(cp.bayes))
    assert dir(cp.report) == ["render", "write"]
    assert not {"GaussianTensor", "rules", "Carrier"} & set(dir(cp))


USER = """
from typing import assert_type
import torch
from torch import nn
import covprop as cp

net = nn.Sequential(nn.Linear(3, 2))
x = cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)
y = cp.propagate(net, x)
assert_type(y, cp.Gaussian)
y.meann  # error
cp.propagat(net, x)  # error
cp.bayes.BayesRegresor()  # error
assert_type(cp.bayes.BayesRegressor(), cp.bayes.BayesRegressor)
cp.propagate(net, x, method=cp.Auto)  # error
cp.propagate(net, torch.zeros(3))  # error
cp.Gaussian.isotropic(torch.zeros(3), sttdev=0.1)  # error
assert_type(cp.propagate(net, x, cp.Cumulants()), cp.Gaussian)
assert_type(cp.propagate(net, (x, x), method="cumulants"), cp.Gaussian)
assert_type(cp.propagate(net, torch.zeros(3), x), cp.Gaussian)
assert_type(cp.propagate(net, input=x), cp.Gaussian)

def several(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return v, v

def named(v: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"v": v}

assert_type(cp.propagate(several, x), tuple[cp.Gaussian, ...])
assert_type(cp.propagate(named, x), dict[str, cp.Gaussian])
assert_type(2 * x + 1.0, cp.Gaussian)
assert_type(x @ torch.eye(3), cp.Gaussian)

@cp.activation
def first(v: torch.Tensor, slope: float = 1.0) -> torch.Tensor:
    return v * slope

@cp.activation(kinks=(0.0,))
def second(v: torch.Tensor) -> torch.Tensor:
    return v.abs()

assert_type(first(torch.zeros(3), 2.0), torch.Tensor)
assert_type(second(torch.zeros(3)), torch.Tensor)
first(torch.zeros(3), "steep")  # error
second()  # error
"""


@pytest.mark.slow
def test_a_type_checker_finds_the_mistakes_of_a_user_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(USER)
    source = Path(cp.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--no-error-summary", "--no-pretty",
         "--hide-error-context", "--python-version=3.11", "--ignore-missing-imports",
         f"--cache-dir={tmp_path / 'cache'}", str(file)],
        capture_output=True, text=True, check=False, env={"MYPYPATH": str(source)}, cwd=tmp_path,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    found = sorted({int(line.split(":")[1]) for line in errors})
    wrong = [number for number, line in enumerate(USER.splitlines(), 1) if "# error" in line]
    assert found == wrong, done.stdout + done.stderr


def test_a_covariance_matrix_is_given_as_it_is() -> None:
    """What has no stddev= or variance=, because it is all of it."""
    matrix = covariance_matrix(size=3)
    assert_close(cp.Gaussian(torch.zeros(3, dtype=torch.float64), matrix).covariance_matrix, matrix)


def test_what_is_no_model_is_told() -> None:
    with pytest.raises(TypeError, match=r"function of tensors, not dict; cp.from_sklearn\(model\)"):
        cp.propagate({}, X)


def test_the_name_of_a_method_in_the_place_of_an_input_is_told() -> None:
    with pytest.raises(TypeError, match=r"a keyword: write method='series:4'"):
        cp.propagate(nn.Identity(), X, "series:4")
