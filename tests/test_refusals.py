"""propagate: what it refuses, and what it says."""

from typing import Any

import pytest
import torch
from torch import nn

import covprop as cp
from tests.layers import propagate
from tests.test_propagate import assert_same, gaussian, network


class Inner(nn.Module):
    """A layer with an operation that has no rule."""

    def forward(self, x: Any) -> Any:
        return torch.cummax(x, -1)


def test_an_operation_without_rule_is_named_with_its_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Inner()))
    message = r"in module 1\.1 \(Inner\): covprop has no rule for torch\.cummax; write one with @cp"
    with pytest.raises(cp.UnsupportedOperation, match=message):
        propagate(model, gaussian().to(torch.float32))


def test_the_path_of_the_model_itself_and_of_a_function() -> None:
    with pytest.raises(cp.UnsupportedOperation, match=r"in the model itself \(Inner\)"):
        propagate(Inner(), gaussian())
    with pytest.raises(cp.UnsupportedOperation, match=r"^covprop has no rule for torch\.cummax"):
        propagate(lambda x: torch.cummax(x, -1), gaussian())


def test_an_attribute_of_tensors_that_a_gaussian_lacks_is_refused_and_points_have_it() -> None:
    def model(x: Any) -> Any:
        return x * (x.nbytes > 0 and not hasattr(x, "codes"))

    with pytest.raises(cp.UnsupportedOperation, match="has no attribute 'nbytes'"):
        propagate(model, gaussian())
    with pytest.raises(AttributeError):  # what `hasattr` and `getattr` with a default rely on
        propagate(model, gaussian())
    assert isinstance(cp.propagate(model, gaussian()).method, cp.QuasiMonteCarlo)
    assert_same(propagate(lambda x: x.data, gaussian()), gaussian())


def test_an_error_of_the_model_is_left_alone() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        propagate(nn.Linear(3, 2).double(), gaussian())


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)])
def test_batch_statistics_are_refused_before_anything_runs(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), norm).train(norm.track_running_stats).double()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    message = r"batch norm 1 would use the statistics of the batch; call model\.eval\(\)"
    with pytest.raises(cp.UnsupportedOperation, match=message):
        propagate(model, gaussian(3))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_batch_statistics_in_a_function_are_refused() -> None:
    norm = nn.BatchNorm1d(4).double()
    with pytest.raises(cp.UnsupportedOperation, match=r"call model\.eval\(\)"):
        propagate(lambda x: norm(x), gaussian(3))
    assert not norm.running_mean.any()


def test_alpha_dropout_while_training_is_refused_and_other_layers_do_not_care() -> None:
    with pytest.raises(cp.UnsupportedOperation, match=r"dropout .* call model\.eval\(\)"):
        propagate(nn.Sequential(nn.AlphaDropout(0.1)).train(), gaussian())
    assert_same(propagate(network().train(), gaussian()), propagate(network(), gaussian()))


WRONG: dict[str, tuple[Any, Any, Any, type[Exception], str]] = {
    "a tensor": (nn.Tanh(), torch.ones(4), cp.Exact(), TypeError, "cp.Gaussian, not Tensor"),
    "a name": (nn.Tanh(), gaussian(), "exakt", ValueError, "'exakt' is no method; there are auto"),
    "a class": (nn.Tanh(), gaussian(), cp.Exact, TypeError, "a method is an object"),
    "another dtype": (nn.Linear(4, 2), gaussian(), cp.Exact(), ValueError,
                      r"parameters are torch.float32 and the Gaussian is torch.float64"),
    "another device": (nn.Linear(4, 2, device="meta").double(), gaussian(), cp.Exact(), ValueError,
                       "the model is on meta and the Gaussian on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_get_one_sentence(name: str) -> None:
    model, x, method, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        propagate(model, x, method=method)


def test_an_output_of_unknown_type_is_refused() -> None:
    class Output:
        def __init__(self, value: Any) -> None:
            self.value = value

    with pytest.raises(cp.UnsupportedOperation, match="returns a Output"):
        propagate(Output, gaussian())
