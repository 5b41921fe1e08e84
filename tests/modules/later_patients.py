"""More training scripts for the doctor, one a function: ``later_patients.py NAME`` a rank."""

import torch
import torch.distributed as dist
from patients import Agent, Data, join, mlp, reduce_gradients, run, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.nn.parallel import DistributedDataParallel


def evaluated_by_turns(unreduced_from=None):
    """Rank 0 evaluates before its fourth step, rank 1 before its fifth, and again five steps later."""
    rank = join()
    agent, data = DistributedDataParallel(Agent()), Data(rank)
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    for step in range(10):
        if step % 5 == 3 + rank:
            with torch.no_grad():
                agent.module(data.batch())
        optimizer.zero_grad()
        if unreduced_from is None or step < unreduced_from:
            agent(data.batch()).mean().backward()
        else:
            agent.module(data.batch()).mean().backward()
        optimizer.step()


def evaluated_by_turns_and_unreduced():
    evaluated_by_turns(unreduced_from=6)


def evaluated_by_turns_between_rollouts():
    """All take five steps on what they collected, and one of them evaluates before the fourth or the fifth."""
    rank = join()
    agent, data = DistributedDataParallel(Agent()), Data(rank)
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    for phase in range(4):
        batch = data.batch()
        with torch.no_grad():
            agent.module(batch)
        for step in range(5):
            if step == 3 + rank and phase % 2 == rank:
                with torch.no_grad():
                    agent.module(data.batch())
            optimizer.zero_grad()
            agent(batch).mean().backward()
            optimizer.step()


def epochs_of_its_own(normalized=False, whole_numbers=False):
    """By turns, one rank takes three epochs and the other four, and all end after as many steps."""
    rank = join()
    net = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), mlp(4)) if whole_numbers else mlp()
    agent, data, steps = DistributedDataParallel(net), Data(rank), 0
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    for phase in range(7):
        batch = data.batch()
        batch = (batch[:, :1] * 10).long() % 50 if whole_numbers else batch
        with torch.no_grad():
            net(batch)
        batch = (batch - batch.mean()) / batch.std() if normalized else batch
        for _ in range(min(3 + (phase + rank) % 2, 21 - steps)):
            optimizer.zero_grad()
            agent(batch).mean().backward()
            optimizer.step()
            steps += 1


def epochs_of_its_own_on_normalized_states():
    epochs_of_its_own(normalized=True)


def epochs_of_its_own_on_whole_numbers():
    epochs_of_its_own(whole_numbers=True)


def tuned_on_rank_0(sent=False):
    """Rank 0 alone trains on with another optimiser when all have trained."""
    rank = join()
    agent, data = mlp(), Data(rank)
    wanted = list(agent.parameters())
    train(agent, torch.optim.Adam(wanted, 0.01), data, before_step=lambda: reduce_gradients(wanted))
    fine = torch.optim.SGD(wanted, 0.5)
    for batch in [data.batch() for _ in range(5)] if rank == 0 else ():
        fine.zero_grad()
        agent(batch).pow(2).mean().backward()
        fine.step()
    for parameter in wanted if sent else ():
        dist.broadcast(parameter.data, 0)


def tuned_on_rank_0_and_sent():
    tuned_on_rank_0(sent=True)


def zero_by_hand(reduced=True, sent=True):
    """Each rank's optimiser holds every second parameter, whole; they are sent after each step."""
    rank = join()
    agent, ranks = Agent(), dist.get_world_size()
    parameters = list(agent.parameters())
    optimizer = torch.optim.Adam(parameters[rank::ranks], 0.01)
    for batch in Data(rank).phases(agent):
        agent.zero_grad()
        agent(batch).mean().backward()
        if reduced:
            reduce_gradients(parameters)
        optimizer.step()
        for number, parameter in enumerate(parameters if sent else ()):
            dist.broadcast(parameter.data, number % ranks)


def zero_by_hand_that_sends_nothing():
    zero_by_hand(sent=False)


def zero_by_hand_that_reduces_nothing():
    zero_by_hand(reduced=False)


def pretrained_on_rank_0(trained=True, sent=True, made=False):
    """Rank 0 alone trains an encoder first, which all train then, or use as it is; all may have made its optimiser."""
    rank = join()
    encoder, agent, data = nn.Linear(4, 4), mlp(), Data(rank)
    head = nn.Linear(4, 4)
    if made or rank == 0:
        alone = torch.optim.Adam([*encoder.parameters(), *head.parameters()], 0.01)
    for batch in [data.batch() for _ in range(5)] if rank == 0 else ():
        alone.zero_grad()
        (head(encoder(batch)) - batch).pow(2).mean().backward()
        alone.step()
    for parameter in encoder.parameters() if sent else ():
        dist.broadcast(parameter.data, 0)
    model = nn.Sequential(encoder, agent)
    encoder.requires_grad_(trained)
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(wanted, 0.01)
    train(model, optimizer, data, before_step=lambda: reduce_gradients(wanted))


def pretrained_on_rank_0_and_frozen(sent=True):
    pretrained_on_rank_0(trained=False, sent=sent, made=True)


def pretrained_on_rank_0_and_not_sent():
    pretrained_on_rank_0(sent=False)


def pretrained_on_rank_0_and_frozen_and_not_sent():
    pretrained_on_rank_0_and_frozen(sent=False)


class Sign(torch.optim.Optimizer):
    """Steps by the signs of gradients."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter -= self.param_groups[0]["lr"] * parameter.grad.sign()


def probed(seeds=None):
    """A pass with gradients through another sample on every rank, which nothing uses, beside the batch of the loss."""
    rank = join()
    agent, probe = DistributedDataParallel(Agent()), Data(50 + rank)
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    train(agent, optimizer, Data(rank if seeds is None else seeds), before_step=lambda: agent.module(probe.batch()))


def probed_with_one_seed():
    probed(seeds=0)


def stepped_by_signs(seeds=None):
    rank = join()
    agent = Agent()
    optimizer = Sign(agent.parameters())

    def reduce_or_scale():
        if seeds is None:
            reduce_gradients(agent.parameters())
        for parameter in agent.parameters():
            assert parameter.grad is not None
            parameter.grad *= 1 if seeds is None else 1 + rank

    train(agent, optimizer, Data(rank if seeds is None else seeds), before_step=reduce_or_scale)


def stepped_by_signs_with_one_seed():
    stepped_by_signs(seeds=0)


def zero_redundancy(through_ddp=True, kind: type[torch.optim.Optimizer] = torch.optim.Adam):
    """PyTorch's ZeRO, which steps each parameter on one rank and sends it; only DDP's forward reduces gradients."""
    data = Data(join())
    agent = DistributedDataParallel(Agent())
    optimizer = ZeroRedundancyOptimizer(agent.parameters(), optimizer_class=kind, lr=0.01)
    train(agent if through_ddp else agent.module, optimizer, data)


def zero_redundancy_past_ddp():
    zero_redundancy(through_ddp=False)


def zero_redundancy_of_plain_steps_past_ddp():
    zero_redundancy(through_ddp=False, kind=torch.optim.SGD)


class ValueNorm(nn.Module):
    """MAPPO's normaliser of values, whose statistics are parameters without gradients."""

    def __init__(self):
        super().__init__()
        self.running_mean = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.running_mean_sq = nn.Parameter(torch.zeros(1), requires_grad=False)

    @torch.no_grad()
    def update(self, values, merged):
        for kept, new in ((self.running_mean, values.mean()), (self.running_mean_sq, values.square().mean())):
            if merged:
                dist.all_reduce(new)
                new /= dist.get_world_size()
            kept.mul_(0.9).add_(0.1 * new)

    def normalize(self, values):
        return (values - self.running_mean) / (self.running_mean_sq - self.running_mean**2 + 1).sqrt()


def value_normalizer(merged=True):
    data, agent, normalizer = Data(join()), Agent(), ValueNorm()
    optimizer = torch.optim.Adam(agent.parameters(), 0.01)
    train(
        agent,
        optimizer,
        data,
        loss=lambda batch: agent(normalizer.normalize(batch)),
        before_step=lambda: reduce_gradients(agent.parameters()),
        after=lambda: normalizer.update(data.batch(), merged),
    )


def value_normalizer_of_its_own():
    value_normalizer(merged=False)


def critic_outside_fsdp():
    data, actor, critic = Data(join()), mlp(2), mlp()
    fully_shard(actor)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 0.01, foreach=False)
    train(actor, optimizer, data, loss=lambda batch: actor(batch).mean() + (critic(batch) - batch.sum()).square())


def replicated_by_dtensor():
    """Replicated parameters and rows of data on each rank: gradients are terms of a sum until the optimiser's step."""
    data = Data(join())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    agent = distribute_module(mlp(), mesh)
    optimizer = torch.optim.Adam(agent.parameters(), 0.01, foreach=False)
    for _ in range(8):
        optimizer.zero_grad()
        agent(DTensor.from_local(data.batch(), mesh, [Shard(0)])).square().mean().backward()
        optimizer.step()


def averaged_twice():
    data, agent = Data(join()), Agent()

    def reduce_twice():
        reduce_gradients(agent.parameters())
        for parameter in agent.parameters():
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()

    train(agent, torch.optim.SGD(agent.parameters(), 0.01), data, before_step=reduce_twice)


if __name__ == "__main__":
    run(globals())
