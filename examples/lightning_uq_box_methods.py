"""covprop as methods of lightning-uq-box, beside its own: dropout without passes, noisy inputs.

Each has the package's `predict_step`, so that a `Trainer` trains, tests and predicts with it:

    method = MomentDropoutRegression(network, nn.MSELoss())
    Trainer(max_epochs=10).fit(method, datamodule)
    method.predict_step(X)  # {"pred": ..., "pred_uct": ..., "epistemic_uct": ...}

lightning-uq-box imports torchvision.
"""

from typing import Any

import torch
from lightning_uq_box.uq_methods import DeterministicClassification, DeterministicRegression
from torch import Tensor, nn

import covprop as cp
from covprop import bayes
from covprop.methods import Method


def _as_regression(y: cp.Gaussian, source: str) -> dict[str, Tensor]:
    """Mean (batch, 1), and standard deviations (batch,), under the names of the package."""
    if y.event_shape != (1,):
        raise ValueError(f"the network has outputs of shape {tuple(y.event_shape)}, not (1,)")
    stddev = y.stddev[:, 0]
    return {"pred": y.mean, "pred_uct": stddev, source: stddev}


class MomentDropoutRegression(DeterministicRegression):
    """What `MCDropoutRegression` converges to with ever more passes, without passes."""

    def __init__(self, *args: Any, method: Method | str = "auto", **options: Any) -> None:
        super().__init__(*args, **options)
        self.method = method

    def predict_step(
        self, X: Tensor, batch_idx: int = 0, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:
        """Mean and standard deviation over the dropout masks."""
        self.model.eval()
        with torch.no_grad():
            y = cp.mc_dropout(self.model, X, method=self.method)
        return _as_regression(y, "epistemic_uct")


class MomentDropoutClassification(DeterministicClassification):
    """What `MCDropoutClassification` converges to with ever more passes, for logits."""

    def __init__(self, *args: Any, method: Method | str = "auto", **options: Any) -> None:
        super().__init__(*args, **options)
        self.method = method

    def predict_step(
        self, X: Tensor, batch_idx: int = 0, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:
        """Class probabilities over the dropout masks, their entropy, and mean logits."""
        self.model.eval()
        with torch.no_grad():
            y = cp.mc_dropout(self.model, X, method=self.method)
            predicted = bayes.Categorical().predict(y)
        p = predicted.mean
        return {"pred": p, "pred_uct": torch.special.entr(p).sum(-1), "logits": y.mean}


class NoisyInputRegression(DeterministicRegression):
    """A trained network whose inputs are measured with noise of known standard deviation."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: nn.Module,
        input_stddev: float | Tensor,
        *,
        method: Method | str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(model, loss_fn, **options)
        self.input_stddev, self.method = input_stddev, method

    def predict_step(
        self, X: Tensor, batch_idx: int = 0, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:
        """Mean and standard deviation that the noise of the inputs gives the output."""
        self.model.eval()
        stddev = torch.as_tensor(self.input_stddev, dtype=X.dtype, device=X.device).expand_as(X)
        with torch.no_grad():
            x = cp.Gaussian.diagonal(X, stddev=stddev, batch_dims=1)
            y = cp.propagate(self.model, x, method=self.method)
        return _as_regression(y, "aleatoric_uct")
