"""Random numbers that a model draws itself are refused by name, and by nobody else's fault."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from tests.layers import propagate

D = torch.float64
ONES = torch.ones(4, dtype=D)
DRAWS: dict[str, Callable[[], Tensor]] = {
    "randn": lambda: torch.randn(4, dtype=D),
    "rand": lambda: torch.rand(4, dtype=D),
    "bernoulli": lambda: torch.bernoulli(ONES / 2),
    "randint": lambda: torch.randint(3, (4,)).to(D),
    "normal": lambda: torch.normal(ONES, 1.0),
    "randperm": lambda: torch.randperm(4).to(D),
    "multinomial": lambda: torch.multinomial(ONES, 4).to(D),
    "uniform_": lambda: torch.empty(4, dtype=D).uniform_(),
    "dropout": lambda: F.dropout(ONES),
    "gumbel_softmax": lambda: F.gumbel_softmax(ONES),
}
METHODS = {
    "exact": cp.Exact(),
    "series": cp.Series(order=4),
    "assumed": cp.AssumedDensity(),
    "sketched": cp.Sketched(16),
    "seeded": cp.Sketched(16, generator=torch.Generator().manual_seed(0)),
    "split": cp.Split(),
    "control": cp.ControlVariate(128),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def given() -> cp.Gaussian:
    return cp.Gaussian.isotropic(torch.zeros(4, dtype=D), stddev=0.5)


class Noisy(nn.Module):
    def __init__(self, draw: Callable[[], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Any) -> Any:
        return torch.tanh(x) * self.draw()


@pytest.mark.parametrize("method", [cp.Split(), cp.ControlVariate(128)])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.randn(4, dtype=D),
        lambda x: x + torch.randn_like(x),
        lambda x: F.rrelu(x, training=True),
        lambda x: F.alpha_dropout(x, 0.5, training=True),
    ],
    ids=["randn", "randn_like", "rrelu", "alpha_dropout"],
)
def test_no_base_is_offered_that_refuses_draws_as_well(function: Any, method: Any) -> None:
    with pytest.raises(cp.UnsupportedOperation) as raised:
        propagate(function, given(), method=method)
    assert "Linearized" not in str(raised.value)
    with pytest.raises(cp.UnsupportedOperation, match=r"base=cp\.Linearized\(\)"):
        propagate(torch.digamma, given(), method=method)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_refused_by_its_name_and_place(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Noisy(DRAWS[name])).to(D)
    with pytest.raises(
        cp.UnsupportedOperation, match=rf"in module 1 \(Noisy\).*{name}.*MonteCarlo"
    ):
        propagate(model, given())


@every_method
def test_every_method_that_goes_through_once_refuses(method: Any) -> None:
    with pytest.raises(cp.UnsupportedOperation, match="randn"):
        propagate(lambda x: x + torch.randn(4, dtype=D), given(), method)


def test_samples_average_over_draws() -> None:
    y = propagate(lambda x: x + torch.randn(4, dtype=D), given(), cp.MonteCarlo(20_000))
    error = y.covariance_stderr.diagonal()
    assert bool(((y.variance - 1.25).abs() < 5 * error).all())


@every_method
def test_what_has_moments_draws_nothing(method: Any) -> None:
    """Dropout of a Gaussian, and numbers from a generator that begins anew every time."""
    before = torch.get_rng_state()
    seeds = torch.Generator()

    def model(x: Any) -> Any:
        fixed = torch.randn(4, dtype=D, generator=seeds.manual_seed(1))
        return F.dropout(torch.tanh(x), 0.5, training=True) * fixed

    if isinstance(method, cp.ControlVariate):  # which evaluates the model, and it drops
        return
    assert float(propagate(model, given(), method).stddev.min()) > 0
    if not isinstance(method, cp.Sketched):
        assert torch.equal(torch.get_rng_state(), before)


def test_the_draws_of_other_threads_are_not_blamed_on_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 4)).to(D)
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            torch.rand(3)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(20):
            propagate(model, given())
        with pytest.raises(cp.UnsupportedOperation, match="randn"):
            propagate(lambda x: x + torch.randn(4, dtype=D), given())
    finally:
        stop.set()
        thread.join()


def test_a_sketch_follows_the_seed_of_torch() -> None:
    model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 4)).to(D)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        method = cp.Sketched(16, exact=0)
        found.append(propagate(model, given(), method))
        assert found[-1].method is method
    first, again, other = (y.covariance_matrix for y in found)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_draw_of_an_exported_program_is_refused_beside_other_threads() -> None:
    program = torch.export.export(Noisy(DRAWS["randn"]), (ONES,)).module()
    idle = threading.Event()
    thread = threading.Thread(target=idle.wait)
    thread.start()
    try:
        with pytest.raises(cp.UnsupportedOperation, match="randn"):
            propagate(program, given())
    finally:
        idle.set()
        thread.join()
