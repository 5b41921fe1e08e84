"""rejax's PPO on a benchmark case: environment, policy and update in one compiled program, on all cores."""

import jax
from settings import read_settings

if not hasattr(jax, "tree_map"):  # it was written for an older JAX
    jax.tree_map = jax.tree.map

from rejax import PPO


def main() -> None:
    settings = read_settings()
    iterations = settings.iterations_per_call
    steps = settings.num_envs * settings.num_steps * iterations
    algorithm = PPO.create(
        env=settings.env,
        num_envs=settings.num_envs,
        num_steps=settings.num_steps,
        num_epochs=settings.num_epochs,
        num_minibatches=settings.num_minibatches,
        total_timesteps=steps,
        eval_freq=steps,
        skip_initial_evaluation=True,
        learning_rate=settings.learning_rate,
        ent_coef=settings.entropy_coef,
        max_grad_norm=0.5,
        gamma=0.99,
        gae_lambda=0.95,
        clip_eps=0.2,
        agent_kwargs={"hidden_layer_sizes": (64, 64), "activation": "tanh"},
    ).replace(eval_callback=lambda *_: ())
    state = jax.jit(algorithm.init_state)(jax.random.PRNGKey(0))
    train = jax.jit(lambda state: algorithm.train(train_state=state)[0])
    for _ in range(settings.iterations // iterations):
        state = jax.block_until_ready(train(state))
        settings.iteration_done()


if __name__ == "__main__":
    main()
