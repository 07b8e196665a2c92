"""A small regression problem, and parameters that train on it in a moment."""

import numpy as np

QUICK = {"hidden": (10,), "epochs": 60, "batch_size": 1000, "learning_rate": 0.05}
QUICK |= {"random_state": 0}


def regression(rows: int = 120, features: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(5, 3, (rows, features))
    return x, 100 + 20 * np.sin(x[:, 0] / 3) + 5 * x[:, 1] + rng.normal(0, 2, rows)
