"""Functions that small networks are fitted to: controllers, cost tables, engineering models.

Each takes points of a cube of side 2 sqrt(3), (rows, inputs), where a coordinate has deviation 1,
and scales them to what its coordinates mean. Plateaus, saturation and kinks are on purpose: where a
target is flat, hidden units vary and must cancel.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

EDGE = math.sqrt(3)
"""Half the side of the cube: a uniform coordinate has deviation 1."""


@final
class Target(NamedTuple):
    """A function and how many inputs it has."""

    inputs: int
    function: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, inputs) -> (rows, outputs)."""
        y = self.function(x)
        return y if y.dim() > 1 else y[:, None]


def scaled(x: Tensor, ranges: Sequence[tuple[float, float]]) -> list[Tensor]:
    """Coordinates in their own units, from the ends that the cube stands for."""
    return [
        low + (high - low) * (x[:, place] / EDGE + 1) / 2
        for place, (low, high) in enumerate(ranges)
    ]


def collision(radius: float, horizon: float) -> Callable[[Tensor], Tensor]:
    """Costs of five advisories for two aircraft in a plane, as in tables of collision avoidance.

    Distance, bearing, heading and two speeds; an advisory turns one's own velocity. The cost rises
    linearly where the closest approach within the horizon is nearer than the radius.
    """

    def costs(x: Tensor) -> Tensor:
        distance, bearing, heading, own, other = scaled(
            x, [(0.1, 10), (-math.pi, math.pi), (-math.pi, math.pi), (0.2, 1.2), (0.0, 1.2)]
        )
        place = torch.stack([distance * bearing.cos(), distance * bearing.sin()], 1)
        found = []
        for turn, price in ((0.0, 0.0), (0.3, 0.02), (-0.3, 0.02), (0.7, 0.05), (-0.7, 0.05)):
            velocity = torch.stack(
                [other * heading.cos() - own * math.cos(turn),
                 other * heading.sin() - own * math.sin(turn)], 1
            )  # fmt: skip
            rate = velocity.square().sum(1) + 1e-3
            when = (-(place * velocity).sum(1) / rate).clamp(0, horizon)
            miss = (place + when[:, None] * velocity).norm(dim=1)
            found.append(price + (1 - miss / radius).clamp(min=0))
        return torch.stack(found, 1)

    return costs


def vertical(x: Tensor) -> Tensor:
    """Costs of five climb rates for two aircraft above each other: height, two rates, time."""
    height, own, other, time = scaled(x, [(-8, 8), (-2, 2), (-2, 2), (0, 6)])
    found = []
    for rate in (None, -1.5, 1.5, -2.5, 2.5):
        climb = own if rate is None else own + (rate - own) * (time / 4).clamp(max=1)
        miss = (height + time * (other - climb)).abs()
        price = 0.0 if rate is None else 0.02 * abs(rate)
        found.append(price + (1 - miss / 2).clamp(min=0) * (1 - time / 8))
    return torch.stack(found, 1)


def cruise(x: Tensor) -> Tensor:
    """Acceleration by an adaptive cruise control: the lower of two laws, saturated."""
    wanted, gap, speed, distance, approach = scaled(
        x, [(25, 35), (1, 2), (15, 35), (5, 120), (-12, 12)]
    )
    following = 0.2 * (distance - 10 - gap * speed) + 0.6 * approach
    return torch.minimum(0.5 * (wanted - speed), following).clamp(-3, 2)


def cruise_smooth(x: Tensor) -> Tensor:
    """The same with soft limits."""
    wanted, gap, speed, distance, approach = scaled(
        x, [(25, 35), (1, 2), (15, 35), (5, 120), (-12, 12)]
    )
    following = 0.2 * (distance - 10 - gap * speed) + 0.6 * approach
    return 2.5 * torch.tanh(-torch.logaddexp(0.5 * (speed - wanted), -following) / 2.5)


def pendulum(x: Tensor) -> Tensor:
    """Torque that swings a pendulum up by its energy and holds it there by a linear law."""
    angle, rate = scaled(x, [(-math.pi, math.pi), (-6, 6)])
    energy = rate.square() / 2 + 9.8 * (angle.cos() - 1)
    swing = -0.5 * energy * rate * angle.cos()
    hold = -(30 * angle.sin() + 8 * rate)
    near = torch.sigmoid(20 * (angle.cos() - 0.85))
    return (near * hold + (1 - near) * swing).clamp(-4, 4)


def cart_pole(x: Tensor) -> Tensor:
    """Force of a saturated linear regulator for a cart with a pole."""
    place, speed, angle, rate = scaled(x, [(-2.4, 2.4), (-2, 2), (-0.5, 0.5), (-2, 2)])
    return (1.0 * place + 1.7 * speed + 30 * angle + 7.5 * rate).clamp(-10, 10)


def cart_swing(x: Tensor) -> Tensor:
    """Force that swings the pole of a cart up by its energy, smoothly limited."""
    place, speed, angle, rate = scaled(x, [(-2.4, 2.4), (-2, 2), (-math.pi, math.pi), (-5, 5)])
    energy = rate.square() / 2 + 9.8 * (angle.cos() - 1)
    return 10 * torch.tanh((energy * rate * angle.cos() - place - 0.7 * speed) / 10)


def time_optimal(x: Tensor) -> Tensor:
    """A double integrator brought to rest in the shortest time, with a narrow linear band."""
    place, speed = scaled(x, [(-2, 2), (-2, 2)])
    return -((place + speed * speed.abs() / 2) / 0.3).clamp(-1, 1)


def regulator(x: Tensor) -> Tensor:
    """A double integrator by a saturated linear regulator."""
    place, speed = scaled(x, [(-2, 2), (-2, 2)])
    return -(place + 1.73 * speed).clamp(-1, 1)


def point_mass(x: Tensor) -> Tensor:
    """Three axes of a vehicle, each by a saturated linear regulator, all within one limit."""
    place, speed = x[:, :3], x[:, 3:]
    wanted = -(place + 1.73 * speed)
    size = wanted.norm(dim=1, keepdim=True)
    return wanted * (2 / size.clamp(min=2))


def unicycle(x: Tensor) -> Tensor:
    """Acceleration and turn rate that drive a vehicle to the origin."""
    east, north, heading, speed = scaled(x, [(-5, 5), (-5, 5), (-math.pi, math.pi), (0, 3)])
    ahead = -(east * heading.cos() + north * heading.sin())
    aside = east * heading.sin() - north * heading.cos()
    return torch.stack([(ahead - speed).clamp(-1, 1), (1.5 * aside).clamp(-2, 2)], 1)


def oscillator(x: Tensor) -> Tensor:
    """A rotating mass that damps a translating oscillator; smooth and saturated."""
    return torch.tanh(1.2 * x[:, 0] - 0.7 * x[:, 1] * x[:, 2].cos() + 2 * x[:, 2].sin() - x[:, 3])


def pursuit(horizon: float, inputs: int = 3) -> Callable[[Tensor], Tensor]:
    """How near a pursuer gets, less its reach: relative place, heading, then speeds and time."""

    def value(x: Tensor) -> Tensor:
        ranges = [(-4, 4), (-4, 4), (-math.pi, math.pi), (0.2, 1.5), (0.2, 1.5), (0.5, horizon)]
        east, north, heading, *rest = scaled(x, ranges[:inputs])
        one = torch.ones_like(east)
        own, other, limit = (*rest, *(one, one, horizon * one)[len(rest) :])
        steps = torch.linspace(0, 1, 9, dtype=x.dtype)[:, None] * limit
        nearest = torch.hypot(
            east + steps * (other * heading.cos() - own), north + steps * other * heading.sin()
        ).amin(0)
        return (nearest - 1).clamp(max=2.0)

    return value


def obstacles(x: Tensor) -> Tensor:
    """The nearest of three balls in three dimensions, limited."""
    centres = torch.tensor([[1.0, 0.5, -0.5], [-1.0, -1.0, 0.5], [0.0, 1.2, 1.0]], dtype=x.dtype)
    return (torch.cdist(x, centres).amin(1) - 0.6).clamp(max=1.0)


def friedman(x: Tensor) -> Tensor:
    """Friedman's first function of five inputs."""
    a, b, c, d, e = scaled(x, [(0, 1)] * 5)
    return 10 * (math.pi * a * b).sin() + 20 * (c - 0.5).square() + 10 * d + 5 * e


def borehole(x: Tensor) -> Tensor:
    """Flow of water through a borehole, eight inputs."""
    radius, reach, above, upper, below, lower, length, flow = scaled(
        x, [(0.05, 0.15), (100, 50000), (63070, 115600), (990, 1110), (63.1, 116), (700, 820),
            (1120, 1680), (9855, 12045)]
    )  # fmt: skip
    log = (reach / radius).log()
    leak = 2 * length * above / (log * radius.square() * flow)
    return 2 * math.pi * above * (upper - lower) / (log * (1 + leak + above / below)) / 100


def arm(x: Tensor) -> Tensor:
    """Place of the hand of a plane robot arm with four joints, and its distance; eight inputs."""
    turns = torch.cumsum(x[:, :4], 1)
    lengths = 0.5 + x[:, 4:] / (4 * EDGE)
    east, north = (lengths * turns.cos()).sum(1), (lengths * turns.sin()).sum(1)
    return torch.stack([east, north, torch.hypot(east, north)], 1)


def ishigami(x: Tensor) -> Tensor:
    """Ishigami's function of three inputs."""
    a, b, c = scaled(x, [(-math.pi, math.pi)] * 3)
    return a.sin() + 7 * b.sin().square() + 0.1 * c**4 * a.sin()


def branin(x: Tensor) -> Tensor:
    """Branin's function of two inputs."""
    a, b = scaled(x, [(-5, 10), (0, 15)])
    bowl = b - 5.1 / (4 * math.pi**2) * a.square() + 5 / math.pi * a - 6
    return (bowl.square() + 10 * (1 - 1 / (8 * math.pi)) * a.cos() + 10) / 50


def folded(x: Tensor) -> Tensor:
    """Products of absolute values (Sobol's g-function) of four inputs."""
    weights = torch.tensor([0.0, 0.5, 3.0, 9.0], dtype=x.dtype)
    return (((2 * x / EDGE).abs() + weights) / (1 + weights)).prod(1)


def planes(x: Tensor) -> Tensor:
    """Maximum of planes less another: kinks in six inputs, three outputs."""
    generator = torch.Generator().manual_seed(7)
    slopes = torch.randn(6, 3, 8, dtype=torch.float64, generator=generator).to(x.dtype)
    heights = torch.einsum("ri,iok->rok", x, slopes)
    return heights[..., :4].amax(2) - heights[..., 4:].amax(2)


def bumps(x: Tensor) -> Tensor:
    """Three bells on a plain, seven inputs: flat nearly everywhere."""
    centres = torch.linspace(-1, 1, 21, dtype=x.dtype).reshape(3, 7)
    return torch.exp(-torch.cdist(x, centres).square() / 4) * 3


TARGETS = {
    "collision": Target(5, collision(2.0, 8.0)), "collision-near": Target(5, collision(1.0, 4.0)),
    "collision-far": Target(5, collision(4.0, 12.0)), "vertical": Target(4, vertical),
    "cruise": Target(5, cruise), "cruise-smooth": Target(5, cruise_smooth),
    "pendulum": Target(2, pendulum), "cart-pole": Target(4, cart_pole),
    "cart-swing": Target(4, cart_swing), "time-optimal": Target(2, time_optimal),
    "regulator": Target(2, regulator), "point-mass": Target(6, point_mass),
    "unicycle": Target(4, unicycle), "oscillator": Target(4, oscillator),
    "pursuit-3": Target(3, pursuit(4.0)), "pursuit-6": Target(6, pursuit(4.0, 6)),
    "obstacles": Target(3, obstacles), "friedman": Target(5, friedman),
    "borehole": Target(8, borehole), "arm": Target(8, arm), "ishigami": Target(3, ishigami),
    "branin": Target(2, branin), "folded": Target(4, folded), "planes": Target(6, planes),
    "bumps": Target(7, bumps),
}  # fmt: skip
