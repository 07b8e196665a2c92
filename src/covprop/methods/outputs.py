"""Whether the covariances of a network's outputs fit into the memory."""

from collections.abc import Callable

import torch

from covprop.errors import TooLarge
from covprop.methods.network import Network
from covprop.report.table import in_bytes
from covprop.room import LARGE, free_bytes


def check_outputs(
    network: Network, entry_bytes: Callable[[torch.dtype], int], beside: int = 0
) -> None:
    """Raise if what a method holds for the covariances of the outputs would not fit.

    entry_bytes: for each entry of the covariance of an output of this dtype; beside: float64
    numbers for each output that are held, too.
    """
    needed, outputs = 0, 0
    for output in network.outputs:
        size = output.event_shape.numel()
        outputs += size
        needed += entry_bytes(output.dtype) * size**2 + torch.float64.itemsize * beside * size
    needed *= network.batch_shape.numel()
    if needed > LARGE and needed > (free := free_bytes(network.means[0].device)):
        raise TooLarge(
            f"the covariances of {outputs:,} outputs would need {in_bytes(needed)}, and "
            f"{in_bytes(free)} are free; return fewer outputs, or propagate parts of the batch"
        )
