"""Propagation with random tangents in place of covariances."""

from covprop.methods.sketched.method import Sketched

__all__ = ["Sketched"]
