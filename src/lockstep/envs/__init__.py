"""Environments: any Gymnasium environment, in the rank or in worker processes, and pure-array environments.

Importing this package registers the array environments with Gymnasium (``lockstep/CartPole-v1``, …).
"""

from lockstep.envs.gymnasium.registration import register_array_environments

register_array_environments()
