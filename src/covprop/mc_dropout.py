"""Monte Carlo dropout without the Monte Carlo: what very many stochastic passes would give."""

from typing import Any, final

from torch import Tensor, nn

from covprop.errors import UnsupportedOperation
from covprop.gaussian import Gaussian
from covprop.methods import Method
from covprop.propagate import propagate
from covprop.rules.noise import dropout_active, dropout_probability


def mc_dropout(
    model: nn.Module, x: Tensor | Gaussian, *, batch_dims: int = 1, method: Method | str = "auto"
) -> Any:
    """Mean and covariance of a model's output over its dropout masks, without draws.

    This is the limit of Monte Carlo dropout (Gal & Ghahramani 2016). Only dropout is switched on
    during the call: batch norm stays in evaluation mode.

    For logits, `bayes.Categorical().predict(y)` has class probabilities and mutual information. A
    softmax inside the model is less accurate, because it uses the delta method.

    Args:
        model: A model in evaluation mode, with dropout layers.
        x: Its input, (*batch, ...): a tensor, or a Gaussian whose noise is added.
        batch_dims: How many leading dimensions of a tensor x are a batch, with separate masks.
        method: As for `cp.propagate`.

    Returns:
        As from `cp.propagate`, with an estimate of its `error`.

    Raises:
        UnsupportedOperation: If the model has no dropout layer.

    Example:
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Dropout(0.2),
                                    torch.nn.Linear(8, 2)).eval()
        y = cp.mc_dropout(model, torch.ones(5, 3))
        y.mean, y.stddev
    """
    if not any(dropout_probability(layer) > 0 for layer in model.modules()):
        raise UnsupportedOperation(
            "this model has no dropout layer with p > 0, so that all stochastic passes are the "
            "same; write F.dropout(x, p, self.training) as a layer, nn.Dropout(p)"
        )
    gaussian = x if isinstance(x, Gaussian) else Gaussian.constant(x, batch_dims)
    with dropout_active(model):  # so that a model in training mode is not warned of
        return propagate(_WithDropout(model), gaussian, method=method)


@final
class _WithDropout(nn.Module):
    """A model whose dropout is on in every pass, also in those that estimate errors later."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = False

    def forward(self, *inputs: Any) -> Any:
        with dropout_active(self.model):
            return self.model(*inputs)
