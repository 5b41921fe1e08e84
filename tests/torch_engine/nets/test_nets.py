"""Actor and critic: the same functions as a stack of ``nn.Linear``, shard by shard; sampling and the module for DDP."""

import numpy as np
import pytest
import torch
from small_runs import (
    MODULES,
    actions_of,
    linear_stack,
    policy_net,
    random_batch,
    random_parameters,
    small_config,
    vectors,
)

from lockstep.core.shards import ShardPlan
from lockstep.torch_engine.gradients import LossModule
from lockstep.torch_engine.nets import distributions, nets
from lockstep.torch_engine.nets.autograd import minibatch_loss
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.rollout import action_noise
from lockstep.torch_engine.state import make_net
from lockstep.training.losses import loss_settings

SHARDS, ROWS = 4, 5

KINDS = [(True, 3), (True, 1), (False, 2), (False, 1)]
with_every_head = pytest.mark.parametrize(("discrete", "actions"), KINDS, ids=lambda value: str(value))


def observations(net: PolicyNet) -> torch.Tensor:
    return torch.randn(SHARDS, ROWS, net.observation.width, generator=torch.Generator().manual_seed(7))


def outputs(net: PolicyNet, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    weights = nets.expand(parameters, len(x))
    return {"actor": nets.actor(net, weights, x), "critic": nets.critic(net, weights, x).unsqueeze(-1)}


@with_every_head
@pytest.mark.parametrize("hidden_sizes", [(64, 64), (17,), (1,), ()], ids=str)
@pytest.mark.parametrize("activation", MODULES)
def test_actor_and_critic_are_a_stack_of_linear_layers(activation, hidden_sizes, discrete, actions):
    net = policy_net(4, actions, discrete, hidden_sizes, activation)
    parameters, x = random_parameters(net), observations(net)
    for name, ours in outputs(net, parameters, x).items():
        expected = linear_stack(net, parameters, name)(x.double())
        assert ours.shape == (SHARDS, ROWS, actions if name == "actor" else 1)
        scale = max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-6 * scale)


def test_activations_and_networks_are_told_apart():
    """The negative of the comparison above: it fails for another activation, and for the other network's weights."""
    net = policy_net(4, 1, True, (8,), "tanh")
    parameters, x = random_parameters(net), observations(net)
    ours = outputs(net, parameters, x)
    for activation in set(MODULES) - {"tanh"}:
        other = linear_stack(policy_net(4, 1, True, (8,), activation), parameters, "actor")(x.double())
        assert not torch.allclose(ours["actor"].double(), other, atol=1e-3)
    assert not torch.allclose(ours["actor"], ours["critic"], atol=1e-3)


@with_every_head
@pytest.mark.parametrize("activation", MODULES)
def test_expanded_weights_give_each_shards_own_gradient(activation, discrete, actions):
    net = policy_net(4, actions, discrete, (6,), activation)
    parameters, x = random_parameters(net), observations(net)
    weights = {name: w.requires_grad_() for name, w in nets.expand(parameters, SHARDS).items()}
    loss = nets.actor(net, weights, x).square().sum() + nets.critic(net, weights, x).square().sum()
    trained = {name: w for name, w in weights.items() if name != "log_std"}
    gradients = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
    for shard in range(SHARDS):
        for name in ("actor", "critic"):
            stack = linear_stack(net, parameters, name)
            stack(x[shard].double()).square().sum().backward()
            for layer, module in enumerate(list(stack)[::2]):
                for kind in ("weight", "bias"):
                    expected = getattr(module, kind).grad
                    ours = gradients[f"{name}.{layer}.{kind}"][shard].double()
                    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_shapes_name_every_parameter_in_checkpoint_order():
    assert policy_net(4, 2, True, (8,), "tanh").shapes() == {
        "actor.0.weight": (8, 4),
        "actor.0.bias": (8,),
        "actor.1.weight": (2, 8),
        "actor.1.bias": (2,),
        "critic.0.weight": (8, 4),
        "critic.0.bias": (8,),
        "critic.1.weight": (1, 8),
        "critic.1.bias": (1,),
    }
    assert policy_net(4, 2, False, (8,), "tanh").shapes()["log_std"] == (2,)


@with_every_head
def test_the_module_for_ddp_gives_the_same_loss_and_terms(discrete, actions):
    config = small_config()
    net = policy_net(4, actions, discrete, (6,), "tanh")
    parameters, settings = random_parameters(net), loss_settings(config)
    columns = random_batch(config, net).columns()
    loss, terms = minibatch_loss(net, nets.expand(parameters, config.shards), columns, settings)
    joined = {name: x.flatten(0, 1).unsqueeze(0) for name, x in columns.items()}
    ours = LossModule(net, parameters, minibatch_loss)(joined, settings)
    torch.testing.assert_close(ours[0], loss.sum(0, keepdim=True), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[1], terms.sum(0, keepdim=True), rtol=1e-5, atol=1e-6)


def test_the_module_trains_the_parameters_it_was_given_not_copies():
    config = small_config(ppo={"entropy_coef": 0.1})
    net = policy_net(4, 2, False, (6,), "tanh")
    parameters = random_parameters(net)
    joined = {name: x.flatten(0, 1).unsqueeze(0) for name, x in random_batch(config, net).columns().items()}
    module = LossModule(net, parameters, minibatch_loss)
    before = module(joined, loss_settings(config))[0].detach()
    for value in parameters.values():
        value.add_(0.5)
    loss, _ = module(joined, loss_settings(config))
    assert not torch.allclose(loss, before, atol=1e-3)
    loss.sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in module.parameters())
    assert len(list(module.parameters())) == len(parameters)


# --- Sampling ---------------------------------------------------------------------------------------------------------


def keyed_noise(discrete: bool, actions: int) -> torch.Tensor:
    """Noise as a rollout draws it: 8 shards of 500 steps of 4 environments, `[1, 16000, actions]`."""
    config = small_config(num_envs=32, num_steps=500)
    net = make_net(config, vectors(4), actions_of(discrete, actions))
    noise = action_noise(config, ShardPlan(32, 8), net, iteration=3)
    return torch.from_numpy(noise).reshape(1, -1, actions)


def test_adding_gumbel_noise_and_taking_the_largest_samples_the_softmax():
    net, logits = policy_net(4, 3, True, (), "tanh"), torch.tensor([1.0, 0.0, -1.5])
    noise = keyed_noise(True, 3)
    actions = distributions.sample(net, {}, logits.expand_as(noise), noise)
    assert actions.dtype == torch.int64
    frequencies = torch.bincount(actions.flatten(), minlength=3).double() / actions.numel()
    five_sigma = 5 * 0.5 / np.sqrt(actions.numel())
    torch.testing.assert_close(frequencies, torch.softmax(logits.double(), 0), rtol=0, atol=five_sigma)
    sharper = torch.softmax(1.2 * logits.double(), 0)
    assert (frequencies - sharper).abs().max() > five_sigma


def test_normal_noise_samples_the_gaussian():
    net, mean = policy_net(4, 2, False, (), "tanh"), torch.tensor([3.0, -1.0])
    parameters = nets.expand({"log_std": torch.tensor([0.0, -1.0])}, 1)
    noise = keyed_noise(False, 2)
    actions = distributions.sample(net, parameters, mean.expand_as(noise), noise)[0]
    five_sigma = 5 / np.sqrt(len(actions))
    torch.testing.assert_close(actions.mean(0), mean, rtol=0, atol=five_sigma)
    torch.testing.assert_close(actions.std(0), torch.tensor([1.0, np.exp(-1)]).float(), rtol=five_sigma, atol=0)
    correlation = np.corrcoef(actions.numpy().T)[0, 1]
    assert abs(correlation) < five_sigma


def test_each_shard_is_scaled_by_the_standard_deviation_and_the_mode_by_nothing():
    net = policy_net(4, 2, False, (), "tanh")
    parameters = nets.expand({"log_std": torch.log(torch.tensor([2.0, 0.5]))}, 2)
    output, noise = torch.ones(2, 3, 2), torch.ones(2, 3, 2)
    torch.testing.assert_close(
        distributions.sample(net, parameters, output, noise), torch.tensor([3.0, 1.5]).expand(2, 3, 2)
    )
    assert torch.equal(distributions.mode(net, output), output)


def test_the_mode_is_the_likeliest_action_and_without_noise_the_sample_too():
    net, logits = policy_net(4, 3, True, (), "tanh"), torch.tensor([[[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]]])
    assert (
        distributions.mode(net, logits).tolist()
        == distributions.sample(net, {}, logits, torch.zeros(1, 2, 3)).tolist()
        == [[1, 0]]
    )
    noise = torch.tensor([[[0.0, 0.0, 1.5], [0.0, 0.0, 0.0]]])
    assert distributions.sample(net, {}, logits, noise).tolist() == [[2, 0]]
