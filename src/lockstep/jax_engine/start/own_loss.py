"""Tries a user's own loss on made-up samples before training starts."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array

from lockstep.config.run import Config
from lockstep.jax_engine.losses import ppo_loss
from lockstep.jax_engine.nets.nets import PolicyNet
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
    settings = loss_settings(config)
    loss = settings.loss
    assert loss is not None
    made_up = made_up_samples(net.outputs, net.critic, bool(settings.kl_coef))
    coefficients = {name: np.float32(x) for name, x in scheduled_coefficients(config, 0).items()}

    def total(trained: dict[str, Any], given: dict[str, Any], coefficients: dict[str, Any]) -> tuple[Array, Array]:
        losses = loss(settings.scheduled(coefficients).sample(ppo_loss, **given | trained))
        check_shape(losses, len(given["log_prob"]), Array)
        return losses.sum(), losses

    def try_out(rows: slice) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        given = {name: None if x is None else x[rows] for name, x in made_up.items()}
        trained = {name: given[name] for name in TRAINED if given[name] is not None}
        compute = jax.jit(lambda *given: jax.grad(total, has_aux=True)(*given))  # a new one: jit reuses no trace then
        gradients, losses = compute(trained, given, coefficients)
        return np.asarray(losses), {name: np.asarray(x) for name, x in gradients.items()}

    return loss_fingerprint(loss, *check_loss(config.ppo.loss, net.outputs, try_out))
