"""Training scripts for the doctor, as different people write them, one a function: ``patients.py NAME`` a rank."""

import copy
import sys
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ITERATIONS, EPOCHS = 4, 2


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.actor, self.critic = nn.Linear(16, 2), nn.Linear(16, 1)

    def losses(self, x):
        hidden = self.body(x)
        return self.actor(hidden).log_softmax(-1)[:, 0].neg() + (self.critic(hidden)[:, 0] - x.sum(-1)).pow(2)

    def forward(self, x):
        return self.losses(x)


def mlp(outputs=1):
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, outputs))


def join(seed=0):
    """The process group; the same parameters on every rank, and then data of its own."""
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    return dist.get_rank()


class Data:
    """What a rank collects: other numbers on every rank, in phases of forward passes without gradients."""

    def __init__(self, rank):
        self._source = torch.Generator().manual_seed(100 + rank)

    def batch(self):
        return torch.randn(8, 4, generator=self._source)

    def phases(self, model, count=ITERATIONS):
        for _ in range(count):
            with torch.no_grad():
                model(self.batch())
            yield self.batch()


def reduce_gradients(parameters):
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def train(agent, optimizer, data, *, loss=None, before_step=lambda: None, after=lambda: None):
    for batch in data.phases(agent):
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            (agent(batch) if loss is None else loss(batch)).mean().backward()
            before_step()
            optimizer.step()
        after()


class RunningMeanStd:
    def __init__(self, shape=()):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, x):
        self.count += len(x)
        self.mean = self.mean + (x.mean(0) - self.mean) * len(x) / self.count

    def merge(self):
        mean = torch.as_tensor(self.mean)
        dist.all_reduce(mean)
        self.mean = mean.numpy() / dist.get_world_size()


# --- correct ----------------------------------------------------------------------------------------------------------


def reduced_by_hand():
    data, agent = Data(join()), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    train(agent, optimizer, data, before_step=lambda: reduce_gradients(agent.parameters()))


def reduced_in_one_buffer():
    data, agent = Data(join()), Agent()
    optimizer = torch.optim.RMSprop(agent.parameters(), 0.01)

    def reduce_together():
        gradients = [p.grad for p in agent.parameters() if p.grad is not None]
        flat = nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / dist.get_world_size(), gradients)

    train(agent, optimizer, data, before_step=reduce_together)


def parameter_server(broadcast=True):
    rank = join()
    data, agent = Data(rank), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), 0.01) if rank == 0 else None
    for batch in data.phases(agent):
        for _ in range(EPOCHS):
            agent.zero_grad()
            agent(batch).mean().backward()
            for parameter in agent.parameters():
                assert parameter.grad is not None
                dist.reduce(parameter.grad, 0)
            if optimizer is not None:
                optimizer.step()
            if broadcast:
                for parameter in agent.parameters():
                    dist.broadcast(parameter.data, 0)


def learners_and_an_actor():
    """All ranks but the last learn in DDP; that one makes no optimiser, and acts by the parameters it is sent."""
    rank = join()
    learners = dist.get_world_size() - 1
    group, agent, data = dist.new_group(list(range(learners))), Agent(), Data(rank)
    wrapped = DistributedDataParallel(agent, process_group=group) if rank < learners else None
    optimizer = torch.optim.Adam(agent.parameters(), 0.01) if wrapped is not None else None
    for _ in range(ITERATIONS):
        if wrapped is None or optimizer is None:
            with torch.no_grad():
                agent(data.batch())
        else:
            for _ in range(EPOCHS):
                optimizer.zero_grad()
                wrapped(data.batch()).mean().backward()
                optimizer.step()
        for parameter in agent.parameters():
            dist.broadcast(parameter.data, 0)


def merged_normalizers_and_a_writer_between():
    rank = join()
    data, agent = Data(rank), Agent()
    obs_rms = RunningMeanStd((4,))
    rubbish = [type("Writer", (), {"mean": 0.0, "rows": []})() for _ in range(500)] if rank == 0 else []
    del rubbish[::2]  # the collector's order of what comes now is another one on rank 0
    ret_rms = RunningMeanStd((4,))
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)

    def update():
        batch = data.batch().numpy()
        obs_rms.update(batch)
        ret_rms.update(3.0 * batch + 1.0)
        obs_rms.merge()
        ret_rms.merge()

    train(agent, optimizer, data, before_step=lambda: reduce_gradients(agent.parameters()), after=update)


def evaluated_on_one_rank():
    rank = join()
    data, agent = Data(rank), Agent()
    rms = RunningMeanStd((4,))
    evaluation = RunningMeanStd((4,)) if rank == 0 else None
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)

    def evaluate():
        rms.update(data.batch().numpy())
        rms.merge()
        if evaluation is not None:
            evaluation.update(data.batch().numpy())

    train(agent, optimizer, data, before_step=lambda: reduce_gradients(agent.parameters()), after=evaluate)


def target_network():
    rank = join(seed=0)
    agent = DistributedDataParallel(mlp())
    target = copy.deepcopy(agent.module)
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)

    def polyak():
        for mine, its in zip(target.parameters(), agent.module.parameters(), strict=True):
            mine.data.lerp_(its.data, 0.1)

    def loss(batch):
        with torch.no_grad():
            goal = target(batch) + batch.sum(-1, keepdim=True)
        return (agent(batch) - goal).pow(2)

    train(agent, optimizer, Data(rank), loss=loss, after=polyak)


def old_policy_made_before_the_broadcast():
    """It differs until it is loaded, and is never used before that."""
    rank = join()
    torch.manual_seed(rank)
    agent = Agent()
    old = copy.deepcopy(agent)
    agent = DistributedDataParallel(agent)
    optimizer, data = torch.optim.Adam(agent.parameters(), 0.01), Data(rank)
    old.load_state_dict(agent.module.state_dict())

    def loss(batch):
        with torch.no_grad():
            before = old(batch)
        return agent(batch) + 0.1 * (agent(batch) - before).pow(2)

    train(agent, optimizer, data, loss=loss, after=lambda: old.load_state_dict(agent.module.state_dict()))


def actor_and_critic_apart():
    rank = join()
    actor, critic = DistributedDataParallel(mlp(2)), DistributedDataParallel(mlp())
    optimizers = [torch.optim.Adam(part.parameters(), 0.01) for part in (actor, critic)]
    for batch in Data(rank).phases(actor):
        loss = actor(batch).log_softmax(-1)[:, 0].mean() + (critic(batch) - batch.sum(-1, keepdim=True)).pow(2).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for part, optimizer in zip((actor, critic), optimizers, strict=True):
            nn.utils.clip_grad_norm_(part.parameters(), 0.5)
            optimizer.step()


def attached_as_ddp_left_it():
    from lockstep import attach

    rank = join()
    agent = DistributedDataParallel(Agent())
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    attach(agent, optimizer)
    train(agent, optimizer, Data(rank), loss=lambda batch: agent.module.losses(batch))


def accumulated():
    rank = join()
    agent, data = DistributedDataParallel(Agent()), Data(rank)
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    for batch in data.phases(agent):
        optimizer.zero_grad()
        with agent.no_sync():
            agent(batch).mean().backward()
        agent(data.batch()).mean().backward()
        optimizer.step()


def average_on_rank_0():
    """An average of the weights that one rank updates, to save it; its number of updates is a buffer."""
    rank = join()
    agent = DistributedDataParallel(Agent())
    ema = torch.optim.swa_utils.AveragedModel(agent.module)

    def average():
        if rank == 0:
            ema.update_parameters(agent.module)

    train(agent, torch.optim.Adam(agent.parameters(), 0.01), Data(rank), after=average)


def taught_and_judged_on_rank_0():
    """A frozen teacher, the same everywhere, so large that a part of it is kept; rank 0 alone has a frozen judge."""

    def frozen():
        return nn.Sequential(nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 1)).requires_grad_(False)

    rank = join()
    teacher, student = frozen(), DistributedDataParallel(mlp())
    judge = frozen() if rank == 0 else teacher
    optimizer = torch.optim.SGD(student.parameters(), 0.01)
    for batch in Data(rank).phases(student):
        with torch.no_grad():
            wanted = teacher(batch)
            judge(batch)
        optimizer.zero_grad()
        (student(batch) - wanted).pow(2).mean().backward()
        optimizer.step()


def reduced_by_hand_and_averaged_on_rank_0(merged=True):
    """Statistics in buffers, whose model is reduced by hand; rank 0 alone keeps an average of it."""
    rank = join()
    data = Data(rank)
    agent = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    ema = torch.optim.swa_utils.AveragedModel(agent, use_buffers=True) if rank == 0 else None

    def merge_and_average():
        for buffer in agent.buffers() if merged else ():
            dist.all_reduce(buffer)
            buffer.copy_(buffer / dist.get_world_size())
        if ema is not None:
            ema.update_parameters(agent)
            if merged:
                with torch.no_grad():
                    ema(torch.ones(2, 4))

    def reduce_and_merge():
        reduce_gradients(agent.parameters())
        merge_and_average()

    train(agent, torch.optim.Adam(agent.parameters(), 0.01), data, before_step=reduce_and_merge)


def updated_by_parts(gather=True):
    """Each rank's optimiser holds a part of the flattened parameters, as with ZeRO, and all parts are gathered."""
    rank = join()
    agent, ranks = Agent(), dist.get_world_size()
    size = sum(p.numel() for p in agent.parameters())
    each = -(-size // ranks)
    own = slice(rank * each, (rank + 1) * each)

    def flat(tensors):
        return nn.functional.pad(nn.utils.parameters_to_vector(tensors).detach(), (0, ranks * each - size))

    part = flat(agent.parameters())[own].clone().requires_grad_()
    optimizer = torch.optim.Adam([part], 0.01)
    for batch in Data(rank).phases(agent):
        agent.zero_grad()
        agent(batch).mean().backward()
        gradient = flat([p.grad for p in agent.parameters()])
        dist.all_reduce(gradient)
        part.grad = gradient[own] / ranks
        optimizer.step()
        parts = list(flat(agent.parameters()).split(each))
        if gather:
            dist.all_gather(parts, part.detach())
        parts[rank] = part.detach()
        nn.utils.vector_to_parameters(torch.cat(parts)[:size].clone(), agent.parameters())


def updated_by_parts_in_groups(gathered=2):
    """As DeepSpeed's ZeRO with two groups of parameters, which one optimiser steps one after the other.

    Each rank's part is written to its model after its group's step; all parts are gathered in the end.
    """
    rank = join()
    agent, ranks = Agent(), dist.get_world_size()
    groups = [[p for p in agent.parameters() if (p.dim() > 1) is decays] for decays in (True, False)]
    sizes = [sum(p.numel() for p in group) for group in groups]
    slices = [slice(rank * -(-size // ranks), (rank + 1) * -(-size // ranks)) for size in sizes]

    def flat(tensors, own):
        vector = nn.utils.parameters_to_vector(tensors).detach()
        return nn.functional.pad(vector, (0, ranks * (own.stop - own.start) - vector.numel()))

    parts = [flat(group, own)[own].clone().requires_grad_() for group, own in zip(groups, slices, strict=True)]
    for group, own, part in zip(groups, slices, parts, strict=True):
        end = 0
        for p in group:
            start, end = end, end + p.numel()
            lies = slice(max(start, own.start) - own.start, max(min(end, own.stop) - own.start, 0))
            fragment = part[lies] if lies.start < lies.stop else None
            mapping = None if fragment is None else SimpleNamespace(hp_fragment=fragment)
            p._hp_mapping = mapping  # pyright: ignore[reportAttributeAccessIssue]
    optimizer = torch.optim.AdamW([{"params": [parts[0]]}, {"params": [parts[1]], "weight_decay": 0.0}], 0.01)
    for batch in Data(rank).phases(agent):
        agent.zero_grad()
        agent(batch).mean().backward()
        reduce_gradients(agent.parameters())
        every = optimizer.param_groups
        for group, own, part, held in zip(groups, slices, parts, every, strict=True):
            part.grad = flat([p.grad for p in group], own)[own]
            optimizer.param_groups = [held]
            optimizer.step()
            vector = flat(group, own)
            vector[own] = part.detach()
            nn.utils.vector_to_parameters(vector, group)
        optimizer.param_groups = every
        for group, part in list(zip(groups, parts, strict=True))[:gathered]:
            pieces = [torch.empty_like(part) for _ in range(ranks)]
            dist.all_gather(pieces, part.detach())
            nn.utils.vector_to_parameters(torch.cat(pieces), group)


def saved_and_continued():
    """Stable-Baselines3's way, with our class: normalised environments are saved, and loaded to go on."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    from lockstep.integrations.sb3 import PPO

    env = VecNormalize(make_vec_env("CartPole-v1", 2))
    model = PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, seed=3, device="cpu")
    model.learn(128)
    model.save("model")
    env.save("env.pkl")
    env = VecNormalize.load("env.pkl", make_vec_env("CartPole-v1", 2))
    model = PPO.load("model", env=env, device="cpu")
    model.learn(128, reset_num_timesteps=False)


# --- faulty -----------------------------------------------------------------------------------------------------------


def critic_outside_ddp():
    rank = join()
    actor, critic = DistributedDataParallel(mlp(2)), mlp()
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 0.01)
    train(
        *(actor, optimizer, Data(rank)),
        loss=lambda batch: actor(batch).log_softmax(-1)[:, 0] + (critic(batch)[:, 0] - batch.sum(-1)).pow(2),
    )


def loop_that_skips_a_tensor():
    data, agent = Data(join()), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    listed = [p for name, p in agent.named_parameters() if name != "critic.bias"]
    train(agent, optimizer, data, before_step=lambda: reduce_gradients(listed))


def frozen_on_one_rank():
    rank = join()
    data, agent = Data(rank), Agent()
    agent.critic.requires_grad_(rank == 0)
    optimizer = torch.optim.SGD(agent.parameters(), 0.01)

    def reduce_what_both_have():
        reduce_gradients([*agent.body.parameters(), *agent.actor.parameters()])

    train(agent, optimizer, data, before_step=reduce_what_both_have)


def optimizer_loaded_on_one_rank():
    rank = join()
    data, agent = Data(rank), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    if rank == 0:
        moments = {
            number: {"step": torch.tensor(5.0), "exp_avg": torch.ones_like(p), "exp_avg_sq": torch.ones_like(p)}
            for number, p in enumerate(agent.parameters())
        }
        optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
    train(agent, optimizer, data, before_step=lambda: reduce_gradients(agent.parameters()))


def weight_decay_of_its_own():
    rank = join()
    data, agent = Data(rank), Agent()
    optimizer = torch.optim.AdamW(agent.parameters(), 0.01, weight_decay=0.01 * rank)
    train(agent, optimizer, data, before_step=lambda: reduce_gradients(agent.parameters()))


def betas_of_its_own():
    rank = join()
    agent = DistributedDataParallel(Agent())
    optimizer = torch.optim.Adam(agent.parameters(), 0.01, betas=(0.9, 0.99 if rank else 0.999))
    train(agent, optimizer, Data(rank))


def target_copied_too_early():
    rank = join()
    torch.manual_seed(rank)
    agent = mlp()
    target = copy.deepcopy(agent)
    agent = DistributedDataParallel(agent)

    def loss(batch):
        with torch.no_grad():
            goal = target(batch) + batch.sum(-1, keepdim=True)
        return (agent(batch) - goal).pow(2)

    train(agent, torch.optim.Adam(agent.parameters(), 0.01), Data(rank), loss=loss)


def frozen_critic_of_another_seed():
    rank = join()
    agent = DistributedDataParallel(Agent())
    torch.manual_seed(rank)
    critic = mlp().requires_grad_(False)
    train(
        *(agent, torch.optim.Adam(agent.parameters(), 0.01), Data(rank)),
        loss=lambda batch: agent(batch) * critic(batch)[:, 0],
    )


class Grpo:
    """Holds policy and reference as an object's attributes, as trainers do."""

    def __init__(self, rank):
        torch.manual_seed(rank)
        self.policy = mlp(2)
        self.reference = copy.deepcopy(self.policy).eval()
        for parameter in self.policy.parameters():
            dist.broadcast(parameter.data, 0)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), 0.01)

    def loss(self, batch):
        with torch.no_grad():
            reference = self.reference(batch).log_softmax(-1)
        policy = self.policy(batch).log_softmax(-1)
        return (policy - reference).pow(2) - policy


def reference_of_its_own():
    rank = join()
    trainer = Grpo(rank)
    train(
        *(trainer.policy, trainer.optimizer, Data(rank)),
        loss=trainer.loss,
        before_step=lambda: reduce_gradients(trainer.policy.parameters()),
    )


def average_of_its_own():
    rank = join()
    torch.manual_seed(rank)
    agent = mlp()
    averages = {"ema": copy.deepcopy(agent)}
    agent = DistributedDataParallel(agent)

    def average():
        for mine, its in zip(averages["ema"].parameters(), agent.module.parameters(), strict=True):
            mine.data.lerp_(its.data, 0.05)

    def loss(batch):
        with torch.no_grad():
            goal = averages["ema"](batch)
        return (agent(batch) - goal - batch.sum(-1, keepdim=True)).pow(2)

    train(agent, torch.optim.Adam(agent.parameters(), 0.01), Data(rank), loss=loss, after=average)


def server_that_sends_nothing():
    parameter_server(broadcast=False)


def parts_that_stay_where_they_are():
    updated_by_parts(gather=False)


def groups_of_parts_of_which_one_stays_where_it_is():
    updated_by_parts_in_groups(gathered=1)


def local_stop():
    """Each rank ends its epochs by itself; gradients are reduced, so that some steps pair different minibatches."""
    rank = join()
    data, agent = Data(rank), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    for number, batch in enumerate(data.phases(agent, 6)):
        for epoch in range(4):
            optimizer.zero_grad()
            agent(batch).mean().backward()
            reduce_gradients(agent.parameters())
            if epoch + number % 2 < 3 or rank == 0:
                optimizer.step()


def extractor_of_a_library_bypassed():
    import gymnasium
    from stable_baselines3.common.torch_layers import FlattenExtractor

    rank = join()

    class Mine(Agent):
        def __init__(self):
            super().__init__()
            self.extractor = FlattenExtractor(gymnasium.spaces.Box(-1, 1, (4,)))

        def losses(self, x):
            return super().losses(self.extractor(x))

    agent = DistributedDataParallel(Mine())
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    train(agent, optimizer, Data(rank), loss=lambda batch: agent.module.losses(batch))


def noise_of_its_own():
    rank = join()
    agent = DistributedDataParallel(Agent())
    torch.manual_seed(rank)

    def shake():
        for parameter in agent.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.1 * torch.randn_like(parameter.grad)

    train(agent, torch.optim.Adam(agent.parameters(), 0.01), Data(rank), before_step=shake)


def no_process_group():
    import os

    torch.manual_seed(0)
    agent = Agent()
    train(agent, torch.optim.Adam(agent.parameters(), 0.01), Data(int(os.environ["RANK"])))


def another_start():
    rank = join()
    torch.manual_seed(rank)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    train(agent, optimizer, Data(rank), before_step=lambda: reduce_gradients(agent.parameters()))


def one_of_two_normalizers_is_local():
    rank = join()
    data, agent = Data(rank), Agent()
    obs_rms, ret_rms = RunningMeanStd((4,)), RunningMeanStd((4,))

    def update():
        obs_rms.update(data.batch().numpy())
        obs_rms.merge()
        ret_rms.update(data.batch().numpy())

    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    train(agent, optimizer, data, before_step=lambda: reduce_gradients(agent.parameters()), after=update)


def same_seed_and_a_graph_on_rank_0():
    """As a writer draws the network: a forward pass with gradients that the other ranks don't make."""
    rank = join()
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)

    def draw():
        if rank == 0:
            agent(torch.ones(1, 4))

    train(agent, optimizer, Data(0), before_step=draw, after=draw)


def whole_and_parts(parts, states=0):
    """One rollout is on every rank, in its own order: a rank takes all of it by minibatches, or its own part.

    With ``states``, observations say which of so few states it is, and come again.
    """
    rank = join()
    agent, source = Agent(), torch.Generator().manual_seed(5)
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    for iteration in range(ITERATIONS):
        rollout = torch.randn(32, 4, generator=source)
        if states:
            rollout = nn.functional.one_hot(torch.randint(states, (32,), generator=source), 4).float()
        with torch.no_grad():
            for observed in rollout.split(8):
                agent(observed)
        seed = torch.Generator().manual_seed(10 * iteration + (0 if parts else rank))
        rows = torch.randperm(len(rollout), generator=seed)
        for minibatch in (rows[rank::2] if parts else rows).split(8):
            optimizer.zero_grad()
            agent(rollout[minibatch]).mean().backward()
            reduce_gradients(agent.parameters())
            optimizer.step()


def same_rollouts_in_another_order():
    whole_and_parts(parts=False)


def parts_of_one_rollout():
    whole_and_parts(parts=True)


def parts_of_one_rollout_of_few_states():
    whole_and_parts(parts=True, states=4)


def batch_norm():
    data = Data(join())
    agent = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    train(agent, optimizer, data, before_step=lambda: reduce_gradients(agent.parameters()))


def batch_norm_and_an_average_on_rank_0():
    reduced_by_hand_and_averaged_on_rank_0(merged=False)


def second_rank_fails():
    rank = join()
    agent, data = DistributedDataParallel(Agent()), Data(rank)
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    for number, batch in enumerate(data.phases(agent)):
        if number == 2 and rank == 1:
            raise ValueError("the motor is gone")
        optimizer.zero_grad()
        agent(batch).mean().backward()
        optimizer.step()


def reduced_every_second_step():
    data, agent = Data(join()), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    steps = []

    def sometimes():
        steps.append(0)
        if len(steps) % 2:
            reduce_gradients(agent.parameters())

    train(agent, optimizer, data, before_step=sometimes)


def reduced_copies():
    data, agent = Data(join()), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)

    def reduce_copies():
        for gradient in (parameter.grad for parameter in agent.parameters()):
            assert gradient is not None
            dist.all_reduce(gradient.clone())

    train(agent, optimizer, data, before_step=reduce_copies)


def summed():
    data, agent = Data(join()), Agent()
    optimizer = torch.optim.SGD(agent.parameters(), 0.01)

    def reduce_without_dividing():
        for parameter in agent.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        nn.utils.clip_grad_norm_(agent.parameters(), 1e3)

    train(agent, optimizer, data, before_step=reduce_without_dividing)


def sent_by_one_rank():
    data, agent = Data(join()), Agent()
    optimizer = torch.optim.SGD(agent.parameters(), 0.01)

    def send():
        for parameter in agent.parameters():
            assert parameter.grad is not None
            dist.broadcast(parameter.grad, 1)

    train(agent, optimizer, data, before_step=send)


def summed_in_hooks():
    data, agent = Data(join()), Agent()
    for parameter in agent.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad))
    train(agent, torch.optim.SGD(agent.parameters(), lr=0.01), data)


def always_clipped():
    data, agent = Data(join()), Agent()
    optimizer = torch.optim.SGD(agent.parameters(), 0.01)

    def reduce_and_clip():
        reduce_gradients(agent.parameters())
        nn.utils.clip_grad_norm_(agent.parameters(), 1e-3)

    train(agent, optimizer, data, before_step=reduce_and_clip)


def statistics_by_other_names():
    rank = join()
    data, agent = Data(rank), Agent()

    class Whitening:
        def __init__(self):
            self.running_mean, self.running_sigma = np.zeros(4), np.ones(4)

    whitening = Whitening()
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)

    def update():
        whitening.running_mean = 0.9 * whitening.running_mean + data.batch().mean(0).numpy()

    train(agent, optimizer, data, before_step=lambda: reduce_gradients(agent.parameters()), after=update)


def run(patients):
    """Runs the one of these functions that the command line names."""
    torch.set_num_threads(1)
    patients[sys.argv[1]]()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run(globals())
