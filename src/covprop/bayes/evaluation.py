"""What a trained network says of many data, some rows at a time, whatever the method."""

from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from covprop.bayes.likelihoods import Likelihood, Prediction
from covprop.bayes.prediction import EXACT, predict, predict_some
from covprop.bayes.sampling import LocalReparametrisation, batch_dims, draws
from covprop.gaussian import Gaussian
from covprop.methods import Method

ROWS = 2048
"""Rows, of all members together, whose outputs are held at a time."""

Data = TypeVar("Data", bound=Tensor | Gaussian)


@torch.no_grad()
def log_predictive(
    model: nn.Module,
    likelihood: Likelihood,
    x: Tensor | Gaussian,
    target: Tensor,
    method: Method | LocalReparametrisation = EXACT,
) -> Tensor:
    """log E[p(t | f)] of every datum, (*members, data), from moments or from draws.

    target: (data, ...) for all members, or (members, data, ...) for each.
    """
    dims = batch_dims(model, x)
    own = dims > 1 and target.shape[:dims] == lead_of(x, dims)
    parts = []
    for rows in slices(lead_of(x, dims)):
        some, wanted = take(x, rows, dims), take(target, rows, dims if own else 1)
        if isinstance(method, LocalReparametrisation):
            values = draws(model, some, method.samples, method.generator)
            parts.append(likelihood.log_predictive_draws(values, wanted))
        else:
            parts.append(likelihood.log_predictive(predict(model, some, method), wanted))
    return torch.cat(parts, -1)


@torch.no_grad()
def predict_target(
    model: nn.Module,
    likelihood: Likelihood,
    x: Tensor | Gaussian,
    method: Method | LocalReparametrisation = EXACT,
) -> Prediction:
    """Mean and variances of the target of every datum, (*members, data, k)."""
    dims = batch_dims(model, x)
    parts = [
        predict_some(model, likelihood, take(x, rows, dims), method)
        for rows in slices(lead_of(x, dims))
    ]
    mean, aleatoric, epistemic = (
        torch.cat([getattr(part, name) for part in parts], dims - 1)
        for name in ("mean", "aleatoric", "epistemic")
    )
    entropy, expected = (
        torch.cat(found, -1) if found else None
        for found in (
            [part.entropy for part in parts if part.entropy is not None],
            [part.expected_entropy for part in parts if part.expected_entropy is not None],
        )
    )
    return Prediction(mean, aleatoric, epistemic, entropy, expected)


def lead_of(x: Tensor | Gaussian, dims: int) -> torch.Size:
    """(data,), or (members, data)."""
    return x.batch_shape if isinstance(x, Gaussian) else x.shape[:dims]


def take(data: Data, rows: Tensor | slice, dims: int) -> Data:
    """Some of the data: a slice of all, or an index (rows,), or (members, rows)."""
    index: Any = rows
    if dims > 1 and isinstance(rows, slice):
        index = (slice(None), rows)
    elif dims > 1 and isinstance(rows, Tensor):
        index = (torch.arange(len(rows), device=rows.device)[:, None], rows)
    return cast(Data, data[index])


def slices(lead: torch.Size) -> Iterator[slice]:
    """Rows that are looked at together."""
    step = max(1, ROWS // (lead[0] if len(lead) > 1 else 1))
    for start in range(0, lead[-1], step):
        yield slice(start, start + step)
