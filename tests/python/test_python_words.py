"""A caller in Python reads arguments of ``lockstep.train`` where the command line has options."""

import json

import pytest

import lockstep
from lockstep.config.words import ADVICE
from lockstep.python.words import in_python


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("write --ppo.value-coef 0.5, or none", "write ppo=dict(value_coef=0.5), or none"),
        ("add --log.wandb, --log.trackio", "add log=dict(wandb=True), log=dict(trackio=True)"),
        ("--log.no-tensorboard leaves them out", "log=dict(tensorboard=False) leaves them out"),
        ("--network.hidden-sizes 64 64", "network=dict(hidden_sizes=[64, 64])"),
        ("--network.hidden-sizes and others", "network=dict(hidden_sizes=…) and others"),
        ("--eval.interval 10 --eval.record-video", "eval=dict(interval=10, record_video=True)"),
        ("use --device cpu.", "use device='cpu'."),
        ("--seeds 0-4 makes five", "seeds='0-4' makes five"),
        ("--runs-dir DIR", "runs_dir=DIR"),
        ("--network.custom module:Class", "network=dict(custom='module:Class')"),
        ("lockstep train --help-all lists all", "lockstep train --help-all lists all"),
        ("--network.recurrent", "network=dict(recurrent=…)"),
        ("nothing - at all", "nothing - at all"),
        ("lockstep run --nproc 2 train.py starts it", "lockstep run --nproc 2 train.py starts it"),
        ("lockstep eval RUN --trust, or --trust", "lockstep eval RUN --trust, or trust=True"),
        (
            "runs/first exists; --resume runs/first continues it, another --name starts a new one",
            "runs/first exists; resume='runs/first' continues it, another name=… starts a new one",
        ),
        ("lockstep train --total-steps 1_000_000", "lockstep train total_steps=1_000_000"),
    ],
)
def test_options_are_arguments(said, expected):
    assert in_python(said) == expected


@pytest.mark.parametrize("word", ADVICE)
def test_no_advice_speaks_of_options_of_training(word):
    found = ADVICE[word]
    text = in_python(found if isinstance(found, str) else found("0.5"))
    assert "--" not in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"vf_coef": 0.5}, "ppo=dict(value_coef=0.5)"),
        ({"capture_video": True}, "eval=dict(interval=10, record_video=True)"),
        ({"loss_fn": lambda: 0.0}, "lockstep.attach"),
        ({"loss": test_options_are_arguments}, "ppo=dict(loss=test_options_are_arguments)"),
        ({"agent": object()}, "network=dict(custom='module:Class')"),
        ({"log": {"project": "x"}}, "log=dict(wandb=True)"),
    ],
)
def test_refusals_are_in_words_of_python(settings, said, tmp_path):
    with pytest.raises(ValueError) as refusal:
        lockstep.train("CartPole-v1", runs_dir=tmp_path, **settings)
    assert said in str(refusal.value)
    assert "--" not in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_switches_of_other_libraries_are_taken(tmp_path):
    run = lockstep.train(
        "CartPole-v1",
        runs_dir=tmp_path,
        name="a",
        total_steps=64,
        num_steps=8,
        anneal_lr=True,
        norm_adv=False,
        quiet=True,
    )
    config = json.loads((run.path / "config.json").read_text())["ppo"]
    assert (config["schedule"], config["advantage_normalization"]) == ("linear", "off")
