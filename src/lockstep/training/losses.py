"""Coefficients and terms of the losses of PPO and GRPO, and users' own losses; the engines have the mathematics."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from lockstep.core.user_code.named import named_object

if TYPE_CHECKING:  # the engines' mathematics imports this module, but no config
    from lockstep.config.run import Config

TERMS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
REFERENCE_KL = "reference_kl"
SETTING = "ppo.loss"
LossFunction = Callable[[Any], Any]
"""Maps a :class:`LossSample` to the loss of each of its samples ``[rows]``."""
LOSS = "loss"
"""The loss term that a user's own loss adds."""
WANTED = (
    "return the loss of each sample, [rows], and no mean or sum: the mean over all samples of all ranks is taken here"
)


@dataclass(frozen=True)
class LossSample:
    """Holds what a user's own loss is computed from: samples of one shard, as tensors or arrays of the engine.

    Each is ``[rows]``, float32, unless stated otherwise; a loss must not depend on the number of rows. Gradients flow
    back through ``log_prob``, ``entropy``, ``value`` and ``actor_output`` only.

    Attributes:
        log_prob: log-probability of the action that was taken, under the policy being trained.
        old_log_prob: the same under the policy that took it.
        entropy: entropy of the policy being trained; for a squashed Gaussian estimated at the action that was taken.
        value: value from the critic being trained; None without a critic (GRPO), as are the next two.
        old_value: value from the critic before the update.
        return_: what the value is fitted to.
        advantage: already normalised, as ``ppo.advantage_normalization`` says.
        actor_output: logits or means as the actor outputs them ``[rows, outputs]``, followed by the log standard
            deviations if they depend on the state, before they are clamped; logits of forbidden actions are -1e8.
        clip_range: the config's, as are the next three; a scheduled one is that of the iteration, a scalar.
        value_clip_range: None if values aren't clipped.
        entropy_coef: weight of the entropy bonus.
        value_coef: weight of the value loss.
        reference_log_prob: log-probability under GRPO's reference policy; None without one.
        kl_coef: weight of the divergence from the reference policy, or 0.
    """

    log_prob: Any
    old_log_prob: Any
    entropy: Any
    value: Any
    old_value: Any
    return_: Any
    advantage: Any
    actor_output: Any
    clip_range: Any
    value_clip_range: Any
    entropy_coef: Any
    value_coef: float
    reference_log_prob: Any = None
    kl_coef: float = 0.0
    _ppo: Callable[[LossSample], Any] | None = field(default=None, repr=False)

    def ppo(self) -> Any:
        """Computes the built-in loss of each sample ``[rows]``: PPO's, or GRPO's.

        It is the clipped surrogate, plus ``value_coef`` times the value loss, minus ``entropy_coef`` times the entropy,
        plus ``kl_coef`` times the divergence from the reference policy. ``dataclasses.replace(sample, …).ppo()``
        computes it from other numbers.
        """
        assert self._ppo is not None, "made by an engine"
        return self._ppo(self)


@dataclass(frozen=True)
class LossSettings:
    """Coefficients of the loss; a scheduled one is a scalar that is traced or on a device.

    Attributes:
        clip_range: clipping range of the probability ratio.
        value_clip_range: clipping range of values around those before the update; None: not clipped.
        count: valid samples of the global minibatch, by which sums are divided: an int, or a scalar that is traced or
            on a device.
        kl_coef: weight of the divergence from GRPO's reference policy.
        loss: the user's own loss in place of PPO's, or None.
    """

    clip_range: Any
    value_clip_range: Any
    entropy_coef: Any
    value_coef: float
    count: Any
    kl_coef: float = 0.0
    loss: LossFunction | None = None

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the loss terms, in order."""
        terms = (*TERMS, REFERENCE_KL) if self.kl_coef else TERMS
        return (*terms, LOSS) if self.loss is not None else terms

    def sample(self, ppo: Callable[[LossSample], Any], **arrays: Any) -> LossSample:
        """Makes the sample that the user's loss is called with, from arrays by name; ``ppo`` is the engine's loss."""
        return LossSample(
            **arrays,
            clip_range=self.clip_range,
            value_clip_range=self.value_clip_range,
            entropy_coef=self.entropy_coef,
            value_coef=self.value_coef,
            kl_coef=self.kl_coef,
            _ppo=ppo,
        )

    def counting(self, count: Any) -> LossSettings:
        """Returns the same coefficients with another count; a count on a device isn't read."""
        return self if isinstance(count, int) and count == self.count else replace(self, count=count)

    def scheduled(self, coefficients: Mapping[str, Any] | None) -> LossSettings:
        """Replaces the coefficients that an iteration has by a schedule, given by name."""
        return replace(self, **coefficients) if coefficients else self


def loss_settings(config: Config, count: Any = None) -> LossSettings:
    """Returns a config's coefficients; ``count`` defaults to that of a minibatch whose samples are all valid.

    Raises:
        ValueError: the user's own loss can't be found; one line.
    """
    ppo = config.ppo
    return LossSettings(
        clip_range=ppo.clip_range,
        value_clip_range=ppo.value_clip_range,
        entropy_coef=ppo.entropy_coef,
        value_coef=ppo.value_coef,
        count=config.steps_per_iteration // ppo.num_minibatches if count is None else count,
        kl_coef=config.grpo.kl_coef if config.algorithm == "grpo" else 0.0,
        loss=None if ppo.loss is None else _called_with(ppo.loss, json.dumps(ppo.loss_kwargs)),
    )


# --- losses of the user's own -----------------------------------------------------------------------------------------


@cache
def _called_with(name: str, kwargs: str) -> LossFunction:
    """Returns a loss with its further arguments; the same object every time, because compiled code is cached by it."""
    found, arguments = loss_function(name), json.loads(kwargs)
    return partial(found, **arguments) if arguments else found


def loss_function(name: str) -> LossFunction:
    """Returns the function that ``ppo.loss`` names.

    Raises:
        ValueError: it doesn't exist or can't be called; one line.
    """
    found = named_object(SETTING, name)
    if not callable(found):
        raise ValueError(f"{SETTING}: {name} is {type(found).__name__}, which can't be called; name a function")
    return found


def check_shape(losses: Any, rows: int, array: type) -> None:
    """Raises a one-line ``ValueError`` unless what a loss returned is an array ``[rows]`` of the engine's kind."""
    if not isinstance(losses, array):
        raise ValueError(f"{SETTING}: it returned {type(losses).__name__}; {WANTED}")
    shape = tuple(losses.shape)
    if shape != (rows,):
        what = "a single number" if shape == () else f"shape {shape}"
        raise ValueError(f"{SETTING}: it returned {what} for {rows} samples; {WANTED}")
