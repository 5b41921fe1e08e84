"""Losses that a user might bring, good ones and others; all but the marked ones work in both engines."""

import dataclasses
import math

import numpy as np

CALLS = []


def penalised(sample):
    """PPO's own, and a penalty on large logits or means."""
    return sample.ppo() + 1e-2 * (sample.actor_output**2).sum(-1)


def same(sample):
    """PPO's own, by name."""
    return sample.ppo()


def spo(sample):
    """Simple policy optimisation (Xie et al. 2024): a quadratic penalty on the ratio instead of clipping."""
    ratio = math.e ** (sample.log_prob - sample.old_log_prob)
    penalty = abs(sample.advantage) / (2 * sample.clip_range) * (ratio - 1) ** 2
    policy = penalty - sample.advantage * ratio
    value = 0.5 * (sample.value - sample.return_) ** 2
    return policy + sample.value_coef * value - sample.entropy_coef * sample.entropy


def policy_gradient(sample):
    """Without a critic's part: its networks get no gradient."""
    return -sample.advantage * sample.log_prob


def of_sigmoids(sample):
    """PPO's own, and sigmoids: an operation of PyTorch's alone."""
    return sample.ppo() + 0.1 * sample.actor_output.sigmoid().sum(-1) * sample.value.sigmoid()


def wider(sample):
    """PPO's with twice the clip range."""
    return dataclasses.replace(sample, clip_range=2 * sample.clip_range).ppo()


def mean(sample):
    return sample.ppo().mean()


def by_output(sample):
    return (sample.actor_output**2).sum(0)


def number(sample):
    return 0.5


def infinite(sample):
    return sample.ppo() / (sample.entropy - sample.entropy)


def without_gradient(sample):
    return sample.advantage * sample.old_log_prob


def counting(sample):
    CALLS.append(sample)
    return sample.ppo() * len(CALLS)


def misspelt(sample):
    return sample.ppo() + sample.entropies


def weighted(sample, weight=1.0):
    """Adds the entropy by a weight of the config's."""
    return sample.ppo() + weight * sample.entropy


def actor_alone_later(sample):
    """Leaves the critic alone once the entropy's weight has fallen."""
    return sample.ppo() if sample.entropy_coef > 0.03 else policy_gradient(sample)


def branching(sample):
    """Decides by numbers, which tracing can't."""
    return sample.ppo() if sample.advantage.mean() > 10 else 2 * sample.ppo()


def of_values(sample):
    """Trains the critic, and leaves the policy to its entropy."""
    return (sample.value - sample.return_) ** 2 - 0.01 * sample.entropy


def by_sign(sample):
    """Decides for all samples at once, which isn't for one truth value to say."""
    return sample.ppo() if sample.advantage > 0 else 2 * sample.ppo()


def of_numpy(sample):
    """Computes with what knows no gradient."""
    return -sample.advantage * np.exp(np.asarray(sample.log_prob))


NOT_CALLABLE = 3
