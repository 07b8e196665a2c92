"""What is computed as it is given, and rarely meant: a warning says what will be computed."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop.rules.noise import warn_of_scripted_dropout
from tests.layers import propagate

pytestmark = pytest.mark.filterwarnings("default::UserWarning")

torch.manual_seed(0)  # of other seeds, all units may be dead at zero
MLP = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).eval()
CNN = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(1), nn.Linear(12, 2)).eval()


def seen(model: Any, x: cp.Gaussian, method: Any = None) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found, torch.no_grad():
        warnings.simplefilter("always")
        propagate(model, x, method or cp.Exact())
    return list(found)


@pytest.mark.parametrize("method", [cp.Exact(), cp.Linearized(), cp.Split()])
@pytest.mark.parametrize(
    ("model", "shape", "count"), [(MLP, (4, 3), 12), (CNN, (4, 2, 4, 4), 128)], ids=["mlp", "cnn"]
)
def test_a_forgotten_batch_is_told_once_at_the_callers_line(
    model: nn.Module, shape: tuple[int, ...], count: int, method: Any
) -> None:
    (found,) = seen(model, cp.Gaussian.isotropic(torch.zeros(shape), stddev=0.1), method)
    assert found.category is cp.BatchWarning
    assert found.filename == __file__
    assert f"joint Gaussian of all {count} features" in str(found.message)
    assert "batch_dims=1" in str(found.message)


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Weighted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.arange(1.0, 5.0)[:, None]


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            raise RuntimeError("plain tensors are not for me")
        return x + 1


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


ROWS = cp.Gaussian.isotropic(torch.zeros(4, 3), stddev=0.1)
MEANT: dict[str, tuple[nn.Module, cp.Gaussian]] = {
    "a batch": (MLP, cp.Gaussian.isotropic(torch.zeros(4, 3), stddev=0.1, batch_dims=1)),
    "one input": (MLP, cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)),
    "one row": (MLP, cp.Gaussian.isotropic(torch.zeros(1, 3), stddev=0.1)),
    "rows that depend": (MLP, cp.Gaussian(torch.zeros(4, 3), torch.eye(12) + 0.1)),
    "an image": (CNN[0], cp.Gaussian.isotropic(torch.zeros(2, 4, 4), stddev=0.1)),
    "a depth-wise layer": (nn.Conv2d(3, 3, 3, groups=3),
                           cp.Gaussian.isotropic(torch.zeros(3, 4, 4), stddev=0.1)),
    "rows that are mixed": (Mixing(), ROWS),
    "rows that are told apart": (Weighted(), ROWS),
    "a sequence": (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(),
                   cp.Gaussian.isotropic(torch.randn(3, 4), stddev=0.1)),
    "a model for Gaussians alone": (Failing(), ROWS),
    "a model that draws": (Drawing(), ROWS),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANT)
def test_what_is_no_batch_is_not_taken_for_one(name: str) -> None:
    state = torch.get_rng_state()
    others = {cp.ApproximationWarning} | ({cp.DropoutWarning} if "draws" in name else set())
    found = [w for w in seen(*MEANT[name]) if w.category not in others]
    assert not found
    assert torch.equal(torch.get_rng_state(), state)


DROPOUTS: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "layer": (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2), nn.Dropout(0.3)), (3,),
              r"module 1 \(Dropout, p = 0.2\) is in training mode"),
    "attention": (nn.MultiheadAttention(4, 2, dropout=0.1), (5, 4), r"\(MultiheadAttention, p"),
    "recurrent": (nn.GRU(3, 4, num_layers=2, dropout=0.25), (2, 3), r"\(GRU, p = 0.25\)"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::covprop.ApproximationWarning")
@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_in_training_mode_is_told(name: str) -> None:
    model, shape, text = DROPOUTS[name]
    x = cp.Gaussian.isotropic(torch.ones(shape), stddev=0.1)
    call = _Attending(model) if isinstance(model, nn.MultiheadAttention) else model
    with pytest.warns(cp.DropoutWarning, match=text), torch.no_grad():
        propagate(call, x)
    assert not [w for w in seen(call.eval(), x) if w.category is cp.DropoutWarning]


@pytest.mark.parametrize("method", [cp.Linearized(), cp.Unscented()])
def test_what_is_told_of_dropout_is_true_of_methods_that_refuse_it(method: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2))
    x = cp.Gaussian.isotropic(torch.ones(3), stddev=1.0)
    with (
        pytest.warns(cp.DropoutWarning, match="some methods refuse dropout"),
        pytest.raises(cp.UnsupportedOperation, match="draws random numbers"),
    ):
        propagate(model, x, method=method)


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(2 * x, 0.5, self.training)


def test_functional_dropout_in_training_mode_is_told() -> None:
    x = cp.Gaussian.isotropic(torch.ones(3), stddev=0.1)
    model = nn.Sequential(nn.Linear(3, 3), Functional())
    with pytest.warns(cp.DropoutWarning, match=r"in module 1 \(Functional\): F.dropout is called"):
        propagate(model, x)
    with pytest.warns(cp.DropoutWarning, match=r"^F.dropout is called with training=True"):
        propagate(nn.functional.dropout, x)
    assert not seen(model.eval(), x)


class Masking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)


def traced(model: nn.Module) -> Any:
    return torch.jit.trace(model, torch.ones(3), check_trace=False)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, traced])
@pytest.mark.parametrize("last", [nn.Dropout(0.5), Functional(), Masking(), nn.AlphaDropout(0.5)])
def test_dropout_within_a_torchscript_program_is_told(make: Any, last: nn.Module) -> None:
    x = cp.Gaussian.isotropic(torch.ones(3), stddev=0.1)
    model = nn.Sequential(nn.Linear(3, 3), last)
    few = cp.MonteCarlo(samples=10)
    with pytest.warns(cp.DropoutWarning, match="the model is a TorchScript program with active"):
        propagate(make(model.train()), x, few)
    with pytest.warns(cp.DropoutWarning, match="module 0 is a TorchScript program with active"):
        propagate(nn.Sequential(make(model)), x, few)
    told = [w for w in seen(make(model.eval()), x, few) if w.category is cp.DropoutWarning]
    assert len(told) == isinstance(last, Masking)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "quiet", [nn.Dropout(0.0), nn.ReLU(), nn.MultiheadAttention(4, 2, dropout=0.3).eval()]
)
def test_a_torchscript_program_without_masks_says_nothing(quiet: nn.Module) -> None:
    warn_of_scripted_dropout([("", torch.jit.script(quiet))])


class _Attending(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("method", [cp.Exact(), cp.MonteCarlo(10)])
def test_dropout_that_was_asked_for_is_not_told(method: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2)).eval()
    x = cp.Gaussian.isotropic(torch.ones(3), stddev=0.1)
    with cp.dropout_active(model):
        assert not seen(model, x, method)
    assert not seen(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)), x, method)
