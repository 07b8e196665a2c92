"""Hypothesis strategies that damage files: their bytes, their entries, their descriptions."""

import copy
import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 3, 7, 64, 255, 2**16, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**63, -(2**63), 10**30]
) | st.integers(-10, 100)
LEAVES = (
    NUMBERS
    | st.none()
    | st.booleans()
    | st.floats()
    | st.sampled_from(["", "x", "relu", "linear", "p_0_weight", "weight_0", "../x", "\0", "NaN"])
    | st.text(max_size=5)
    | st.sampled_from([[], {}, [[]], {"as_int": 2}, {"as_none": True}, {"name": "x"}])
)
"""What stands in place of something else in a description."""

Mutation = Callable[[bytes], bytes]


def cut(place: float) -> Mutation:
    """Keep the beginning."""
    return lambda content: content[: int(place * len(content))]


def flip(places: list[tuple[float, int]]) -> Mutation:
    """Turn some bits around."""

    def apply(content: bytes) -> bytes:
        changed = bytearray(content)
        for place, bit in places:
            if changed:
                changed[int(place * (len(changed) - 1))] ^= 1 << bit
        return bytes(changed)

    return apply


def overwrite(place: float, new: bytes) -> Mutation:
    """Put other bytes somewhere."""

    def apply(content: bytes) -> bytes:
        start = int(place * len(content))
        return content[:start] + new + content[start + len(new) :]

    return apply


def splice(place: float, length: int, new: bytes) -> Mutation:
    """Put bytes in place of others, fewer or more."""

    def apply(content: bytes) -> bytes:
        start = int(place * len(content))
        return content[:start] + new + content[start + length :]

    return apply


PLACES = st.floats(0, 1)
MUTATIONS = (
    PLACES.map(cut)
    | st.lists(st.tuples(PLACES, st.integers(0, 7)), min_size=1, max_size=5).map(flip)
    | st.builds(overwrite, PLACES, st.binary(min_size=1, max_size=16))
    | st.builds(splice, PLACES, st.integers(0, 64), st.binary(max_size=16))
)
"""Damage to bytes, wherever they are."""


def in_entry(choice: float, mutation: Mutation) -> Mutation:
    """Damage inside one entry of a zip archive, whose checksums are right again afterwards."""

    def apply(content: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(content)) as old:
            entries = {name: old.read(name) for name in old.namelist()}
        names = sorted(entries)
        chosen = names[int(choice * (len(names) - 1))]
        entries[chosen] = mutation(entries[chosen])
        return packed(entries)

    return apply


def packed(entries: dict[str, bytes]) -> bytes:
    """A zip archive."""
    new = io.BytesIO()
    with zipfile.ZipFile(new, "w") as file:
        for name, content in entries.items():
            file.writestr(name, content)
    return new.getvalue()


def in_description(ending: str, changes: list[tuple[float, Any]]) -> Mutation:
    """Other values at some places of a description in JSON."""

    def apply(content: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(content)) as old:
            entries = {name: old.read(name) for name in old.namelist()}
        name = next(name for name in entries if name.endswith(ending))
        told = json.loads(entries[name])
        for choice, value in changes:
            spots = list(_spots(told))
            if not spots:
                break
            owner, key = spots[int(choice * (len(spots) - 1))]
            owner[key] = copy.deepcopy(value)
        entries[name] = json.dumps(told).encode()
        return packed(entries)

    return apply


def with_operator(choice: float, target: str) -> Mutation:
    """Another operator in place of one of a program."""

    def apply(content: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(content)) as old:
            entries = {name: old.read(name) for name in old.namelist()}
        name = next(name for name in entries if name.endswith("models/model.json"))
        told = json.loads(entries[name])
        nodes = told["graph_module"]["graph"]["nodes"]
        nodes[int(choice * (len(nodes) - 1))]["target"] = f"torch.ops.{target}"
        entries[name] = json.dumps(told).encode()
        return packed(entries)

    return apply


def _spots(nest: Any) -> Any:
    """Every place in a nest that something stands at, but for remarks that nobody reads."""
    pairs = nest.items() if isinstance(nest, dict) else enumerate(nest)
    for key, value in list(pairs):
        if key == "metadata":
            continue
        yield nest, key
        if isinstance(value, dict | list):
            yield from _spots(value)


KNOWN = sorted(
    f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("aten::")
)
OPERATORS = st.builds(with_operator, PLACES, st.sampled_from(KNOWN))
CHANGES = st.lists(st.tuples(PLACES, LEAVES), min_size=1, max_size=3)
ENTRIES = st.builds(in_entry, PLACES, MUTATIONS)
DESCRIPTIONS = st.builds(
    in_description,
    st.sampled_from(["models/model.json", "weights_config.json", "constants_config.json"]),
    CHANGES,
)
