"""How many elements a function takes together: windows of max pooling, groups of norms."""

import math
from collections.abc import Callable
from typing import Any

from covprop.errors import name_of

LENGTHS = {"std", "var", "norm", "vector_norm", "matrix_norm", "std_mean", "var_mean"}
SHAPED = {"layer_norm", "rms_norm"}


def window(function: Callable[..., Any], given: Any) -> int:
    """Elements of a window of max pooling; 0 for maxima over whole dimensions."""
    if not _pools(function):
        return 0
    kernel = _argument(given, 1, "kernel_size")
    return kernel ** _dimensions(function) if isinstance(kernel, int) else math.prod(kernel)


def padding(function: Callable[..., Any], given: Any, count: int) -> int:
    """Elements that the padding of max pooling adds to so many."""
    around = _argument(given, 3, "padding") if _pools(function) else 0
    if not around:
        return 0
    dims = _dimensions(function)
    widths = [around] * dims if isinstance(around, int) else list(around)
    sizes = _argument(given, 0, "input").shape[-dims:]
    wider = [(size + 2 * width) / size for size, width in zip(sizes, widths, strict=True)]
    return int(count * math.prod(wider)) - count


def group(name: str, given: Any, count: int, features: int) -> int:
    """How many of so many elements have a length together in a norm; 0 for other functions."""
    if name in LENGTHS:
        return count // max(1, features)
    if name in SHAPED:
        return math.prod(_argument(given, 1, "normalized_shape"))
    if name == "group_norm":
        return count // int(_argument(given, 1, "num_groups"))
    return count if name in ("instance_norm", "normalize") else 0


def _pools(function: Callable[..., Any]) -> bool:
    name = name_of(function)
    return "max_pool" in name and "adaptive" not in name


def _dimensions(function: Callable[..., Any]) -> int:
    return next(int(part[0]) for part in name_of(function).split("max_pool")[1:])


def _argument(given: Any, place: int, name: str) -> Any:
    args, kwargs = given
    return args[place] if len(args) > place else kwargs.get(name)
