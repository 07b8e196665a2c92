"""onnx2pytorch without torchvision, as the command line imports it."""

from covprop.cli.models import without_torchvision

__all__ = ["without_torchvision"]
