"""`architectures`: which public architectures work, and how near to samples at small noise.

Small networks with random weights (`experiments.public_models`, and of `transformers` where it is
installed) get noise of 0.01 around two random inputs of a batch. One works if all deviations of
both, as `cp.GaussianLayers()` gives them, are within 3 % of those of 10,000 samples in root mean
square; or it is refused with a sentence.
"""

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import covprop as cp
from covprop.errors import approximations_ignored
from experiments.options import Options
from experiments.public_models import MODELS, Built, Forward, in_double
from experiments.randomness import seed_of
from experiments.table import Table

NAME = "architectures"
NOISE, WITHIN, BATCH = 0.01, 0.03, 2
SAMPLES, TOGETHER = 10_000, 500
SMOKE = {"samples": 1000}
TEXT = {
    "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32,
    "vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
IMAGE = {
    "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32,
    "image_size": 16, "patch_size": 8, "num_channels": 3,
}  # fmt: skip
GPT = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32, "vocab_size": 40}
TRANSFORMERS: dict[str, tuple[dict[str, Any], str]] = {
    **dict.fromkeys(
        ("Bert", "Roberta", "Ernie", "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma",
         "Gemma2", "Phi", "GPTNeoX", "Cohere", "Olmo2", "StableLm", "ModernBert", "Mixtral",
         "FNet"),
        ({**TEXT, "num_key_value_heads": 1, "head_dim": 8, "cls_token_id": 3, "sep_token_id": 4,
          "experts_implementation": "eager"}, "inputs_embeds")),
    "GPT2": ({**GPT, "bos_token_id": 1, "eos_token_id": 2}, "inputs_embeds"),
    "Bloom": ({"hidden_size": 16, "n_head": 2, "n_layer": 2, "vocab_size": 40}, "inputs_embeds"),
    "OPT": ({**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16}, "inputs_embeds"),
    "Electra": ({**TEXT, "embedding_size": 16}, "inputs_embeds"),
    "Albert": ({**TEXT, "embedding_size": 16}, "inputs_embeds"),
    "Mamba": ({**TEXT, "state_size": 4}, "inputs_embeds"),
    "T5": ({"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
            "vocab_size": 40}, "inputs_embeds"),
    **dict.fromkeys(("ViT", "DeiT", "Dinov2", "Beit"), (IMAGE, "pixel_values")),
    "Swin": ({"image_size": 16, "patch_size": 4, "embed_dim": 4, "depths": [1, 1],
              "num_heads": [2, 2], "window_size": 2}, "pixel_values"),
    "ConvNext": ({"hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
                 "pixel_values"),
    "ResNet": ({"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, "pixel_values"),
    "RegNet": ({"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
                "groups_width": 4}, "pixel_values"),
    "MobileNetV2": ({"depth_multiplier": 0.25, "image_size": 16, "min_depth": 4}, "pixel_values"),
    "PatchTST": ({"num_input_channels": 2, "context_length": 16, "patch_length": 4,
                  "patch_stride": 4, "num_hidden_layers": 1, "d_model": 16,
                  "num_attention_heads": 2, "ffn_dim": 32}, "past_values"),
}  # fmt: skip
"""Options of each configuration, and the argument that is random."""
SHAPES = {"inputs_embeds": (5, 16), "pixel_values": (3, 16, 16), "past_values": (16, 2)}
PACKAGE = "transformers"


def installed(package: str) -> str | None:
    """The version of a package, None without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def settings(options: Options) -> dict[str, Any]:
    """Samples, and the version of what is not a dependency."""
    samples = SMOKE["samples"] if options.smoke else SAMPLES
    return {"seed": options.seed, "smoke": options.smoke, "samples": samples,
            PACKAGE: installed(PACKAGE)}  # fmt: skip


def units(options: Options) -> list[str]:
    """Networks by their names."""
    own = [f"torch/{name}" for name in MODELS]
    others = [f"{PACKAGE}/{name}" for name in TRANSFORMERS] if installed(PACKAGE) else []
    return own[:2] if options.smoke else own + others


def transformer(name: str) -> Built:
    """A network of `transformers`, from its configuration."""
    import transformers

    options, argument = TRANSFORMERS[name]
    kind = f"{name}EncoderModel" if name == "T5" else f"{name}Model"
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**options))
    model = model.double().eval().requires_grad_(requires_grad=False)
    return (lambda x: model(**{argument: x})[0]), SHAPES[argument]


def built(key: str) -> Built:
    """A network in float64, with weights that its name determines."""
    source, _, name = key.partition("/")
    with torch.random.fork_rng():
        torch.manual_seed(seed_of(NAME, name))
        forward, shape = transformer(name) if source == PACKAGE else MODELS[name]()
    return in_double(forward), shape


@torch.no_grad()
def sampled(forward: Forward, mean: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Deviations of the outputs around means (batch, *shape), flat."""
    centre = forward(mean).flatten(1)
    total, squares = torch.zeros_like(centre), torch.zeros_like(centre)
    for _ in range(count // TOGETHER):
        noise = torch.randn((TOGETHER, *mean.shape), generator=generator, dtype=mean.dtype)
        out = forward((mean + NOISE * noise).flatten(0, 1)).flatten(1).unflatten(0, (TOGETHER, -1))
        gap = out - centre
        total, squares = total + gap.sum(0), squares + gap.square().sum(0)
    done = count // TOGETHER * TOGETHER
    return (squares / done - (total / done).square()).clamp(min=0).sqrt()


@torch.no_grad()
def checked(forward: Forward, shape: tuple[int, ...], count: int, seed: int) -> dict[str, Any]:
    """The error of the deviations, or the sentence that refuses the network."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn((BATCH, *shape), generator=generator, dtype=torch.float64)
    begun = time.process_time()
    try:
        with approximations_ignored() as notes:
            y = cp.propagate(
                forward, cp.Gaussian.isotropic(mean, stddev=NOISE, batch_dims=1),
                cp.GaussianLayers(),
            )  # fmt: skip
    except (cp.UnsupportedOperation, cp.TooLarge) as error:
        return {"refused": str(error)}
    seconds = time.process_time() - begun
    truth = sampled(forward, mean, count, generator)
    error = float((y.stddev.flatten(1) - truth).norm() / truth.norm())
    return {"error": error, "seconds": seconds, "notes": len(notes)}


def measure(key: str, options: Options) -> dict[str, Any]:
    """Of one network."""
    forward, shape = built(key)
    return checked(forward, shape, settings(options)["samples"], seed_of(NAME, options.seed, key))


def works(found: dict[str, Any]) -> bool:
    """Whether a network is not refused, and near enough to samples."""
    return "error" in found and found["error"] <= WITHIN


def tables(record: dict[str, Any]) -> list[Table]:
    """The share that works, and a row for each network."""
    results = record["results"]
    share = sum(map(works, results.values())) / len(results)
    rows = []
    for key, found in results.items():
        if "refused" in found:
            rows.append([key, "refused", "", found["refused"]])
        else:
            words = "yes" if works(found) else "no"
            rows.append([key, words, f"{found['error']:.1%}", f"{found['seconds']:.1f} s"])
    note = f"{share:.0%} of {len(results)} architectures work, within {WITHIN:.0%} of samples."
    return [
        Table("Public architectures", ["network", "works", "error", "time, or why"], rows, note)
    ]


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """None: the table says it."""
    del record
    return {}
