"""Trains Stable-Baselines3's PPO and A2C on many ranks: only the import changes.

Start the script with ``lockstep run --nproc 4 script.py`` or with torchrun. Without a launcher these classes train as
Stable-Baselines3's own do, bit for bit. Importing this module stops all ranks but the first from writing files.
"""

from lockstep.integrations.sb3.callbacks import OneRankCallback
from lockstep.integrations.sb3.files import leave_files_to_the_writer
from lockstep.integrations.sb3.synchronized import A2C, PPO

__all__ = ["A2C", "PPO", "OneRankCallback"]

leave_files_to_the_writer()
