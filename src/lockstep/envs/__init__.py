"""Steps environments: any Gymnasium environment, in the rank or in worker processes, and pure-array environments.

Importing this package registers the array environments with Gymnasium, as is the custom since Gymnasium 1.0, which
loads no plugins: ``gymnasium.make("lockstep.envs:lockstep/CartPole-v1")`` needs no other line.
"""

from lockstep.envs.gymnasium.registration import register_array_environments

register_array_environments()
