"""Learning curves of finished runs: python benchmarks/plot_runs.py OUT.png PANEL [PANEL ...]; needs matplotlib.

A panel is TITLE=RUN[:LABEL],RUN[:LABEL],… where RUN is a run directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def curve(run: Path) -> tuple[list[int], list[float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    known = [r for r in records if r["rollout/episode_return_mean"] is not None]
    return [r["global_step"] for r in known], [r["rollout/episode_return_mean"] for r in known]


def main() -> None:
    out, panels = sys.argv[1], sys.argv[2:]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.4), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        title, _, runs = panel.partition("=")
        styles = ["-", "--", ":", "-."]
        for number, word in enumerate(runs.split(",")):
            path, _, label = word.partition(":")
            axis.plot(*curve(Path(path)), styles[number % 4], linewidth=2.4 - 0.4 * (number % 4), label=label or path)
        axis.set(title=title, xlabel="global environment steps", ylabel="mean return, last 100 episodes")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
