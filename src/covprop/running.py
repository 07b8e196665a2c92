"""Call a module on in-flight Gaussians, and make plain ones of what it returns."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from covprop.covariance import Covariance, Dense, Streamed
from covprop.covariance.base import without_negative_variances
from covprop.dispatch import leaves
from covprop.eager import eager
from covprop.errors import (
    CovpropError,
    LostRank,
    MomentOverflow,
    TooLarge,
    UnsupportedOperation,
    path_of,
)
from covprop.gaussian import Gaussian
from covprop.kernels.normal import is_finite
from covprop.lineage import Lineage, Node
from covprop.methods import LayerwiseMethod, Method, Sketched
from covprop.retrace import retraced
from covprop.sampling import SamplingError
from covprop.tensor import GaussianTensor


def run(
    module: Any,
    inputs: tuple[Any, ...],
    named_inputs: dict[str, Any],
    wrapped: Callable[[Gaussian], GaussianTensor],
) -> Any:
    """Call the module with something in place of each Gaussian; an error says in which module."""
    try:
        # No name for the in-flight inputs: it would keep them, and all that came of them, alive.
        result = eager(module)(*wrap(inputs, wrapped), **wrap(named_inputs, wrapped))
        for leaf in leaves(result):
            if isinstance(leaf, GaussianTensor):
                leaf.materialize()
        return result
    except CovpropError as error:
        path = _module_path(module, error)
        if path is None or isinstance(error, TooLarge | LostRank):
            raise
        raise type(error)(f"in module {path}: {error}") from error


@contextmanager
def broken_weights_named(module: object) -> Iterator[None]:
    """Moments that are not finite have a reason: the first weight that is not, if one is."""
    try:
        yield
    except MomentOverflow as error:
        if not isinstance(module, nn.Module):
            raise
        weights = itertools.chain(module.named_parameters(), module.named_buffers())
        broken = (name for name, tensor in weights if not bool(torch.isfinite(tensor).all()))
        if (name := next(broken, None)) is None:
            raise
        reason = f"{name} has NaN or infinite entries"
        if str(error).endswith(reason):  # a run inside this one has said it
            raise
        raise type(error)(f"{error}; {reason}") from error


def in_flight(x: Gaussian, lineage: Lineage) -> GaussianTensor:
    """What a module sees of a Gaussian."""
    return GaussianTensor(x.mean, Node(lineage.method.begin(x.covariance)), lineage)


def wrap(nest: Any, wrapped: Callable[[Gaussian], Any]) -> Any:
    """A nest with something in place of each Gaussian."""
    if isinstance(nest, Gaussian):
        return wrapped(nest)
    if isinstance(nest, list | tuple) and not hasattr(nest, "_fields"):
        return type(nest)(wrap(item, wrapped) for item in nest)
    if isinstance(nest, dict):
        return {key: wrap(item, wrapped) for key, item in nest.items()}
    return nest


def unwrap(result: Any, method: LayerwiseMethod) -> Any:
    """A nest with a Gaussian in place of each in-flight one."""
    if isinstance(result, GaussianTensor):
        result.check_current()
        if isinstance(method, Sketched):
            mean, matrix = retraced(result, method)
            return finite(mean, Dense(matrix), method)
        covariance = result.covariance
        if isinstance(covariance, Streamed):
            result.expect(result.loc)
            covariance = Dense(covariance.matrix())
        variance = covariance.diagonal()
        covariance = without_negative_variances(
            covariance, lambda: variance.abs().amax(-1, keepdim=True)
        )
        return finite(result.loc, covariance, method)
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(unwrap(item, method) for item in result))
    if isinstance(result, list | tuple):
        return type(result)(unwrap(item, method) for item in result)
    if isinstance(result, dict):
        return {key: unwrap(item, method) for key, item in result.items()}
    if result is None or isinstance(result, Tensor | bool | int | float | str):
        return result
    raise UnsupportedOperation(
        f"the model returns a {type(result).__name__}; covprop unwraps tensors, tuples, lists and "
        "dicts"
    )


def finite(
    mean: Tensor,
    covariance: Covariance,
    method: Method,
    error: SamplingError | None = None,
) -> Gaussian:
    """The result, unless it has overflown."""
    # All processes of a sharded one know the variances, and end in the same way.
    numbers = covariance.values if isinstance(covariance, Dense) else covariance.diagonal()
    if not (is_finite(mean) and is_finite(numbers)):
        raise MomentOverflow(
            f"the output's moments are not finite in {mean.dtype}; look for NaN or infinity "
            "in the model's weights and constants, or convert model and Gaussian to float64"
        )
    return Gaussian(mean, covariance, validate_args=False, method=method, sampling=error)


def finite_gains(gains: dict[int, list[Tensor]]) -> dict[int, list[Tensor]]:
    """Expected Jacobians of the outputs times roots of the inputs, unless they have overflown."""
    for gain in itertools.chain(*gains.values()):
        if not is_finite(gain):
            raise MomentOverflow(
                f"the expected Jacobian of the output is not finite in {gain.dtype}; look for NaN "
                "or infinity in the model's weights and constants, or convert model and Gaussian "
                "to float64"
            )
    return gains


def _module_path(module: object, error: CovpropError) -> str | None:
    """The innermost module of the network whose forward was running, or that the error names."""
    if not isinstance(module, nn.Module):
        return None
    layers = {id(layer) for layer in module.modules()}
    owner, trace = error.layer, error.__traceback__
    while trace is not None and error.layer is None:
        running = trace.tb_frame.f_locals.get("self")
        if isinstance(running, nn.Module) and id(running) in layers:
            owner = running
        trace = trace.tb_next
    return None if owner is None else path_of(owner, module)
