"""A batch of inputs that the processes of torchrun share, and their results as one again."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from covprop.cli.question import Question
from covprop.covariance import Covariance
from covprop.errors import ApproximationWarning
from covprop.gaussian import Gaussian
from covprop.mixture import Mixture
from covprop.ranks import Ranks
from covprop.robustness import NoiseBudget, Robustness
from covprop.sampling import SamplingError

Found = TypeVar("Found")


def shared(
    question: Question,
    ranks: Ranks,
    work: Callable[[Question, slice], Found],
    join: Callable[[Sequence[Found]], Found],
) -> Found:
    """What `work` finds for the whole batch; processes other than the first end here.

    work: for a part of the batch, and which part that is.
    """
    count = question.x.batch_shape[0] if question.x.batch_shape else 0
    if ranks.size == 1 or count <= 1:
        ranks.first_alone()
        return work(question, slice(None))
    part = ranks.part(count)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ApproximationWarning)
        own = None
        if part.start < part.stop:
            own = work(dataclasses.replace(question, x=question.x[part]), part)
    notes = [str(item.message) for item in seen if item.category is ApproximationWarning]
    gathered = ranks.gather((own, notes))
    for note in dict.fromkeys(note for _, notes in gathered for note in notes):
        warnings.warn(note, ApproximationWarning, stacklevel=2)
    return join([found for found, _ in gathered if found is not None])


def bare(y: Gaussian) -> Gaussian:
    """A result without its method, which may hold a generator and cannot be sent."""
    mixture = y.mixture
    if mixture is not None:
        mixture = Mixture(mixture.weights, bare(mixture.components))
    return Gaussian(
        y.mean, y.covariance, validate_args=False, sampling=y.sampling_error, mixture=mixture
    )


def one_batch(parts: Sequence[Gaussian], method: object, dim: int = 0) -> Gaussian:
    """Batches of Gaussians one after another, along a dimension of the batch."""
    first = parts[0]

    def cat(of: Callable[[Any], Tensor]) -> Tensor:
        return torch.cat([of(part) for part in parts], dim)

    error, mixture = first.sampling_error, first.mixture
    if error is not None:
        error = SamplingError(
            error.samples, cat(lambda y: y.mean_stderr), cat(lambda y: y.covariance_stderr)
        )
    if mixture is not None:
        components = [part.mixture.components for part in parts]
        mixture = Mixture(mixture.weights, one_batch(components, method, dim + 1))
    return Gaussian(
        cat(lambda y: y.mean), _one_structure([part.covariance for part in parts], dim),
        validate_args=False, method=method, sampling=error, mixture=mixture,
    )  # fmt: skip


def _one_structure(parts: Sequence[Covariance], dim: int) -> Covariance:
    """Whatever tensors a structure is made of, those of all parts one after another."""
    inside: list[list[Tensor]] = [[] for _ in parts]

    def kept(number: int, tensor: Tensor) -> Tensor:
        inside[number].append(tensor)
        return tensor

    for number, part in enumerate(parts):
        part.map(partial(kept, number))
    whole = iter([torch.cat(group, dim) for group in zip(*inside, strict=True)])
    return parts[0].map(lambda _: next(whole))


def one_analysis(parts: Sequence[Robustness]) -> Robustness:
    """Analyses of batches, one after another."""
    whole: Robustness = _joined(parts)
    return whole


def _joined(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, NoiseBudget):
        return _one_budget(parts)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        found = {name: _joined([getattr(part, name) for part in parts]) for name in names}
        return dataclasses.replace(first, **found)
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(parts))
    return first  # the same for all: a name, a number of samples, a norm


def _one_budget(parts: Sequence[NoiseBudget]) -> NoiseBudget:
    """Levels that were tried for one part are missing from the others."""
    longest = max(len(part.levels) for part in parts)

    def tried(name: str) -> Tensor:
        tables = [getattr(part, name) for part in parts]
        missing = [table.new_full((longest - len(table), *table.shape[1:]), torch.nan)
                   for table in tables]  # fmt: skip
        filled = [torch.cat(pair) for pair in zip(tables, missing, strict=True)]
        return torch.cat(filled, dim=1)

    return dataclasses.replace(
        parts[0],
        level=torch.cat([part.level for part in parts]),
        stddev=torch.cat([part.stddev for part in parts]),
        reason=tuple(reason for part in parts for reason in part.reason),
        probability=torch.cat([part.probability for part in parts]),
        levels=tried("levels"),
        probabilities=tried("probabilities"),
    )
