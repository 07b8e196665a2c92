"""onnx2pytorch without torchvision, of which there is no CPU build beside torch's everywhere.

It imports names of torchvision for a few operators (regions of interest, deformable convolutions,
decoding of images). Where torchvision is not installed, these names stand for them while
onnx2pytorch is imported, and raise if called. With torchvision installed, nothing is done.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

NAMES = {
    "torchvision": (),
    "torchvision.ops": ("deform_conv2d", "roi_pool", "roi_align", "nms", "box_convert"),
    "torchvision.io": ("decode_image", "ImageReadMode"),
}


def _absent(*args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise ModuleNotFoundError("this ONNX operator needs torchvision, which is not installed")


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Let onnx2pytorch be imported."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    for name, functions in NAMES.items():
        module = ModuleType(name)
        for function in functions:
            setattr(module, function, _absent)
        sys.modules[name] = module
    sys.modules["torchvision"].ops = sys.modules["torchvision.ops"]  # type: ignore[attr-defined]
    sys.modules["torchvision"].io = sys.modules["torchvision.io"]  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in NAMES:
            del sys.modules[name]
