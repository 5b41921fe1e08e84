"""Steps Gymnasium environments, in the rank's process or in worker processes, and array environments.

Importing this package registers the array environments with Gymnasium, because Gymnasium 1.0 and later load no plugins:
``gymnasium.make("lockstep.envs:lockstep/CartPole-v1")`` needs no other line.
"""

from gymnasium import register
from gymnasium import registry as registered  # renamed: this package has a module ``registry``

from lockstep.envs.arrays import ARRAY_ENVIRONMENTS


def register_array_environments() -> None:
    """Registers each array environment with its time limit; leaves ids that are registered already as they are."""
    for env_id, environment in ARRAY_ENVIRONMENTS.items():
        if env_id not in registered:
            register(
                id=env_id,
                entry_point="lockstep.envs.arrays.gymnasium_env:ArrayGymnasiumEnv",
                max_episode_steps=environment.max_episode_steps,
                kwargs={"array_environment": env_id},
            )


register_array_environments()
