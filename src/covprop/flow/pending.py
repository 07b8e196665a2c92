"""Element-wise functions of in-flight tensors that are yet to be evaluated."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from covprop.activations.expression import Expression
from covprop.errors import CovpropError
from covprop.modules import calling_module


class Pending:
    """An element-wise function of a tensor that is evaluated when something asks for numbers.

    base: a tensor with numbers; expression: the function of its elements; evaluated: the result,
    once there is one, for all that share it.
    """

    def __init__(
        self,
        base: Any,
        expression: Expression,
        evaluate: Callable[["Pending"], Any],
        one_by_one: Callable[[], Any],
        again: Callable[[Callable[[Any], Any]], Any],
    ) -> None:
        """Keep how to evaluate it, under the modes of autograd that are set now.

        one_by_one: the result with its last operation taken by itself; again: its last operation,
        on others in place of the tensors among its arguments.
        """
        self.base, self.expression = base, expression
        self.evaluate, self.one_by_one, self._again = evaluate, one_by_one, again
        self.evaluated: Any = None
        self._modes = _modes()
        self._layer = calling_module()

    def result(self) -> Any:
        """The tensor with numbers; what it raises names the module that asked for the function."""
        if self.evaluated is None:
            if self._modes != _modes():
                inference, gradients = self._modes
                with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                    return self.result()
            try:
                self.evaluated = self.evaluate(self)
                self.evaluated.materialize()
            except CovpropError as error:
                error.layer = error.layer or self._layer
                raise
        return self.evaluated

    def at_mean(self) -> Tensor:
        """The function at the mean of its argument, as the model sees it."""
        base = self.base
        flat = base.loc.double().reshape(*base.batch_shape, base.event_shape.numel())
        value = self.expression(flat, *self.expression.parameters).reshape(base.loc.shape)
        shown: Tensor = base.batch_at.shown(value.to(base.dtype))
        return shown

    def of(self, base: Any) -> Any:
        """The same function of another tensor."""
        return self._again(lambda x: base if x.pending is None else x.pending.of(base))


def _modes() -> tuple[bool, bool]:
    """Those of autograd that are set."""
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled()
