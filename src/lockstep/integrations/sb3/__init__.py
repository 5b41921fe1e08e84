"""Trains Stable-Baselines3's PPO and A2C on many ranks: only the import changes.

Start the script with ``lockstep run --nproc 4 script.py`` or with torchrun; without a launcher these classes are
Stable-Baselines3's own, bit for bit. Importing this makes ranks other than the first write no files.
"""

from lockstep.integrations.sb3.callbacks import OneRankCallback
from lockstep.integrations.sb3.files import leave_files_to_the_writer
from lockstep.integrations.sb3.synchronized import A2C, PPO

__all__ = ["A2C", "PPO", "OneRankCallback"]

leave_files_to_the_writer()
