"""Limits of rounding: how many roundings a computed number may be off.

Each limit counts machine epsilons: the roundings of the longest formula that it guards, and a
margin of about two.
"""

import torch

DEGENERATE = 4.0
"""Of 1 - |rho|: rho = c (1 / sigma_i) (1 / sigma_j) is six roundings of half an epsilon."""
REMAINDER = 8.0
"""Of Var - sum_k a_k^2, relative to Var: a difference of two numbers of a few roundings each."""
JUMP = 64.0
"""Of the difference of two values of one function, relative to its values and arguments."""
DEVIATION = 64.0
"""Of a deviation g(y) - E[g], relative to g and to its argument."""
CANCELLATION = 8.0
"""Of a sum of covariances that cancel, relative to the variances that were added up."""
SINGULAR = 512.0
"""Of what is left of a variance given all other elements, relative to it, where nothing should be:
covariances are sums of products over layers of thousands of features."""
BESIDE_FACTOR = 64.0
"""Of independent noise beside a factor, relative to the variance: torch's density of low rank is
a difference of numbers that are as many times larger."""
CONSTANT_SUM = 4.0
"""Of a sum that does not vary, relative to what was added."""
MOMENT = 32.0
"""Of a moment of samples, relative to its size."""
PROBABILITY = 100.0
"""Of a probability that an integral finds, absolutely."""
SUMMATION_ORDER = 1e3
"""Of a sum of many products in another order, relative to the sum."""
EIGENVALUE = 8.0
"""Of an eigenvalue that should be zero, relative to n times the largest."""
DIFFERENCE = 16.0
"""Of a difference of a few numbers, relative to what was subtracted."""
DIFFERENCE_VARIANCE = 4.0
"""Of the variance of a difference, relative to the sum of what cancels in it."""
STANDARDISED = 10.0
"""Of the standard deviation of a constant column, relative to its largest value."""
LOGITS = 64.0
"""Of the outputs of an affine network, relative to the largest."""
COMPONENT_MEAN = 4.0
"""Of the mean of a component of a mixture, relative to the largest mean: at least."""
UNCHANGED = 64.0
"""Of an output that does not depend on the inputs, relative to its size and theirs."""
CHANGED = 1e4
"""Of an output that does, relative to its size: more is no rounding, less may be."""
NEGATIVE_VARIANCE = 100.0
"""Of a variance that should be zero, relative to the largest: sums of products of n numbers."""
FLUSH = 0.3
"""The power of the smallest normal number below which a coefficient counts as zero."""
DIFFERENCE_STEP = torch.finfo(torch.float64).eps ** (1 / 3)
"""The step at which rounding (eps / h^2) and truncation (h) of second derivatives are equal."""


def rounding(count: float, dtype: torch.dtype) -> float:
    """Return the relative error of a number of roundings of a dtype."""
    return count * torch.finfo(dtype).eps
