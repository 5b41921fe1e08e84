"""A disk of its own for a run, which can be filled: a file system in memory (Linux, root)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MIB = 24


def can_mount(directory: Path) -> bool:
    """Says whether file systems can be mounted here."""
    place = directory / "probe"
    place.mkdir(parents=True)
    try:
        with small_disk(place):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        place.rmdir()


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """Mounts a file system of some megabytes at an empty directory for as long as the block runs."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={MIB}m,mode=700", "lockstep-chaos", str(place)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, capture_output=True)


def fill(place: Path) -> Path:
    """Writes a file that takes all that is left; the file."""
    filler = place / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        block = bytes(1 << 20)
        while block:
            with suppress(OSError):
                while file.write(block) == len(block):
                    pass
            block = block[: len(block) // 2]
    return filler
