"""Functions of numbers alone: the normal distribution, Hermite functions, pairwise integrals."""
