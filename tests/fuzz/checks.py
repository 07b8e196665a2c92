"""What must hold of a propagation through any program, whatever it is."""

import torch

import covprop as cp
from tests.fuzz.outcomes import Refusal, Wrong, compare
from tests.fuzz.programs import JUMPS, accuracy
from tests.fuzz.trial import DRAWS, SAFETY, STEP, Trial, near, perturbed, rounding


def sound(trial: Trial) -> None:
    """Finite, symmetric to the last bit, no negative variance, positive semi-definite."""
    y = trial.result
    if isinstance(y, Refusal):
        return
    matrix = y.covariance_matrix
    if not (bool(torch.isfinite(y.mean).all()) and bool(torch.isfinite(matrix).all())):
        raise Wrong("moments are not finite")
    if not torch.equal(matrix, matrix.mT):
        worst = float((matrix - matrix.mT).abs().max())
        raise Wrong(f"covariance is not symmetric: entries differ by {worst:.2e}")
    definite(trial, y, torch.float64)


def definite(trial: Trial, y: cp.Gaussian, dtype: torch.dtype) -> None:
    """Eigenvalues of the correlations are not negative, up to errors on the way."""
    matrix = y.covariance_matrix.double()
    scale = matrix.diagonal(dim1=-2, dim2=-1).abs().amax(-1)
    unit = torch.where(scale > 0, scale, 1.0)
    lowest = torch.linalg.eigvalsh(matrix / unit[..., None, None])[..., 0]
    part = accuracy(trial.program, dtype)
    s = matrix.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    simple = SAFETY * part * s.sum(-1) * s.amax(-1) / unit
    if bool((lowest >= -simple).all()):
        return
    allowed = rounding(trial, y, part)[1].sum(-1).amax(-1) / unit  # by Gershgorin
    if bool((lowest >= -allowed).all()):
        return
    at = int((lowest + allowed).reshape(-1).argmin())
    raise Wrong(
        f"an eigenvalue is {float(lowest.reshape(-1)[at]):.3e} of the largest variance where "
        f"{-float(allowed.reshape(-1)[at]):.1e} is allowed"
    )


def batch_is_loop(trial: Trial) -> None:
    """Each of a batch alone has the same result."""
    y = trial.result
    if not trial.input.batch_dims or isinstance(y, Refusal | type(None)):
        return
    if isinstance(trial.method, cp.Sketched):
        return  # its tangents are drawn for the whole batch
    index = trial.random.randrange(len(y))
    one = trial.input.element(index, keep=True)
    alone = trial.run(input=one)
    if isinstance(alone, Refusal):
        raise Wrong(f"element {index} alone is refused, the batch is not: {alone.message}")
    part = accuracy(trial.program, torch.float64)
    near(trial, "of a batch", y[index : index + 1], alone, part, input=one)


def single_is_double(trial: Trial) -> None:
    """float32 is as near float64 as its rounding allows."""
    y = trial.run(torch.float32)
    z = trial.result
    if isinstance(y, Refusal) or isinstance(z, Refusal):
        return  # what overflows float32 is refused in it alone
    if isinstance(trial.method, cp.Sketched | cp.Split):
        return  # directions are drawn in their dtype, or those of a decomposition, which may turn
    if JUMPS & set(trial.program.operations):
        return  # what rounds to the jump, or has no variance in float32, is on another side of it
    matrix = y.covariance_matrix
    if not torch.equal(matrix, matrix.mT):
        raise Wrong("covariance in float32 is not symmetric")
    part = accuracy(trial.program, torch.float32)
    try:
        near(trial, "in float32", y, z, part)
    except Wrong:
        if not trial.rough:
            raise


def still(trial: Trial) -> None:
    """Without noise the result is the program's, and does not vary."""
    y = trial.run(noise=0.0)
    if isinstance(y, Refusal):
        return
    generator = torch.Generator().manual_seed(3)
    mean = trial.input.mean
    with torch.no_grad():
        expected = trial.program.build(torch.float64)[0](mean)
        values = []
        for _ in range(DRAWS):
            function, _ = trial.program.build(torch.float64, perturbed(generator))
            values.append((function(mean) - expected).abs())
    part = torch.finfo(torch.float64).eps
    change = torch.stack(values).amax() * SAFETY * part / STEP
    compare("mean without noise", y.mean, expected, change + SAFETY * part * expected.abs())
    rounded = isinstance(trial.method, cp.Split)  # of components that are equal up to rounding
    limit = (SAFETY * part * float(expected.abs().max()) + float(change)) ** 2 if rounded else 0.0
    if bool((y.covariance_matrix.abs() > limit).any()):
        worst = float(y.covariance_matrix.abs().max())
        raise Wrong(f"covariance without noise is {worst:.2e}, not zero")
