"""A config file may be named from one's home, where no shell replaces the ``~``."""

import pytest

import lockstep


@pytest.mark.parametrize("as_config", [False, True])
def test_a_config_file_in_ones_home(as_config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("lockstep.python.train.start", lambda asked, *_: asked)
    (tmp_path / "cfg.yaml").write_text("env: CartPole-v1\nseed: 3\n")
    file = "~/cfg.yaml"
    asked = lockstep.train(config=file) if as_config else lockstep.train(file)
    assert asked == {"env": {"id": "CartPole-v1"}, "seed": 3}


@pytest.mark.parametrize("as_config", [False, True])
def test_a_config_file_of_a_user_who_is_none(as_config):
    file = "~nobody-of-this-name/cfg.yaml"
    with pytest.raises(ValueError, match=rf"^{file}: no such config file$"):
        lockstep.train(config=file) if as_config else lockstep.train(file)
