"""Small networks of public architectures with random weights, written in plain torch.

Tabular models as in rtdl, normalising flows, graph layers, KANs, neural ODEs and others; each is a
function of a batch of tensors of a shape, of 16 to 200 numbers.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, NODES, LENGTH = 12, 5, 6
Forward: TypeAlias = Callable[[Any], Any]
Built: TypeAlias = tuple[Forward, tuple[int, ...]]
EDGES = torch.tensor([[0, 1, 1, 2, 3, 4, 4, 0, 2], [1, 0, 2, 1, 4, 3, 0, 4, 2]])
"""A graph of five nodes: from where, to where."""


def mlp(inputs: int, outputs: int, act: type[nn.Module] = nn.ReLU, hidden: int = 24) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), act(), nn.Linear(hidden, hidden), act(),
        nn.Linear(hidden, outputs),
    )  # fmt: skip


class Residual(nn.Module):
    """A module beside the identity."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        """x + f(x)."""
        return x + self.inner(x)


def transformer(norm_first: bool, act: str = "gelu") -> Built:
    """nn.TransformerEncoder."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, 2, 24, 0.0, act, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (LENGTH, WIDTH)


def encoder_decoder() -> Built:
    """nn.Transformer, with a causal decoder."""
    model = nn.Transformer(WIDTH, 2, 1, 1, 24, 0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    return (lambda x: model(x, x, tgt_mask=mask.to(x.dtype))), (LENGTH, WIDTH)


def recurrent(kind: type[nn.RNNBase], **options: Any) -> Built:
    """Outputs at all steps."""
    model = kind(4, 8, batch_first=True, **options)
    return (lambda x: model(x)[0]), (LENGTH, 4)


def tabular_resnet() -> Built:
    """Blocks of rtdl: norm, linear, ReLU, linear."""
    blocks = [
        Residual(nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)))
        for _ in range(2)
    ]
    return nn.Sequential(nn.Linear(WIDTH, 16), *blocks, nn.ReLU(), nn.Linear(16, 2)), (WIDTH,)


class FeatureTokens(nn.Module):
    """FT-Transformer: a token for each feature, a class token, attention (Gorishniy 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 8) / 3)
        self.bias = nn.Parameter(torch.randn(WIDTH, 8) / 3)
        self.token = nn.Parameter(torch.randn(1, 8) / 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Sequential(nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Any) -> Any:
        """The head of the class token."""
        tokens = x.unsqueeze(-1) * self.weight + self.bias
        tokens = torch.cat([self.token.expand(len(x), 1, 8), tokens], 1)
        return self.head(self.layer(tokens)[:, 0])


class Periodic(nn.Module):
    """Periodic embeddings of numbers before an MLP (Gorishniy 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.randn(WIDTH, 4))
        self.head = mlp(8 * WIDTH, 2)

    def forward(self, x: Any) -> Any:
        """Sines and cosines of every feature."""
        v = 2 * math.pi * self.rate * x[..., None]
        return self.head(torch.cat([torch.cos(v), torch.sin(v)], -1).flatten(1))


class CrossNetwork(nn.Module):
    """DCN v2: x0 * (W x + b) + x (Wang 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.deep = mlp(WIDTH, 4)

    def forward(self, x: Any) -> Any:
        """Crosses beside a deep part."""
        crossed = x
        for layer in self.layers:
            crossed = x * layer(crossed) + crossed
        return torch.cat([crossed, self.deep(x)], -1)


class Sparsemax(nn.Module):
    """The projection onto the simplex, by sorting (Martins 2016)."""

    def forward(self, x: Any) -> Any:
        """max(x - tau, 0)."""
        ordered = x.sort(-1, descending=True).values
        number = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
        sums = ordered.cumsum(-1) - 1
        support = (number * ordered > sums).sum(-1, keepdim=True)
        return torch.relu(x - sums.gather(-1, support - 1) / support)


class TabNet(nn.Module):
    """Feature transformers and attentive masks (Arik 2019)."""

    def __init__(self, mask: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.steps = nn.ModuleList(nn.Linear(WIDTH, 16) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(8, WIDTH) for _ in range(2))
        self.mask, self.head = mask, nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        """Two steps, whose masks do not repeat themselves."""
        attended = F.glu(self.first(x))
        prior: Any = torch.ones(x.shape, dtype=x.dtype)
        total: Any = 0.0
        for step, attention in zip(self.steps, self.attention, strict=True):
            mask = self.mask(attention(attended) * prior)
            prior = prior * (1.3 - mask)
            attended = F.glu(step(mask * x))
            total = total + torch.relu(attended)
        return self.head(total)


class SoftTrees(nn.Module):
    """Oblivious soft decision trees of depth three, as NODE has them (Popov 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = nn.Linear(WIDTH, 12)
        self.leaves = nn.Parameter(torch.randn(4, 8, 2))

    def forward(self, x: Any) -> Any:
        """Probabilities of the leaves times their values."""
        right = torch.sigmoid(2 * self.choice(x)).unflatten(-1, (4, 3))
        sides = torch.stack([right, 1 - right], -1)
        paths = torch.einsum("bti,btj->btij", sides[:, :, 0], sides[:, :, 1]).flatten(-2)
        paths = torch.einsum("bti,btj->btij", paths, sides[:, :, 2]).flatten(-2)
        return torch.einsum("btl,tlo->bo", paths, self.leaves)


class Coupling(nn.Module):
    """Affine couplings: RealNVP, which writes both halves into an empty tensor, as nflows does."""

    def __init__(self, conditioner: Callable[[int, int], nn.Module] = mlp) -> None:
        super().__init__()
        self.nets = nn.ModuleList(conditioner(WIDTH // 2, WIDTH) for _ in range(2))

    def forward(self, x: Any) -> Any:
        """Every other element is scaled and shifted."""
        for i, net in enumerate(self.nets):
            kept, moved = x[:, i::2], x[:, 1 - i :: 2]
            scale, shift = net(kept).chunk(2, -1)
            result = torch.empty_like(x)
            result[:, i::2] = kept
            result[:, 1 - i :: 2] = moved * torch.exp(torch.tanh(scale)) + shift
            x = result
        return x


class Autoregressive(nn.Module):
    """A masked autoregressive flow (Papamakarios 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 24), nn.Linear(24, 2 * WIDTH)
        degree, hidden = torch.arange(1, WIDTH + 1), torch.arange(24) % (WIDTH - 1) + 1
        self.register_buffer("into", (hidden[:, None] >= degree[None]).float())
        self.register_buffer("out", (degree.repeat(2)[:, None] > hidden[None]).float())

    def forward(self, x: Any) -> Any:
        """Towards the base distribution."""
        hidden = torch.relu(F.linear(x, self.first.weight * self.into, self.first.bias))
        shift, scale = F.linear(hidden, self.second.weight * self.out).chunk(2, -1)
        return (x - shift) * torch.exp(-scale)


class Planar(nn.Module):
    """Planar flows (Rezende 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(3, WIDTH) / 3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(3))

    def forward(self, x: Any) -> Any:
        """x + u tanh(w x + b)."""
        for u, layer in zip(self.u, self.layers, strict=True):
            x = x + u * torch.tanh(layer(x))
        return x


class Graph(nn.Module):
    """Message passing on a fixed graph: sums, means or maxima over neighbours."""

    def __init__(self, reduce: str) -> None:
        super().__init__()
        self.reduce = reduce
        self.message = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.own = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Any) -> Any:
        """Two rounds, of nodes (batch, 5, 4)."""
        x = F.pad(x, (0, 4))
        for message, own in zip(self.message, self.own, strict=True):
            sent = message(x[:, EDGES[0]])
            index = EDGES[1][:, None].expand(sent.shape)
            total = torch.zeros(x.shape, dtype=x.dtype)
            if self.reduce == "sum":
                total.index_add_(1, EDGES[1], sent)
            else:
                total = total.scatter_reduce(1, index, sent, self.reduce, include_self=False)
            x = torch.relu(own(x) + total)
        return x.mean(1)


class GraphAttention(nn.Module):
    """GAT: softmax over the neighbours that a mask leaves (Velickovic 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.left, self.right = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
        adjacent = torch.eye(NODES).bool()
        adjacent[EDGES[1], EDGES[0]] = True
        self.register_buffer("adjacent", adjacent)

    def forward(self, x: Any) -> Any:
        """One head."""
        hidden = self.linear(x)
        scores = F.leaky_relu(self.left(hidden) + self.right(hidden).mT, 0.2)
        return F.elu(torch.softmax(scores.masked_fill(~self.adjacent, -1e9), -1) @ hidden)


class Equivariant(nn.Module):
    """EGNN: messages of squared distances (Satorras 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.move = mlp(1, 8, nn.SiLU), nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        """Positions (batch, 5, 3)."""
        gaps = x[:, :, None] - x[:, None]
        message = self.edge(gaps.square().sum(-1, keepdim=True))
        return x + (gaps * self.move(message)).mean(2)


class PointNet(nn.Module):
    """A network of each point and the maximum over points."""

    def __init__(self) -> None:
        super().__init__()
        self.point, self.head = mlp(3, 12), mlp(12, 3)

    def forward(self, x: Any) -> Any:
        """Points (batch, 5, 3)."""
        return self.head(self.point(x).amax(1))


class Splines(nn.Module):
    """A KAN layer: cubic B-splines by their recursion, and SiLU (Liu 2024)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-3, 3, 12))
        self.coefficient = nn.Parameter(torch.randn(outputs, inputs * 8) / 5)
        self.base = nn.Linear(inputs, outputs)

    def forward(self, x: Any) -> Any:
        """Bases of degree three, of one more knot each."""
        y, grid = x.unsqueeze(-1), self.grid
        bases: Any = ((y >= grid[:-1]) & (y < grid[1:])).to(x.dtype)
        for k in range(1, 4):
            left = (y - grid[: -k - 1]) / (grid[k:-1] - grid[: -k - 1]) * bases[..., :-1]
            right = (grid[k + 1 :] - y) / (grid[k + 1 :] - grid[1:-k]) * bases[..., 1:]
            bases = left + right
        return F.linear(bases.flatten(-2), self.coefficient) + self.base(F.silu(x))


class RadialKAN(nn.Module):
    """FastKAN: Gaussian bumps in place of splines."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 8))
        self.norm, self.linear = nn.LayerNorm(inputs), nn.Linear(inputs * 8, outputs)
        self.base = nn.Linear(inputs, outputs)

    def forward(self, x: Any) -> Any:
        """Bumps of the normalised input."""
        bumps = torch.exp(-(((self.norm(x)[..., None] - self.grid) / 0.57) ** 2))
        return self.linear(bumps.flatten(-2)) + self.base(F.silu(x))


class Chebyshev(nn.Module):
    """ChebyKAN: polynomials of tanh."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.coefficient = nn.Parameter(torch.randn(inputs, outputs, 4) / inputs)

    def forward(self, x: Any) -> Any:
        """T_0 to T_3."""
        y = torch.tanh(x)
        terms = [torch.ones(x.shape, dtype=x.dtype) + 0 * y, y, 2 * y * y - 1, 4 * y**3 - 3 * y]
        return torch.einsum("bid,iod->bo", torch.stack(terms, -1), self.coefficient)


def ode(stages: int) -> Built:
    """A neural ODE by Euler's method (one stage) or that of Runge and Kutta (four)."""
    field, step = mlp(WIDTH, WIDTH, nn.Tanh), 0.25

    def forward(x: Any) -> Any:
        for _ in range(4):
            k1 = field(x)
            if stages == 1:
                x = x + step * k1
                continue
            k2 = field(x + step / 2 * k1)
            k3 = field(x + step / 2 * k2)
            k4 = field(x + step * k3)
            x = x + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return x

    return forward, (WIDTH,)


class Mixer(nn.Module):
    """MLP-Mixer: over tokens, then over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.tokens = mlp(LENGTH, LENGTH, nn.GELU, 12)
        self.channels = mlp(WIDTH, WIDTH, nn.GELU)

    def forward(self, x: Any) -> Any:
        """Tokens (batch, 6, 12)."""
        x = x + self.tokens(self.norms[0](x).mT).mT
        return (x + self.channels(self.norms[1](x))).mean(1)


class SpatialGate(nn.Module):
    """gMLP: half of the channels gate the others, over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 24), nn.Linear(12, WIDTH)
        self.norm, self.spatial = nn.LayerNorm(12), nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Any) -> Any:
        """Tokens (batch, 6, 12)."""
        kept, gate = F.gelu(self.into(x)).chunk(2, -1)
        return x + self.out(kept * self.spatial(self.norm(gate).mT).mT)


class Experts(nn.Module):
    """A mixture of experts, all of them weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(mlp(WIDTH, 4) for _ in range(3))

    def forward(self, x: Any) -> Any:
        """The softmax of the gate times the experts."""
        share = torch.softmax(self.gate(x), -1)
        return (share.unsqueeze(1) * torch.stack([e(x) for e in self.experts], -1)).sum(-1)


class RoutedExperts(Experts):
    """The best two experts only, by `topk`, added into a tensor of zeros."""

    def forward(self, x: Any) -> Any:
        """Which experts they are depends on the input."""
        share, chosen = torch.softmax(self.gate(x), -1).topk(2, -1)
        total = torch.zeros(len(x), 4, dtype=x.dtype)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            total.index_add_(0, rows, expert(x[rows]) * share[rows, place, None])
        return total


class Highway(nn.Module):
    """t h + (1 - t) x (Srivastava 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))

    def forward(self, x: Any) -> Any:
        """Two layers."""
        for layer in self.layers:
            value, gate = layer(x).chunk(2, -1)
            gate = torch.sigmoid(gate)
            x = gate * torch.relu(value) + (1 - gate) * x
        return x


class Sirens(nn.Module):
    """Sines of linear maps (Sitzmann 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 24), nn.Linear(24, 24)])
        self.head = nn.Linear(24, 2)

    def forward(self, x: Any) -> Any:
        """Rates of three."""
        for layer in self.layers:
            x = torch.sin(3 * layer(x))
        return self.head(x)


class Fields(nn.Module):
    """Positional encodings before an MLP, as NeRF has them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = mlp(3 * 8, 4)

    def forward(self, x: Any) -> Any:
        """Points (batch, 16, 3)."""
        parts = [f(2.0**k * x) for k in range(4) for f in (torch.sin, torch.cos)]
        return torch.sigmoid(self.head(torch.cat(parts, -1))).flatten(1)


class Fourier(nn.Module):
    """A spectral convolution of FNO."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Any) -> Any:
        """The low modes of a signal."""
        modes = torch.fft.rfft(x)
        return torch.fft.irfft(modes[..., :3] * self.weight, n=x.shape[-1])


class Capsules(nn.Module):
    """Two rounds of routing by agreement, with squashed lengths (Sabour 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, 4, 4) / 2)

    def forward(self, x: Any) -> Any:
        """Six capsules of four numbers into three."""
        votes = torch.einsum("bid,ijde->bije", x, self.weight)
        share: Any = torch.full((1, 6, 3, 1), 1 / 3, dtype=x.dtype)
        for last in (False, True):
            total = (share * votes).sum(1)
            squares = total.square().sum(-1, keepdim=True)
            out = total * (torch.sqrt(squares + 1e-8) / (1 + squares))
            if not last:
                share = torch.softmax((votes * out.unsqueeze(1)).sum(-1, keepdim=True), 2)
        return out


class Scan(nn.Module):
    """A diagonal state space, step by step (S4D, with real poles)."""

    def __init__(self) -> None:
        super().__init__()
        self.pole = nn.Parameter(-torch.rand(8))
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        """A sequence (batch, 6, 4); outputs are written into a tensor of zeros."""
        result = torch.zeros(x.shape, dtype=x.dtype)
        state: Any = torch.zeros(len(x), 8, dtype=x.dtype)
        for t in range(x.shape[1]):
            state = torch.exp(self.pole) * state + self.into(x[:, t])
            result[:, t] = F.silu(self.out(state))
        return result


class Decomposed(nn.Module):
    """DLinear: a moving average and the rest, each with a linear layer (Zeng 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.trend, self.rest = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        """A series (batch, 2, 16)."""
        padded = torch.cat([x[..., :1].expand(-1, -1, 2), x, x[..., -1:].expand(-1, -1, 2)], -1)
        trend = F.avg_pool1d(padded, 5, 1)
        return self.trend(trend) + self.rest(x - trend)


class Beats(nn.Module):
    """N-BEATS: residuals of backcasts, sums of forecasts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(16, 20) for _ in range(2))

    def forward(self, x: Any) -> Any:
        """A series (batch, 16)."""
        forecast: Any = 0.0
        for block in self.blocks:
            back, ahead = block(x).split([16, 4], -1)
            x, forecast = x - back, forecast + ahead
        return forecast


class Waves(nn.Module):
    """WaveNet: gated dilated convolutions with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=2**k) for k in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(3))

    def forward(self, x: Any) -> Any:
        """A signal (batch, 4, 12)."""
        total: Any = 0.0
        for k, (gate, skip) in enumerate(zip(self.gates, self.skips, strict=True)):
            filtered, gated = gate(F.pad(x, (2**k, 0))).chunk(2, 1)
            hidden = skip(torch.tanh(filtered) * torch.sigmoid(gated))
            x, total = x + hidden, total + hidden
        return total


class Quantised(nn.Module):
    """Weights and activations on a grid: steps where one would train with their slope."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, 2)

    def forward(self, x: Any) -> Any:
        """Activations in steps of 1 / 50."""
        hidden = torch.clamp(torch.round(50 * torch.relu(self.first(x))), 0, 127) / 50
        return self.second(hidden)


class Squeeze(nn.Module):
    """Convolutions with squeeze-and-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU())
        self.gate = nn.Sequential(nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 1), nn.Sigmoid())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        """An image (batch, 1, 6, 6)."""
        x = self.stem(x)
        return self.head((x * self.gate(x.mean((2, 3), keepdim=True))).mean((2, 3)))


class ConvNext(nn.Module):
    """A block of ConvNeXt, whose norm over channels is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depth = nn.Conv2d(1, 4, 2, 2), nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.wide, self.back = nn.Conv2d(4, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Any) -> Any:
        """An image (batch, 1, 8, 8)."""
        x = self.stem(x)
        y = self.depth(x)
        mean = y.mean(1, keepdim=True)
        spread = (y - mean).pow(2).mean(1, keepdim=True)
        y = (y - mean) / torch.sqrt(spread + 1e-6)
        return (x + self.back(F.gelu(self.wide(y)))).flatten(1)


class UNet(nn.Module):
    """Down, up, and the skip between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Any) -> Any:
        """An image (batch, 1, 6, 6)."""
        high = self.down(x)
        low = self.middle(F.max_pool2d(high, 2))
        return self.last(torch.cat([high, self.up(low)], 1))


class Hyper(nn.Module):
    """A network whose weights another one makes of the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.first = mlp(WIDTH, 4 * 6), nn.Linear(WIDTH, 6)

    def forward(self, x: Any) -> Any:
        """A matrix of each row."""
        weight = self.maker(x).unflatten(-1, (4, 6))
        return (weight @ torch.tanh(self.first(x)).unsqueeze(-1)).squeeze(-1)


class Hamiltonian(nn.Module):
    """Leapfrog steps of a separable energy, whose gradient is in closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x: Any) -> Any:
        """Positions and momenta (batch, 12)."""
        q, p = x.chunk(2, -1)
        for _ in range(3):
            p = p - 0.1 * torch.tanh(q @ self.weight.mT) @ self.weight
            q = q + 0.1 * p
        return torch.cat([q, p], -1)


def sequential(*layers: nn.Module) -> nn.Module:
    """In a row."""
    return nn.Sequential(*layers)


MODELS: dict[str, Callable[[], Built]] = {
    "MLP, ReLU": lambda: (mlp(WIDTH, 3), (WIDTH,)),
    "MLP, SiLU and dropout": lambda: (
        sequential(nn.Linear(WIDTH, 16), nn.SiLU(), nn.Dropout(0.1), nn.Linear(16, 2)), (WIDTH,)),
    "maxout": lambda: ((net := nn.Linear(WIDTH, 24)) and (
        lambda x: net(x).unflatten(-1, (8, 3)).amax(-1)), (WIDTH,)),
    "highway": lambda: (Highway(), (WIDTH,)),
    "SIREN": lambda: (Sirens(), (WIDTH,)),
    "NeRF": lambda: (Fields(), (16, 3)),
    "hypernetwork": lambda: (Hyper(), (WIDTH,)),
    "quantised": lambda: (Quantised(), (WIDTH,)),
    "tabular ResNet": tabular_resnet,
    "FT-Transformer": lambda: (FeatureTokens(), (WIDTH,)),
    "periodic embeddings": lambda: (Periodic(), (WIDTH,)),
    "DCN v2": lambda: (CrossNetwork(), (WIDTH,)),
    "TabNet, softmax": lambda: (TabNet(nn.Softmax(-1)), (WIDTH,)),
    "TabNet, sparsemax": lambda: (TabNet(Sparsemax()), (WIDTH,)),
    "NODE trees": lambda: (SoftTrees(), (WIDTH,)),
    "mixture of experts": lambda: (Experts(), (WIDTH,)),
    "routed experts": lambda: (RoutedExperts(), (WIDTH,)),
    "RealNVP": lambda: (Coupling(), (WIDTH,)),
    "MAF": lambda: (Autoregressive(), (WIDTH,)),
    "planar flow": lambda: (Planar(), (WIDTH,)),
    "GCN, sum": lambda: (Graph("sum"), (NODES, 4)),
    "GraphSAGE, mean": lambda: (Graph("mean"), (NODES, 4)),
    "GraphSAGE, max": lambda: (Graph("amax"), (NODES, 4)),
    "GAT": lambda: (GraphAttention(), (NODES, 4)),
    "EGNN": lambda: (Equivariant(), (NODES, 3)),
    "PointNet": lambda: (PointNet(), (NODES, 3)),
    "KAN, splines": lambda: (sequential(Splines(6, 4), Splines(4, 2)), (6,)),
    "FastKAN": lambda: (sequential(RadialKAN(6, 6), RadialKAN(6, 2)), (6,)),
    "ChebyKAN": lambda: (sequential(Chebyshev(6, 6), Chebyshev(6, 2)), (6,)),
    "neural ODE, Euler": lambda: ode(1),
    "neural ODE, RK4": lambda: ode(4),
    "Hamiltonian": lambda: (Hamiltonian(), (WIDTH,)),
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU, two directions": lambda: recurrent(nn.GRU, bidirectional=True),
    "RNN": lambda: recurrent(nn.RNN),
    "state space": lambda: (Scan(), (LENGTH, 4)),
    "WaveNet": lambda: (Waves(), (4, 12)),
    "DLinear": lambda: (Decomposed(), (2, 16)),
    "N-BEATS": lambda: (Beats(), (16,)),
    "transformer, post-norm": lambda: transformer(norm_first=False),
    "transformer, pre-norm": lambda: transformer(norm_first=True),
    "encoder and decoder": encoder_decoder,
    "MLP-Mixer": lambda: (Mixer(), (LENGTH, WIDTH)),
    "gMLP": lambda: (SpatialGate(), (LENGTH, WIDTH)),
    "capsules": lambda: (Capsules(), (6, 4)),
    "squeeze and excitation": lambda: (Squeeze(), (1, 6, 6)),
    "ConvNeXt": lambda: (ConvNext(), (1, 8, 8)),
    "U-Net": lambda: (UNet(), (1, 6, 6)),
    "FNO": lambda: (Fourier(), (16,)),
}  # fmt: skip
"""Each by its name: makes the network and the shape of an input."""


def in_double(forward: Forward) -> Forward:
    """The same network in float64, in evaluation mode, without gradients of its weights."""
    held = [forward, *(getattr(forward, "__closure__", None) or ())]
    for one in held:
        module = getattr(one, "cell_contents", one)
        if isinstance(module, nn.Module):
            module.double().eval().requires_grad_(requires_grad=False)
    return forward
