"""Seeds that say what they are for, so that a run that was stopped goes on as if it had not."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SEED_BYTES = 6


def seed_of(*parts: object) -> int:
    """A seed from words and numbers: the same on every machine, unrelated for related parts."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:SEED_BYTES], "big")


@contextmanager
def seeded(*parts: object) -> Iterator[None]:
    """Torch's global generator at that seed, and as it was afterwards (torch.nn knows no other)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(*parts))
        yield
