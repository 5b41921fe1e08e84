"""Tries a user's own loss on made-up samples before training."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields

import numpy as np

from lockstep.core.user_code.errors import error_line, users_error, users_line
from lockstep.training.losses import SETTING, LossSample

TRAINED = ("log_prob", "entropy", "value", "actor_output")
"""Fields of a sample through which the networks are trained."""
PLAIN = 5
"""Number of leading samples on which any loss must be finite; two more if the actor has as many outputs."""
WIDE = 16
"""Number of samples after them that are farther from the old policy, of either sign; any loss is allowed there."""
FAR = 8
"""Number of samples after those with large values, up to thousands, and so large errors."""
Losses = np.ndarray
"""The loss of each sample ``[rows]``."""
Gradients = Mapping[str, np.ndarray]
"""Gradients of the losses' sum by :data:`TRAINED`, each ``[rows]`` or ``[rows, outputs]``; only those that exist."""
TryOut = Callable[[slice], tuple[Losses, Gradients]]
"""Computes losses and gradients of a slice of the made-up samples."""


def plain_samples(outputs: int) -> slice:
    """Returns the slice of made-up samples on which a loss must be finite, for an actor with ``outputs`` outputs."""
    return slice(0, PLAIN if outputs not in (PLAIN, PLAIN + WIDE + FAR) else PLAIN + 2)


def made_up_samples(outputs: int, critic: bool, reference: bool) -> dict[str, np.ndarray | None]:
    """Makes up the arrays of some samples, float32 by the names of a sample's fields, the same every time.

    The number of rows differs from ``outputs``, so that the two can't be confused. In the first rows, see
    :func:`plain_samples`, values and returns are positive, because a loss may take their logarithm. The policy of the
    very first row is the old one, as that of all samples at the first optimiser step.
    """
    plain, draws = plain_samples(outputs).stop, np.random.Generator(np.random.Philox(0))
    rows = plain + WIDE + FAR
    wide = np.arange(rows) >= plain
    sizes = np.where(wide, 2.0, 1.0)
    sizes[-FAR:] = np.geomspace(10.0, 3000.0, FAR)

    def normal(*shape: int) -> np.ndarray:
        return draws.standard_normal((rows, *shape)).astype(np.float32)

    def positive_where_plain() -> np.ndarray:
        drawn = normal()
        return np.where(wide, sizes * drawn, 0.1 + np.abs(drawn)).astype(np.float32)

    log_prob = -0.1 - np.abs(normal())
    changes = normal() * np.where(wide, 0.8, 0.05).astype(np.float32)
    changes[0] = 0.0
    out: dict[str, np.ndarray | None] = {
        "log_prob": log_prob,
        "old_log_prob": log_prob + changes,
        "entropy": 0.1 + np.abs(normal()),
        "advantage": normal(),
        "actor_output": normal(outputs),
    }
    for name in ("value", "old_value", "return_"):
        out[name] = positive_where_plain() if critic else None
    out["reference_log_prob"] = log_prob + 0.05 * normal() if reference else None
    return out


def check_loss(name: str, outputs: int, try_out: TryOut) -> tuple[Losses, Gradients]:
    """Tries a loss on made-up samples.

    Args:
        name: the loss's name in the config.
        outputs: number of the actor's outputs.
        try_out: computes losses and gradients of some samples.

    Returns:
        The losses and gradients of all made-up samples.

    Raises:
        ValueError: it raises, doesn't return a finite loss of each sample, depends on other samples, or depends on
            nothing that is trained; one line, with the place in the user's code if there is one.
    """
    plain, some = plain_samples(outputs), slice(0, 3)
    try:
        losses, gradients = try_out(slice(None))
        again, alone = try_out(slice(None))[0], try_out(some)[0]
    except Exception as error:  # raised by the user's code
        if str(error).startswith(SETTING):
            raise ValueError(str(error).replace(f"{SETTING}: it", f"{SETTING}: {name}", 1)) from None
        cause = users_error(error) or error
        raise ValueError(f"{SETTING}: {name}: {error_line(error)}{users_line(error)}{hint(error)}") from cause
    if not np.array_equal(losses, again, equal_nan=True):
        raise ValueError(
            f"{SETTING}: {name} gave other numbers when it was called again with the same samples; a loss must be a "
            "function of its sample alone, without numbers drawn or kept"
        )
    if not np.allclose(losses[some], alone, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise ValueError(
            f"{SETTING}: {name} gave {losses[some].tolist()} for three samples among others and {alone.tolist()} for "
            "the three alone; a sample's loss must come from that sample's numbers, without a mean or a sum over rows "
            "(advantages are normalised already)"
        )
    if not np.isfinite(losses[plain]).all():
        raise ValueError(f"{SETTING}: {name} gave {losses[plain].tolist()} of made-up samples, which isn't finite")
    broken = [field for field, x in gradients.items() if not np.isfinite(x[plain]).all()]
    if broken:
        raise ValueError(
            f"{SETTING}: the gradient of {name} by {' and '.join(broken)} isn't finite on made-up samples, as that of "
            "a root at 0; at the first step log_prob is old_log_prob, and their difference 0"
        )
    if not any(gradient[plain].any() for gradient in gradients.values()):
        raise ValueError(
            f"{SETTING}: {name} has no gradient: what it returns doesn't depend on {', '.join(TRAINED[:-1])} or "
            f"{TRAINED[-1]}, or was detached from them"
        )
    return losses, gradients


# --- what may have been meant -----------------------------------------------------------------------------------------

NAMES_OF = {
    "log_prob": "newlogprob new_logprob newlogprobs new_log_prob curr_log_prob",
    "old_log_prob": "logprob logprobs log_probs oldlogprob old_logprob old_log_probs actions_log_prob",
    "value": "newvalue new_value newvalues vpred values_pred",
    "old_value": "values old_values oldvalue target_values",
    "return_": "return returns ret target targets target_return",
    "advantage": "advantages adv",
    "actor_output": "logits mean action_mean mu",
    "entropy": "entropies entropy_loss",
    "clip_range": "clip_coef clip_param clip_eps",
    "value_clip_range": "clip_range_vf",
    "entropy_coef": "ent_coef entropy_beta",
    "value_coef": "vf_coef value_loss_coef",
    "log_prob and old_log_prob, whose difference is its logarithm": "ratio",
    "log_prob and old_log_prob, whose difference it is": "logratio log_ratio",
}
"""Names of a sample's fields in other programs. In CleanRL the plain name is that of what the rollout collected."""
ELSEWHERE = {name: field for field, names in NAMES_OF.items() for name in names.split()}
UNKNOWN = "obs observation observations action actions rewards dones state next_obs"
"""Things that a loss doesn't get."""
HINTS = (
    ("TracerBoolConversionError", "choose by jax.numpy.where instead of by if, and, or"),
    ("TracerArrayConversionError", "compute with jax.numpy instead of numpy"),
    ("ConcretizationTypeError", "a number can't be taken out of an array that is traced; compute with the array"),
    ("Tracer' object has no attribute", "the arrays are JAX's; compute with jax.numpy"),
    ("got <class 'torch.Tensor'>", "the arrays are PyTorch's; compute with torch"),
    ("Boolean value of Tensor", "choose by torch.where instead of by if, and, or"),
    ("Can't call numpy()", "compute with torch instead of numpy, for the gradient"),
)
"""Parts of an error's class or text, with what to do instead."""


def hint(error: BaseException) -> str:
    """Suggests what a loss that raised may have meant; begins with a semicolon, or is ``""``."""
    if isinstance(error, AttributeError) and isinstance(error.obj, LossSample):
        names = [field.name for field in fields(LossSample) if not field.name.startswith("_")]
        asked = (error.name or "").lower().removeprefix("b_").removeprefix("mb_")
        close = difflib.get_close_matches(asked, names, 1, cutoff=0.75)
        meant = ELSEWHERE.get(asked) or (asked if asked in names else close[0] if close else None)
        if asked in UNKNOWN.split():
            return "; a loss gets no observations, actions or rewards, but what networks and environments made of them"
        return f"; it has {', '.join(names)}" if meant is None else f"; it is {meant} here"
    if isinstance(error, NameError) and error.name in ("args", "self", "config"):
        return "; numbers of the config are the sample's, as sample.clip_range, others are ppo.loss_kwargs"
    text = f"{type(error).__mro__} {error}"
    return next((f"; {instead}" for part, instead in HINTS if part in text), "")
