"""Arguments of a call: methods by name, what can be checked before it is run, what to warn of.

Methods have the names of the command line: `cumulants`, `series:4`, `auto:0.01`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from covprop.errors import BatchWarning, UnsupportedOperation, warn_user
from covprop.gaussian import Gaussian, how_to_make
from covprop.kernels.rounding import SUMMATION_ORDER
from covprop.methods.accuracy import Estimator
from covprop.methods.assumed import AssumedDensity
from covprop.methods.auto import Auto
from covprop.methods.base import Method
from covprop.methods.call import Call, random_state_kept
from covprop.methods.comparison.piecewise import PiecewiseLinear
from covprop.methods.comparison.wu2019 import Wu2019
from covprop.methods.control import ControlVariate
from covprop.methods.cumulants import Cumulants
from covprop.methods.gaussian_layers import GaussianLayers
from covprop.methods.linearized import Linearized, Unscented
from covprop.methods.montecarlo import MonteCarlo
from covprop.methods.quasi_monte_carlo import QuasiMonteCarlo
from covprop.methods.series import Series
from covprop.methods.sketched import Sketched
from covprop.methods.split import MAX_COMPONENTS, Split
from covprop.modules import eager, original
from covprop.rules.noise import warn_of_dropout

MOST_SAMPLES = 10**9  # each is a run of the network; a thousand times more give two more digits
MOST_TANGENTS = 10**6  # each goes through the network as a sample does
MOST_TERMS = 512  # after which a series gives up a tolerance, too


class MethodChoice(NamedTuple):
    """How a method is made from the text after the colon and a seed, and what that text is.

    shared: whether processes that share a batch take the same points, as one would for all of it.
    """

    make: Callable[[str, int | None], Method]
    option: str = ""
    shared: bool = False


def _count(text: str, most: int, what: str) -> list[Any]:
    """The number in an option as an argument of a method, or no argument."""
    if not text:
        return []
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is no whole number")
    if len(text.lstrip("0")) > len(str(most)) or int(text) > most:
        raise ValueError(f"it takes {most:,} {what} at most")
    return [int(text)]


def _sampling(
    make: Callable[..., Method], most: int, what: str
) -> Callable[[str, int | None], Method]:
    """With a generator of its own, or torch's if there is no seed."""

    def made(text: str, seed: int | None) -> Method:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return make(*_count(text, most, what), generator=generator)

    return made


def _series(text: str, _: int | None) -> Method:
    """An order if it is a whole number, else a tolerance."""
    if not text or text.isdigit():
        return Series(*_count(text, MOST_TERMS, "terms"))
    return Series(tolerance=float(text))


def _piecewise(text: str, _: int | None) -> Method:
    """A ReLU by its number among the calls, or by the name of its module."""
    number = text.removeprefix("-").isdigit()
    return PiecewiseLinear((int(text) if number else text) if text else None)


def _points(text: str, seed: int | None) -> Method:
    """With a number of points, or without."""
    method = QuasiMonteCarlo(*_count(text, MOST_SAMPLES, "points"))
    return method if seed is None else replace(method, seed=seed)


def _auto(text: str, seed: int | None) -> Method:
    """With a tolerance, or without."""
    method = Auto(float(text) if text else None)
    return method if seed is None else replace(method, seed=seed)


METHODS: dict[str, MethodChoice] = {
    "auto": MethodChoice(_auto, "TOLERANCE", shared=True),
    "gaussian-layers": MethodChoice(lambda *_: GaussianLayers()),
    "cumulants": MethodChoice(lambda *_: Cumulants()),
    "split": MethodChoice(
        lambda text, _: Split(*_count(text, MAX_COMPONENTS, "components")), "COMPONENTS"
    ),
    "sketched": MethodChoice(_sampling(Sketched, MOST_TANGENTS, "tangents"), "TANGENTS"),
    "series": MethodChoice(_series, "ORDER or TOLERANCE"),
    "quasimontecarlo": MethodChoice(_points, "POINTS", shared=True),
    "montecarlo": MethodChoice(_sampling(MonteCarlo, MOST_SAMPLES, "samples"), "SAMPLES"),
    "controlvariate": MethodChoice(_sampling(ControlVariate, MOST_SAMPLES, "samples"), "SAMPLES"),
    "linearized": MethodChoice(lambda *_: Linearized()),
    "unscented": MethodChoice(lambda *_: Unscented()),
    "wu2019": MethodChoice(lambda *_: Wu2019()),
    "piecewise": MethodChoice(_piecewise, "LAYER"),
    "assumed": MethodChoice(lambda *_: AssumedDensity()),
}
FORMER_NAMES = {"exact": "gaussian-layers"}


def _letters(name: str) -> str:
    """Of the names of a method, such as `quasi-monte-carlo` and `QuasiMonteCarlo`, the same."""
    return name.lower().replace("-", "").replace("_", "")


_SPELLINGS = {_letters(name): name for name in METHODS} | FORMER_NAMES
METHOD_NAMES = ", ".join(
    f"{name}[:{choice.option}]" if choice.option else name for name, choice in METHODS.items()
)


def parse_method(text: str, seed: int | None = None, rank: int = 0) -> Method:
    """The method of a name such as `series:4`.

    Args:
        text: The name, and after a colon its option.
        seed: Of what it draws; torch's own generator and the default seeds without it.
        rank: Of this process among several, which draw other numbers unless they share points.

    Raises:
        ValueError: Where it is no method.
    """
    name, _, option = text.partition(":")
    choice = METHODS.get(_SPELLINGS.get(_letters(name), ""))
    if choice is None:
        raise ValueError(f"{text!r} is no method; there are {METHOD_NAMES}")
    if option and not choice.option:
        raise ValueError(f"the method {name} takes no option, so {option!r} says nothing")
    own = seed if seed is None or choice.shared else seed + rank
    try:
        return choice.make(option, own)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{text!r} is no method: {error}") from error


def is_method(given: object) -> bool:
    """Whether it is a method, or by mistake the class of one."""
    return isinstance(given, Method) or (isinstance(given, type) and issubclass(given, Method))


def is_name(given: object) -> bool:
    """Whether it is the name of a method, with its option or without."""
    return isinstance(given, str) and _letters(given.partition(":")[0]) in _SPELLINGS


def as_method(given: Any) -> Method:
    """A method as it is, or that of a name; a sentence for anything else."""
    if isinstance(given, str):
        return parse_method(given)
    if isinstance(given, Method):
        return given
    if is_method(given):
        name = given.__name__
        raise TypeError(f"a method is an object, and cp.{name} is a class: write cp.{name}()")
    raise TypeError(
        "a method is an object such as cp.GaussianLayers() or cp.Series(order=4), or a name such "
        f"as 'cumulants', not {given!r}"
    )


def checked(
    module: object,
    inputs: Sequence[Any],
    method: Any,
    named_inputs: dict[str, Any],
    errors: bool = False,
) -> tuple[Call, Method]:
    """The call and its method, after all that can be checked of them.

    errors: whether results from layer to layer estimate theirs when they are asked for.
    """
    if inputs and is_method(inputs[-1]):
        *inputs, method = inputs
    elif inputs and is_name(inputs[-1]):
        raise TypeError(
            f"{inputs[-1]!r} would be given to the model; a method by its name is a keyword: write "
            f"method={inputs[-1]!r}"
        )
    method = as_method(method)
    if not callable(module) and not isinstance(module, Gaussian):
        raise TypeError(
            f"the model is a torch module or a function of tensors, not {type(module).__name__}; "
            "cp.from_sklearn(model) makes one of a fitted model of scikit-learn"
        )
    module = original(module)
    method.check_model(module)
    call = Call(module, tuple(inputs), named_inputs, estimator=Estimator if errors else None)
    _check_inputs(call)
    check_module(call.layers, call.inputs[0])
    return call, method


def _check_inputs(call: Call) -> None:
    """Some Gaussian, none twice, all of one batch."""
    inputs = call.inputs
    if inputs and torch.is_autocast_enabled(call.device.type):
        raise UnsupportedOperation(
            "covprop computes in float32 or float64; call it outside of torch.autocast"
        )
    if not inputs:
        items = (*call.arguments, *call.named_arguments.values())
        kinds = ", ".join(type(item).__name__ for item in items) or "nothing"
        raise TypeError(f"propagate takes a cp.Gaussian, not {kinds}; {how_to_make(items[:1])}")
    if len({id(x) for x in inputs}) < len(inputs):
        raise ValueError(
            "the same Gaussian is given twice; for one variable in two places use "
            "propagate(lambda x: f(x, x), x), for two independent ones make a second Gaussian"
        )
    if len({x.batch_shape for x in inputs}) > 1:
        shapes = ", ".join(str(tuple(x.batch_shape)) for x in inputs)
        raise ValueError(f"all Gaussians need one batch shape, and these have {shapes}")


def check_module(layers: Iterable[tuple[str, nn.Module]], x: Gaussian) -> None:
    """Nothing in a module that depends on the batch, and dtype and device those of the Gaussian.

    layers: as its `named_modules()` has them.
    """
    dtypes: set[torch.dtype] = set()
    devices: set[torch.device] = set()
    for name, layer in layers:
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            raise UnsupportedOperation(
                f"batch norm {name or type(layer).__name__} would use the statistics of the batch; "
                "call model.eval(), and keep its running statistics"
            )
        if x.dtype in dtypes and x.device in devices:
            continue
        own = [p for p in layer._parameters.values() if p is not None and p.is_floating_point()]
        dtypes.update(p.dtype for p in own)
        devices.update(p.device for p in own)
    if dtypes and x.dtype not in dtypes:
        half = not dtypes & {torch.float32, torch.float64}
        raise ValueError(
            f"the model's parameters are {_names(dtypes)} and "
            + ("covprop computes in float32 or float64; convert the model with .float()" if half
               else f"the Gaussian is {x.dtype}; convert one, the Gaussian with "
               f".to({_names(dtypes)}) or the model with .to({x.dtype})")
        )  # fmt: skip
    if devices and x.device not in devices:
        raise ValueError(
            f"the model is on {_names(devices)} and the Gaussian on {x.device}; move one with "
            ".to(device)"
        )


def _names(items: set[Any]) -> str:
    return " and ".join(sorted(str(item) for item in items))


def warn_of_arguments(call: Call) -> None:
    """Warn of what is computed as it is given, and is rarely meant."""
    if not isinstance(call.module, nn.Module):
        return
    warn_of_dropout(call.layers)
    if len(call.inputs) == 1:
        _warn_of_batch(call)


def _warn_of_batch(call: Call) -> None:
    """Say what will be computed of a Gaussian whose first dimension is a batch to the model.

    Where its rows are independent and the model treats each by itself, in the same way, a batch of
    Gaussians has the same numbers and none of the zeros between the rows.
    """
    (x,) = call.inputs
    rows = x.event_shape[0] if len(x.event_shape) > 1 else 0
    if len(x.batch_shape) or rows <= 1 or not x.covariance.independent:
        return
    if not _treats_rows_alike(eager(call.on_tensors), x):
        return
    warn_user(
        "the Gaussian has no batch dimension, but the model seems to treat its first dimension, of "
        f"{rows:,}, as a batch. The result is one joint Gaussian of all "
        f"{x.event_shape.numel():,} features, with the same numbers as {rows:,} separate ones. For "
        "these, which are cheaper, write cp.Gaussian.isotropic(mean, stddev=..., batch_dims=1), or "
        "--batch-dims 1 on the command line",
        BatchWarning,
    )


@torch.no_grad()
def _treats_rows_alike(call: Callable[[Tensor], Any], x: Gaussian) -> bool:
    """Whether the last row in place of the first changes the first row of the result to its last.

    And nothing else: two passes on plain tensors, of which random ones agree on nothing.
    """
    waves = torch.cos(torch.arange(x.mean.numel(), dtype=x.dtype, device=x.device))
    point = x.mean + (x.stddev + 1) * waves.reshape(x.mean.shape)
    changed = torch.cat([point[-1:], point[1:]])
    with random_state_kept([point]):
        try:
            before, after = call(point), call(changed)
        except Exception:
            return False
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return False
    if before.dim() == 0 or before.shape != after.shape or len(before) != len(point):
        return False
    expected = torch.cat([before[-1:], before[1:]])
    slack = SUMMATION_ORDER * torch.finfo(x.dtype).eps * before.abs().max()
    differs = bool(((before[0] - before[-1]).abs() > slack).any())
    return differs and bool(((after - expected).abs() <= slack).all())
