"""Element-wise functions of in-flight tensors that are yet to be evaluated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from covprop.activations.expression import Expression


@final
@dataclass(eq=False)
class Pending:
    """An element-wise function of a tensor that is evaluated when something asks for numbers.

    base: a tensor with numbers; expression: the function of its elements; evaluate: gives the
    tensor with numbers; stepwise: the result with its last operation taken by itself; reapply: its
    last operation, on others in place of the tensors among its arguments; inference, gradients: the
    modes of autograd in which it is evaluated; layer: the module that asked for it; evaluated: the
    result, once there is one, for all that share it.
    """

    base: Any
    expression: Expression
    evaluate: Callable[["Pending"], Any]
    stepwise: Callable[[], Any]
    reapply: Callable[[Callable[[Any], Any]], Any]
    inference: bool
    gradients: bool
    layer: nn.Module | None
    evaluated: Any = None

    def at_mean(self) -> Tensor:
        """The function at the mean of its argument, as the model sees it."""
        base = self.base
        flat = base.loc.double().reshape(*base.batch_shape, base.event_shape.numel())
        value = self.expression(flat, *self.expression.parameters).reshape(base.loc.shape)
        shown: Tensor = base.batch_at.shown(value.to(base.dtype))
        return shown

    def rebased(self, base: Any) -> Any:
        """The same function of another tensor."""
        return self.reapply(lambda x: base if x.pending is None else x.pending.rebased(base))
