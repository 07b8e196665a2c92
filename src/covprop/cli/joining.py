"""Results of the parts of a batch, which several processes have computed, as one."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from covprop.covariance import Covariance, Dense
from covprop.diagnostics.compare import method_name
from covprop.error_estimate import ErrorEstimate, SamplingError
from covprop.gaussian import Gaussian
from covprop.methods import Auto, Method
from covprop.mixture import Mixture
from covprop.robustness import NoiseBudget


def without_generator(y: Gaussian) -> Gaussian:
    """A result without its method where that holds a generator, which cannot be sent."""
    mixture, method = y.mixture, y.method
    if mixture is not None:
        mixture = Mixture(mixture.weights, without_generator(mixture.components))
    if any(isinstance(value, torch.Generator) for value in _parts(method)):
        method = None
    return Gaussian(
        y.mean, y.covariance, validate_args=False, method=method, sampling=y.sampling_error,
        mixture=mixture, skewness=y.skewness, notes=y.notes, error=y.error,
    )  # fmt: skip


def _parts(method: object) -> list[object]:
    """The fields of a method, and of the methods in it."""
    own = list(vars(method).values()) if isinstance(method, Method) else []
    return own + [part for value in own for part in _parts(value)]


def concatenate(parts: Sequence[Gaussian], method: object, dim: int = 0) -> Gaussian:
    """Concatenate batches of Gaussians along a dimension of the batch.

    method: that was asked for; `cp.Auto` may have taken another for each part, and what only some
    of these know is left out.
    """
    first = parts[0]

    def cat(of: Callable[[Any], Tensor]) -> Tensor:
        return torch.cat([of(part) for part in parts], dim)

    def all_have(name: str) -> bool:
        return all(getattr(part, name) is not None for part in parts)

    sampling = mixture = error = None
    if all_have("sampling_error"):
        sampling = SamplingError(
            min(part.samples or 0 for part in parts),
            cat(lambda y: y.mean_stderr),
            cat(lambda y: y.covariance_stderr),
        )
    if all_have("error"):
        bases = dict.fromkeys(part.error.basis for part in parts if part.error is not None)
        error = ErrorEstimate(
            cat(lambda y: y.error.mean), cat(lambda y: y.error.stddev), "; ".join(bases)
        )
    if first.mixture is not None:
        components = [part.mixture.components for part in parts]
        mixture = Mixture(first.mixture.weights, concatenate(components, method, dim + 1))
    if isinstance(method, Auto) and len({method_name(part.method) for part in parts}) == 1:
        method = first.method
    structures = [part.covariance for part in parts]
    if len({type(structure) for structure in structures}) > 1:
        structures = [Dense(structure.matrix()) for structure in structures]
    return Gaussian(
        cat(lambda y: y.mean), _concatenate_covariances(structures, dim), validate_args=False,
        method=method, sampling=sampling, mixture=mixture, error=error,
        skewness=cat(lambda y: y.skewness) if all_have("skewness") else None,
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )  # fmt: skip


def _concatenate_covariances(parts: Sequence[Covariance], dim: int) -> Covariance:
    """Concatenate the tensors that a structure is made of, whichever they are."""
    tensors: list[list[Tensor]] = [[] for _ in parts]

    def collect(number: int, tensor: Tensor) -> Tensor:
        tensors[number].append(tensor)
        return tensor

    for number, part in enumerate(parts):
        part.map(partial(collect, number))
    whole = iter([torch.cat(group, dim) for group in zip(*tensors, strict=True)])
    return parts[0].map(lambda _: next(whole))


def joined(parts: Sequence[Any]) -> Any:
    """Concatenate analyses of batches, field by field."""
    first = parts[0]
    if any(part is None for part in parts):
        return None  # what one part does not know
    if isinstance(first, NoiseBudget):
        return _joined_budgets(parts)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        values = {name: joined([getattr(part, name) for part in parts]) for name in names}
        return dataclasses.replace(first, **values)
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(parts))
    return first  # the same for all: a name, a number of samples, a norm


def _joined_budgets(parts: Sequence[NoiseBudget]) -> NoiseBudget:
    """Levels that were tried for one part are missing, as NaN, from the others."""
    longest = max(len(part.levels) for part in parts)

    def padded(name: str) -> Tensor:
        tables = [getattr(part, name) for part in parts]
        rows = [(longest - len(table), *table.shape[1:]) for table in tables]
        pairs = zip(tables, rows, strict=True)
        return torch.cat([torch.cat([t, t.new_full(shape, torch.nan)]) for t, shape in pairs], 1)

    return dataclasses.replace(
        parts[0],
        level=torch.cat([part.level for part in parts]),
        stddev=torch.cat([part.stddev for part in parts]),
        reason=tuple(reason for part in parts for reason in part.reason),
        probability=torch.cat([part.probability for part in parts]),
        error=torch.cat([part.error for part in parts]),
        levels=padded("levels"),
        probabilities=padded("probabilities"),
    )
