"""What covprop asks of a covariance, whatever its structure."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Protocol, Self, TypeAlias, final

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal
from torch.serialization import add_safe_globals

from covprop.covariance.planned import PlannedCovariance
from covprop.covariance.semidefinite import FactorRoot, Root, check_regular, singular, square_root
from covprop.errors import InconsistentBranches
from covprop.kernels.normal import correlation, inverse_deviation
from covprop.kernels.rounding import NEGATIVE_VARIANCE

PairFunction: TypeAlias = Callable[[tuple[Tensor, ...], tuple[Tensor, ...], Tensor], Tensor]
"""(elements of the rows, of the columns, covariance block) -> a block of the same shape."""
MatrixFunction: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor] | None]


@dataclass(frozen=True)
class Pairs:
    """A pair function, with an optional implementation for a whole symmetric matrix.

    matrix: (elements, covariance, diagonal of the result) -> the result, or None.
    """

    block: PairFunction
    matrix: Callable[[Sequence[Tensor], Tensor, Tensor], Tensor | None]

    def __call__(
        self, left: tuple[Tensor, ...], right: tuple[Tensor, ...], covariance: Tensor
    ) -> Tensor:
        """A block of any shape."""
        return self.block(left, right, covariance)


CHUNK = 2**18
"""Entries of vectors that go through a linear map at a time: what comes of them stays in cache."""
SMALL = 2**20
"""Entries of a matrix that may be read across its rows: larger ones leave the cache."""
STRIP = 256
"""Rows of a larger one that are read at a time."""


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite."""
    numbers = tensor.detach() if tensor.requires_grad else tensor
    # A finite sum proves it in one pass; finite numbers may yet have an infinite one.
    return math.isfinite(float(numbers.sum())) or bool(torch.isfinite(numbers).all())


def symmetric(matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """The symmetric part of a matrix that is symmetric up to rounding; out: where to write it."""
    if matrix.requires_grad or matrix.numel() <= SMALL:
        return torch.add(matrix, matrix.mT, out=out).mul_(0.5)
    result = torch.empty_like(matrix) if out is None else out
    for start in range(0, matrix.shape[-1], STRIP):
        stop = min(matrix.shape[-1], start + STRIP)
        below = matrix[..., start:, start:stop].contiguous().mT.contiguous()
        rows = (below + matrix[..., start:stop, start:]).mul_(0.5)
        result[..., start:stop, start:stop] = rows[..., : stop - start]
        both_triangles(result, start, stop, rows[..., stop - start :])
    return result


def both_triangles(matrix: Tensor, start: int, stop: int, beyond: Tensor) -> None:
    """Write rows [start, stop) from column `stop` on, and the same below the diagonal."""
    # Transposing one piece of memory is much faster than writing across the rows of another.
    beyond = beyond if beyond.mT.is_contiguous() else beyond.contiguous()
    matrix[..., start:stop, stop:] = beyond.contiguous()
    matrix[..., stop:, start:stop] = beyond.mT.contiguous()


class Layer(Protocol):
    """Operations that a layer has for its linear map A, beside applying it."""

    def rows(self, vectors: Tensor, start: int = 0) -> tuple[int, Tensor]:
        """A v of vectors (*any, n) from an output `first` <= start on: first, (*any, m - first)."""

    def product(self, vectors: Tensor) -> Tensor | None:
        """A v of many vectors (*batch, count, n), if it is one product of matrices."""

    def diagonal(self, half: Tensor) -> Tensor | None:
        """diag(A H) of H (*batch, n, m), if there is a short way to it."""

    def transposed(self, rows: Tensor) -> Tensor | None:
        """Rows (*any, m) times A: (*any, n), if there is a short way to it."""

    def without_buffers(self) -> "Layer":
        """The same without its buffers."""

    def outputs(self, size: int) -> int:
        """The number of outputs for an event of `size` elements."""

    def congruence(self, values: Tensor) -> tuple[Tensor, float] | None:
        """A S A^T of S (*batch, n, n) and the smallest of its variances, where it is compiled."""


@final
@dataclass(frozen=True)
class LinearMap:
    """The linear part of an operation on the event, for any number of vectors at once.

    Args:
        function: Takes a tensor (*batch, *event_shape) as the operation itself does.
        event_shape: The shape of what it takes, without the batch.
        leading: Whether it also takes any further leading dimensions as they are.
        layer: Knows more of the map.
        squared: The map whose matrix has the squares of the entries, where there is one.

    Example:
        cp.extending.LinearMap(lambda t: 2 * t, torch.Size((3,)))(torch.eye(3))  # three vectors
    """

    function: Callable[[Tensor], Tensor]
    event_shape: torch.Size
    leading: bool = False
    layer: Layer | None = None
    squared: Callable[[Tensor], Tensor] | None = None

    def __call__(self, vectors: Tensor) -> Tensor:
        """Map vectors (*batch, count, n) to (*batch, count, m), some at a time or compiled."""
        count, size = vectors.shape[-2], max(1, vectors.numel())
        if (step := max(1, CHUNK * count // size)) >= count:
            return self._of(vectors)
        if self.layer is not None and (product := self.layer.product(vectors)) is not None:
            return product
        first = self._of(vectors[..., :step, :])
        if first.requires_grad:
            return self._of(vectors)
        result = first.new_empty(*first.shape[:-2], count, first.shape[-1])
        result[..., :step, :] = first
        for start in range(step, count, step):
            part = slice(start, start + step)
            result[..., part, :] = self._of(vectors[..., part, :])
        return result

    def rest(self, vectors: Tensor, start: int) -> tuple[int, Tensor]:
        """Outputs from `start` on, or from an earlier one: (the first, the outputs)."""
        return (0, self(vectors)) if self.layer is None else self.layer.rows(vectors, start)

    def without_buffers(self) -> "LinearMap":
        """The same without the buffers of its layer, to be kept for later."""
        layer = None if self.layer is None else self.layer.without_buffers()
        return self if layer is self.layer else replace(self, layer=layer)

    def variances(self, values: Tensor) -> Tensor:
        """diag(A V A^T) for independent features of variances (*batch, n)."""
        batch = values.shape[:-1]
        if self.squared is not None:
            result = self.squared(values.reshape((*batch, *self.event_shape)))
            return result.reshape(*batch, result.shape[len(batch) :].numel())
        step = max(1, CHUNK // max(1, values.numel()))
        total: Tensor | None = None
        for start in range(0, values.shape[-1], step):
            part = values[..., start : start + step]
            units = part.new_zeros(*batch, part.shape[-1], values.shape[-1])
            units.diagonal(offset=start, dim1=-2, dim2=-1).fill_(1)
            share = (self(units).square() * part[..., None]).sum(-2)
            total = share if total is None else total + share
        return self(values[..., None, :])[..., 0, :] if total is None else total

    def _of(self, vectors: Tensor) -> Tensor:
        if self.layer is not None:
            return self.layer.rows(vectors)[1]
        batch = vectors.shape[:-2]
        if self.leading:
            mapped = self.function(vectors.unflatten(-1, self.event_shape))
            size = mapped.shape[vectors.dim() - 1 :].numel()
            return mapped.reshape(*vectors.shape[:-1], size)
        stacked = vectors.movedim(-2, 0)
        stacked = stacked.reshape(*stacked.shape[:-1], *self.event_shape)
        mapped = torch.func.vmap(self.function)(stacked)
        size = mapped.shape[1 + len(batch) :].numel()
        return mapped.reshape(len(mapped), *batch, size).movedim(0, -2)


class Covariance(ABC):
    """A symmetric positive semi-definite matrix for every element of a batch.

    Example:
        cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1).covariance.diagonal()
    """

    independent: ClassVar[bool] = False
    """Whether the structure says that no two features depend on each other."""

    constant: ClassVar[bool] = False
    """Whether nothing varies."""

    deferred: ClassVar[bool] = False
    """Whether its entries are computed only when they are asked for."""

    distributed: ClassVar[bool] = False
    """Whether several processes hold it together."""

    factored: ClassVar[bool] = False
    """Whether it is held without a matrix, which an activation makes of it."""

    nonnegative: bool = False
    """Whether it is known that no variance is negative, nor NaN."""

    def __init_subclass__(cls) -> None:
        """Let torch.load read every structure with weights_only=True, which runs no code."""
        add_safe_globals([cls])

    @property
    @abstractmethod
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Variances (*batch, n)."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """The full matrix (*batch, n, n)."""

    @abstractmethod
    def push(self, linear: LinearMap) -> "Covariance":
        """A S A^T."""

    def pushed_variances(self, linear: LinearMap) -> Tensor:
        """diag(A S A^T), without the other entries where possible."""
        return self.push(linear).diagonal()

    @abstractmethod
    def take(self, index: Tensor) -> "Covariance":
        """The covariance of y[index], for an index (m,) that may repeat and leave out."""

    @abstractmethod
    def scale(self, factor: Tensor) -> "Covariance":
        """The covariance of factor * y, factor (*batch, n)."""

    @abstractmethod
    def plus(self, variance: Tensor) -> "Covariance":
        """Add independent noise of these variances (*batch, n)."""

    @abstractmethod
    def pairwise(
        self, pair: PairFunction, elements: Sequence[Tensor], variance: Tensor
    ) -> "Covariance":
        """Replace each off-diagonal entry by `pair` of it and put `variance` on the diagonal."""

    def of_matrix(self, function: MatrixFunction) -> "tuple[Tensor, Covariance] | None":
        """Apply a function of the matrix if it is materialized: its mean and the new covariance."""
        del function
        return None

    @abstractmethod
    def largest(self, pair: PairFunction, elements: Sequence[Tensor]) -> float:
        """The largest |pair| over the off-diagonal entries, 0 if there are none."""

    def largest_correlation(self) -> float:
        """The largest |correlation| of two features."""
        inverse = inverse_deviation(self.diagonal().double()).to(self.dtype)
        return self.largest(lambda left, right, c: correlation(c, left[0], right[0]), (inverse,))

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor]) -> "Covariance":
        """Apply a function to the tensors inside: a change of dtype, an index of the batch."""

    @abstractmethod
    def planned(self) -> PlannedCovariance:
        """What a plan knows of it."""

    def matrix_rows(self, features: int) -> int:
        """Rows of the largest matrix that a linear map to so many features writes, 0 if none."""
        return max(self.size, features)

    def shape_flaw(self) -> str | None:
        """What is wrong with the shapes of the tensors inside, if anything."""
        return None

    def flaw(self, rounding: float) -> str | None:
        """Why it is no covariance, if its entries beside the variances tell."""
        del rounding
        return None

    def finite(self) -> bool:
        """Whether its numbers are finite; by default, its variances."""
        return is_finite(self.diagonal())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors inside by their names, for files."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    @classmethod
    def of_file(cls, tensors: dict[str, Tensor], mean: Tensor, batch_dims: int) -> Self:
        """The structure of `tensors`, read from a file beside its mean."""
        del mean, batch_dims
        return cls(**tensors)

    def symmetrised(self) -> "Covariance":
        """The same, exactly symmetric, as a matrix of the caller may not be."""
        return self

    def to_torch(self, mean: Tensor) -> Distribution:
        """A Gaussian of torch.distributions, over the flattened event."""
        flat, matrix = mean.reshape(*self.batch_shape, self.size), self.matrix()
        try:
            result = MultivariateNormal(flat, matrix)
        except (ValueError, RuntimeError) as error:  # the latter from Cholesky
            raise singular() from error
        check_regular(result.scale_tril, self.diagonal())
        return result

    def factor_and_noise(self) -> tuple[Tensor, Tensor | None] | None:
        """F (*batch, n, k) and v (*batch, n) of F F^T + diag(v), where it is held so."""
        return None

    def root(self) -> Root:
        """L with L L^T = S."""
        return FactorRoot(square_root(self.matrix()))

    def noise(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Samples (count, *batch, n) of mean zero."""
        root = self.root()
        shape = (count, *self.batch_shape, root.width)
        numbers = torch.randn(shape, dtype=self.dtype, device=self.device, generator=generator)
        return root.times(numbers)

    @property
    def directions(self) -> int:
        """The number of columns of the root, the first ones, that `without` may reduce."""
        return self.size

    def without(self, units: Tensor, vectors: Tensor) -> "Covariance | Tensor":
        """L (1 - U^T U) L^T, in a structure, or as its root L (1 - U^T U).

        units: orthonormal rows U (*batch, d, directions); vectors: the rows U L^T (*batch, d, n).
        The difference S - V V^T itself would have negative eigenvalues by rounding.
        """
        root = self.root()
        return root.columns(0, root.width) - vectors.mT @ units

    def quadratic(self, rows: Tensor) -> Tensor:
        """A S A^T of a matrix A, given by its rows (*batch, m, n)."""
        return symmetric(rows @ self.matrix() @ rows.mT)

    def conditioned(
        self, seen: Tensor, hidden: Tensor, noise: Tensor | None
    ) -> "tuple[Tensor, Covariance | Tensor]":
        """Condition the hidden elements on the observed ones, with noise (m, m).

        The gain (*batch, hidden, m) by which what was seen moves the mean, and the covariance.
        """
        matrix = self.matrix()
        observed = matrix[..., seen[:, None], seen] + (0 if noise is None else noise)
        across = matrix[..., hidden[:, None], seen]
        gain = across @ torch.linalg.pinv(observed, hermitian=True)
        left = matrix[..., hidden[:, None], hidden] - gain @ across.mT
        return gain, symmetric(left)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the numbers inside."""
        return self.diagonal().dtype

    @property
    def device(self) -> torch.device:
        """The device of the numbers inside."""
        return self.diagonal().device

    @property
    def size(self) -> int:
        """The number of features n."""
        return self.diagonal().shape[-1]


def without_negative_variances(covariance: Covariance, scale: Callable[[], Tensor]) -> Covariance:
    """Zeros in place of features whose variance rounding has made negative; others are refused.

    scale: the size of what was added up to each variance (*batch, n), asked for if one is below 0.
    """
    if covariance.nonnegative:
        return covariance
    variance = covariance.diagonal().detach()
    if not variance.numel() or float(variance.min()) >= 0 or not is_finite(variance):
        return covariance
    limits = torch.finfo(variance.dtype)  # digits are lost below tiny, the smallest normal number
    roundings = max(NEGATIVE_VARIANCE, covariance.size)  # of this sum, and of those before it
    below = variance < -limits.eps * roundings * scale().detach().abs() - limits.tiny
    if bool(below.any()):
        raise InconsistentBranches(
            f"a variance comes out negative ({float(variance.min()):.3g}): the covariances before "
            "it are known too roughly here; use smaller noise, or sampling",
            below.any(-1),
        )
    return covariance.scale((variance >= 0).to(covariance.dtype))
