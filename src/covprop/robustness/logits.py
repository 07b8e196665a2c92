"""Gaussian logits: margins, expected softmax, and the quasi-random points that integrate them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.quasirandom import SobolEngine

from covprop.gaussian import Gaussian
from covprop.kernels.gradients import first_order
from covprop.kernels.normal import standard_deviation
from covprop.methods.montecarlo import HALF_CELL, REPLICATES
from covprop.propagate import GAUSSIAN_LAYERS, propagate
from covprop.robustness.estimates import Probabilities
from covprop.robustness.pairs import PairError, known_error, pair_error, pair_skewness

POINTS = 4096
"""Sobol points of all replicates together."""
BINARY = 2
CHUNK = 2**21
"""Logits of all points together that are in memory at a time."""


@final
@dataclass(frozen=True)
class Logits:
    """Moments of the logits in float64: mean (rows, classes), covariance (rows, classes, classes).

    Rows are the flattened batch; of a mixture, as `cp.Split` makes it, the components with their
    batch, and weights (components,). skewness: of y_i - y_j for all pairs (rows, classes, classes),
    where third cumulants are known; error: of the same pairs, where it is estimated.
    """

    mean: Tensor
    covariance: Tensor
    batch_shape: torch.Size
    dtype: torch.dtype
    weights: Tensor | None = None
    skewness: Tensor | None = None
    error: PairError | None = None

    @classmethod
    def of(cls, output: Gaussian) -> "Logits":
        """From a network's output; a single logit is the log-odds of class 1 against class 0.

        An estimate of the error is used where it is known, and not made.
        """
        if not isinstance(output, Gaussian):
            raise TypeError(
                f"logits are a cp.Gaussian, as cp.propagate gives, not {type(output).__name__}"
            )
        event = output.event_shape
        if not event or event.numel() != event[-1] or event[-1] < 1:
            raise ValueError(
                f"logits have an event of shape (classes,), and this Gaussian one of "
                f"{tuple(event)}; give it its batch dimensions, or pick the logits"
            )
        parts, weights = output, None
        if output.mixture is not None:
            parts, weights = output.mixture.components, output.mixture.weights.double()
        mean, covariance = _moments(parts)
        skewness = error = None
        if parts.skewness is not None:
            skewness = pair_skewness(covariance.detach(), _columns(parts.skewness, parts))
        if weights is None and (known := known_error(output)) is not None:
            columns = (_columns(part, output) for part in (known.mean, known.stddev))
            error = pair_error(covariance.detach(), *columns)
        return cls(mean, covariance, output.batch_shape, output.dtype, weights, skewness, error)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.mean.shape[-1]

    def labels(self, label: int | Tensor) -> Tensor:
        """Class numbers (batch,) from one number, or from one for each of the batch."""
        return class_numbers(label, self.batch_shape, self.classes, self.mean.device).reshape(-1)

    def averaged(self, values: Tensor) -> Tensor:
        """Average over the components of a mixture: (*any, rows, k) -> (*any, batch, k)."""
        if self.weights is None:
            return values
        by_component = values.unflatten(-2, (len(self.weights), -1))
        return torch.einsum("c,...cbk->...bk", self.weights, by_component)

    def restored(
        self, value: Tensor, stderr: Tensor, assumption: Tensor | None = None
    ) -> Probabilities:
        """From (batch, ...) to (*batch, ...), in the dtype of the logits."""
        shape = (*self.batch_shape, *value.shape[1:])
        found = Probabilities(value, stderr, assumption)
        return found.map(lambda tensor: tensor.reshape(shape).to(self.dtype))


def _moments(output: Gaussian) -> tuple[Tensor, Tensor]:
    """Mean (rows, classes) and covariance; a single logit is compared with 0."""
    rows, size = output.batch_shape.numel(), output.event_shape[-1]
    mean = output.mean.double().reshape(rows, size)
    covariance = output.covariance_matrix.double().reshape(rows, size, size)
    if size > 1:
        return mean, covariance
    return functional.pad(mean, (1, 0)), functional.pad(covariance, (1, 0, 1, 0))


def _columns(values: Tensor, output: Gaussian) -> Tensor:
    """One number for each logit (rows, classes) in float64; a single logit is compared with 0."""
    rows, size = output.batch_shape.numel(), output.event_shape[-1]
    found = values.detach().double().reshape(rows, size)
    return found if size > 1 else functional.pad(found, (1, 0))


def class_numbers(
    label: int | Tensor, batch_shape: torch.Size, classes: int, device: torch.device
) -> Tensor:
    """Labels (*batch,), validated against the number of classes."""
    try:
        numbers = torch.as_tensor(label, device=device)
    except (TypeError, ValueError, RuntimeError) as error:  # of None, of words, of ragged lists
        raise TypeError(
            f"a label is a class number, or a tensor of one for each of the batch, not {label!r}"
        ) from error
    if numbers.dtype.is_floating_point or numbers.dtype == torch.bool or numbers.is_complex():
        raise ValueError(f"labels are class numbers (integers), not {numbers.dtype}")
    if numbers.dim() and numbers.shape != batch_shape:
        raise ValueError(
            f"the labels have shape {tuple(numbers.shape)} and the batch {tuple(batch_shape)}; "
            "give one class number, or one for each element of the batch"
        )
    if numbers.numel() and not bool(((numbers >= 0) & (numbers < classes)).all()):
        raise ValueError(f"a label is none of the {classes} classes, 0 to {classes - 1}")
    return numbers.long().expand(batch_shape)


def others(chosen: Tensor, count: int) -> Tensor:
    """Every number below count but the chosen ones (rows, k), ascending: (rows, count - k)."""
    rest = torch.ones(len(chosen), count, dtype=torch.bool, device=chosen.device)
    rest.scatter_(1, chosen, value=False)
    return rest.nonzero()[:, 1].reshape(len(chosen), count - chosen.shape[1])


def differences(
    mean: Tensor, covariance: Tensor, base: Tensor, rivals: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of y_base - y_rival for every rival, and the magnitude that cancels in the variances.

    mean (rows, classes), base (rows,), rivals (rows, k): (rows, k), (rows, k, k), (rows, k).
    """
    rows = torch.arange(len(base), device=base.device)
    cross = covariance[rows, base].gather(1, rivals)  # Cov(y_base, y_rival)
    own = covariance[rows, base, base]
    between = covariance[rows[:, None, None], rivals[:, :, None], rivals[:, None, :]]
    matrix = own[:, None, None] - cross[:, :, None] - cross[:, None, :] + between
    size = own[:, None].abs() + 2 * cross.abs() + between.diagonal(dim1=-2, dim2=-1).abs()
    return mean[rows, base][:, None] - mean.gather(1, rivals), matrix, size.detach()


def margins(logits: Gaussian, label: int | Tensor) -> Gaussian:
    """The joint Gaussian of the label's logit minus every other logit.

    d = A y, Cov[d] = A S A^T with a row e_label - e_j of A for every other class j, in the order of
    the classes. The label wins where every element of d is positive.

    Args:
        logits: A Gaussian with event (classes,); one logit is the log-odds of class 1.
        label: A class number, or one for each of the batch.

    Returns:
        A Gaussian with event (classes - 1,).

    Example:
        y = cp.propagate(nn.Linear(4, 3), cp.Gaussian.isotropic(torch.zeros(4), stddev=0.1))
        print(cp.robustness.margins(y, 0).stddev)
    """
    moments = Logits.of(logits)
    labels = moments.labels(label)
    rivals = others(labels[:, None], moments.classes)
    mean, matrix, _ = differences(*_moments(logits), labels, rivals)
    shape = (*logits.batch_shape, moments.classes - 1)
    return Gaussian(
        mean.reshape(shape).to(logits.dtype),
        matrix.reshape(*shape, moments.classes - 1).to(logits.dtype),
        validate_args=False,
        method=logits.method,
    )


def check_count(name: str, value: int) -> None:
    """Raise unless the value is a positive integer."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is a whole number from 1, not {value!r}")


@final
@dataclass(frozen=True)
class Randomisation:
    """Scrambled Sobol points, fixed by their seeds so that averages over them are continuous."""

    each: int
    seeds: tuple[int, ...]

    @classmethod
    def draw(cls, points: int, generator: torch.Generator | None) -> "Randomisation":
        """Draw seeds; points are rounded up, as Sobol's sequence is balanced at powers of two."""
        check_count("points", points)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(
                "generator is a torch.Generator, as torch.Generator().manual_seed(0) gives, not "
                f"{generator!r}"
            )
        each = 2 ** math.ceil(math.log2(max(2, points / REPLICATES)))
        device = "cpu" if generator is None else generator.device
        seeds = torch.randint(2**31 - 1, (REPLICATES,), generator=generator, device=device)
        return cls(each, tuple(seeds.tolist()))

    @property
    def replicates(self) -> int:
        """Number of independent scramblings."""
        return len(self.seeds)

    def uniform(self, size: int, device: torch.device) -> Tensor:
        """Points of the unit cube, (size, replicates * each) in float64, replicate by replicate."""
        return _sobol(size, self.each, self.seeds).to(device)


@lru_cache(maxsize=8)
def _sobol(size: int, each: int, seeds: tuple[int, ...]) -> Tensor:
    engines = (SobolEngine(size, scramble=True, seed=seed) for seed in seeds)
    points = torch.cat([engine.draw(each, dtype=torch.float64) for engine in engines])
    return points.mT.contiguous() + HALF_CELL


def standard_error(replicates: Tensor) -> Tensor:
    """Standard error of the average of replicates (count, ...); a single one is exact.

    Two degrees of freedom are used: the average, and a coefficient of the control variate.
    """
    count = len(replicates)
    if count == 1:
        return torch.zeros_like(replicates[0])
    squares = (replicates - replicates.mean(0)).square().sum(0)  # torch's std warns if empty
    return (squares / (count * (count - 2))).sqrt()


def expected_softmax(
    logits: Gaussian, *, points: int = POINTS, generator: torch.Generator | None = None
) -> Probabilities:
    """E[softmax(y)], (*batch, classes), for Gaussian logits.

    Two classes (or one logit, the log-odds of class 1): E[sigmoid] of the difference by quadrature,
    to 1e-8. More: the average over scrambled Sobol points, with the standard error of 32
    independent scramblings; every point's softmax sums to 1, and so does the average.
    Differentiable with respect to mean and covariance by Price's theorem, which holds for a
    singular covariance too.

    Args:
        logits: A Gaussian with event (classes,).
        points: Number of points in all, rounded up.
        generator: Draws the scramblings; torch's global one by default.

    Example:
        y = cp.Gaussian.isotropic(torch.tensor([2.0, 0.0, 0.0]), stddev=1.0)
        print(cp.robustness.expected_softmax(y).probability)
    """
    return softmax_of(Logits.of(logits), Randomisation.draw(points, generator))


def softmax_of(moments: Logits, points: Randomisation) -> Probabilities:
    """E[softmax(y)], at fixed points."""
    if moments.classes == BINARY:
        value = moments.averaged(_binary_softmax(moments))
        return moments.restored(value, torch.zeros_like(value))
    value, replicates = _ExpectedSoftmax.apply(moments.mean, moments.covariance, points)
    return moments.restored(moments.averaged(value), standard_error(moments.averaged(replicates)))


def _binary_softmax(moments: Logits) -> Tensor:
    second = torch.ones(len(moments.mean), dtype=torch.long, device=moments.mean.device)
    mean, matrix, _ = differences(moments.mean, moments.covariance, second, 1 - second[:, None])
    log_odds = Gaussian(mean, matrix.clamp(min=0), validate_args=False)
    opposite = Gaussian(-mean, log_odds.covariance, validate_args=False)
    return torch.cat(
        [propagate(torch.sigmoid, one, GAUSSIAN_LAYERS).mean for one in (opposite, log_odds)],
        dim=-1,
    )


def entropy(probability: Probabilities | Tensor) -> Tensor:
    """-sum_c p_c log p_c in nats, (*batch,).

    For `class_probabilities`, it is the entropy of the decision under noise, which is zero if the
    noise never changes the decision. For `expected_softmax`, it is the predictive entropy, which
    includes the network's own doubt.

    Args:
        probability: Probabilities, or a tensor of them, (*batch, classes).

    Example:
        print(cp.robustness.entropy(torch.tensor([0.5, 0.5])))  # log 2
    """
    p = probability.probability if isinstance(probability, Probabilities) else probability
    positive = p > 0  # where p = 0 the derivative is infinite and of no use
    return torch.where(positive, torch.special.entr(torch.where(positive, p, 1)), 0).sum(-1)


class _ExpectedSoftmax(Function):
    """E[p] and, for L = sum_c g_c p_c, dL/dmu = E[grad L], dL/dS = E[hess L] / 2 (Price 1958)."""

    @staticmethod
    def forward(mean: Tensor, covariance: Tensor, points: Randomisation) -> tuple[Tensor, Tensor]:
        parts = [
            values.softmax(-1).unflatten(0, (points.replicates, points.each)).mean(1)
            for values in _logit_samples(mean, covariance, points)
        ]
        replicates = torch.cat(parts, dim=1)
        return replicates.mean(0), replicates

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        mean, covariance, ctx.points = inputs
        ctx.save_for_backward(mean, covariance)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Any, ...]:
        mean, covariance = ctx.saved_tensors
        slopes, curvatures = [], []
        for values, weights in zip(
            _logit_samples(mean, covariance, ctx.points),
            upstream.split(_chunk_rows(mean, ctx.points)),
            strict=True,
        ):
            p = values.softmax(-1)  # (points, rows, classes)
            gradient = p * (weights - (weights * p).sum(-1, keepdim=True))
            slope = gradient.mean(0)
            cross = torch.einsum("sri,srj->rij", gradient, p) / len(p)
            slopes.append(slope)
            curvatures.append((torch.diag_embed(slope) - cross - cross.mT) / 2)
        return torch.cat(slopes), torch.cat(curvatures), None


def _chunk_rows(mean: Tensor, points: Randomisation) -> int:
    return max(1, CHUNK // (points.replicates * points.each * mean.shape[-1]))


def _logit_samples(mean: Tensor, covariance: Tensor, points: Randomisation) -> Iterator[Tensor]:
    """Logits (points, rows, classes), a chunk of rows at a time.

    Softmax ignores what all logits share: without it, the points cover fewer dimensions.
    """
    centred = covariance - covariance.mean(-1, keepdim=True)
    centred = centred - centred.mean(-2, keepdim=True)
    normal = torch.special.ndtri(points.uniform(mean.shape[-1], mean.device)).mT
    rows = _chunk_rows(mean, points)
    for m, s in zip(mean.split(rows), centred.split(rows), strict=True):
        eigenvalues, vectors = torch.linalg.eigh(s)
        # The widest direction takes Sobol's first coordinate, the most even of them.
        root = (vectors * standard_deviation(eigenvalues)[:, None, :]).flip(-1)
        yield m + (normal @ root.mT).movedim(-2, 0)
