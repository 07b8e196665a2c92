"""Independent runs: what each may remember, and their average."""

from collections.abc import Sequence
from typing import Any

import torch

from covprop.errors import TooLarge
from covprop.flow.nests import leaves, map_leaves
from covprop.gaussian import Gaussian, SamplingError
from covprop.methods.base import Method
from covprop.text_table import in_bytes

WORTH_A_PLAN = 2**20
"""Numbers in the tangents of the inputs from which memory is planned."""


def tangents_kept(tangents: int, order: int, peak: int, available: int) -> int | None:
    """How many tangents each nonlinearity may remember, None for all; peak: bytes for all."""
    if peak <= available:
        return None
    kept = tangents * available // peak // 2 * 2 if order > 1 else 0  # the first order keeps none
    if kept == 0:
        first = "order=1, " if order > 1 else ""
        raise TooLarge(
            f"{tangents} tangents would need {in_bytes(peak)}, and {in_bytes(2 * available)} may "
            f"be used; take fewer tangents or more replicates, {first}or propagate parts of the "
            "batch"
        )
    return kept


def averaged(results: Sequence[Any], method: Method, tangents: int) -> Any:
    """Independent results as one, and from their spread its standard errors."""
    each = [iter(list(leaves(result))) for result in results]

    def of_leaf(leaf: Any) -> Any:
        found = [next(values) for values in each]
        return _average(found, method, tangents) if isinstance(leaf, Gaussian) else leaf

    return map_leaves(results[0], of_leaf)


def _average(found: Sequence[Gaussian], method: Method, tangents: int) -> Gaussian:
    means = torch.stack([y.mean for y in found])
    matrices = torch.stack([y.covariance_matrix for y in found])
    error, root = None, len(found) ** 0.5
    if len(found) > 1:
        error = SamplingError(tangents, means.std(0) / root, matrices.std(0) / root)
    notes = dict.fromkeys(note for y in found for note in y.notes)
    return Gaussian(
        means.mean(0), matrices.mean(0), validate_args=False, method=method, sampling=error,
        notes=tuple(notes),
    )  # fmt: skip
