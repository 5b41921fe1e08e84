"""Tries a user's own loss on made-up samples before training starts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.torch_engine.losses import ppo_loss
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.training.losses import check_shape, loss_settings
from lockstep.training.own_loss.fingerprint import Fingerprint, loss_fingerprint
from lockstep.training.own_loss.trial import TRAINED, check_loss, made_up_samples
from lockstep.training.schedules import scheduled_coefficients


def check_own_loss(config: Config, net: PolicyNet) -> Fingerprint | None:
    """Tries the loss that the config names on made-up samples; raises what :func:`check_loss` raises.

    Returns:
        The loss's fingerprint; None if the config names no loss.
    """
    if config.ppo.loss is None:
        return None
    scheduled = {name: torch.tensor(x) for name, x in scheduled_coefficients(config, 0).items()}
    settings = loss_settings(config).scheduled(scheduled)
    loss = settings.loss
    assert loss is not None

    def try_out(rows: slice) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        made_up = made_up_samples(net.outputs, net.critic, bool(settings.kl_coef))
        given: dict[str, Any] = {name: None if x is None else torch.from_numpy(x[rows]) for name, x in made_up.items()}
        trained: list[tuple[str, Tensor]] = []
        for name in TRAINED:
            if given[name] is not None:
                trained.append((name, given[name].requires_grad_()))
        with torch.enable_grad():
            losses = loss(settings.sample(ppo_loss, **given))
            check_shape(losses, len(given["log_prob"]), Tensor)
            total = losses.sum()
        if not total.requires_grad:
            return losses.numpy(), {}
        leaves = [leaf for _, leaf in trained]
        gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return losses.detach().numpy(), {name: x.numpy() for (name, _), x in zip(trained, gradients, strict=True)}

    return loss_fingerprint(loss, *check_loss(config.ppo.loss, net.outputs, try_out))
