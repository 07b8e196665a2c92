"""covprop as models for the routines of torch-uncertainty: dropout without passes, noisy inputs.

A wrapped network answers in evaluation mode with the distribution that a routine expects, so that
it computes likelihood and calibration of it:

    model = MomentDropout(network, noise=0.1)
    Trainer().test(RegressionRoutine(model, output_dim=1, dist_family="normal"), loader)

torch-uncertainty imports torchvision where its routines are.
"""

import torch
from torch import Tensor, nn

import covprop as cp
from covprop import bayes
from covprop.methods import Method


class _Moments(nn.Module):
    """A network that answers with moments in evaluation mode, and is itself in training.

    Args:
        network: The network; with `logits`, a classifier.
        noise: The standard deviation of a target around the network's output.
        logits: Whether to return the logarithms of expected class probabilities, of which the
            softmax of `ClassificationRoutine` makes these probabilities again.
        method: As for `cp.propagate`.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        noise: float = 0.0,
        logits: bool = False,
        method: Method | str = "auto",
    ) -> None:
        super().__init__()
        self.network, self.noise, self.logits, self.method = network, noise, logits, method

    def output(self, x: Tensor) -> cp.Gaussian:
        """The output as a Gaussian."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        """The parameters of a normal distribution, or logits."""
        if self.training:
            result: Tensor = self.network(x)
            return result
        with torch.no_grad():
            y = self.output(x)
            if self.logits:
                return bayes.Categorical().predict(y).mean.log()
            return {"loc": y.mean, "scale": (y.variance + self.noise**2).sqrt()}


class MomentDropout(_Moments):
    """What `mc_dropout` of torch-uncertainty converges to with ever more estimators."""

    def output(self, x: Tensor) -> cp.Gaussian:
        """Mean and covariance over the dropout masks."""
        y: cp.Gaussian = cp.mc_dropout(self.network, x, method=self.method)
        return y


class NoisyInputs(_Moments):
    """A network whose inputs are measured with noise of known standard deviation.

    Args:
        network: The network.
        stddev: The standard deviation of the noise.
        options: Those of `_Moments`.
    """

    def __init__(self, network: nn.Module, stddev: float, **options: object) -> None:
        super().__init__(network, **options)  # type: ignore[arg-type]
        self.stddev = stddev

    def output(self, x: Tensor) -> cp.Gaussian:
        """The noise, propagated."""
        noisy = cp.Gaussian.isotropic(x, stddev=self.stddev, batch_dims=1)
        return cp.propagate(self.network, noisy, method=self.method)
