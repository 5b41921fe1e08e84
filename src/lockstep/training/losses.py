"""Coefficients and terms of the losses of PPO and GRPO, and losses of the user's own; engines have the mathematics."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from lockstep.config.named import named_object

if TYPE_CHECKING:  # the engines' mathematics stands on this module, and on no config
    from lockstep.config.run import Config

TERMS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
REFERENCE_KL = "reference_kl"
SETTING = "ppo.loss"
LossFunction = Callable[[Any], Any]
"""From a :class:`LossSample` to the loss of each of its samples ``[rows]``."""
LOSS = "loss"
"""The term that a loss of the user's own is."""
WANTED = (
    "return the loss of each sample, [rows], and no mean or sum: the mean over all samples of all ranks is taken here"
)


@dataclass(frozen=True)
class LossSample:
    """Holds what a loss of the user's own is computed from: samples of one shard, tensors or arrays of the engine.

    Each is ``[rows]``, float32, unless said; how many rows there are is no matter of the loss. Gradients flow back
    through ``log_prob``, ``entropy``, ``value`` and ``actor_output`` alone.

    Attributes:
        log_prob: of the action that was taken, under the policy that is trained.
        old_log_prob: of it under the policy that took it.
        entropy: of the policy that is trained; of a squashed Gaussian estimated at the action that was taken.
        value: of the critic that is trained; None without a critic (GRPO), as the next two are.
        old_value: of the critic before the update.
        return_: what the value is fitted to.
        advantage: normalised already, as ``ppo.advantage_normalization`` says.
        actor_output: logits or means as the actor gives them ``[rows, outputs]``, then the logarithms of standard
            deviations where they depend on the state, before they are limited; logits of actions that aren't allowed
            are -1e8.
        clip_range: of the config, as are the next three; scheduled ones are those of the iteration, scalars.
        value_clip_range: None where values aren't clipped.
        entropy_coef: weight of the entropy bonus.
        value_coef: weight of the value loss.
        reference_log_prob: under GRPO's reference policy; None where there is none.
        kl_coef: weight of the divergence from it, or 0.
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
        """Computes the loss that is trained without one of your own, of each sample ``[rows]``: PPO's, or GRPO's.

        The clipped surrogate, plus ``value_coef`` times the value loss, minus ``entropy_coef`` times the entropy, plus
        ``kl_coef`` times the divergence from the reference policy. ``dataclasses.replace(sample, …).ppo()`` is that of
        other numbers.
        """
        assert self._ppo is not None, "made by an engine"
        return self._ppo(self)


@dataclass(frozen=True)
class LossSettings:
    """Coefficients of the loss; a scheduled one is a scalar that is traced or on a device.

    Attributes:
        clip_range: of the probability ratio.
        value_clip_range: of values around those before the update; None: none.
        count: valid samples of the global minibatch, by which sums are divided: an int, or a scalar that is traced or
            on a device.
        kl_coef: weight of the divergence from GRPO's reference policy.
        loss: the user's own, in the place of PPO's; None: there is none.
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
        """Makes what the user's loss is called with, of arrays by name; ``ppo`` is the engine's own loss of it."""
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
        """Returns the same coefficients with another count, at which nothing looks if it is a tensor's."""
        return self if isinstance(count, int) and count == self.count else replace(self, count=count)

    def scheduled(self, coefficients: Mapping[str, Any] | None) -> LossSettings:
        """Returns the same with those coefficients, by name, that an iteration has by a schedule."""
        return replace(self, **coefficients) if coefficients else self


def loss_settings(config: Config, count: Any = None) -> LossSettings:
    """Reads the coefficients from a config; ``count`` is by default that of a minibatch whose samples are all valid.

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
    """Finds a loss with its further arguments, the same object every time: compiled code is kept by it."""
    found, arguments = loss_function(name), json.loads(kwargs)
    return partial(found, **arguments) if arguments else found


def loss_function(name: str) -> LossFunction:
    """Finds the function that ``ppo.loss`` names.

    Raises:
        ValueError: there is none, or it can't be called; one line.
    """
    found = named_object(SETTING, name)
    if not callable(found):
        raise ValueError(f"{SETTING}: {name} is {type(found).__name__}, which can't be called; name a function")
    return found


def check_shape(losses: Any, rows: int, array: type) -> None:
    """Raises a one-line ``ValueError`` if what a loss returned isn't an array ``[rows]`` of the engine's kind."""
    if not isinstance(losses, array):
        raise ValueError(f"{SETTING}: it returned {type(losses).__name__}; {WANTED}")
    shape = tuple(losses.shape)
    if shape != (rows,):
        what = "a single number" if shape == () else f"shape {shape}"
        raise ValueError(f"{SETTING}: it returned {what} for {rows} samples; {WANTED}")
