"""Failures of a run whose message is one line for the user; user errors before a run starts are ``ValueError``."""


class RunError(RuntimeError):
    """A run can't go on; the message says why in one line.

    Attributes:
        everywhere: whether every rank raises it at the same time, so that one of them says it for all.
    """

    everywhere = False


class KilledError(RunError):
    """A process of ours was killed by SIGKILL, from outside, before it could say anything."""


class PeerFailureError(RunError):
    """A collective failed because another rank is gone: that rank's own error is the one to show."""


class EnvironmentFailureError(RunError):
    """An environment raised, died or hung; the message names it."""


class NonFiniteError(RunError):
    """A loss or gradient is NaN or infinite; every rank raises it at the same optimiser step."""

    everywhere = True


class DesyncError(RunError):
    """Ranks that should hold the same arrays don't; the message names tensor, ranks and iteration."""

    everywhere = True


class OutOfStepError(RunError):
    """Ranks of a user's script met in different places, or after different numbers of passes; every rank raises it.

    ``ranks_parted`` says whether they have left one another for certain (True) or perhaps (False); None: not at all.
    """

    everywhere = True

    def __init__(self, message: str, ranks_parted: bool | None = None) -> None:
        super().__init__(message)
        self.ranks_parted = ranks_parted


class UnreducedGradientError(RunError):
    """An optimiser of a user's script was about to step with gradients that no reduction has seen."""


class UnsynchronizedUpdateError(RunError):
    """A script's own update was about to step the policy without what makes it all ranks'; every rank raises it."""

    everywhere = True


class RankMismatchError(ValueError):
    """Ranks run on different machines, versions or configs; every rank raises it."""

    everywhere = True


class UnavailableError(ValueError):
    """What the config demands can't be had on this machine, as training has shown; one line."""


class NoSharedMemoryError(ValueError):
    """The config demands shared memory and the ranks have none; every rank raises it."""

    everywhere = True


DEVICE_ERROR = "AcceleratorError"
"""The class, by its name, of what PyTorch raises where an accelerator itself reports an error."""


def device_failed(error: BaseException) -> str | None:
    """Says in one line what an accelerator reported, None of other errors."""
    if type(error).__name__ != DEVICE_ERROR:
        return None
    return f"the device reported an error, its own or of a kernel that ran there: {str(error).partition(chr(10))[0]}"


# --- memory -----------------------------------------------------------------------------------------------------------

FULL = ("out of memory", "out_of_memory", "resource_exhausted", "unable to allocate", "can't allocate memory")
"""What PyTorch, XLA and NumPy say, in small letters, where a device or the host has too little memory."""
DETAILS = (" Of the allocated memory", " If reserved but unallocated")
"""Where PyTorch begins to speak of its allocator."""


def memory_full(error: BaseException, device: str) -> str | None:
    """Says in one line, of an error by which memory is full, what takes less; None of any other error.

    Args:
        error: of PyTorch, JAX, NumPy or Python.
        device: of the config.
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
