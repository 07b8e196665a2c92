"""`train-mnist`: the network of table 2, trained to above 99 %.

The test images are read once, after training; nothing is selected by them.
"""

import hashlib
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from benchmarks import models
from experiments import mnist, record
from experiments.mnist import Digits
from experiments.options import Options
from experiments.randomness import seeded

NAME = "train-mnist"
EPOCHS, BATCH, RATE, DECAY = 4, 64, 5e-4, 1e-2
SMOKE_IMAGES = 512


def network(smoke: bool) -> nn.Sequential:
    """The paper's network (its table 4) in float32, or a narrow one for a smoke run.

    As torch initialises it, like the published one: trained from Kaiming's larger weights half as
    many units of the second ReLU are active, and PL-DNN is off to the other side.
    """
    sizes: dict[str, Any] = {"channels": (2, 3), "hidden": 16} if smoke else {}
    return models.mnist(**sizes).float().apply(models.as_torch_does)


def run(options: Options) -> dict[str, Any]:
    """Train, save the weights, write and return the record."""
    digits = mnist.load("train", options.data)
    if options.smoke:
        digits = Digits(digits.images[:SMOKE_IMAGES], digits.labels[:SMOKE_IMAGES])
    started = time.perf_counter()
    with seeded(options.seed, NAME):
        model = network(options.smoke).requires_grad_(True)
        train(model, digits, 1 if options.smoke else EPOCHS)
    seconds = time.perf_counter() - started
    path = options.weights_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    results = {
        "test accuracy": accuracy(model, mnist.load("t10k", options.data)),
        "training accuracy": accuracy(model, digits),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "seconds": round(seconds, 1),
        "sha256": checksum(path),
    }
    settings = {
        "seed": options.seed, "smoke": options.smoke, "epochs": 1 if options.smoke else EPOCHS,
        "batch": BATCH, "largest rate": RATE, "weight decay": DECAY, "images": len(digits.images),
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    record.write(options.path(NAME), settings, results, runs=[record.conditions()])
    return results


def train(model: nn.Module, digits: Digits, epochs: int) -> None:
    """AdamW with one cycle of the rate, cross-entropy, every image once in an epoch."""
    batches = -(-len(digits.images) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=epochs * batches)
    with tqdm(total=epochs * batches, desc=NAME, unit="batch", disable=None) as bar:
        for _ in range(epochs):
            for chosen in torch.randperm(len(digits.images)).split(BATCH):
                loss = F.cross_entropy(model(digits.images[chosen]), digits.labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                bar.set_postfix(loss=f"{float(loss.detach()):.3f}", refresh=False)
                bar.update()


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of images whose largest logit is the label's."""
    pairs = zip(digits.images.split(BATCH), digits.labels.split(BATCH), strict=True)
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in pairs)
    return right / len(digits.images)


@cache
def trained(options: Options) -> nn.Sequential:
    """The network with the weights that `train-mnist` saved.

    Read once, so that a file that is replaced during a long run does not get into it.
    """
    model = network(options.smoke)
    model.load_state_dict(torch.load(found(options), weights_only=True))
    return model.requires_grad_(False)


def found(options: Options) -> Path:
    """The file of the weights, which must be there."""
    path = options.weights_path()
    if not path.exists():
        raise FileNotFoundError(f"no weights at {path}: run `python -m experiments {NAME}` first")
    return path


def checksum(path: Path) -> str:
    """The sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def show(results: dict[str, Any]) -> None:
    """Print what came of it."""
    for name, value in results.items():
        print(f"{name}: {value}")
