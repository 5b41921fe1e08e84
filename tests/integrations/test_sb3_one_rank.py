"""Without a launcher ``lockstep.integrations.sb3`` is Stable-Baselines3, bit for bit, in everything it documents."""

import json
import os
import zipfile
from typing import Any

import numpy as np
import pytest
import stable_baselines3
import torch
from sb3_features import FEATURES, SMALL, cartpoles, digest
from stable_baselines3.common.vec_env import VecNormalize

from lockstep.integrations.sb3 import A2C, PPO

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:rich is experimental:FutureWarning")
CLOCK = ("start_time", "ep_info_buffer")
"""What a zip holds of the time of day."""


def both(function, folder):
    """What a function of a class and a folder gives with our class and the library's."""
    out = []
    for cls in (PPO, stable_baselines3.PPO):
        place = folder / cls.__module__.partition(".")[0]
        place.mkdir()
        out.append(function(cls, place))
    return out


def files(folder):
    """Relative paths; of TensorBoard's, which carry time and process, the folder."""
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(name.partition("events.out")[0] if "events.out" in name else name for name in found)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_gives_the_same_bits_and_the_same_files(name, tmp_path):
    ours, theirs = both(FEATURES[name], tmp_path)
    assert digest(ours) == digest(theirs)
    written = [[f for f in files(folder) if "theirs-" not in f] for folder in sorted(tmp_path.iterdir())]
    assert written[0] == written[1]


def test_a_digest_tells_a_difference_in_one_weight_or_moment():
    model = PPO("MlpPolicy", cartpoles(), **SMALL).learn(64)
    before = digest(model)
    with torch.no_grad():
        next(model.policy.parameters()).view(-1)[0] += 1e-6
    between = digest(model)
    next(iter(model.policy.optimizer.state.values()))["exp_avg"].view(-1)[0] += 1e-6
    assert len({before, between, digest(model)}) == 3


def test_alone_a_train_of_ones_own_is_nobodys_business():
    class Own(PPO):
        def train(self):
            self.policy.optimizer.step()

    assert Own("MlpPolicy", cartpoles(), **SMALL).learn(64).num_timesteps == 64


def test_a_models_log_goes_where_the_tests_are_tidied_up(monkeypatch, tmp_path):
    folder = PPO("MlpPolicy", cartpoles(), **SMALL).learn(32).logger.get_dir()
    assert folder == os.environ["SB3_LOGDIR"]
    assert folder.startswith(os.environ["XDG_CONFIG_HOME"])
    monkeypatch.delenv("SB3_LOGDIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    PPO("MlpPolicy", cartpoles(), **SMALL).learn(32)
    assert [path.name[:4] for path in tmp_path.iterdir()] == ["SB3-"]  # the library's own way


def test_a2c_gives_the_same_bits():
    ours, theirs = (
        cls("MlpPolicy", cartpoles(), seed=3, device="cpu", normalize_advantage=True).learn(80)
        for cls in (A2C, stable_baselines3.A2C)
    )
    assert digest(ours) == digest(theirs)


@pytest.mark.parametrize(("ours", "library"), [(PPO, stable_baselines3.PPO), (A2C, stable_baselines3.A2C)])
def test_a_zip_holds_what_the_librarys_holds_and_names_nothing_of_ours(ours, library, tmp_path):
    settings = {"seed": 3, "device": "cpu", "n_steps": 16}
    for number, cls in enumerate((ours, library)):
        cls("MlpPolicy", VecNormalize(cartpoles()), **settings).learn(64).save(tmp_path / f"{number}.zip")
    zips = [zipfile.ZipFile(tmp_path / f"{number}.zip") for number in range(2)]
    assert zips[0].namelist() == zips[1].namelist()
    data = [json.loads(archive.read("data")) for archive in zips]
    for key in CLOCK:
        assert all(key in one for one in data)
        data = [{k: v for k, v in one.items() if k != key} for one in data]
    assert data[0] == data[1]
    assert b"lockstep" not in b"".join(zips[0].read(name) for name in zips[0].namelist() if name != "system_info.txt")


def test_a_saved_option_of_ours_is_kept_and_left_alone_by_the_library(tmp_path):
    PPO("MlpPolicy", cartpoles(), normalize_advantage_locally=True, **SMALL).save(tmp_path / "model")
    assert PPO.load(tmp_path / "model", device="cpu").normalize_advantage_locally
    theirs = stable_baselines3.PPO.load(tmp_path / "model", device="cpu")
    assert theirs.predict(np.zeros((2, 4), np.float32))[0].shape == (2,)


def test_an_option_of_ours_that_is_on_or_off_is_no_text():
    text: Any = "no"
    with pytest.raises(ValueError, match=r"^normalize_advantage_locally: 'no' must be True or False$"):
        PPO("MlpPolicy", cartpoles(), normalize_advantage_locally=text, **SMALL)


def test_the_librarys_own_errors_come_through():
    with pytest.raises(ValueError, match="NoPolicy unknown"):
        PPO("NoPolicy", "CartPole-v1")
    with pytest.raises(ValueError, match=r"wasn.t a zip-file"):
        PPO.load(__file__)
