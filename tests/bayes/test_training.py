"""The training loop: what it reaches, what it notes, and that members do not see each other."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop import bayes
from tests.oracles import assert_close


def data(*lead: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*lead, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(*lead, generator=generator, dtype=torch.float64)
    return x, torch.sin(2 * x[..., 0]) + x[..., 1] + 0.1 * noise


def network(members: int | None = None, outputs: int = 2, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    make = {"members": members, "dtype": torch.float64}
    return nn.Sequential(
        bayes.BayesLinear(3, 10, **make), nn.ReLU(), bayes.BayesLinear(10, outputs, **make)
    )


def trained(model: nn.Module, x, y, **options) -> bayes.History:
    elbo = options.pop("elbo", None)
    if elbo is None:
        elbo = bayes.ELBO(bayes.HeteroskedasticGaussian(), data_size=y.shape[-1])
    settings = {"epochs": 5, "batch_size": 16, "learning_rate": 0.02} | options
    settings.setdefault("generator", torch.Generator().manual_seed(1))
    return bayes.fit(model, elbo, x, y, **settings)


METHODS = [
    cp.Exact(),
    cp.Series(),
    cp.Wu2019(),
    cp.AssumedDensity(),
    bayes.LocalReparametrisation(10),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_every_method_raises_the_elbo(method):
    x, y = data(64)
    history = trained(network(), x, y, method=method, epochs=12)
    assert history.epochs == 12
    assert history.elbo[-1] > history.elbo[0] + 0.5


def test_the_history_adds_up():
    x, y = data(40)
    history = trained(network(), x, y)
    for elbo, expected, kl in zip(history.elbo, history.expected_log_prob, history.kl, strict=True):
        assert_close(elbo, expected - kl / 40)
    assert set(history.record()) == {"elbo", "expected_log_prob", "kl", "validation"}
    assert history.best_epoch is None


def test_the_same_generator_gives_the_same_network_and_the_global_one_is_untouched():
    x, y = data(40)
    first, second = network(), network()
    before = torch.get_rng_state()
    trained(first, x, y)
    trained(second, x, y)
    assert torch.equal(before, torch.get_rng_state())
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_members_train_as_if_alone(monkeypatch):
    """With one order of the data for all, members are what networks alone become."""
    x, y = data(3, 40)
    model = network(members=3)
    order = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(torch, "rand", lambda lead, **_: order.expand(lead))
    alone = [network() for _ in range(3)]
    for i, single in enumerate(alone):
        state = {name: value[i] for name, value in model.state_dict().items()}
        single.load_state_dict(state)
    held_x, held_y = data(3, 30, seed=2)
    together = trained(model, x, y, validation=(held_x, held_y), patience=2, epochs=30)
    for i, single in enumerate(alone):
        own = (held_x[i], held_y[i])
        history = trained(single, x[i], y[i], validation=own, patience=2, epochs=30)
        assert history.best_epoch == together.best_epoch[i]
        for name, value in single.state_dict().items():
            assert_close(value, model.state_dict()[name][i], rtol=1e-7, atol=1e-9)


def test_every_member_has_its_own_order():
    seen = []

    class Watch(nn.Module):
        def forward(self, x):
            return x

    x = torch.arange(8.0)[:, None].expand(2, 8, 1)
    model = nn.Sequential(Watch(), bayes.BayesLinear(1, 1, members=2))
    model[0].register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    elbo = bayes.ELBO(bayes.HomoskedasticGaussian(), data_size=8)
    generator = torch.Generator().manual_seed(0)
    bayes.fit(
        model, elbo, x, x, epochs=1, batch_size=8, learning_rate=0.1, generator=generator,
        method=bayes.LocalReparametrisation(2, torch.Generator().manual_seed(0)),
    )  # fmt: skip
    first, second = seen[0][..., 0].reshape(2, 2, 8)[:, 0]
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)


def test_early_stopping_restores_the_best_epoch():
    x, y = data(12)
    held = data(200, seed=3)
    model, states = network(), []
    history = trained(
        model, x, y, validation=held, patience=3, epochs=400, learning_rate=0.1,
        callback=lambda *_: states.append([p.detach().clone() for p in model.parameters()]),
    )  # fmt: skip
    best = int(history.best_epoch)
    assert history.epochs == best + 4 < 400
    assert history.validation[best] == max(history.validation)
    for value, kept in zip(model.parameters(), states[best], strict=True):
        assert torch.equal(value, kept)
    likelihood = bayes.HeteroskedasticGaussian()
    again = bayes.log_predictive(model, likelihood, *held).mean()
    assert_close(again, history.validation[best])


def test_a_callback_may_end_the_training():
    x, y = data(20)
    history = trained(network(), x, y, epochs=50, callback=lambda epoch, _: epoch == 2)
    assert history.epochs == 3


def test_a_learned_noise_is_learned():
    x, y = data(60)
    likelihood = bayes.HomoskedasticGaussian(1.0)
    elbo = bayes.ELBO(likelihood, data_size=60)
    trained(network(outputs=1), x, y, elbo=elbo, epochs=20)
    assert likelihood.log_variance.detach() < -0.3


def test_data_of_weight_zero_do_not_count():
    x, y = data(20)
    wrong = torch.cat([y[:15], y[15:] + 100])
    weight = (torch.arange(20) < 15).double()
    models = []
    for target in (y, wrong):
        model = network()
        trained(model, x, target, weight=weight)
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


def test_uncertain_inputs_are_trained_on():
    x, y = data(32)
    history = trained(network(), cp.Gaussian.isotropic(x, stddev=0.1, batch_dims=1), y, epochs=8)
    assert history.elbo[-1] > history.elbo[0]


def test_rows_in_pieces_are_rows_together(monkeypatch):
    x, y = data(2, 50)
    model, likelihood = network(members=2), bayes.HeteroskedasticGaussian()
    whole = bayes.log_predictive(model, likelihood, x, y)
    moments = bayes.predict_target(model, likelihood, x)
    monkeypatch.setattr("covprop.bayes.prediction.ROWS", 14)
    assert_close(bayes.log_predictive(model, likelihood, x, y), whole)
    assert_close(bayes.log_predictive(model, likelihood, x, y[0])[0], whole[0])
    assert_close(bayes.predict_target(model, likelihood, x).stddev, moments.stddev)
    sampled = bayes.predict_target(
        model, likelihood, x, bayes.LocalReparametrisation(4, torch.Generator().manual_seed(0))
    )
    assert sampled.mean.shape == moments.mean.shape


def test_a_loss_that_is_no_number_ends_the_training():
    x, y = data(20)
    with pytest.raises(cp.TrainingDiverged, match="lower learning rate"):
        trained(network(), x, torch.full_like(y, math.nan))


def test_a_validation_that_is_no_number_ends_the_training():
    x, y = data(20)
    held = (x, torch.full_like(y, math.nan))
    with pytest.raises(cp.TrainingDiverged, match="nan"):
        trained(network(), x, y, validation=held, patience=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "at least 1"),
        ({"learning_rate": 0.0}, "positive"),
        ({"cooldown": 1.5}, "from 0 to 1"),
        ({"patience": 2}, "validation"),
        ({"weight": torch.ones(3)}, "weight has the shape"),
        ({"weight": torch.zeros(20)}, "not all of them 0"),
        ({"weight": torch.linspace(-1, 2, 20)}, "numbers from 0"),
    ],
)
def test_settings_are_checked(options, message):
    x, y = data(20)
    with pytest.raises(ValueError, match=message):
        trained(network(), x, y, **options)


def test_a_data_size_other_than_that_of_the_data_is_not_silent():
    """A batch's size in its place, as in the published code, makes the divergence far too heavy."""
    x, y = data(20)
    with pytest.warns(UserWarning, match="data_size of the ELBO is 10, and there are 20 data"):
        trained(network(), x, y, elbo=bayes.ELBO(bayes.HeteroskedasticGaussian(), 10), epochs=1)


def test_validation_data_count_by_their_weight():
    x, y = data(20)
    twice = torch.cat([x, x[:5]]), torch.cat([y, y[:5]])
    weight = 1 + (torch.arange(20) < 5).double()
    found = [
        trained(network(), x, y, validation=held, epochs=2).validation[-1]
        for held in (twice, (x, y, weight), (x, y))
    ]
    assert_close(found[1], found[0])
    assert abs(found[2] - found[0]) > 1e-3


def test_targets_go_with_the_data():
    x, y = data(20)
    with pytest.raises(ValueError, match="y has the shape"):
        trained(network(), x, y[:7])


def test_members_may_have_learning_rates_of_their_own():
    x, y = data(2, 40)
    rates, both = torch.tensor([0.02, 0.005], dtype=torch.float64), network(members=2)
    trained(both, x, y, learning_rate=rates, weight_decay=0.1)
    for member, rate in enumerate(rates.tolist()):
        alike = network(members=2)
        trained(alike, x, y, learning_rate=rate, weight_decay=0.1)
        for one, other in zip(both.parameters(), alike.parameters(), strict=True):
            assert_close(one[member], other[member])


def test_the_rate_falls_to_zero_in_the_cooldown():
    """A step of AdamW moves a parameter by at most about its rate."""
    x, y = data(40)
    model, moved = network(), []
    before = [one.detach().clone() for one in model.parameters()]

    def note(*_: object) -> None:
        now = [one.detach().clone() for one in model.parameters()]
        moved.append(max(float((a - b).abs().max()) for a, b in zip(now, before, strict=True)))
        before[:] = now

    trained(model, x, y, epochs=10, batch_size=40, cooldown=0.5, callback=note)
    ceiling = 0.02 * np.minimum(1, np.arange(10, 0, -1) / 5)
    assert (np.array(moved) < 1.5 * ceiling).all()
    assert (np.array(moved) > 0.3 * ceiling).all()


def test_a_cooldown_ends_nearer_to_the_optimum():
    x, y = data(60)
    bounds = []
    for cooldown in (0.0, 0.5):
        model = network()
        trained(model, x, y, epochs=15, batch_size=4, learning_rate=0.1, cooldown=cooldown)
        elbo = bayes.ELBO(bayes.HeteroskedasticGaussian(), data_size=60)
        bounds.append(float(elbo(model, x, y).elbo.detach()))
    assert bounds[1] > bounds[0]


def test_learning_rates_are_one_for_each_member():
    x, y = data(2, 40)
    with pytest.raises(ValueError, match="lead with as many members"):
        trained(network(members=2), x, y, learning_rate=torch.tensor([0.1, 0.2, 0.3]))
