"""Bayesian networks from ordinary ones, and posteriors found elsewhere."""

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop import bayes
from tests.bayes.sampled import normal
from tests.oracles import assert_close


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(18, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2, bias=False)),
    ).double().eval()  # fmt: skip


def quiet(model: nn.Module) -> nn.Module:
    """No variance at all."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "log_stddev" in name:
                parameter.fill_(-torch.inf)
    return model


def test_layers_are_replaced_and_the_model_is_untouched() -> None:
    model, x = network(), normal(3, 1, 5, 5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = bayes.to_bayesian(model, bayes.XavierPrior())
    kinds = [
        type(layer).__name__
        for layer in made.modules()
        if isinstance(layer, bayes.BayesLinear | bayes.BayesConv2d)
    ]
    assert kinds == ["BayesConv2d", "BayesLinear", "BayesLinear"]
    assert isinstance(made[1], nn.BatchNorm2d)
    assert made[0].prior == bayes.XavierPrior()
    assert not made.training
    assert made[5][1].bias_mean is None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert bool((bayes.predict(made, x).variance > 0).all())
    assert_close(bayes.predict(quiet(made), x).mean, model(x))


def test_a_single_layer_and_one_used_twice() -> None:
    made = bayes.to_bayesian(nn.Conv1d(2, 3, 2))
    assert isinstance(made, bayes.BayesConv1d)
    layer = nn.Linear(3, 3)
    twice = bayes.to_bayesian(nn.Sequential(layer, nn.ReLU(), layer))
    assert twice[0] is twice[2]
    with pytest.raises(cp.UnsupportedOperation, match="used twice"):
        bayes.predict(twice, torch.ones(2, 3))
    declared = bayes.to_bayesian(nn.Sequential(layer, nn.ReLU(), layer), shared=True)
    found = bayes.predict(declared, torch.ones(2, 3))
    plain = nn.Sequential(layer, nn.ReLU(), layer)
    variance = {name: torch.full_like(one, 0.01) for name, one in plain.state_dict().items()}
    elsewhere = bayes.with_posterior(plain, plain.state_dict(), variance, shared=True)
    assert bayes.predict(elsewhere, torch.ones(2, 3)).mean.shape == found.mean.shape


def test_new_weights_and_members() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    torch.manual_seed(1)
    fresh = bayes.to_bayesian(model, keep_weights=False)
    assert not torch.equal(fresh[0].weight_mean, model[0].weight)
    members = bayes.to_bayesian(model, members=5)
    assert members[0].weight_mean.shape == (5, 4, 3)
    assert torch.equal(members[0].weight_mean[3], model[0].weight)
    assert bayes.predict(members, torch.ones(5, 2, 3)).batch_shape == (5, 2)


def test_moped_begins_at_its_prior() -> None:
    model = network()
    model[4].bias.data.zero_()
    made = bayes.to_bayesian(model, bayes.TrainedPrior(0.2))
    assert_close(bayes.kl(made), torch.zeros((), dtype=torch.float64), atol=1e-10)
    weight, stddev = model[4].weight, made[4].weight_log_stddev.exp()
    large = weight.abs() > 0.1 * weight.square().mean().sqrt()
    assert_close(stddev[large], 0.2 * weight.abs()[large])
    assert bool((stddev > 0).all())
    assert bool((made[4].bias_log_stddev.exp() > 0).all())
    with torch.no_grad():
        made[4].weight_mean += 0.1
    assert float(bayes.kl(made).detach()) > 0
    copy = bayes.to_bayesian(network(), bayes.TrainedPrior(0.2))
    copy.load_state_dict(made.state_dict())
    assert_close(bayes.kl(copy), bayes.kl(made))


def test_what_cannot_be_made_bayesian_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no nn\.Linear"):
        bayes.to_bayesian(nn.ReLU())
    with pytest.raises(cp.UnsupportedOperation, match="padding_mode='circular'"):
        bayes.to_bayesian(nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular"))
    with pytest.raises(ValueError, match="keep_weights=True"):
        bayes.to_bayesian(nn.Linear(2, 2), bayes.TrainedPrior(), keep_weights=False)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    words = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    words[1].weight = words[0].weight
    for model in (tied, words):
        with pytest.raises(cp.UnsupportedOperation, match="the same weights"):
            bayes.to_bayesian(model)


def test_hooks_of_a_layer_are_not_lost_in_silence() -> None:
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        layer = nn.Linear(2, 2)
        getattr(layer, register)(lambda *_: None)
        with pytest.raises(cp.UnsupportedOperation, match="has hooks"):
            bayes.to_bayesian(layer)


def test_a_transformer_is_bayesian_without_the_fast_path() -> None:
    """The fast path of torch reads weights of its layers, and would leave their randomness out."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True).double().eval()
    made, x = bayes.to_bayesian(encoder), normal(2, 3, 4)
    assert not hasattr(made.linear1, "weight")
    with torch.no_grad(), pytest.raises(AttributeError, match="set_fastpath_enabled"):
        made(x)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert_close(bayes.predict(quiet(made), x).mean, encoder(x))
        assert bool((bayes.predict(bayes.to_bayesian(encoder), x).variance > 0).all())
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def states(count: int = 4) -> list[dict[str, Tensor]]:
    base = network().state_dict()
    return [
        {
            k: v + 0.1 * normal(*v.shape, seed=i) if v.is_floating_point() else v
            for k, v in base.items()
        }
        for i in range(count)
    ]


def test_moments_of_state_dicts() -> None:
    mean, variance = bayes.moments_of(states())
    stacked = torch.stack([state["4.weight"] for state in states()])
    assert_close(mean["4.weight"], stacked.mean(0))
    assert_close(variance["4.weight"], stacked.var(0))
    assert mean["1.num_batches_tracked"].dtype == torch.int64
    assert "1.num_batches_tracked" not in variance
    with pytest.raises(ValueError, match="at least two"):
        bayes.moments_of(states(1))
    with pytest.raises(ValueError, match=r"lacks 4\.bias"):
        bayes.moments_of([states()[0], {k: v for k, v in states()[1].items() if k != "4.bias"}])


def test_a_posterior_from_elsewhere() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    mean = {name: normal(*p.shape, seed=1) for name, p in model.state_dict().items()}
    variance = {name: normal(*p.shape, seed=2).square() for name, p in model.named_parameters()}
    variance["0.weight"][0] = 0.0
    made = bayes.with_posterior(model, mean, variance)
    assert_close(made[2].weight_variance, variance["2.weight"])
    assert_close(made[0].weight_variance, variance["0.weight"])
    assert_close(made[0].bias_mean, mean["0.bias"])
    y = bayes.predict(made, normal(2, 3))
    hidden = nn.functional.linear(normal(2, 3).square(), variance["0.weight"], variance["0.bias"])
    first = bayes.predict(made[:1], normal(2, 3))
    assert_close(first.variance, hidden)
    assert y.mean.shape == (2, 2)
    y.variance.sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in made.parameters() if p.grad is not None)


def test_a_collection_of_networks_with_batch_norm_goes_in_whole() -> None:
    """SWAG: what moments_of gives is what with_posterior takes, once it is told what to fix."""
    model, x = network(), normal(3, 1, 5, 5)
    mean, variance = bayes.moments_of(states())
    norm = [f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
    with pytest.raises(cp.UnsupportedOperation) as caught:
        bayes.with_posterior(model, mean, variance)
    assert f"pass fixed={norm}" in str(caught.value)
    made = bayes.with_posterior(model, mean, variance, fixed=norm)
    assert_close(made[1].running_var, mean["1.running_var"])
    plain = network()
    plain.load_state_dict(mean)
    assert_close(bayes.predict(quiet(made), x).mean, plain(x))


def test_names_and_shapes_are_checked() -> None:
    model = network()
    mean, variance = bayes.moments_of(states())
    names = [n for n, _ in model.named_parameters()]
    random = {k: v for k, v in variance.items() if k in names and not k.startswith("1.")}
    bayes.with_posterior(model, mean, random)
    with pytest.raises(ValueError, match=r"variance_state has 7\.weight, which the model has not"):
        bayes.with_posterior(model, mean, {**random, "7.weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"variance_state lacks 4\.bias"):
        bayes.with_posterior(model, mean, {k: v for k, v in random.items() if k != "4.bias"})
    with pytest.raises(ValueError, match=r"mean_state lacks 4\.bias"):
        bayes.with_posterior(model, {k: v for k, v in mean.items() if k != "4.bias"}, random)
    with pytest.raises(ValueError, match="of shape"):
        bayes.with_posterior(model, mean, {**random, "4.bias": torch.ones(5).double()})
    with pytest.raises(ValueError, match="not finite numbers from zero"):
        bayes.with_posterior(model, mean, {**random, "4.bias": -random["4.bias"]})
    norm = {**random, "1.weight": variance["1.weight"]}
    with pytest.raises(cp.UnsupportedOperation, match=r"fixed=\['1.weight'\]"):
        bayes.with_posterior(model, mean, norm)
    kept = bayes.with_posterior(model, mean, norm, fixed=["1.weight", "4.weight"])
    assert not kept[4].weight_variance.any()
    lone = {k: v for k, v in norm.items() if k != "4.weight"}  # what is fixed needs no variance
    assert not bayes.with_posterior(model, mean, lone, fixed=["1.weight", "4.weight"])[
        4
    ].weight_variance.any()
    with pytest.raises(ValueError, match=r"means of 4\.bias are not finite"):
        bayes.with_posterior(model, {**mean, "4.bias": mean["4.bias"] * torch.nan}, random)
    with pytest.raises(ValueError, match="names nothing that the model has"):
        bayes.with_posterior(model, mean, random, fixed=["nothing"])
