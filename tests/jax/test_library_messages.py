"""What a newcomer gets wrong in ``lockstep.jax`` is said in one line that tells what would work."""

from typing import Any

import jax
import numpy as np
import pytest

import lockstep.jax as ljax
from lockstep.jax.checkpoint_folder import CheckpointFolder
from lockstep.jax.history import PPOMetricsHistory

untyped: Any = ljax
"""For what a type checker would refuse as well."""

PPO = ljax.PPOConfig(n_steps=8, n_minibatches=2, n_epochs=1, hidden_sizes=(4,))


def error_of(function, *args, **kwargs):
    with pytest.raises(ValueError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, capsys):
    state = ljax.PPO.init(jax.random.key(0), 4, 2, PPO)
    folder = CheckpointFolder(ljax.RunnerConfig(checkpoint_dir=tmp_path), {"seed": 0})
    for update in (1, 2):
        folder.save(state, PPOMetricsHistory(total_loss=np.ones(update)), update, 10 * update)
    resumed = CheckpointFolder(ljax.RunnerConfig(checkpoint_dir=tmp_path, resume=True), {"seed": 0})
    found = resumed.find(state)
    assert (found and found.updates, capsys.readouterr().err) == (2, "")
    (tmp_path / "step_20" / "kinds.json").write_text("{}")
    found = resumed.find(state)
    damage = "is damaged (its sha256 is not the manifest's); passed over"
    assert (found and found.updates) == 1
    assert capsys.readouterr().err == f"lockstep: warning: {tmp_path}/step_20/kinds.json {damage} for step_10\n"
    (tmp_path / "step_10" / "manifest.json").unlink()
    assert resumed.find(state) is None
    newest, older = capsys.readouterr().err.splitlines()
    assert newest.endswith(f"{damage}, and training begins anew")
    assert f"{tmp_path}/step_10 has no valid manifest.json; passed over" in older
