"""skrl's PPO_RNN on a benchmark case: an LSTM and 2x64 tanh each for actor and critic.

The model of a recurrent agent of skrl's is the user's own: this one computes a training sequence as its documentation's
examples do, in pieces between the steps at which any sequence's episode ends.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from settings import Settings, read_torch_settings
from skrl.agents.torch.ppo import PPO_RNN
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl_ppo import mlp, spaces, train
from torch import Tensor, cat, nn

SEQUENCE = 32
"""Steps of a training sequence, as many as ours have by default."""


class Recurrent(Model):
    """An LSTM before the hidden layers, whose state skrl keeps."""

    def __init__(self, env: Any, settings: Settings, outputs: int) -> None:
        Model.__init__(self, **spaces(env), device="cpu")
        self.num_envs, self.units = settings.num_envs, int(settings.lstm or 0)
        self.lstm = nn.LSTM(env.observation_space.shape[0], self.units, batch_first=True)
        self.net = mlp(self.units, outputs)

    def get_specification(self) -> dict[str, Any]:
        """What skrl has to keep: hidden and cell state."""
        return {"rnn": {"sequence_length": SEQUENCE, "sizes": [(1, self.num_envs, self.units)] * 2}}

    def compute(self, inputs: dict[str, Any], role: str) -> tuple[Tensor, dict[str, Any]]:
        """Outputs of one step of all environments in a rollout, of whole sequences in training."""
        obs = inputs["observations"]
        if not self.training:
            hidden, state = self.lstm(obs.unsqueeze(1), tuple(inputs["rnn"]))
        else:
            first = [x.view(1, -1, SEQUENCE, self.units)[:, :, 0].contiguous() for x in inputs["rnn"]]
            ended = (inputs["terminated"] | inputs["truncated"]).view(-1, SEQUENCE)
            hidden, state = self.sequences(obs.view(-1, SEQUENCE, obs.shape[-1]), (first[0], first[1]), ended)
        return self.net(hidden.flatten(0, 1)), {"rnn": list(state)}

    def sequences(
        self, obs: Tensor, state: tuple[Tensor, Tensor], ended: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Outputs of sequences, whose state is nought after an episode's end."""
        cuts = [0, *(ended[:, :-1].any(0).nonzero().flatten() + 1).tolist(), SEQUENCE]
        found = []
        for begin, end in pairwise(cuts):
            hidden, (h, c) = self.lstm(obs[:, begin:end], state)
            going_on = (~ended[:, end - 1]).view(1, -1, 1)
            state = (h * going_on, c * going_on)
            found.append(hidden)
        return cat(found, 1), state


class Actor(CategoricalMixin, Recurrent):
    def __init__(self, env: Any, settings: Settings) -> None:
        Recurrent.__init__(self, env, settings, int(env.action_space.n))
        CategoricalMixin.__init__(self, unnormalized_log_prob=True)


class Critic(DeterministicMixin, Recurrent):
    def __init__(self, env: Any, settings: Settings) -> None:
        Recurrent.__init__(self, env, settings, 1)
        DeterministicMixin.__init__(self)


def main() -> None:
    settings = read_torch_settings()
    train(settings, PPO_RNN, lambda env: {"policy": Actor(env, settings), "value": Critic(env, settings)})


if __name__ == "__main__":
    main()
