"""Errors of a run, whose message is one line for the user; bad input before a run starts is a ``ValueError``."""

from __future__ import annotations

from typing import Literal


def one_line(said: object) -> str:
    """Returns the text of an error, a space or anything else on one line: each run of white space becomes a space."""
    return " ".join(str(said).split())


class RunError(RuntimeError):
    """The run can't go on; the message says why in one line.

    Attributes:
        everywhere: whether every rank raises it at the same time, so that one rank reports it for all.
    """

    everywhere = False


class KilledError(RunError):
    """A process that we started was killed by SIGKILL from outside, and so reported nothing itself."""


class PeerFailureError(RunError):
    """A collective failed because another rank is gone; that rank's own error is the one to show."""


class EnvironmentFailureError(RunError):
    """An environment raised, died or hung; the message names it."""


class NonFiniteError(RunError):
    """A loss or gradient is NaN or infinite; every rank raises it at the same optimiser step."""

    everywhere = True


class DesyncError(RunError):
    """Ranks that should hold the same arrays don't; the message names tensor, ranks and iteration."""

    everywhere = True


class OutOfStepError(RunError):
    """Ranks of a user's script met at different collectives, or after different numbers of passes; all ranks raise it.

    ``ranks_parted`` says whether the ranks have diverged: for certain (True; ``rates`` if by their learning rates),
    perhaps (False) or not at all (None).
    """

    everywhere = True

    def __init__(self, message: str, ranks_parted: bool | Literal["rates"] | None = None) -> None:
        super().__init__(message)
        self.ranks_parted = ranks_parted


class UnreducedGradientError(RunError):
    """An optimiser of a user's script would step with gradients that weren't reduced over ranks as they are."""


class UnsynchronizedUpdateError(RunError):
    """A script's own update was about to step the policy before the ranks synchronise; every rank raises it."""

    everywhere = True


class RankMismatchError(ValueError):
    """Ranks run on different machines, versions or configs; every rank raises it."""

    everywhere = True


class UnavailableError(ValueError):
    """Training has shown that this machine can't provide what the config demands; one line."""


class NoSharedMemoryError(ValueError):
    """The config demands shared memory and the ranks have none; every rank raises it."""

    everywhere = True


DEVICE_ERROR = "AcceleratorError"
"""Name of the class that PyTorch raises if an accelerator itself reports an error."""


def device_failed(error: BaseException) -> str | None:
    """Says in one line what an accelerator reported; returns None for other errors."""
    if type(error).__name__ != DEVICE_ERROR:
        return None
    return f"the device reported an error, its own or of a kernel that ran there: {str(error).partition(chr(10))[0]}"


# --- memory -----------------------------------------------------------------------------------------------------------

FULL = ("out of memory", "out_of_memory", "resource_exhausted", "unable to allocate", "can't allocate memory")
"""What PyTorch, XLA and NumPy say, in lower case, if a device or the host is out of memory."""
DETAILS = (" Of the allocated memory", " If reserved but unallocated")
"""Beginnings of PyTorch's details on its allocator, which are cut off."""


def memory_full(error: BaseException, device: str) -> str | None:
    """Says in one line how to use less memory, if the error is one of memory that is full; else returns None.

    Args:
        error: an error of PyTorch, JAX, NumPy or Python.
        device: the config's device.
    """
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if not isinstance(error, MemoryError) and not any(word in text.lower() for word in FULL):
        return None
    for words in DETAILS:
        text = text.partition(words)[0]
    others = "" if device == "cpu" else ", and another program may hold some of it (nvidia-smi shows which)"
    return (
        f"device {device}: too little memory: {text.rstrip('. ')}; each of more ranks takes less, with the same agent; "
        f"fewer num_envs or num_steps, or smaller networks, do as well in a new run{others}"
    )
