"""A rank of a small script under ``lockstep.attach``: ``python -m attaching CASE`` with torchrun's variables set.

It prints one JSON line for each thing it saw; the tests read them. Every rank meets the others in every check.
"""

import copy
import gc
import hashlib
import io
import json
import sys
import weakref
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.core.errors import RunError
from lockstep.integrations.attach.process_group import communicator

ROWS = 12


def say(what, **facts):
    print(json.dumps({"what": what, **facts}), flush=True)


class Agent(nn.Module):
    """Two heads on one trunk; its losses never come by ``forward``."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.trunk = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.actor, self.critic, self.spare = nn.Linear(16, 2), nn.Linear(16, 1), nn.Linear(16, 1)

    def evaluate(self, x):
        hidden = self.trunk(x)
        return self.actor(hidden), self.critic(hidden)

    def losses(self, x):
        logits, values = self.evaluate(x)
        return logits.pow(2).mean(-1) + (values[:, 0] - x.sum(-1)).pow(2)


def data(seed=1):
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(seed))


class Script:
    """An agent, its optimiser, the handle, and this rank's part of the data."""

    def __init__(self, agent=None, optimizer: Any = torch.optim.SGD, lr=0.1, **options):
        self.rank, self.size = lockstep.join()
        self.agent = agent if agent is not None else Agent(seed=self.rank)  # the first rank's counts
        self.optimizer = optimizer(self.agent.parameters(), lr)
        self.handle = lockstep.attach(self.agent, self.optimizer, **options)
        self.x = data()[self.rank :: self.size]

    def backward(self, loss=None):
        (self.agent.losses(self.x).mean() if loss is None else loss).backward()

    def gradients(self):
        return {name: p.grad.clone() for name, p in self.agent.named_parameters() if p.grad is not None}


@contextmanager
def script(*args, **options):
    made = Script(*args, **options)
    try:
        yield made
    finally:
        made.handle.detach()


def whole(loss=None, dtype=torch.float32):
    """Gradients of one rank that has all data."""
    agent = Agent().to(dtype)
    (agent.losses(data().to(dtype)).mean() if loss is None else loss(agent)).backward()
    return {name: p.grad for name, p in agent.named_parameters() if p.grad is not None}


def gap(a, b):
    """Largest difference of two dicts of tensors; infinite where their names differ."""
    return max(float((a[k] - b[k]).detach().abs().max()) for k in a) if a.keys() == b.keys() else float("inf")


def digest(tensors):
    return hashlib.sha256(
        b"".join(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    )


def fingerprint(agent):
    return digest(agent.state_dict().values()).hexdigest()


def same_on_all_ranks(agent):
    return len(set(communicator().gather_json(fingerprint(agent)))) == 1


def error_of(operation):
    try:
        operation()
    except (RunError, ValueError) as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": None, "text": ""}


def say_error(what, operation):
    say(what, **error_of(operation))


def check_wrapped():
    """An agent in DDP, whose loss goes round its forward: by itself, and attached as it is."""
    with script() as s:
        s.backward()
        expected = s.gradients()
        for what, attached in (("bypassed", False), ("wrapped", True)):
            ddp = DistributedDataParallel(Agent(), broadcast_buffers=False)
            handle = lockstep.attach(ddp, torch.optim.SGD(ddp.parameters(), 0.1)) if attached else None
            ddp.module.losses(s.x).mean().backward()
            found = {name: p.grad for name, p in ddp.module.named_parameters() if p.grad is not None}
            say(what, equal=gap(found, expected) == 0)
            if handle is not None:
                handle.detach()


def check_through_ddp():
    """Losses that go through DDP's forward, and round it."""
    cases: Any = (
        ("mean through ddp", False, "mean", True),
        ("sum through ddp", False, "sum", True),
        ("sum through ddp of its module", False, "sum", False),
        ("bucket view", True, "mean", True),
    )
    for what, view, reduction, wraps in cases:
        net = nn.Linear(4, 1)
        ddp = DistributedDataParallel(net, gradient_as_bucket_view=view)
        handle = lockstep.attach(ddp if wraps else net, reduction=reduction)
        x = torch.full((3, 4), float(handle.rank))
        say_error(what, lambda ddp=ddp, x=x: ddp(x).mean().backward())
        net.zero_grad()
        net(x).mean().backward()
        say(f"{what}, round it", gradient=next(p.grad.mean().item() for p in net.parameters() if p.grad is not None))
        with torch.no_grad():
            ddp(x)
        say_error(f"{what}, of a copy", lambda net=net, x=x: DistributedDataParallel(copy.deepcopy(net))(x))
        handle.detach()
        say_error(f"{what}, detached", lambda ddp=ddp, x=x: ddp(x).mean().backward())


# --- gradients --------------------------------------------------------------------------------------------------


def updates(optimizer, clip, steps=1, attached=True, **options):
    """This rank's agent after some updates by parts, and one rank's by all data."""
    with script(Agent(), optimizer=optimizer, **options) as s:
        alone = Agent()
        its_optimizer = optimizer(alone.parameters(), 0.1)
        if not attached:
            s.handle.detach()
        for step in range(steps):
            for agent, opt, x in (
                (s.agent, s.optimizer, data(step)[s.rank :: s.size]),
                (alone, its_optimizer, data(step)),
            ):
                opt.zero_grad()
                agent.losses(x).mean().backward()
                if clip:
                    nn.utils.clip_grad_norm_(agent.parameters(), clip)
                opt.step()
        equal = same_on_all_ranks(s.agent)
        return gap(dict(s.agent.named_parameters()), dict(alone.named_parameters())), equal


def check_updates():
    for optimizer in (torch.optim.SGD, torch.optim.Adam):
        for clip in (None, 0.05):
            difference, equal = updates(optimizer, clip)
            say(f"update {optimizer.__name__} {clip}", difference=difference, equal=equal)
    difference, equal = updates(torch.optim.SGD, None, attached=False)
    say("update detached", difference=difference, equal=equal)
    difference, equal = updates(torch.optim.SGD, 0.05, steps=20)
    say("updates", difference=difference, equal=equal)


def check_repeats():
    def train(seed):
        with script(Agent(seed), optimizer=torch.optim.Adam) as s:
            for step in range(10):
                s.optimizer.zero_grad()
                s.agent.losses(data(step)[s.rank :: s.size]).mean().backward()
                s.optimizer.step()
            return fingerprint(s.agent)

    say("repeats", first=train(0), second=train(0), other=train(7))


def check_transport():
    def gradients():
        with script() as s:
            s.backward()
            return s.gradients()

    shared, slots = gradients(), communicator().slots
    communicator().slots = None
    try:
        by_backend = gradients()
    finally:
        communicator().slots = slots
    say("transport", shared=slots is not None, difference=gap(shared, by_backend))


def check_sum():
    with script(reduction="sum") as s:
        x = data()[: ROWS // 3] if s.rank == 0 else data()[ROWS // 3 :][s.rank - 1 :: s.size - 1]  # unequal parts
        s.backward(s.agent.losses(x).sum() / ROWS)
        say("sum", difference=gap(s.gradients(), whole()), rows=len(x))


def check_accumulation():
    expected = whole()
    with script() as s:
        s.backward()
        kept = s.agent.actor.weight.grad
        s.backward()
        say(
            "accumulate",
            difference=gap(s.gradients(), {k: 2 * g for k, g in expected.items()}),
            reductions=s.handle.reductions,
        )
        say("accumulate keeps the tensor", same=s.agent.actor.weight.grad is kept)
        nn.utils.clip_grad_norm_(s.agent.parameters(), 0.1)
        clipped = s.gradients()
        s.backward()
        say("accumulate on clipped", difference=gap(s.gradients(), {k: clipped[k] + g for k, g in expected.items()}))
        for to_none in (True, False):
            s.optimizer.zero_grad(set_to_none=to_none)
            s.backward()
            say(f"zeroed {to_none}", difference=gap(s.gradients(), expected))


def check_no_sync():
    expected = whole()
    with script() as s:
        with s.handle.no_sync():
            s.backward()
            s.backward()
            local = s.gradients()
        before = s.handle.reductions
        s.backward()
        say(
            "no_sync",
            difference=gap(s.gradients(), {k: 3 * g for k, g in expected.items()}),
            before=before,
            local=gap(local, {k: 2 * g for k, g in expected.items()}),
        )
        with s.handle.no_sync():
            s.backward()
        s.backward()
        say("no_sync upon reduced", difference=gap(s.gradients(), {k: 5 * g for k, g in expected.items()}))
        for to_none in (True, False):
            with s.handle.no_sync():
                s.backward()
            s.optimizer.zero_grad(set_to_none=to_none)
            s.backward(s.agent.critic(s.agent.trunk(s.x)).mean())
            critic = whole(lambda agent: agent.critic(agent.trunk(data())).mean())
            seen = {k: g for k, g in s.gradients().items() if k in critic}
            left = [float(g.abs().max()) for k, g in s.gradients().items() if k not in critic]
            say(f"no_sync then zeroed {to_none}", difference=gap(seen, critic), left=left)
            s.backward()

    with script() as s:
        s.backward()
        with s.handle.no_sync():
            s.backward()
        nn.utils.clip_grad_norm_(s.agent.parameters(), 1e-3)
        say_error("changed before it is reduced", s.backward)


def check_no_sync_from_none():
    """The first backward pass since gradients were None doesn't reduce; then the script changes or zeroes them."""

    def clipped(s):
        nn.utils.clip_grad_norm_(s.agent.parameters(), 1e-3)

    def replaced(s):
        for p in s.agent.parameters():
            p.grad = None if p.grad is None else p.grad * 0.5

    for what, change in (("changed", clipped), ("replaced", replaced)):
        with script() as s:
            with s.handle.no_sync():
                s.backward()
            change(s)
            say_error(f"{what} before it is reduced, from None", s.backward)
    with script() as s:
        with s.handle.no_sync():
            s.backward()
        s.optimizer.zero_grad(set_to_none=False)
        s.backward()
        say("no_sync from None then zeroed", difference=gap(s.gradients(), whole()))


def check_no_sync_through_ddp():
    net = nn.Linear(4, 1)
    ddp = DistributedDataParallel(net)
    handle = lockstep.attach(ddp)
    x = torch.full((3, 4), float(handle.rank))
    with handle.no_sync(), ddp.no_sync():
        ddp(x).mean().backward()
    ddp(x).mean().backward()
    assert net.weight.grad is not None
    say("no_sync through ddp", gradient=net.weight.grad.mean().item())
    net.zero_grad()
    with handle.no_sync():
        ddp(x).mean().backward()
    say_error("no_sync through ddp alone", ddp(x).mean().backward)
    handle.detach()


def check_unused():
    with script() as s:
        hidden = s.agent.trunk(s.x)
        head = s.agent.actor if s.rank == 0 else s.agent.critic
        s.backward(head(hidden).mean())
        absent = [name for name, p in s.agent.named_parameters() if p.grad is None]
        gathered = communicator().gather_json(digest(s.gradients().values()).hexdigest())
        say("unused", absent=absent, equal=len(set(gathered)) == 1, reductions=s.handle.reductions)


def check_several():
    rank, size = lockstep.join()
    x = data()[rank::size]
    actor, critic = Agent(rank), Agent(10 + rank)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (actor, critic)]
    handle = lockstep.attach([actor, critic], optimizers)
    actor.losses(x).mean().backward()
    only = [name for name, p in critic.named_parameters() if p.grad is not None]
    optimizers[0].step()
    critic.losses(x).mean().backward()
    (actor.losses(x) + critic.losses(x)).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    say(
        "several",
        reductions=handle.reductions,
        critic_before=only,
        equal=same_on_all_ranks(actor) and same_on_all_ranks(critic),
    )
    handle.detach()


def check_ways_to_compute():
    expected = whole()

    def reentrant(s, use_reentrant):
        x = s.x.clone().requires_grad_()
        hidden = checkpoint(s.agent.trunk, x, use_reentrant=use_reentrant)
        logits, values = s.agent.actor(hidden), s.agent.critic(hidden)
        s.backward((logits.pow(2).mean(-1) + (values[:, 0] - x.sum(-1)).pow(2)).mean())

    def retained(s):
        loss = s.agent.losses(s.x).mean()
        loss.backward(retain_graph=True)
        s.optimizer.zero_grad()
        loss.backward()

    def compiled(s):
        losses = torch.compile(s.agent.losses, backend="aot_eager")
        s.backward(losses(s.x).mean())

    def compiled_module(s):
        trunk = torch.compile(s.agent.trunk, backend="aot_eager")
        with torch.no_grad():
            trunk(s.x)
        hidden = trunk(s.x)
        s.backward((s.agent.actor(hidden).pow(2).mean(-1) + (s.agent.critic(hidden)[:, 0] - s.x.sum(-1)).pow(2)).mean())

    def penalised(s):
        """A gradient of a gradient: ``autograd.grad`` inside the loss is no bypass."""
        inner = torch.autograd.grad(s.agent.losses(s.x).mean(), list(s.agent.trunk.parameters()), create_graph=True)
        s.backward(s.agent.losses(s.x).mean() + 0.0 * sum(g.sum() for g in inner))

    ways = {
        "reentrant checkpoint": lambda s: reentrant(s, True),
        "checkpoint": lambda s: reentrant(s, False),
        "retained graph": retained,
        "compiled": compiled,
        "compiled module": compiled_module,
        "penalised": penalised,
    }
    for what, way in ways.items():
        with script() as s:
            way(s)
            s.optimizer.step()
            say(what, difference=gap(s.gradients(), expected), reductions=s.handle.reductions)


def check_scaler():
    with script() as s:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        before, scales = fingerprint(s.agent), []
        for bad in (True, False):
            s.optimizer.zero_grad()
            loss = s.agent.losses(s.x).mean()
            factor = float("inf") if bad and s.rank == s.size - 1 else 1.0  # one rank's loss overflows
            scaler.scale(loss * factor).backward()
            scaler.unscale_(s.optimizer)
            nn.utils.clip_grad_norm_(s.agent.parameters(), 1.0)
            scaler.step(s.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            say(
                f"scaler {bad}",
                scale=scales[-1],
                stepped=fingerprint(s.agent) != before,
                equal=same_on_all_ranks(s.agent),
            )


def check_types():
    for dtype in (torch.bfloat16, torch.float64):
        with script(Agent().to(dtype)) as s:
            s.backward(s.agent.losses(s.x.to(dtype)).mean())
            grads = s.gradients()
            equal = len(set(communicator().gather_json(digest(grads.values()).hexdigest()))) == 1
            exact = whole(dtype=torch.float64)
            relative = max(float((grads[k].double() - exact[k]).norm() / exact[k].norm()) for k in exact)
            say(f"type {dtype}", dtypes=sorted({str(g.dtype) for g in grads.values()}), equal=equal, relative=relative)
    mixed = Agent()
    mixed.critic.double()
    with script(mixed) as s:
        hidden = s.agent.trunk(s.x)
        s.backward(s.agent.actor(hidden).mean().double() + s.agent.critic(hidden.double()).mean())
        say("mixed types", dtypes=sorted({str(g.dtype) for g in s.gradients().values()}))


# --- what is refused --------------------------------------------------------------------------------------------


def bypass(s):
    grads = torch.autograd.grad(s.agent.losses(s.x).mean(), [*s.agent.trunk.parameters()])
    for p, g in zip(s.agent.trunk.parameters(), grads, strict=True):
        p.grad = g
    s.optimizer.step()


def check_bypasses():
    with script() as s:
        say_error("autograd.grad", lambda: bypass(s))
    with script() as s:
        s.backward()
        s.optimizer.step()
        s.optimizer.zero_grad()
        say_error("autograd.grad after a good step", lambda: bypass(s))
    with script() as s:
        s.backward()
        s.optimizer.step()
        say_error("two steps with one gradient", s.optimizer.step)
    with script() as s:
        with s.handle.no_sync():
            s.backward()
        say_error("step before the reduction", s.optimizer.step)
    with script() as s:
        s.agent.spare.weight.requires_grad_(False)
        s.handle.detach()
        s.handle = lockstep.attach(s.agent, s.optimizer)
        s.backward()
        s.optimizer.step()
        s.agent.spare.weight.requires_grad_(True)
        say_error("unfrozen", lambda: s.backward(s.agent.spare(s.agent.trunk(s.x)).mean()))
    with script() as s:
        say_error("replaced module", lambda: setattr(s.agent, "actor", nn.Linear(16, 2)))
        say_error("replaced parameter", lambda: setattr(s.agent.critic, "weight", nn.Parameter(torch.zeros(1, 16))))
        say_error(
            "added to the optimiser", lambda: s.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        )
        s.backward()
        s.optimizer.param_groups[-1]["params"][0].grad = torch.ones(3)
        say_error("stepped though added", s.optimizer.step)

    def step_inside(s, optimizer_known):
        if not optimizer_known:
            s.handle.detach()
            s.handle = lockstep.attach(s.agent)

        def step(_):
            s.optimizer.step()
            s.optimizer.zero_grad()

        s.agent.actor.weight.register_post_accumulate_grad_hook(step)
        s.backward()

    for known in (True, False):
        with script() as s:
            say_error(f"step inside of backward {known}", lambda s=s, known=known: step_inside(s, known))


def check_modules():
    rank, _ = lockstep.join()
    agent = Agent()
    with script(agent) as s:
        say_error("attached twice", lambda: lockstep.attach(agent))
        say_error("copy", lambda: copy.deepcopy(agent).losses(s.x).mean().backward())
        buffer = io.BytesIO()
        torch.save(agent.state_dict(), buffer)
    say_error("attached again after detach", lambda: lockstep.attach(agent).detach())
    say_error("ddp", lambda: lockstep.attach(nn.Sequential(DistributedDataParallel(Agent()))))
    say_error("other optimiser", lambda: lockstep.attach(Agent(), torch.optim.SGD(Agent().parameters(), 0.1)))
    unknown: Any = "median"
    say_error("reduction", lambda: lockstep.attach(Agent(), reduction=unknown))
    say_error("complex", lambda: lockstep.attach(nn.Linear(2, 2, dtype=torch.complex64)))
    say_error("nothing to train", lambda: lockstep.attach(nn.Tanh()))
    say_error("other shapes", lambda: lockstep.attach(nn.Linear(2, 2 + rank)))
    say_error("other count", lambda: lockstep.attach(nn.Linear(2, 2, bias=rank == 0)))
    say_error("other learning rate", lambda: Script(lr=0.1 * (1 + rank)))
    state = Agent()
    optimizer = torch.optim.Adam(state.parameters())
    if rank == 0:
        state.losses(data()).mean().backward()
        optimizer.step()
    say_error("other optimiser state", lambda: lockstep.attach(state, optimizer))
    embedding = nn.Embedding(4, 2, sparse=True)
    handle = lockstep.attach(embedding)
    say_error("sparse", lambda: embedding(torch.tensor([1, 2])).sum().backward())
    handle.detach()


def check_out_of_step():
    with script() as s:
        with s.handle.no_sync():
            for _ in range(s.rank):
                s.backward()
        say_error("other number of backward passes", s.backward)
    with script() as s:
        s.backward()
        if s.rank == 0:
            s.optimizer.step()
        say_error("other number of steps", s.backward)

    def rollout(s, under_eval=False):
        s.agent.train(not under_eval)
        with torch.no_grad():
            s.agent.evaluate(s.x)
        s.agent.train()

    def local_stop(check, under_eval=False):
        """The last rank has left its epochs, as after a local KL stop, and collects the next rollout."""
        with script(check_phases=check) as s:
            for _ in range(2):
                rollout(s, under_eval)
                s.backward()
                s.optimizer.step()
                s.optimizer.zero_grad()
            if s.rank == s.size - 1:
                rollout(s, under_eval)
            return error_of(s.backward)

    say("local stop", **local_stop(True))
    say("local stop unchecked", **local_stop(False))
    say("local stop under eval", **local_stop(True, under_eval=True))
    with script() as s:
        if s.rank == 0:
            rollout(s, under_eval=True)
        rollout(s)
        s.backward()
        if s.rank == 0:
            rollout(s, under_eval=True)
        say_error("one rank evaluates, then again", s.backward)
    with script() as s:
        if s.rank == 0:
            s.agent.eval()
            with torch.no_grad():
                s.agent.evaluate(s.x)
            s.agent.train()
        say_error("one rank evaluates", s.backward)
    with script() as s:
        say_error("another place", s.backward if s.rank == 0 else lambda: lockstep.stop_if(False))
    with script() as s:
        say_error(
            "another companion", (lambda: lockstep.all_mean(1.0)) if s.rank == 0 else lambda: lockstep.stop_if(True)
        )
        say_error("another shape", lambda: lockstep.all_mean(torch.ones(2 + s.rank)))
        say_error("back in step", s.backward)


def check_rates():
    """Learning rates that one rank changes by its own data, and some that all ranks change alike."""

    def update(s):
        s.backward()
        s.optimizer.step()
        s.optimizer.zero_grad()

    def rate(s, value):
        for group in s.optimizer.param_groups:
            group["lr"] = value

    with script() as s:
        update(s)
        rate(s, 0.2 if s.rank == 0 else 0.3)
        say_error("other rate", s.backward)
    with script() as s:
        s.backward()
        rate(s, 0.2 if s.rank == 0 else 0.3)
        s.optimizer.step()
        rate(s, 0.1)
        say_error("other rate for one step", s.backward)
    with script(lr=torch.tensor(0.1)) as s:
        update(s)
        s.optimizer.param_groups[0]["lr"].fill_(0.2 if s.rank == 0 else 0.3)
        say_error("other rate in a tensor", s.backward)

    def together(optimizer: Any = torch.optim.Adam, lr: Any = 0.1):
        with script(optimizer=optimizer, lr=lr) as s:
            schedule = torch.optim.lr_scheduler.ExponentialLR(s.optimizer, 0.5)
            for _ in range(3):
                update(s)
                schedule.step()
            s.backward()
            schedule.step()
            s.optimizer.step()
            rate(s, 0.01 if lockstep.all_mean(float(s.rank)) > 0.1 else 0.02)
            update(s)
            assert same_on_all_ranks(s.agent)

    def two_groups(parameters, lr):
        first, *others = parameters
        return torch.optim.Adam([{"params": [first], "lr": lr / 10}, {"params": others}], lr)

    def closures():
        with script(optimizer=lambda parameters, lr: torch.optim.LBFGS(parameters, lr, max_iter=4)) as s:
            schedule = torch.optim.lr_scheduler.ExponentialLR(s.optimizer, 0.5)

            def closure():
                s.optimizer.zero_grad()
                loss = s.agent.losses(s.x).mean()
                loss.backward()
                return lockstep.all_mean(loss.detach())

            for _ in range(3):
                s.optimizer.step(closure)
                schedule.step()
            assert same_on_all_ranks(s.agent)

    say_error("rates together", together)
    say_error("rates together, in a tensor", lambda: together(lr=torch.tensor(0.1)))
    say_error("rates together, two groups", lambda: together(two_groups))
    say_error("rates together, closures", closures)
    with script() as s:  # two hosts' rounding
        update(s)
        rate(s, 0.1 * (1 + 1e-15 * s.rank))
        say_error("rates rounded", s.backward)


# --- buffers, companions, the end ---------------------------------------------------------------------------------


def check_buffers():
    for follow in (True, False):
        rank, size = lockstep.join()
        torch.manual_seed(rank)
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        net.get_buffer("1.running_mean").add_(rank)
        handle = lockstep.attach(net, broadcast_buffers=follow)
        started = same_on_all_ranks(net)
        net(data()[rank::size]).mean().backward()
        say(
            f"buffers {follow}",
            started=started,
            after=same_on_all_ranks(net),
            counted=int(net.get_buffer("1.num_batches_tracked")),
        )
        handle.detach()


def check_expanded():
    """Buffers whose elements share memory, as position ids and masks do, and a sparse one that nobody broadcasts."""
    rank, size = lockstep.join()
    net = nn.Linear(4, 1)
    net.register_buffer("mask", torch.full((1, 3), float(rank)).expand(4, 3))
    net.register_buffer("rows", torch.arange(3).add(rank).unsqueeze(0).expand(2, 3))
    handle = lockstep.attach(net)
    net(data()[rank::size]).mean().backward()
    said = {name: buffer.tolist() for name, buffer in net.named_buffers()}
    handle.detach()
    net.register_buffer("pairs", torch.eye(2).to_sparse())
    lockstep.attach(net, broadcast_buffers=False).detach()
    say("expanded", **said)


def check_large():
    """Weights and buffers of more than the slots through which they travel; wrong ones would be alike."""

    def made(seed):
        generator = torch.Generator().manual_seed(seed)
        net = nn.Linear(1300, 1000)  # 5.2 MB
        net.weight.data.copy_(torch.randn(1000, 1300, generator=generator))
        net.register_buffer("table", torch.randn(1_000_000, generator=generator))
        return net

    rank, _ = lockstep.join()
    net, wanted, other = made(rank), made(0), made(1)
    handle = lockstep.attach(net)
    found = {name: float((net.get_parameter(name) != p).sum()) for name, p in wanted.named_parameters()}
    found["table"] = float((net.get_buffer("table") != wanted.get_buffer("table")).sum())
    found.pop("bias")
    say("large", wrong=found, equal=same_on_all_ranks(net))
    say("large of another seed", wrong=float((net.weight != other.weight).sum()))
    handle.detach()


def check_companions():
    import numpy as np

    rank, size = lockstep.join()
    mean = (size - 1) / 2
    given = {
        "float": float(rank),
        "int": rank,
        "tensor": torch.tensor([[float(rank), 1.0]], dtype=torch.float32),
        "scalar tensor": torch.tensor(float(rank), dtype=torch.bfloat16),
        "array": np.array([rank, 2.0], dtype=np.float32),
        "numpy scalar": np.float32(rank),
    }
    for name, x in given.items():
        result = lockstep.all_mean(x)
        value = result.tolist() if hasattr(result, "tolist") else result
        say(f"all_mean {name}", value=value, kind=f"{type(result).__name__} {getattr(result, 'dtype', '')}".strip())
    say("mean", value=mean)
    say_error("all_mean of integers", lambda: lockstep.all_mean(torch.tensor([1, 2])))
    x = data(5).flatten() * 3 + 7
    parts = x.split([5, len(x) - 5, *[0] * (size - 2)])  # unequal; the third rank has none
    result = lockstep.normalize(parts[rank])
    expected = ((x - x.mean()) / (x.std() + 1e-8)).split([len(p) for p in parts])[rank]
    say("normalize", difference=float((result - expected).abs().max()) if len(result) else 0.0, n=len(result))
    local = (parts[0] - parts[0].mean()) / (parts[0].std() + 1e-8)
    say("normalize locally", difference=float((local - ((x - x.mean()) / x.std())[:5]).abs().max()))
    as_array = lockstep.normalize(parts[rank].double().numpy())
    say("normalize array", kind=f"{type(as_array).__name__} {as_array.dtype}")
    say_error("normalize one", lambda: lockstep.normalize(torch.ones(1 if rank == 0 else 0)))
    say("stop_if", one=lockstep.stop_if(rank == size - 1), none=lockstep.stop_if(False))
    say(
        "who",
        seed=lockstep.shard_seed(3),
        other=lockstep.shard_seed(4),
        first=lockstep.shard_seed(3, rank=0),
        writer=lockstep.is_writer(),
    )


def check_forgotten():
    """What nobody holds any more, without ``detach``; and what is attached by its module or optimiser alone."""

    def made():
        s = Script(optimizer=torch.optim.Adam)
        with torch.no_grad():
            s.agent.evaluate(s.x)
        s.backward()
        s.optimizer.step()
        return s.agent, s.optimizer, weakref.ref(s.handle)

    left = [weakref.ref(each) for _ in range(2) for each in made()[:2]]
    gc.collect()
    say("forgotten", alive=sum(each() is not None for each in left))
    for what in ("module", "optimizer"):
        agent, optimizer, handle = made()
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        if what == "module":
            del optimizer
        else:
            del agent
        gc.collect()
        rank = lockstep.join()[0]
        loss = torch.stack([(rank + 1) * p.sum() for p in trained]).sum()
        before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained]
        loss.backward()
        mean = sum(range(1, lockstep.join()[1] + 1)) / lockstep.join()[1]
        gap = max(float((p.grad - old - mean).abs().max()) for p, old in zip(trained, before, strict=True))
        say(f"kept by its {what}", difference=gap)
        if what == "module":
            say_error("replaced module, kept", lambda agent=agent: setattr(agent, "actor", nn.Linear(16, 2)))
        attached = handle()
        assert attached is not None
        attached.detach()


def check_end():
    """The last rank ends while the others wait for it."""
    s = Script()
    s.backward()
    if s.rank < s.size - 1:
        say_error("a rank has ended", s.backward)


def everything():
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()


def own_group():
    """The script has opened a process group of its own, and uses it in between."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    with script() as s:
        own = torch.ones(3) * s.rank
        dist.all_reduce(own)
        s.backward()
        dist.all_reduce(own)
        say("own group", sum=own.tolist(), difference=gap(s.gradients(), whole()))
    dist.destroy_process_group()


torch.set_num_threads(1)
{"everything": everything, "own_group": own_group}[sys.argv[1]]()
