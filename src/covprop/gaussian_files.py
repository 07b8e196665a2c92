"""A Gaussian in a file of safetensors: its tensors in their structure, and what is known of it."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from covprop.covariance import Covariance, Dense
from covprop.error_estimate import Deferred, ErrorEstimate, SamplingError
from covprop.errors import UnsupportedOperation
from covprop.files import reading_tensors, write_tensors
from covprop.validation import check_shapes, check_tensors

NOT_ESTIMATED = "its error was not estimated before it was saved"
COVARIANCE, SAMPLING, ERROR = "covariance.", "sampling.", "error."


SLOTS = (
    "_covariance", "_error", "_mean", "_method", "_mixture", "_notes", "_sampling", "_skewness",
)  # fmt: skip
"""What a Gaussian holds."""


class Stored:
    """Saving and loading: safetensors files, pickle and torch.save."""

    __slots__ = ()

    def save(self, path: str | PathLike[str]) -> None:
        """Save to a safetensors file, without the mixture and with the method as text.

        An error estimate that has not been computed is left out, because it needs the model; the
        `notes` of the loaded Gaussian say so. Ask for `error` first to keep it.

        Args:
            path: The file, which is replaced if it exists.

        Example:
            cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1).save("x.safetensors")
        """
        write_tensors(Path(path), type(self).__name__, *packed(self.__getstate__()[1]))

    @classmethod
    def load(cls, path: str | PathLike[str], device: str = "cpu") -> Self:
        """Load a file of `save`; no code in the file is run.

        Args:
            path: The file.
            device: The device of the tensors.

        Raises:
            InvalidFile: If the file is damaged, or is not such a file.

        Example:
            cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1).save("x.safetensors")
            x = cp.Gaussian.load("x.safetensors")
        """
        with reading_tensors(Path(path), cls.__name__, device) as (described, tensors):
            result = object.__new__(cls)
            result.__setstate__((None, unpacked(described, tensors)))
        return result

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """All but an estimate of the error that was not asked for: it needs the model."""
        state = {name: getattr(self, name) for name in SLOTS}
        if isinstance(error := state["_error"], Deferred):
            state["_error"] = error.value if error.known else None
            state["_notes"] = state["_notes"] if error.known else (*state["_notes"], NOT_ESTIMATED)
        return None, state

    def __copy__(self) -> Self:
        return self._copied(lambda value: value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """With tensors of its own; an estimate of the error stays that of the model."""
        return self._copied(
            lambda value: value if isinstance(value, Deferred) else deepcopy(value, memo)
        )

    def _copied(self, copy: Callable[[Any], Any]) -> Self:
        result = object.__new__(type(self))
        for name in SLOTS:
            setattr(result, name, copy(getattr(self, name)))
        return result

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:  # torch.load asks for it
        for name, value in state[1].items():
            setattr(self, name, value)


def packed(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of a file."""
    covariance, sampling, error = (
        _written(state["_covariance"]), state["_sampling"], state["_error"]
    )  # fmt: skip
    described: dict[str, Any] = {
        "structure": type(covariance).__name__, "batch_dims": len(covariance.batch_shape),
        "method": None if state["_method"] is None else str(state["_method"]),
        "notes": list(state["_notes"]),
    }  # fmt: skip
    tensors = {"mean": state["_mean"]}
    if state["_skewness"] is not None:
        tensors["skewness"] = state["_skewness"]
    tensors |= {COVARIANCE + name: tensor for name, tensor in covariance.tensors().items()}
    if sampling is not None:
        described["samples"] = sampling.samples
        tensors |= _tensors(SAMPLING, sampling)
    if error is not None:
        described["basis"] = error.basis
        tensors |= _tensors(ERROR, error)
    # A copy of each: safetensors refuses tensors that share memory.
    return described, {name: tensor.detach().clone(memory_format=torch.contiguous_format)
                       for name, tensor in tensors.items()}  # fmt: skip


def unpacked(described: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What a file's description and tensors are of."""
    mean = tensors["mean"]
    structure = _structures()[described["structure"]]
    covariance = structure.of_file(_named(COVARIANCE, tensors), mean, described["batch_dims"])
    check_tensors(mean, covariance)
    check_shapes(mean, covariance)
    sampling, error = _named(SAMPLING, tensors), _named(ERROR, tensors)
    return {
        "_mean": mean, "_covariance": covariance, "_method": described["method"],
        "_sampling": SamplingError(described["samples"], **sampling) if sampling else None,
        "_mixture": None, "_skewness": tensors.get("skewness"),
        "_notes": tuple(described["notes"]),
        "_error": ErrorEstimate(**error, basis=described["basis"]) if error else None,
    }  # fmt: skip


def _structures() -> dict[str, type[Covariance]]:
    """What a file can hold, by name: all structures that are defined and hold their numbers."""
    kinds = [kind for kind in Covariance.__subclasses__() if not kind.deferred | kind.distributed]
    return {kind.__name__: kind for kind in reversed(kinds)}  # of two with one name, the first


def _written(covariance: Covariance) -> Covariance:
    """A structure that a file can hold."""
    if covariance.distributed:
        raise UnsupportedOperation(
            "a file holds a whole covariance, and the rows of this one are spread over processes; "
            "gather it with .covariance.to_dense()"
        )
    return Dense(covariance.matrix()) if covariance.deferred else covariance


def _tensors(prefix: str, holder: Any) -> dict[str, Tensor]:
    """The tensors of a dataclass, by their names."""
    values = {field.name: getattr(holder, field.name) for field in fields(holder)}
    return {prefix + name: value for name, value in values.items() if isinstance(value, Tensor)}


def _named(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
