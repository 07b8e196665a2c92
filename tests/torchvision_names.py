"""onnx2pytorch without torchvision, as the command line imports it."""

from covprop.cli.torchvision_names import without_torchvision

__all__ = ["without_torchvision"]
