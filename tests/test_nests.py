"""What models take and return: tuples, lists, mappings and dataclasses of Gaussians."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop.flow.nests import leaves, map_leaves
from tests.layers import propagate
from tests.oracles import assert_close
from tests.test_propagate import gaussian

D = torch.float64


class Pair(NamedTuple):
    x: Any
    scale: Any = 2.0


@dataclass
class Record:
    x: Any
    scale: Any = 2.0
    note: str = "as it was"


@dataclass(frozen=True, slots=True)
class Checked:
    """A dataclass that checks what it is made of."""

    x: Any
    scale: Any = 2.0

    def __post_init__(self) -> None:
        assert isinstance(self.x, Tensor | cp.Gaussian | cp.GaussianTensor)


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """As that of transformers: a dataclass, and a dict of its fields that are not None."""

    x: Any
    scale: Any = 2.0
    attentions: Any = None

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) is not None:
                OrderedDict.__setitem__(self, one.name, getattr(self, one.name))

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("its items are its fields")


def part(nest: Any, name: str) -> Any:
    return nest[name] if isinstance(nest, Mapping) else getattr(nest, name)


NESTS = {
    "named tuple": Pair,
    "dataclass": Record,
    "frozen dataclass": Checked,
    "ModelOutput": ModelOutput,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "UserDict": UserDict,
    "read-only mapping": lambda **items: MappingProxyType(items),
}
METHODS = {
    "exact": cp.Exact(),
    "sketched": cp.Sketched(),
    "linearized": cp.Linearized(),
    "split": cp.Split(),
    "samples": cp.MonteCarlo(200, torch.Generator().manual_seed(0)),
}
every_nest = pytest.mark.parametrize("make", NESTS.values(), ids=NESTS)


@every_nest
@pytest.mark.parametrize("name", METHODS)
def test_a_gaussian_in_any_nest_goes_in_and_comes_out(make: Any, name: str) -> None:
    class Model(nn.Module):
        def forward(self, nest: Any) -> Any:
            return make(x=part(nest, "scale") * part(nest, "x").tanh(), scale=3.0)

    x, method = gaussian(), METHODS[name]
    with torch.no_grad():
        result = propagate(Model(), make(x=x, scale=2.0), method=method)
        expected = propagate(lambda x: 2 * x.tanh(), x, method)
    assert type(result) is type(make(x=x, scale=2.0))
    assert part(result, "scale") == 3.0
    y = part(result, "x")
    assert isinstance(y, cp.Gaussian)
    if name in ("exact", "linearized", "split"):
        assert_close(y.mean, expected.mean)
        assert_close(y.covariance_matrix, expected.covariance_matrix)
    if isinstance(result, ModelOutput):
        assert result.x is y
        assert list(result) == ["x", "scale"]
        assert result.attentions is None


@every_nest
def test_mapping_the_leaves_changes_a_copy(make: Any) -> None:
    nest = make(x=[1, (2, 3)], scale=4) if make is not Checked else Pair([1, (2, 3)], 4)
    found = [leaf for leaf in leaves(nest) if isinstance(leaf, int)]
    assert found == [1, 2, 3, 4]
    changed = map_leaves(nest, lambda leaf: leaf + 1 if isinstance(leaf, int) else leaf)
    assert type(changed) is type(nest)
    assert [leaf for leaf in leaves(changed) if isinstance(leaf, int)] == [2, 3, 4, 5]
    assert [leaf for leaf in leaves(nest) if isinstance(leaf, int)] == found


def test_other_mappings_keep_what_they_are() -> None:
    nest = defaultdict(list, a=1)
    changed = map_leaves(nest, lambda leaf: leaf + 1)
    assert changed == {"a": 2}
    assert changed.default_factory is list


def test_arguments_without_a_gaussian_are_not_copied() -> None:
    @dataclass
    class Options:
        sizes: tuple[int, ...] = (1, 2)
        layer: nn.Module = field(default_factory=nn.Identity)

    options, seen = Options(), list[Any]()

    def model(x: Any, options: Options) -> Any:
        seen.append(options)
        return options.layer(x)

    propagate(model, gaussian(), options)
    assert seen[0] is options


def test_results_of_torch_functions_are_nests() -> None:
    result = torch.max(torch.tensor([[1.0, 2.0]]), dim=1)
    assert [leaf.item() for leaf in leaves(result)] == [2.0, 1]
    assert [t.item() for t in map_leaves(result, lambda leaf: leaf + 1)] == [3.0, 2]


def test_values_of_covprop_and_modules_are_leaves() -> None:
    method, x = cp.Exact(), gaussian()
    assert list(leaves([method, x, x.covariance])) == [method, x, x.covariance]


def test_what_a_result_cannot_have_in_it_is_refused() -> None:
    for method in (cp.Exact(), cp.Linearized()):
        with pytest.raises(cp.UnsupportedOperation, match="the model returns a object; covprop"):
            propagate(lambda x: Record(x, object()), gaussian(), method)


def test_a_dataclass_that_has_itself_in_it_is_no_endless_nest() -> None:
    @dataclass(eq=False)
    class Tree:
        value: Any = None
        parent: Any = None
        child: Any = None

    x = cp.Gaussian.isotropic(torch.ones(2), stddev=0.1)
    tree = Tree(value=x)
    tree.child = Tree(parent=tree)
    y = propagate(lambda t: 2 * t.value, tree)
    assert_close(y.mean, 2 * x.mean)
