"""The commit that stands beside a figure."""

from pathlib import Path

import pytest

from benchmarks import commit

FULL = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("told", "short"),
    [(FULL, "0123456789ab"), (f"{FULL}-dirty", "0123456789ab-dirty"), (None, "unknown")],
)
def test_it_is_short_and_still_says_whether_files_differ(monkeypatch, told, short):
    asked = []
    monkeypatch.setattr(commit, "commit_of", lambda tree: asked.append(tree) or told)
    assert commit.short_commit(Path("before")) == short
    assert commit.short_commit() == short
    assert asked == [Path("before"), commit.ROOT]


def test_figures_are_of_this_checkout():
    assert (commit.ROOT / "pyproject.toml").is_file()
