"""An environment of one's own, trained from Python on two ranks until it is good enough; run as a script."""

import gymnasium
import numpy as np

import lockstep


class Reach(gymnasium.Env):
    """A point on a line is pushed to the origin."""

    observation_space = gymnasium.spaces.Box(-2.0, 2.0, (1,))
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = float(self.np_random.uniform(-1, 1)), 0
        return np.array([self.place], np.float32), {}

    def step(self, action):
        self.place, self.steps = float(np.clip(self.place + 0.1 * (int(action) - 1), -2.0, 2.0)), self.steps + 1
        return np.array([self.place], np.float32), -abs(self.place), False, self.steps == 20, {}


class GoodEnough(lockstep.BaseCallback):
    """Ends the run at a return."""

    def on_iteration(self, record):
        return record["rollout/episode_return_mean"] < -4.0


if __name__ == "__main__":
    run = lockstep.train(Reach, nproc=2, total_steps=200_000, callbacks=[GoodEnough()])
    print(run.status, run.final_return, "action at 0.5:", run.policy([0.5]))
    run.export(torch=run.path / "policy.pt2")
    print("report:", run.report())
