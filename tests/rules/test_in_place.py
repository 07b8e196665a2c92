"""Forms of element-wise functions and reductions that change their argument."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from covprop.activations import in_place_spellings
from tests.gaussians import gaussian
from tests.layers import propagate
from tests.oracles import assert_close

INDEX = torch.tensor([0, 2, 0, 1])
ARGUMENTS: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("expm1", "exp2", "sinh", "cosh", "log1p", "log2", "log10"), ()
) | {
    "floor": (), "ceil": (), "round": (), "trunc": (), "fix": (), "frac": (),
    "floor_divide": (0.5,), "remainder": (0.75,), "fmod": (0.75,),
    "atan2": (torch.ones(4).double(),), "arctan2": (torch.ones(4).double(),),
    "scatter_reduce": (0, INDEX, torch.ones(4).double(), "sum"),
    "index_reduce": (0, INDEX, torch.ones(4).double(), "mean"),
}  # fmt: skip
FORMS = {form: name for name in ARGUMENTS for form in in_place_spellings(name)}


@pytest.mark.parametrize("form", FORMS, ids=list(FORMS.values()))
def test_a_form_changes_its_argument_to_what_the_function_returns(
    form: Callable[..., Tensor],
) -> None:
    name = FORMS[form]
    x = gaussian(4)
    x = type(x)(3 + x.mean / 4, x.covariance_matrix / 64)  # where logarithms are defined

    def changed(x: Any) -> Any:
        z = x.clone()
        form(z, *ARGUMENTS[name])
        return 1 * z

    y, expected = propagate(changed, x), propagate(partial(_method, name), x)
    assert_close(y.mean, expected.mean, rtol=1e-15)
    assert_close(y.covariance_matrix, expected.covariance_matrix, rtol=1e-14)


def _method(name: str, x: Any) -> Any:
    return getattr(Tensor, name)(x, *ARGUMENTS[name])
