"""Structures of a covariance, all with the same interface."""

from covprop.covariance.base import Covariance
from covprop.covariance.base import Layer as Layer
from covprop.covariance.base import LinearMap as LinearMap
from covprop.covariance.deflated import Deflated as Deflated
from covprop.covariance.dense import Dense
from covprop.covariance.diagonal import Diagonal, Zero
from covprop.covariance.low_rank import LowRank
from covprop.covariance.sharded import Sharded
from covprop.covariance.streamed import Streamed as Streamed

__all__ = [
    "Covariance",
    "Dense",
    "Diagonal",
    "LowRank",
    "Sharded",
    "Zero",
]


def __dir__() -> list[str]:
    return list(__all__)
