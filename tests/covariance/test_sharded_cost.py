"""What a covariance spread over processes takes of each: bytes held and bytes sent.

The formulas of `docs/performance.md` are checked here against what is really allocated and sent.
"""

import ctypes
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import covprop as cp
from covprop.covariance import Dense, Sharded
from tests.covariance.test_sharded import spread, team
from tests.covariance.test_streamed import model
from tests.gaussians import gaussian
from tests.layers import propagate
from tests.teams import together


class Sent(Counter[str]):
    """Bytes that this process hands to others, by operation, while it watches."""

    def __enter__(self) -> "Sent":
        self._kept = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather")}
        others = dist.get_world_size() - 1

        def exchange(out: Tensor, into: Tensor, arriving: Any, sizes: Any, **group: Any) -> Any:
            own = sizes[dist.get_rank()]
            self["exchanged"] += (into.numel() - own) * into.itemsize
            return self._kept["all_to_all_single"](out, into, arriving, sizes, **group)

        def gather(parts: Any, own: Tensor, **group: Any) -> Any:
            self["gathered"] += own.nbytes * others
            return self._kept["all_gather"](parts, own, **group)

        dist.all_to_all_single, dist.all_gather = exchange, gather
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._kept.items():
            setattr(dist, name, function)


SIZES = (24, 36, 8)
"""Features of a chain of three layers; two and four processes divide them."""


@torch.no_grad()
def _bytes_sent(dtype: torch.dtype) -> dict[str, int]:
    network = model(
        nn.Linear(SIZES[0], SIZES[1]), nn.BatchNorm1d(SIZES[1]), nn.ReLU(), nn.Linear(*SIZES[1:]),
        nn.Tanh(), dtype=dtype,
    )  # fmt: skip
    x = gaussian(SIZES[0], batch=(1,), dtype=dtype)
    shared = cp.Gaussian(x.mean, spread(x.covariance_matrix, team()))
    with Sent() as sent:
        propagate(network, shared)
    return dict(sent)


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float64), (4, torch.float32)])
def test_a_linear_map_sends_each_entry_once_and_nothing_else_sends_any(
    size: int, dtype: torch.dtype
) -> None:
    pairs = list(itertools.pairwise(SIZES))
    exchanged = sum(n * m for n, m in pairs) * (size - 1) // size**2 * dtype.itemsize
    gathered = sum(m for _, m in pairs) * (size - 1) // size * dtype.itemsize
    for sent in together(size, _bytes_sent, dtype):
        assert sent == {"exchanged": exchanged, "gathered": gathered}


MMAP_THRESHOLD = -3
"""Of glibc's mallopt."""
STATUS = Path("/proc/self/status")
SIDE = 28
"""Of an image of four channels: 3136 units, a covariance of 39 MB."""


def _resident(field: str) -> int:
    fields = dict(line.split(":") for line in STATUS.read_text().splitlines())
    return 1024 * int(fields[field].split()[0])


@torch.no_grad()
def _propagated(side: int, alone: bool) -> tuple[int, int]:
    """Bytes of the covariance that the process holds, and the peak of the plan."""
    network = model(
        nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(),
        dtype=torch.float32,
    )  # fmt: skip
    variance = torch.full((1, 4 * side**2), 0.1)
    structure = Dense(torch.diag_embed(variance)) if alone else _spread(variance)
    x = cp.Gaussian(torch.zeros(1, 4, side, side), structure, validate_args=False)
    y = propagate(network, x)
    assert isinstance(y.covariance, Dense | Sharded)
    return y.covariance.values.untyped_storage().nbytes(), cp.plan(network, x).peak_bytes


def _memory(alone: bool) -> tuple[int, int, int]:
    """The same, and by how much the process has grown at most."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**20)  # what is freed is returned at once
    _propagated(4, alone)  # code, threads and buffers that any size needs
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmHWM")
    return *_propagated(SIDE, alone), _resident("VmHWM") - before


def _spread(variance: Tensor) -> Sharded:
    return Sharded.from_diagonal(variance, team())


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells of the memory of a process")
def test_each_process_takes_its_share_of_the_memory() -> None:
    whole = 4 * (4 * SIDE**2) ** 2
    ((held, planned, grown),) = together(1, _memory, True)
    assert held == whole
    size = 4
    for share in together(size, _memory, False):
        assert share[0] == whole // size
        assert share[1] == pytest.approx(planned / size, rel=1e-6)
        # Code and buffers of any size take 6 to 14 MB; a matrix of n^2 would take 39 MB more.
        assert share[2] < share[1] + whole // 2
        assert share[2] < grown / size + whole // 2
