"""Warnings are attributed to the line that called covprop, and name the module that they are of."""

import inspect
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop.errors import approximations_ignored, warn_user
from covprop.modules import path_of
from tests.layers import propagate

ROUGH = cp.Gaussian.isotropic(torch.zeros(3, dtype=torch.float64), stddev=3.0)
"""Noise over which a softmax is nonlinear."""


class Block(nn.Module):
    """A softmax of a user's own, in a file of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Softmax(-1)

    def forward(self, x: Any) -> Any:
        return self.act(10 * x)


def seen(call: Any, *args: Any, **kwargs: Any) -> list[warnings.WarningMessage]:
    """What Python shows by default."""
    globals().pop("__warningregistry__", None)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        call(*args, **kwargs)
    return found


def test_every_module_has_a_warning_of_its_own_at_the_callers_line() -> None:
    model = nn.Sequential(Block(), Block())
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    found = seen(lambda: propagate(model, ROUGH))
    texts = [str(item.message) for item in found]
    assert len(texts) == 2
    assert texts[0].startswith("in module 0.act (Softmax): torch.nn.functional.softmax")
    assert texts[1].startswith("in module 1.act (Softmax): torch.nn.functional.softmax")
    assert {(item.filename, item.lineno) for item in found} == {(__file__, line)}


def test_a_line_that_is_run_again_is_shown_once() -> None:
    def again() -> None:
        for _ in range(3):
            propagate(Block(), ROUGH)

    assert len(seen(again)) == 1


def test_a_function_has_no_path_but_the_modules_in_it_have() -> None:
    (plain,) = seen(lambda: propagate(lambda x: torch.softmax(x, -1), ROUGH))
    assert str(plain.message).startswith("torch.softmax is nonlinear")
    block = Block()
    (inner,) = seen(lambda: propagate(lambda x: block(x), ROUGH))
    assert str(inner.message).startswith("in module act (Softmax): ")


class Outer(nn.Module):
    """A user's module that calls covprop itself."""

    def forward(self, x: cp.Gaussian) -> Any:
        return propagate(lambda y: torch.softmax(y, -1), x)


def test_the_callers_own_modules_are_not_named() -> None:
    (found,) = seen(Outer(), ROUGH)
    assert str(found.message).startswith("torch.softmax is nonlinear")
    assert found.filename == __file__


@pytest.mark.parametrize("run", [cp.trace, lambda m, x: cp.compare(m, x, methods=[cp.Exact()])])
def test_what_calls_propagate_warns_at_the_callers_line(run: Any) -> None:
    found = [w for w in seen(run, Block(), ROUGH) if w.category is cp.ApproximationWarning]
    assert found
    assert {item.filename for item in found} == {__file__}
    assert all("in module act (Softmax)" in str(item.message) for item in found)


def test_another_category_and_no_module() -> None:
    (found,) = seen(warn_user, "beware", DeprecationWarning)
    assert (found.category, str(found.message)) == (DeprecationWarning, "beware")
    assert found.filename == __file__


def test_approximations_are_ignored_in_one_thread_alone() -> None:
    inside, done = threading.Event(), threading.Event()

    def quiet() -> None:
        with approximations_ignored():
            inside.set()
            done.wait(10)
            warn_user("hidden", cp.ApproximationWarning)
            warn_user("shown all the same")

    def loud() -> None:
        thread = threading.Thread(target=quiet)
        thread.start()
        inside.wait(10)
        warn_user("shown", cp.ApproximationWarning)
        done.set()
        thread.join()

    assert {str(item.message) for item in seen(loud)} == {"shown", "shown all the same"}


def test_a_module_of_another_network_has_no_path() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    assert path_of(model[0], model) == "module 0 (Linear)"
    assert path_of(model, model) == "the model itself (Sequential)"
    assert path_of(nn.Linear(1, 1), model) is None


class Unregistered(nn.Module):
    """Holds its layer in a list, where torch does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Softmax(-1)]

    def forward(self, x: Any) -> Tensor:
        result: Tensor = self.hidden[0](x)
        return result


def test_a_layer_that_is_not_registered_is_named_by_what_holds_it() -> None:
    (found,) = seen(lambda: propagate(nn.Sequential(Unregistered()), ROUGH))
    assert str(found.message).startswith("in module 0 (Unregistered): ")
