"""Losses of the user's own that reproduce PPO's and GRPO's have the reference's numbers and gradients."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
import users_losses

from lockstep import reference
from lockstep.jax_engine import losses as jax_losses
from lockstep.torch_engine import losses as torch_losses
from lockstep.training.losses import TERMS, LossSettings

ROWS, OUTPUTS = 24, 3
TRAINED = ("log_prob", "entropy", "values", "actor_output")
PPO: dict[str, Any] = {"clip_range": 0.2, "value_clip_range": 0.1, "entropy_coef": 0.02, "value_coef": 0.7, "count": 40}
GRPO = PPO | {"value_clip_range": None, "kl_coef": 0.3}


def samples(critic: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    names = ("old_log_prob", "entropy", "advantages", *(("values", "old_values", "returns") if critic else ()))
    out = {name: rng.normal(size=ROWS).astype(np.float32) for name in names}
    out["log_prob"] = out["old_log_prob"] + rng.uniform(-0.5, 0.5, ROWS).astype(np.float32)
    out["actor_output"] = rng.normal(size=(ROWS, OUTPUTS)).astype(np.float32)
    out["valid"] = (rng.random(ROWS) < 0.7).astype(np.float32)
    if not critic:
        out["reference_log_prob"] = out["log_prob"] + 0.1
    return out


def by_torch(x: dict[str, np.ndarray], settings: LossSettings) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Terms with the loss as the last one, and gradients, of two shards with half of the samples each."""
    given = {name: torch.from_numpy(a.copy()).unflatten(0, (2, ROWS // 2)) for name, a in x.items()}
    trained = {name: given[name].requires_grad_() for name in TRAINED if name in given}
    missing: dict[str, Any] = dict.fromkeys({"values", "old_values", "returns"} - given.keys())
    loss, terms = torch_losses.loss_and_terms(**given, **missing, settings=settings)
    gradients = torch.autograd.grad(loss.sum(), list(trained.values()), materialize_grads=True)
    named = zip(trained, gradients, strict=True)
    return torch.cat([terms.sum(0), loss.sum()[None]]).detach().numpy(), {k: g.flatten(0, 1).numpy() for k, g in named}


def by_jax(x: dict[str, np.ndarray], settings: LossSettings) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    trained = {name: x[name] for name in TRAINED if name in x}
    missing: dict[str, Any] = dict.fromkeys({"values", "old_values", "returns"} - x.keys())

    def loss(trained: Any) -> Any:
        return jax_losses.loss_and_terms(**(x | trained), **missing, settings=settings)

    (total, terms), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained)
    return np.array([*terms, total]), {name: np.asarray(g) for name, g in gradients.items()}


def expected(x: dict[str, np.ndarray], settings: dict[str, Any]) -> dict[str, float]:
    kept = {name: a[x["valid"] > 0] for name, a in x.items()}
    names = ("log_prob", "old_log_prob", "advantages")
    if "values" in x:
        return reference.ppo_loss(
            *(kept[n] for n in (*names, "values", "old_values", "returns", "entropy")), **settings
        )
    rest = {name: a for name, a in settings.items() if name not in ("value_clip_range", "value_coef")}
    given = (x[n] for n in (*names, "valid", "entropy"))
    return reference.grpo_loss(*given, reference_log_prob=x["reference_log_prob"], **rest)


@pytest.mark.parametrize("by", [by_torch, by_jax], ids=["torch", "jax"])
@pytest.mark.parametrize("coefficients", [PPO, GRPO], ids=["PPO", "GRPO"])
def test_the_engines_own_loss_by_name_is_the_references_and_has_its_gradients(by, coefficients):
    x = samples(critic=coefficients is PPO)
    terms, gradients = by(x, LossSettings(**coefficients, loss=users_losses.same))
    without, others = by(x, LossSettings(**coefficients))
    wanted = expected(x, coefficients)
    np.testing.assert_allclose(terms[:-2], without[:-1], rtol=1e-6)  # as they are without it
    assert terms[-2] == pytest.approx(terms[-1]) == pytest.approx(wanted["loss"], rel=1e-5)
    assert terms[:5].tolist() == pytest.approx([wanted.get(name, 0.0) for name in TERMS], rel=1e-4, abs=1e-6)
    for name in gradients:
        np.testing.assert_allclose(gradients[name], others[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert not gradients["actor_output"].any()


@pytest.mark.parametrize("by", [by_torch, by_jax], ids=["torch", "jax"])
def test_other_losses_are_what_they_say(by):
    x = samples(critic=True)
    kept, count = x["valid"] > 0, PPO["count"]
    terms, gradients = by(x, LossSettings(**PPO, loss=users_losses.penalised))
    penalty = 1e-2 * (x["actor_output"] ** 2).sum(-1)[kept].sum() / count
    assert terms[-1] == pytest.approx(expected(x, PPO)["loss"] + penalty, rel=1e-5)
    wanted = 2e-2 * x["actor_output"] * x["valid"][:, None] / count
    np.testing.assert_allclose(gradients["actor_output"], wanted, rtol=1e-5, atol=1e-8)
    terms, gradients = by(x, LossSettings(**PPO, loss=users_losses.policy_gradient))
    assert terms[-1] == pytest.approx(-(x["advantages"] * x["log_prob"])[kept].sum() / count, rel=1e-4)
    np.testing.assert_allclose(gradients["log_prob"], -x["advantages"] * x["valid"] / count, rtol=1e-5, atol=1e-8)
    assert not gradients["values"].any()
    wider, _ = by(x, LossSettings(**PPO, loss=users_losses.wider))
    assert wider[-1] == pytest.approx(expected(x, PPO | {"clip_range": 0.4})["loss"], rel=1e-5)
    spo, _ = by(x, LossSettings(**PPO, loss=users_losses.spo))
    ratio, advantages = np.exp(x["log_prob"] - x["old_log_prob"]), x["advantages"]
    policy = np.abs(advantages) / 0.4 * (ratio - 1) ** 2 - advantages * ratio
    each = policy + 0.35 * (x["values"] - x["returns"]) ** 2 - 0.02 * x["entropy"]
    assert spo[-1] == pytest.approx(each[kept].sum() / count, rel=1e-4)
