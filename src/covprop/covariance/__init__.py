"""Structures of a covariance, all with the same interface."""

from covprop.covariance.base import Covariance, Layer, LinearMap
from covprop.covariance.deflated import Deflated
from covprop.covariance.dense import Dense
from covprop.covariance.diagonal import Diagonal, Zero
from covprop.covariance.low_rank import LowRank
from covprop.covariance.sharded import Sharded
from covprop.covariance.streamed import Streamed

__all__ = [
    "Covariance",
    "Deflated",
    "Dense",
    "Diagonal",
    "Layer",
    "LinearMap",
    "LowRank",
    "Sharded",
    "Streamed",
    "Zero",
]
