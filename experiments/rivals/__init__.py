"""The methods of the field behind one call: `RIVALS[name](model, x)` is a Gaussian of the output.

What covprop has as a method is called there and not written again. Each other file is a page of
formulas after a paper, or calls a package that was installed beside:

    pip install --no-deps --target FOLDER fastbnns==0.4.3 pytagi==0.1.12
    PYTHONPATH=FOLDER python -m experiments field

Wheels of pytagi 0.2 are linked with Open MPI 4, without which they cannot be imported.
"""

from experiments.rivals import cutagi, fast_bnns, methods, petersen2024, polynomial_chaos
from experiments.rivals.rival import Refused, Rival

__all__ = ["OURS", "RIVALS", "WITHOUT_ROW", "Refused", "Rival"]

OURS = methods.OURS
RIVALS: dict[str, Rival] = {
    **methods.PUBLISHED,
    "Petersen 2024 (SDP)": Rival(petersen2024.propagate),
    "Petersen 2024, marginals": Rival(petersen2024.propagate_marginals, joint=False),
    "FastBNNs": Rival(fast_bnns.propagate, joint=False),
    "cuTAGI, ReLU": Rival(cutagi.propagate, joint=False, counted=False),
    "cuTAGI, MixtureReLU": Rival(cutagi.propagate_mixture, joint=False, counted=False),
    **methods.POINTS,
    **{
        f"polynomial chaos, degree {degree}": Rival(polynomial_chaos.of_degree(degree))
        for degree in (2, 4, 6)
    },
    **methods.SAMPLES,
}
WITHOUT_ROW = {
    "Kuang & Lin 2026": "its published figure is not at hand, and nothing is quoted from memory",
    "cumulants of arXiv 2605.05179 (2026)": "its published numbers are not at hand; it computes "
    "means of random networks alone, without a covariance",
}
"""What the table says of methods that it has no row of."""
