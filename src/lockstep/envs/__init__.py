"""Steps environments: any Gymnasium environment, in the rank or in worker processes, and pure-array environments.

Importing this package registers the array environments with Gymnasium, as is the custom since Gymnasium 1.0, which
loads no plugins: ``gymnasium.make("lockstep.envs:lockstep/CartPole-v1")`` needs no other line.
"""

from gymnasium import register
from gymnasium import registry as registered  # this package has a module of that name

from lockstep.envs.arrays import ARRAY_ENVIRONMENTS


def register_array_environments() -> None:
    """Register each array environment with its time limit; ids that are there already stay as they are."""
    for env_id, environment in ARRAY_ENVIRONMENTS.items():
        if env_id not in registered:
            register(
                id=env_id,
                entry_point="lockstep.envs.arrays.gymnasium_env:ArrayGymnasiumEnv",
                max_episode_steps=environment.max_episode_steps,
                kwargs={"array_environment": env_id},
            )


register_array_environments()
