"""Models of HuggingFace's transformers, from small configurations with random weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import covprop as cp
from tests.oracles import assert_close

transformers = pytest.importorskip("transformers")

WIDTH, LENGTH = 16, 5
SMALL = {
    "hidden_size": WIDTH, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32,
    "vocab_size": 40, "max_position_embeddings": 32,
}  # fmt: skip
IMAGES = {
    "hidden_size": WIDTH, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32,
    "image_size": 16, "patch_size": 8, "num_channels": 3,
}  # fmt: skip
GPT = {"n_embd": WIDTH, "n_head": 2, "n_layer": 2, "n_positions": 32}
GPT |= {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2}
OPT = {**SMALL, "ffn_dim": 32, "word_embed_proj_dim": WIDTH}
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
SWIN = {"image_size": 16, "patch_size": 4, "embed_dim": 4, "depths": [1, 1], "num_heads": [2, 2]}
SWIN |= {"window_size": 2}
PATCHTST = {
    "num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4,
    "num_hidden_layers": 1, "d_model": WIDTH, "num_attention_heads": 2, "ffn_dim": 32,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], str, tuple[int, ...]]] = {
    "BERT": ("Bert", SMALL, "inputs_embeds", (LENGTH, WIDTH)),
    "GPT-2": ("GPT2", GPT, "inputs_embeds", (LENGTH, WIDTH)),
    "OPT": ("OPT", OPT, "inputs_embeds", (LENGTH, WIDTH)),
    "Llama": (
        "Llama", {**SMALL, "num_key_value_heads": 1}, "inputs_embeds", (LENGTH, WIDTH),
    ),
    "T5": ("T5", T5, "inputs_embeds", (LENGTH, WIDTH)),
    "ViT": ("ViT", IMAGES, "pixel_values", (3, 16, 16)),
    "Swin": ("Swin", SWIN, "pixel_values", (3, 16, 16)),
    "PatchTST": ("PatchTST", PATCHTST, "past_values", (16, 2)),
}  # fmt: skip


def forward_of(name: str) -> tuple[Callable[[Any], Any], tuple[int, ...]]:
    family, options, argument, shape = MODELS[name]
    torch.manual_seed(0)
    kind = f"{family}EncoderModel" if family == "T5" else f"{family}Model"
    model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**options))
    model = model.double().eval().requires_grad_(requires_grad=False)
    return lambda x: model(**{argument: x}).last_hidden_state, shape


@pytest.mark.filterwarnings("ignore")  # those of the package are not ours
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_is_the_loop_over_it_and_close_to_the_derivative(name: str) -> None:
    """Small noise, where the linearised model, by torch's derivatives, is within 3 %."""
    forward, shape = forward_of(name)
    mean = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1)).double()
    x = cp.Gaussian.isotropic(mean, stddev=0.003, batch_dims=1)
    y = cp.propagate(forward, x, cp.GaussianLayers())
    for i in range(2):
        one = cp.Gaussian.isotropic(mean[i : i + 1], stddev=0.003, batch_dims=1)
        alone = cp.propagate(forward, one, cp.GaussianLayers())
        assert_close(y[i].mean, alone[0].mean, atol=1e-11)
        assert_close(y[i].stddev, alone[0].stddev, atol=1e-11)
    flat = cp.Gaussian.isotropic(mean[:1], stddev=0.003)
    linear = cp.propagate(forward, flat, cp.Linearized())
    assert float(y[0].stddev.norm() / linear.stddev.norm()) == pytest.approx(1.0, rel=0.03)
