"""An environment that leaves a thread running."""

import threading
import time

from handed_envs import Counting


class Threaded(Counting):
    """Starts a thread that Python waits for at its end, as long as it runs."""

    def __init__(self):
        super().__init__()
        threading.Thread(target=time.sleep, args=(1000,), name="poller").start()
