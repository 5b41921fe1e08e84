"""An environment that starts processes and leaves them running, with its standard error."""

import os
import subprocess
from pathlib import Path

from handed_envs import Counting

SECONDS = 120
LEFT = Path(os.environ.get("LEFT", "left"))
"""Each process adds a line here, of its id; one that wasn't killed adds ``over``."""


class Lingering(Counting):
    """Starts a process in the session of whoever trains, and one in a session of its own: the first one made does."""

    _began = False

    def __init__(self):
        super().__init__()
        if not Lingering._began:
            Lingering._began = True
            for apart in (False, True):
                words = f"echo $$ >> '{LEFT}'; sleep {SECONDS}; echo over >> '{LEFT}'"
                subprocess.Popen(["sh", "-c", words], start_new_session=apart)
