"""The commit that a session was started in."""

import subprocess

from lockstep.runs.session_facts import commit_of


def git(path, *words):
    who = ("-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *who, *words], cwd=path, capture_output=True, text=True, check=True).stdout.strip()


def test_it_is_the_one_checked_out_and_says_whether_files_differ(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    inside = tmp_path / "repository"
    inside.mkdir()
    assert commit_of(inside) is None
    git(inside, "init", "--quiet")
    assert commit_of(inside) is None
    (inside / "file").write_text("1")
    git(inside, "add", "file")
    git(inside, "commit", "--quiet", "-m", "first")
    git(inside, "tag", "-a", "v1", "-m", "v1")
    first = git(inside, "rev-parse", "HEAD")
    (inside / "untracked").touch()
    assert commit_of(inside) == first
    (inside / "file").write_text("2")
    assert commit_of(inside) == f"{first}-dirty"


def test_without_git_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(tmp_path) is None
