"""The in-flight Gaussian: what a module's forward sees instead of a tensor."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeGuard, final

import torch
from torch import Tensor

from covprop.covariance import Covariance, LinearMap
from covprop.errors import BatchDimensionError, MissingAttribute, UnsupportedOperation, name_of
from covprop.flow.batch_position import FIRST, Position, with_batch_first
from covprop.flow.carrier import Carrier
from covprop.flow.lineage import Lineage, Transfer, as_rule, turn_into
from covprop.flow.nests import instances
from covprop.flow.pending import Pending
from covprop.flow.table import (
    OPERATORS,
    TABLE,
    Batch,
    Kind,
    as_torch_function,
    unsupported,
)
from covprop.validation import SUPPORTED, unsupported_dtype


class _Views:
    """Shared by all views of one tensor: the number of in-place changes, like `Tensor._version`."""

    __slots__ = ("version",)

    def __init__(self) -> None:
        self.version = 0


@final
class GaussianTensor(Tensor):
    """A Gaussian that is a `torch.Tensor` without numbers of its own, so that a model runs on it.

    Every torch function that has a rule works on it, as a function and as a method; others raise
    `UnsupportedOperation`. Rules see tensors that have numbers, and their batch first. Those made
    of steps (`Batch.STEPWISE`) see them as they are: they may be `pending`, until `evaluate`.

    Args:
        loc: The mean, (*batch, *event).
        carrier: The random vector around it.
        view_of: The tensor of which this is a view.
        batch_at: Where the model sees the batch.

    Example:
        @cp.rule(torch.trapezoid)
        def trapezoid(function, x):
            return x.through(function(x.loc), cp.extending.LinearMap(function, x.event_shape))
        cp.propagate(torch.trapezoid, x, cp.GaussianLayers())
    """

    __array_ufunc__ = None  # numpy leaves its operators to ours

    @staticmethod
    def __new__(
        cls, loc: Tensor, carrier: Carrier, view_of: "GaussianTensor | None" = None,
        batch_at: Position = FIRST,
    ) -> "GaussianTensor":  # fmt: skip
        """A tensor for torch, which has a dtype and a device but no memory."""
        del carrier, view_of, batch_at
        return Tensor._make_wrapper_subclass(cls, loc.shape, dtype=loc.dtype, device=loc.device)

    def __init__(
        self,
        loc: Tensor,
        carrier: Carrier,
        view_of: "GaussianTensor | None" = None,
        batch_at: Position = FIRST,
    ) -> None:
        """Wrap a mean (*batch, *event) and the random vector around it."""
        if loc.dtype not in SUPPORTED:
            raise UnsupportedOperation(unsupported_dtype(loc))
        self.loc, self.carrier, self.batch_at = loc, carrier, batch_at
        carrier.dtype = loc.dtype
        self._views: _Views = _Views() if view_of is None else view_of._views
        self._seen = self._views.version
        self.pending: Pending | None = None
        carrier.lineage.add(self)

    @classmethod
    def pending_on(cls, pending: Pending) -> "GaussianTensor":
        """A tensor that is yet to be evaluated."""
        base = pending.base
        result = cls.__new__(cls, base.loc, base.carrier)
        result.batch_at, result.pending = base.batch_at, pending
        result._views, result._seen = _Views(), 0
        return result

    @property
    def is_pending(self) -> bool:
        """Whether there are no numbers yet."""
        return "carrier" not in self.__dict__

    def evaluate(self) -> None:
        """Compute mean and carrier if they are pending; later operations extend the function."""
        if self.pending is not None and self.is_pending:
            made = self.pending.evaluate(self.pending)
            self.loc, self.carrier = made.loc, made.carrier
            self.carrier.lineage.add(self)

    def materialize(self) -> None:
        """Evaluate, and drop the function, so that later operations start from this tensor."""
        self.evaluate()
        self.pending = None

    @property
    def base(self) -> "GaussianTensor":
        """The tensor of which this is a pending function, itself if it is not pending."""
        return self if self.pending is None else self.pending.base

    def is_same(self, other: "GaussianTensor") -> bool:
        """Whether two evaluated tensors have the same mean, carrier and layout."""
        if self.carrier is not other.carrier or self.batch_at != other.batch_at:
            return False
        return self.loc is other.loc or torch.equal(self.loc, other.loc)

    def alias(self) -> "GaussianTensor":
        """A second tensor of the same value; in-place operations on this one do not change it."""
        if self.pending is not None and self.is_pending:
            return GaussianTensor.pending_on(self.pending)
        return GaussianTensor(self.loc, self.carrier, batch_at=self.batch_at)

    @property
    def template(self) -> Tensor:
        """A tensor of the shape, dtype and device of the mean."""
        return self.base.loc

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions, which no operation may touch."""
        return self.base.carrier.batch_shape

    @property
    def event_shape(self) -> torch.Size:
        """The other dimensions."""
        return self.template.shape[len(self.batch_shape) :]

    @property
    def flat(self) -> Tensor:
        """The mean of the flattened event, (*batch, n)."""
        batch, loc = self.carrier.batch_shape, self.loc
        if loc.dim() == len(batch) + 1:
            return loc
        return self.loc.reshape(*batch, self.event_shape.numel())

    @property
    def lineage(self) -> Lineage:
        """The propagation that it belongs to."""
        return self.base.carrier.lineage

    @property
    def covariance(self) -> Covariance:
        """The covariance of the flattened event."""
        return self.carrier.covariance

    @property
    def variances(self) -> Tensor:
        """The variances of the flattened event, (*batch, n)."""
        return self.carrier.variances()

    def replace(
        self, loc: Tensor, covariance: Covariance, transfer: Transfer | None = None
    ) -> "GaussianTensor":
        """The result of an operation on this tensor: its mean and its covariance.

        transfer: how Cov(this, w) becomes Cov(result, w), to first order in expectation; without
        it the result cannot be joined with other tensors.
        """
        return GaussianTensor(loc, self.carrier.with_covariance(loc, covariance, transfer))

    def moved(self, loc: Tensor, view: bool = False) -> "GaussianTensor":
        """The same random vector around another mean, or in another shape."""
        if loc.dtype != self.dtype:
            return GaussianTensor(loc, self.carrier.map(loc, lambda tensor: tensor.to(loc.dtype)))
        return GaussianTensor(loc, self.carrier, view_of=self if view else None)

    def through(self, loc: Tensor, linear: LinearMap) -> "GaussianTensor":
        """The result of an affine operation: its value at the mean, and its linear part."""
        return GaussianTensor(loc, self.carrier.linear(loc, linear))

    @property
    def shown(self) -> Tensor:
        """The mean as the model sees it."""
        return self.batch_at.shown(self.loc)

    def with_batch_at(self, batch_at: Position) -> "GaussianTensor":
        """The same tensor with its batch dimension in another place of the model's layout."""
        if batch_at == self.batch_at:
            return self
        self.evaluate()
        return GaussianTensor(self.loc, self.carrier, view_of=self, batch_at=batch_at)

    def seen_from(self, batch_at: Position) -> "GaussianTensor":
        """The same tensor, whose batch of one is another dimension of the model's layout."""
        loc = batch_at.first(self.shown)
        return GaussianTensor(loc, self.carrier, view_of=self, batch_at=batch_at)

    def cross_covariance(self, other: "GaussianTensor") -> Tensor | None:
        """Cov(this, other) as (*batch, n, m), or None if they are independent."""
        return self.carrier.cross(other.carrier)

    def become(self, other: "GaussianTensor") -> None:
        """Take another's value in place; older views of this tensor become invalid."""
        self._views.version += 1
        self._seen = self._views.version
        self.batch_at = other.batch_at
        if other.is_pending and other.pending is not None:
            if not self.is_pending:
                del self.loc, self.carrier
        else:
            self.loc, self.carrier = other.loc, other.carrier
        self.pending = other.pending

    def check_current(self) -> None:
        """Raise if this is a view of something that changed in place since."""
        if self._seen != self._views.version:
            raise UnsupportedOperation(
                "this tensor was changed in place through another view of it, which covprop cannot "
                "follow; use the out-of-place operation (inplace=False)"
            )

    # What a model may ask of a tensor, under `torch.Tensor`'s names.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # read-only
        """The shape that the model sees."""
        return self.batch_at.shape(self.template.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # read-only
        """The dtype."""
        return self.template.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # read-only
        """The device."""
        return self.template.device

    def size(self, dim: int | None = None) -> Any:
        """Tensor.size."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Tensor.dim."""
        return len(self.shape)

    def numel(self) -> int:
        """Tensor.numel."""
        return self.template.numel()

    def __len__(self) -> int:
        """The size of the first dimension."""
        return self.shape[0]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Hand torch's function to its rule."""
        del types
        if getattr(func, "__name__", None) == "__get__" and func not in TABLE:  # an attribute
            raise AttributeError
        return dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no class
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse operators that bypass the rules, because there is no data."""
        raise unsupported(func)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]  # read-only
        """Whether autograd follows the mean or the covariance."""
        base = self.base
        return base.loc.requires_grad or base.carrier.requires_grad

    def __repr__(self) -> str:  # type: ignore[override]  # torch has contents
        """Shapes only."""
        known = "pending" if self.is_pending else type(self.carrier).__name__
        shapes = f"shape={tuple(self.shape)}, batch_shape={tuple(self.batch_shape)}"
        return f"GaussianTensor({shapes}, carrier={known})"

    def __format__(self, spec: str) -> str:
        """Shapes only."""
        return repr(self)

    def __getattr__(self, name: str) -> Any:
        """Raise for attributes that torch does not have, and for those that are pending."""
        if name in ("loc", "carrier"):
            raise AttributeError(f"{name} of a tensor that is pending: call evaluate() first")
        raise MissingAttribute(f"an in-flight Gaussian has no attribute {name!r}; do without it")


def is_plain(item: Any) -> TypeGuard[Tensor]:
    """Whether something is a tensor of numbers."""
    return isinstance(item, Tensor) and not isinstance(item, GaussianTensor)


def dispatch(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the rule of a torch function."""
    row = TABLE.get(function) or TABLE.get(function := as_torch_function(function))
    if function is torch.Tensor.view and not isinstance(args[-1], torch.dtype):
        function = torch.Tensor.reshape  # strides of in-flight means are not those of the model
        row = TABLE[function]
    tensors = instances(GaussianTensor, args, kwargs)
    for tensor in tensors:
        tensor.check_current()
    if kwargs.get("out") is not None:
        raise UnsupportedOperation(
            f"{name_of(function)} with out=... would write a Gaussian into a plain tensor; leave "
            "out away"
        )
    if row is None:
        raise unsupported(function)
    if row.in_place_of is not None:
        return _in_place(function, row.in_place_of, args, kwargs)
    watcher = tensors[0].lineage.watcher

    def run() -> Any:
        """Extend a pending function, or else run the rule on evaluated tensors."""
        made = row.compose(function, args, kwargs, tensors) if row.compose else None
        return run_rule(function, args, kwargs, tensors) if made is None else made

    if watcher is None:
        return as_rule(run)
    return as_rule(lambda: watcher.run(function, args, kwargs, run))


def run_rule(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[GaussianTensor],
) -> Any:
    """Run the rule of a function, with the batch of its tensors where the rule expects it."""
    row = TABLE[function]
    if row.kind is not Kind.MAXIMUM and row.batch is not Batch.STEPWISE:
        for tensor in tensors:
            tensor.materialize()  # those made of other operations leave it to them
    tensors[0].lineage.collect()
    batch, body = row.batch, row.body
    assert body is not None
    if batch is Batch.STEPWISE:
        return body(function, *args, **kwargs)
    moved = any(tensor.batch_at != FIRST for tensor in tensors)
    if moved and batch is Batch.FIRST:
        raise BatchDimensionError(
            f"{name_of(function)} has a rule for tensors whose batch comes first; move it there "
            "with .movedim"
        )
    if moved:
        return with_batch_first(function, body, args, kwargs, tensors)
    try:
        return body(function, *args, **kwargs)
    except BatchDimensionError:
        if batch is Batch.ANYWHERE and len(tensors[0].batch_shape) == 1:
            with suppress(BatchDimensionError):
                return with_batch_first(function, body, args, kwargs, tensors)
        raise


def _in_place(
    function: Callable[..., Any],
    plain: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    result, target = dispatch(plain, args, kwargs), args[0]
    if result.numel() != target.numel():
        raise UnsupportedOperation(f"{name_of(function)} cannot change the shape of its target")
    write(function, target, result)
    return target


def write(function: Callable[..., Any], target: Tensor, result: GaussianTensor) -> None:
    """Write the result of an in-place operation to its target; a plain target becomes Gaussian."""
    if isinstance(target, GaussianTensor):
        target.become(result)
        return
    turn_into(function, target, dispatch(Tensor.to, (result, target.dtype), {}))


def _operator(name: str) -> Callable[..., Any]:
    function = getattr(torch.Tensor, name)

    def method(self: GaussianTensor, *others: Any) -> Any:
        return dispatch(function, (self, *others), {})

    return method


for _python, _torch in OPERATORS.items():
    setattr(GaussianTensor, f"__{_python}__", _operator(_torch))
