"""Two-stage linearisation around one ReLU: PL-DNN."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from covprop.activations import DECLARATIONS
from covprop.activations.rectifiers import relu
from covprop.covariance import Dense
from covprop.covariance.base import symmetric
from covprop.errors import UnsupportedOperation
from covprop.flow.nests import leaves
from covprop.flow.table import as_torch_function
from covprop.gaussian import Gaussian
from covprop.methods.base import FunctionMethod
from covprop.methods.call import Advance
from covprop.methods.layerwise import GaussianLayers
from covprop.methods.linearized import linearize, pushed
from covprop.methods.network import Estimate, Network
from covprop.methods.probes import Dependence
from covprop.modules import calling_modules, module_names

RELU = next(d for d in DECLARATIONS if d.name == "relu")
SPELLINGS = {*RELU.functions, *RELU.in_place}


@final
@dataclass(frozen=True)
class PiecewiseLinear(FunctionMethod):
    """PL-DNN of Bibi, Alfadly & Ghanem (2018): affine, one ReLU, affine.

    The network before one ReLU is linearised at the mean of the input, and the network after it at
    the ReLU's output there. The moments of the ReLU itself are exact. Everything that reaches the
    output must pass this ReLU. Differentiable.

    Args:
        layer: Which ReLU: its number among the calls of ReLU (from the end if negative), or the
            name of its module; by default the middle one, as in the published comparison.
        zero_mean: Compute the covariance of the ReLU as if the means of its input were zero, as the
            first publication and the published comparisons do. The mean of the output does not
            change.

    Example:
        y = cp.propagate(model, x, cp.PiecewiseLinear())
    """

    layer: int | str | None = None
    zero_mean: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse what names no layer."""
        if self.layer is not None and type(self.layer) not in (int, str):
            raise ValueError(f"a layer is a number or the name of a module, not {self.layer!r}")

    def entry_bytes(self, dtype: torch.dtype) -> int:
        """As of the last linearisation; the ReLU has its own."""
        return 2 * dtype.itemsize

    def estimate(self, network: Network, advance: Advance) -> list[Estimate]:
        """B Cov(relu(y)) B^T for y ~ N(f_1(mu), A S A^T), about f(mu) + B (E relu(y) - relu)."""
        if not network.visible:
            raise UnsupportedOperation(
                "PL-DNN looks for a ReLU, and cannot look into all of this model, as into scripts "
                "of TorchScript; propagate the module that was scripted, or use cp.Linearized()"
            )
        chosen = self._choose(_calls(network))
        before = Network(lambda *tensors: _input_of(network, chosen, tensors), network.inputs)
        (point,), (jacobians,) = linearize(before)
        advance(1, 3)
        size = torch.Size(before.outputs[0].event_shape)
        inner = Dense(pushed(jacobians, network.inputs))
        if self.zero_mean:
            mean = relu().mean(point.double(), inner.diagonal().double()).to(point.dtype)
            covariance = GaussianLayers().activate(relu(), torch.zeros_like(point), inner)[1]
        else:
            mean, covariance = GaussianLayers().activate(relu(), point, inner)
        advance(1, 3)
        at = before.outputs[0].batch_at
        shape = (*network.batch_shape, *size)

        def rest(tensor: Tensor) -> Any:
            shown = tensor.movedim(0, at) if network.batch_shape else tensor
            return _output_from(network, chosen, shown, [mean.clone() for mean in network.means])

        # Its covariance is not asked for; its mean is where the rest is linearised.
        origin = Gaussian(torch.relu(point).reshape(shape), covariance, validate_args=False)
        _check_passage(network, chosen, origin.mean.detach().movedim(0, at) if at else origin.mean)
        after = Network(rest, [origin])
        values, gains = linearize(after)
        advance(1, 3)
        shift = (mean - torch.relu(point))[..., None]
        return [
            Estimate(
                value + (gain @ shift)[..., 0],
                symmetric(gain @ covariance.matrix() @ gain.mT),
            )
            for value, (gain,) in zip(values, gains, strict=True)
        ]

    def _choose(self, calls: "list[_Call]") -> int:
        if not calls:
            raise UnsupportedOperation(
                "PL-DNN linearises around a ReLU, and this network has none; use cp.Linearized()"
            )
        if self.layer is None:
            return calls[len(calls) // 2].number
        if isinstance(self.layer, str):
            named = [call for call in calls if call.module == self.layer]
            if len(named) == 1:
                return named[0].number
            names = ", ".join(repr(call.module) for call in calls)
            raise UnsupportedOperation(
                f"{len(named)} calls of ReLU are in a module {self.layer!r}, where PL-DNN needs "
                f"one; they are in {names}, in this order: give its number"
            )
        if not -len(calls) <= self.layer < len(calls):
            raise UnsupportedOperation(
                f"there is no ReLU number {self.layer}: the network calls {len(calls)}"
            )
        return calls[self.layer].number


class _Call(NamedTuple):
    """A call of ReLU that depends on the input: its number among all calls, and its module."""

    number: int
    module: str


class _Reached(Exception):
    """The chosen ReLU is reached."""


class _AtRelu(TorchFunctionMode):
    """Counts the calls of ReLU and hands one of them, or all, to a function of its own."""

    def __init__(self, treat: Callable[[int, Tensor, Callable[[], Tensor]], Tensor]) -> None:
        super().__init__()
        self.treat, self.count = treat, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        given = kwargs or {}
        if as_torch_function(func) not in SPELLINGS:
            return func(*args, **given)
        number, self.count = self.count, self.count + 1
        tensor = args[0] if args else given["input"]
        return self.treat(number, tensor, lambda: func(*args, **given))


def _calls(network: Network) -> list[_Call]:
    """All calls of ReLU on what depends on the inputs."""
    found: list[_Call] = []
    means = [mean.detach().clone() for mean in network.means]
    with torch.no_grad(), Dependence(means) as dependence:

        def note(number: int, tensor: Tensor, proceed: Callable[[], Tensor]) -> Tensor:
            if dependence.depends(tensor):
                running = calling_modules(lambda frame: frame.f_code is _calls.__code__)
                name = module_names(running[-1]).get(id(running[0]), "") if running else ""
                found.append(_Call(number, name))
            return proceed()

        with _AtRelu(note):
            network.call(*means)
    return found


def _input_of(network: Network, chosen: int, tensors: tuple[Tensor, ...]) -> Tensor:
    """What goes into the chosen ReLU."""
    reached: list[Tensor] = []

    def stop(number: int, tensor: Tensor, proceed: Callable[[], Tensor]) -> Tensor:
        if number != chosen:
            return proceed()
        reached.append(tensor)
        raise _Reached

    try:
        with _AtRelu(stop):
            network.call(*tensors)
    except _Reached:
        return reached[0]
    raise UnsupportedOperation("the ReLU that was chosen is not called for every input")


def _output_from(
    network: Network, chosen: int, activated: Tensor, tensors: Sequence[Tensor]
) -> Any:
    """What the network returns at these tensors if the chosen ReLU gives that."""

    def swap(number: int, tensor: Tensor, proceed: Callable[[], Tensor]) -> Tensor:
        del tensor
        return activated if number == chosen else proceed()

    with _AtRelu(swap):
        return network.call(*tensors)


@torch.no_grad()
def _check_passage(network: Network, chosen: int, activated: Tensor) -> None:
    """All that depends on the inputs depends on the ReLU, and on the inputs through it alone."""
    outputs = [output.leaf for output in network.outputs]
    means = [mean.detach().clone() for mean in network.means]
    with Dependence([fresh := activated.detach().clone()]) as dependence:
        result = list(leaves(_output_from(network, chosen, fresh, means)))
    through = all(dependence.depends(result[i]) for i in outputs)
    means = [mean.detach().clone() for mean in network.means]
    with Dependence(means) as dependence:
        result = list(leaves(_output_from(network, chosen, fresh, means)))
    past = any(dependence.depends(result[i]) for i in outputs)
    if past or not through:
        raise UnsupportedOperation(
            "PL-DNN needs a ReLU that everything passes on its way to the output, and something "
            "goes past this one; choose another layer, or use cp.GaussianLayers()"
        )
