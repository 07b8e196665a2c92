"""Checks of a propagation: comparison with samples, traces, normality and progress."""
