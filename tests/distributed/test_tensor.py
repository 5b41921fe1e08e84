"""Training on tensor environments: the same agent for every number of ranks, and after a stop in its middle."""

from command_line import lockstep, resume, same, train

SMALL = (
    *("--env.backend", "tensor", "--num-envs", 4, "--num-steps", 16, "--total-steps", 512),
    *("--ppo.num-epochs", 2, "--ppo.num-minibatches", 4, "--log.no-tensorboard", "--normalize.observations"),
)


def test_a_simulator_with_state_hooks(tmp_path):
    words = ("simulators:maniskill", *SMALL)
    whole = train(tmp_path, *words, "--nproc", 2, name="whole")
    stopped = train(tmp_path, *words, "--stop-at-step", 192, name="stopped")
    resumed = resume(stopped.path)
    assert resumed.summary["restarted_environments"] == []
    same(whole, resumed)
    assert whole.metrics[-1]["rollout/success_rate"] is not None


def test_a_real_simulator(tmp_path):
    words = ("simulators:vmas", *SMALL, "--env.kwargs", '{"max_steps": 10}')
    two = train(tmp_path, *words, "--nproc", 2, name="two")
    assert two.agent == train(tmp_path, *words, name="one").agent
    assert two.metrics[-1]["rollout/episode_length_mean"] == 10.0


def test_an_array_environment(tmp_path):
    words = ("lockstep/CartPole-v1", *SMALL)
    tensors = train(tmp_path, *words, "--eval.interval", 4, name="tensors")
    assert tensors.metrics[3]["eval/return_mean"] > 0
    arrays = train(tmp_path, *words, "--env.backend", "auto", name="arrays")
    assert tensors.agent != arrays.agent  # other random numbers: the back end is part of the config
    evaluated = lockstep("eval", tensors.path, "--episodes", 2, cwd=tmp_path)
    assert evaluated.code == 0, evaluated.stderr
