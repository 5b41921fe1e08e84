"""Processes of ours ask MKL for products that don't depend on places in memory; a user's own compute as without us."""

import subprocess
import sys

import pytest
from command_line import SMALL, run_words

PYTHON = (sys.executable, "-m")
ALONE = ("--standalone", "--local-addr", "127.0.0.1")
TRAIN = ("lockstep", "train", "steadied:Steadied", *map(str, SMALL), "--total-steps", "128", "--max-restarts", "0")
IN_PYTHON = """if True:
    import lockstep
    run = lockstep.train("steadied:Steadied", num_steps=16, total_steps=128, quiet=True)
    assert run.evaluate(1)["episodes"] == 1
"""
ENTRIES = {
    "one rank": (*PYTHON, *TRAIN),
    "two ranks": (*PYTHON, *TRAIN, "--nproc", "2"),
    "engine jax": (*PYTHON, *TRAIN, "--engine", "jax"),
    "workers": (*PYTHON, *TRAIN, "--env.workers", "2"),
    "torchrun": (*PYTHON, "torch.distributed.run", *ALONE, "--nproc-per-node", "2", "-m", *TRAIN),
    "lockstep.train": (sys.executable, "-c", IN_PYTHON),
    "check": (*PYTHON, "lockstep", "check", "steadied:Steadied"),
}
OWN = """if True:
    import os, sys
    import lockstep
    lockstep.attach, lockstep.load_policy, lockstep.train
    assert "MKL_CBWR" not in os.environ
"""
PRODUCTS = """if True:
    import hashlib
    import torch
    torch.set_num_threads(1)
    drawn, bits = torch.Generator().manual_seed(0), hashlib.sha256()
    for rows in (1, 2, 4, 8, 17, 32, 64):
        for inputs in (3, 4, 8, 17, 64):
            for outputs in (1, 2, 4, 6, 64):
                x, w = (torch.randn(n, inputs, generator=drawn) for n in (rows, outputs))
                gradient = torch.randn(rows, outputs, generator=drawn)
                bits.update((x @ w.T).numpy().tobytes() + (gradient.T @ x).numpy().tobytes())
    print(bits.hexdigest())
"""
"""Of these some have other bits in MKL's other modes."""


@pytest.fixture(autouse=True)
def unasked(monkeypatch):
    monkeypatch.delenv("MKL_CBWR", raising=False)


@pytest.mark.parametrize("entry", ENTRIES)
def test_whatever_trains_or_plays_asks_first(entry, tmp_path):
    ended = run_words(ENTRIES[entry], tmp_path)
    assert ended.code == 0, ended.stderr


def test_a_mode_that_the_user_chose_stays(tmp_path):
    ended = run_words(ENTRIES["one rank"], tmp_path, MKL_CBWR="COMPATIBLE")
    assert "MKL_CBWR is COMPATIBLE" in ended.stderr


@pytest.mark.parametrize("words", [(), ("-m", "lockstep", "run", "--nproc", "2")], ids=["python", "lockstep run"])
def test_a_program_of_the_users_is_left_alone(words, tmp_path):
    script = tmp_path / "own.py"
    script.write_text(OWN)
    ended = run_words([sys.executable, *words, str(script)], tmp_path)
    assert ended.code == 0, ended.stderr


def test_importing_us_changes_no_bits_of_a_users_products():
    def bits(code):
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    with_us = "import lockstep, lockstep.integrations.sb3\nlockstep.attach, lockstep.load_policy\n"
    pytest.importorskip("stable_baselines3")
    assert bits(with_us + PRODUCTS) == bits(PRODUCTS)
