"""Functions of plain numbers: the normal distribution, Hermite functions, pairwise integrals."""
