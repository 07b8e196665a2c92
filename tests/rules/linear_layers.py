"""Linear operations that have parameters or a window: layers, convolutions, pools and pads."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.rules.spelling import BATCH, LinearCase, const, layer, made, one, spelled

LARGE = 1e3
"""An offset that must not touch the covariance, not even by rounding."""
EVENTS = {1: (2, 6), 2: (2, 4, 5), 3: (2, 3, 3, 4)}


def convolutions() -> Iterator[LinearCase]:
    convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
    transposed = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
    for dims, event in EVENTS.items():
        name, kernel = f"conv{dims}d", (2, *(3,) * (dims - 1))
        for mode in ("zeros", "reflect", "replicate", "circular"):
            make = convolution[dims]
            yield layer(name, event, make(2, 3, 3, padding=1, padding_mode=mode))
            yield layer(name, event, make(2, 2, 3, padding="same", padding_mode=mode))
        yield layer(name, event, convolution[dims](2, 4, 2, stride=2, padding=1, groups=2))
        yield layer(name, event, convolution[dims](2, 2, 2, padding=1, dilation=2, bias=False))
        yield layer(name, event, convolution[dims](2, 2, 2, padding="valid"))
        bias = const(2, offset=LARGE)
        yield from spelled(name, event, const(2, 2, *kernel), bias, 1, 1)
        same = const(1, 2, *(3,) * dims)
        yield from spelled(name, event, weight=same, bias=const(1), padding="same", dilation=2)
        name = f"conv_transpose{dims}d"
        make = transposed[dims]
        yield layer(name, event, make(2, 2, 3, stride=2, padding=1, output_padding=1))
        yield layer(name, event, make(2, 4, 2, groups=2, dilation=2, bias=False))
        yield from spelled(name, event, const(2, 2, *kernel), bias, 2, 1, 1)
        yield from spelled(name, event, const(2, 1, *kernel), groups=2, bias=bias)


def pools() -> Iterator[LinearCase]:
    average = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
    adaptive = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
    for dims, event in EVENTS.items():
        name = f"avg_pool{dims}d"
        yield layer(name, event, average[dims](2))
        options: dict[str, Any] = {"stride": 1, "padding": 1, "count_include_pad": False}
        yield layer(name, event, average[dims](2, ceil_mode=True, **options))
        if dims > 1:
            yield layer(name, event, average[dims](2, divisor_override=3))
        yield from spelled(name, event, 2, stride=1, padding=1)
        name = f"adaptive_avg_pool{dims}d"
        yield layer(name, event, adaptive[dims](2))
        yield from spelled(name, event, 1)
        if dims > 1:
            yield layer(name, event, adaptive[dims]((None, *(2,) * (dims - 1))))


def pads() -> Iterator[LinearCase]:
    zero = {1: nn.ZeroPad1d, 2: nn.ZeroPad2d, 3: nn.ZeroPad3d}
    constant = {1: nn.ConstantPad1d, 2: nn.ConstantPad2d, 3: nn.ConstantPad3d}
    reflection = {1: nn.ReflectionPad1d, 2: nn.ReflectionPad2d, 3: nn.ReflectionPad3d}
    replication = {1: nn.ReplicationPad1d, 2: nn.ReplicationPad2d, 3: nn.ReplicationPad3d}
    circular = {1: nn.CircularPad1d, 2: nn.CircularPad2d, 3: nn.CircularPad3d}
    for dims, event in EVENTS.items():
        yield layer("pad", event, zero[dims](1))
        yield layer("pad", event, constant[dims](1, LARGE))
        for kind in (reflection, replication, circular):
            yield layer("pad", event, kind[dims](1))
        widths = (1, 2) * dims
        yield from spelled("pad", event, (1, -1) * dims)
        yield from spelled("pad", event, widths, "constant", LARGE)
        yield from spelled("pad", event, widths, value=-LARGE)
        for mode in ("reflect", "replicate", "circular"):
            yield from spelled("pad", event, widths, mode=mode)
    yield one("pad", "F, one dimension", (5,), lambda x: F.pad(x, (2, 1), value=LARGE))


def resizing() -> Iterator[LinearCase]:
    modes = {1: "linear", 2: "bilinear", 3: "trilinear"}
    for dims, event in EVENTS.items():
        every = ["nearest", "nearest-exact", "area", modes[dims]] + ["bicubic"] * (dims == 2)
        for mode in every:
            size = (3, 7, 2)[:dims]
            yield from spelled("interpolate", event, size, mode=mode, single=None)
            yield layer("interpolate", event, nn.Upsample(size, mode=mode), batch_only=True)
            if mode in (modes[dims], "bicubic"):
                options = {"scale_factor": 1.5, "mode": mode, "align_corners": True}
                yield from spelled("interpolate", event, single=None, **options)
    yield layer("interpolate", EVENTS[2], nn.UpsamplingNearest2d(scale_factor=2), batch_only=True)
    yield layer("interpolate", EVENTS[2], nn.UpsamplingBilinear2d((3, 7)), batch_only=True)
    smooth = {"size": (2, 3), "mode": "bilinear", "antialias": True}
    yield from spelled("interpolate", EVENTS[2], single=None, **smooth)
    yield one("upsample", "F", EVENTS[1], _old_upsample, None)


def sampling() -> Iterator[LinearCase]:
    for dims in (2, 3):
        event = EVENTS[dims]
        places = const(BATCH, *(2, 3, 2)[:dims], dims)
        for mode in ("bilinear", "nearest") + ("bicubic",) * (dims == 2):
            for padding in ("zeros", "border", "reflection"):
                options = {"mode": mode, "padding_mode": padding, "align_corners": False}
                yield from spelled("grid_sample", event, places, single=None, **options)
        yield from spelled(
            "grid_sampler", event, places, 0, 0, True, single=None, operation="grid_sample"
        )


def _old_upsample(x: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated; models still call it
        return F.upsample(x, 9)


def windows() -> Iterator[LinearCase]:
    image, columns = (2, 4, 5), (8, 12)
    yield layer("unfold", image, nn.Unfold(2, padding=1, stride=2))
    yield one("unfold", "F", image, lambda x: F.unfold(x, (2, 3), dilation=1))
    yield one("unfold", "Tensor, sliding", (6, 2), lambda x: x.unfold(-2, 3, 2))
    yield layer("fold", columns, nn.Fold((4, 5), 2))
    yield one("fold", "F", (4, 9), lambda x: F.fold(x, (4, 4), (2, 2), padding=1, stride=2))
    shuffles = (
        ("pixel_shuffle", (4, 2, 3), nn.PixelShuffle),
        ("pixel_unshuffle", (1, 4, 2), nn.PixelUnshuffle),
    )
    for name, event, module in shuffles:
        yield layer(name, event, module(2))
        yield from spelled(name, event, 2)
    yield layer("channel_shuffle", (4, 3), nn.ChannelShuffle(2), batch_only=True)
    yield from spelled("channel_shuffle", (4, 3), 2, single=None)


def layers() -> Iterator[LinearCase]:
    for event in ((4,), (3, 4)):
        yield layer("linear", event, nn.Linear(4, 3))
        yield layer("linear", event, nn.Linear(4, 2, bias=False))
        yield from spelled("linear", event, const(3, 4), const(3, offset=LARGE))
        yield from spelled("linear", event, const(3, 4), bias=const(3, offset=LARGE))
        yield layer("identity", event, nn.Identity())
    norms = (
        (nn.BatchNorm1d, (3,)),
        (nn.BatchNorm1d, (3, 4)),
        (nn.BatchNorm2d, (3, 2, 2)),
        (nn.BatchNorm3d, (3, 2, 2, 2)),
    )
    name = "batch_norm"
    for norm, event in norms:
        yield layer(name, event, norm(3), batch_only=True)
        yield layer(name, event, norm(3, affine=False, eps=0.1), batch_only=True)
    statistics = const(3, offset=LARGE), const(3, offset=4)
    scale, shift = const(3), const(3, offset=LARGE)
    by_name = {"weight": scale, "bias": shift, "eps": 1e-3, "training": False}
    for label, call in {
        "F": lambda x: F.batch_norm(x, *made(statistics, x), **made(by_name, x)),
        "F, by position": lambda x: F.batch_norm(
            x, *made((*statistics, scale, shift), x), False, 0.1, 0.2
        ),
        "torch": lambda x: torch.batch_norm(
            x, *made((scale, shift, *statistics), x), False, 0.1, 0.2, False
        ),
    }.items():
        yield one(name, label, (3, 4), call, None)
