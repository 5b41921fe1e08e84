"""A humanoid learns to walk: Gymnasium's on CPUs, Brax's or MuJoCo Playground's inside the program on GPUs.

    python examples/walking.py                       # Humanoid-v5: MuJoCo steps in worker processes, JAX learns
    python examples/walking.py brax --device cuda    # brax/humanoid by its preset, 2,048 environments
    python examples/walking.py playground --device cuda

Every further option is one of ``lockstep train``: ``--total-steps 1000000 --name walking``.
"""

from __future__ import annotations

import sys

from lockstep.cli import main

TASKS = {
    "gymnasium": ["Humanoid-v5", "--env.workers", "2", "--total-steps", "1000000"],
    "brax": ["brax/humanoid"],
    "playground": ["playground/HumanoidWalk"],
}


def walk(words: list[str]) -> int:
    """Train the task that the first word names, Gymnasium's by default; returns the exit status."""
    task = words[0] if words and words[0] in TASKS else "gymnasium"
    options = words[1:] if words and words[0] in TASKS else words
    return main(["train", *TASKS[task], "--engine", "jax", *options])


if __name__ == "__main__":
    raise SystemExit(walk(sys.argv[1:]))
