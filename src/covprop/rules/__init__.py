"""What operations do to an in-flight Gaussian; importing this package fills the table."""

from covprop.rules import affine, elementwise, identity, movement

__all__ = ["affine", "elementwise", "identity", "movement"]
