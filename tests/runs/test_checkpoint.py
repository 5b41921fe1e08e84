import json
import pickle
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import SafetensorError

from lockstep.runs import checkpoint
from lockstep.runs.checkpoint import (
    MANIFEST,
    CheckpointError,
    best_of,
    checkpoints_in,
    find_checkpoint,
    pack,
    problem_with,
    read_checkpoint,
    step_of,
    to_files,
    unpack,
)
from lockstep.runs.checkpoint_writer import commit

FILES = [
    "policy.safetensors",
    "optimizer.safetensors",
    "normalizers.safetensors",
    "envs/shard_0.safetensors",
    "envs/shard_1.safetensors",
    "state.json",
]


def contents(seed=0):
    random = np.random.default_rng(seed)
    arrays = {
        "policy/actor.0.weight": random.normal(size=(3, 2)).astype(np.float32),
        "policy/actor.0.bias": np.zeros(3, np.float32),
        "optimizer/exp_avg/actor.0.weight": random.normal(size=(3, 2)).astype(np.float32),
        "optimizer/step": np.array([7.0], np.float32),
        "normalizers/observations.mean": random.normal(size=4),
    }
    shards = {s: {"episodes": random.integers(0, 9, 2), "done": np.array([True, False])} for s in range(2)}
    return arrays, shards, {"iteration": seed, "learning_rate": 0.1 + 0.2, "note": "ü", "nothing": None}


def files_of(seed=0):
    arrays, shards, state = contents(seed)
    return to_files(arrays, {s: pack(a) for s, a in shards.items()}, state)


def save(directory, step, score=None):
    return commit(directory, step, files_of(step), score)


def flip(path, position=None, bit=0):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1 << bit
    path.write_bytes(bytes(content))


def assert_same_arrays(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert a[name].tobytes() == b[name].tobytes(), name


# ---- round trip


def test_a_checkpoint_comes_back_byte_for_byte(tmp_path):
    arrays, shards, state = contents(5)
    path = save(tmp_path, 5, score=1.5)
    assert path == tmp_path / "step_5"
    checkpoint = read_checkpoint(path)
    assert_same_arrays(checkpoint.arrays, arrays)
    assert checkpoint.env_shards.keys() == shards.keys()
    for shard in shards:
        assert_same_arrays(checkpoint.env_shards[shard], shards[shard])
    assert checkpoint.state == state
    assert checkpoint.path == path
    assert checkpoint.state != read_checkpoint(save(tmp_path, 6)).state


ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.int32, np.uint64, np.uint8, np.bool_]),
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3),
)


@given(st.dictionaries(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1), ARRAYS))
def test_arrays_of_every_dtype_and_shape_survive_packing(arrays):
    arrays.pop("__metadata__", None)
    assert_same_arrays(unpack(pack(arrays)), arrays)
    strided = {name: np.asfortranarray(array) for name, array in arrays.items()}
    assert_same_arrays(unpack(pack(strided)), arrays)


def test_a_scalar_comes_back_as_a_scalar():
    """An environment's own state may hold some."""
    scalar = {"time": np.float64(3.5), "steps": np.zeros((), np.int64)}
    assert {name: array.shape for name, array in unpack(pack(scalar)).items()} == {"time": (), "steps": ()}


def test_names_in_the_files_are_bare(tmp_path):
    path = save(tmp_path, 1)
    assert unpack((path / "policy.safetensors").read_bytes()).keys() == {"actor.0.weight", "actor.0.bias"}
    assert unpack((path / "optimizer.safetensors").read_bytes()).keys() == {"exp_avg/actor.0.weight", "step"}


# ---- nothing that could execute


def test_only_safetensors_and_json_are_written(tmp_path):
    path = save(tmp_path, 1)
    files = [file for file in path.rglob("*") if file.is_file()]
    assert sorted(str(file.relative_to(path)) for file in files) == sorted([*FILES, MANIFEST])
    for file in files:
        content = file.read_bytes()
        with pytest.raises((pickle.UnpicklingError, ValueError, EOFError, KeyError, IndexError)):
            pickle.loads(content)
        parsed = unpack(content) if file.suffix == ".safetensors" else json.loads(content)
        assert isinstance(parsed, dict)


@pytest.mark.parametrize("array", [np.array([{"a": 1}]), np.array([print]), np.array(["text"])])
def test_objects_cannot_be_saved(array):
    with pytest.raises(SafetensorError, match="dtype"):
        pack({"a": array})


class Bait:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["policy.safetensors", "envs/shard_0.safetensors", "state.json", MANIFEST])
def test_a_planted_pickle_is_not_executed(tmp_path, name):
    bait = pickle.dumps(Bait(tmp_path / "executed"))
    pickle.loads(pickle.dumps(Bait(tmp_path / "it does work")))
    assert (tmp_path / "it does work").is_dir()
    path = save(tmp_path, 1)
    (path / name).write_bytes(bait)
    with pytest.raises(CheckpointError):
        read_checkpoint(path)
    forged = commit(tmp_path, 2, files_of() | ({name: bait} if name != MANIFEST else {}), None)
    if name != MANIFEST:
        with pytest.raises((ValueError, SafetensorError)):
            read_checkpoint(forged)
    assert not (tmp_path / "executed").exists()


def name_in_manifest(path, name):
    """Adds a file to a checkpoint's manifest."""
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][name] = "0" * 64
    (path / MANIFEST).write_text(json.dumps(manifest))


OUTSIDE = ["../../secret.json", "/etc/hostname", "envs/../../../secret.json", "envs/.hidden.json", ""]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_that_leads_out_of_its_checkpoint_is_refused(tmp_path, name):
    (tmp_path / "secret.json").write_text("{}")
    path = save(tmp_path / "checkpoints", 1)
    name_in_manifest(path, name)
    with pytest.raises(CheckpointError, match="is no file of a checkpoint") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["policy.safetensors", "state.json", "envs/shard_0.safetensors"])
def test_a_link_in_a_checkpoint_is_refused(tmp_path, name):
    path = save(tmp_path / "checkpoints", 1)
    elsewhere = tmp_path / "elsewhere"
    (path / name).rename(elsewhere)
    (path / name).symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=r"is a link to .*/elsewhere; copy the run with cp -rL"):
        read_checkpoint(path)
    (path / name).unlink()
    elsewhere.rename(path / name)
    read_checkpoint(path)


def test_so_is_a_folder_that_is_a_link(tmp_path):
    path = save(tmp_path / "checkpoints", 1)
    (path / "envs").rename(tmp_path / "envs")
    (path / "envs").symlink_to(tmp_path / "envs")
    with pytest.raises(CheckpointError, match="is a link"):
        read_checkpoint(path)


def test_a_run_may_lie_behind_a_link(tmp_path):
    save(tmp_path / "on_another_disk", 1)
    (tmp_path / "checkpoints").symlink_to(tmp_path / "on_another_disk")
    assert find_checkpoint(tmp_path / "checkpoints").state["iteration"] == 1


# ---- damage


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("position", [0, None, -1])
def test_a_flipped_byte_is_found_and_passed_over_for_the_older_one(tmp_path, capsys, name, position):
    save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    assert find_checkpoint(tmp_path).state["iteration"] == 2
    assert capsys.readouterr().err == ""
    flip(damaged / name, position)
    assert find_checkpoint(tmp_path).state["iteration"] == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"lockstep: warning: {damaged / name} is damaged")
    assert lines[0].endswith("passed over for step_1")
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(damaged)
    flip(damaged / name, position)
    assert find_checkpoint(tmp_path).state["iteration"] == 2


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(tmp_path, capsys, name):
    save(tmp_path, 1)
    (save(tmp_path, 2) / name).unlink()
    assert find_checkpoint(tmp_path).state["iteration"] == 1
    assert f"{tmp_path / 'step_2' / name} is missing" in capsys.readouterr().err


def test_a_flipped_hash_in_the_manifest_is_found(tmp_path, capsys):
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / MANIFEST
    digest = json.loads(manifest.read_text())["files"]["policy.safetensors"]
    flip(manifest, manifest.read_bytes().index(digest.encode()) + 5)
    assert find_checkpoint(tmp_path).state["iteration"] == 1
    assert "policy.safetensors is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "manifest", [None, b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b"{}", b'{"files": 3}', b'{"files": {}}']
)
def test_without_a_valid_manifest_it_is_no_checkpoint(tmp_path, capsys, manifest):
    save(tmp_path, 1, score=1.0)
    path = save(tmp_path, 2, score=2.0) / MANIFEST
    path.unlink()
    if manifest is not None:
        path.write_bytes(manifest)
    assert find_checkpoint(tmp_path).state["iteration"] == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert best_of(tmp_path) == tmp_path / "step_1"
    with pytest.raises(CheckpointError, match=r"manifest\.json|missing"):
        read_checkpoint(tmp_path / "step_2")


def test_a_manifest_with_a_name_that_is_no_path_is_invalid_too(tmp_path):
    path = save(tmp_path, 1)
    (path / MANIFEST).write_text(json.dumps({"files": {"a\x00b": "c"}}))
    with pytest.raises(CheckpointError):
        find_checkpoint(tmp_path)


def test_a_manifest_that_leaves_out_a_file_is_invalid(tmp_path):
    path = save(tmp_path, 1)
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["files"]["policy.safetensors"]
    (path / MANIFEST).write_text(json.dumps(manifest))
    flip(path / "policy.safetensors", -1)
    with pytest.raises(CheckpointError, match="policy"):
        read_checkpoint(path)


def test_a_shard_that_the_manifest_does_not_name_is_not_read(tmp_path):
    path = save(tmp_path, 1)
    shutil.copy(path / "envs/shard_0.safetensors", path / "envs/shard_7.safetensors")
    assert read_checkpoint(path).env_shards.keys() == {0, 1}


def test_every_checkpoint_passed_over_is_named_and_none_left_is_an_error(tmp_path, capsys):
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip(tmp_path / "step_3" / "state.json")
    flip(tmp_path / "step_2" / "policy.safetensors")
    assert find_checkpoint(tmp_path).path == tmp_path / "step_1"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "step_3/state.json" in lines[0]
    assert "step_2/policy.safetensors" in lines[1]
    assert find_checkpoint(tmp_path, warn=False).path == tmp_path / "step_1"
    assert capsys.readouterr().err == ""
    (tmp_path / "step_1" / MANIFEST).unlink()
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)
    assert all(f"step_{step}" in str(caught.value) for step in (1, 2, 3))


# ---- which one


@pytest.mark.parametrize("when", ["before it is checked", "once it is checked"])
@pytest.mark.parametrize("which", ["latest", "best"])
def test_a_run_that_goes_on_while_it_is_read_is_read_where_it_is_then(tmp_path, monkeypatch, capsys, which, when):
    """It commits its next checkpoint, and prunes the one that is being read."""
    save(tmp_path, 1, score=1.0)
    looked = []

    def check(path):
        looked.append(path.name)
        problem = problem_with(path) if when == "once it is checked" else None
        if len(looked) == 1:
            save(tmp_path, 2, score=2.0)
            shutil.rmtree(tmp_path / "step_1")
        return problem_with(path) if when == "before it is checked" else problem

    monkeypatch.setattr(checkpoint, "problem_with", check)
    assert find_checkpoint(tmp_path, which).state["iteration"] == 2
    assert looked == ["step_1", "step_2"]
    assert capsys.readouterr().err == ""


def test_a_file_that_is_removed_while_it_is_read_is_named(tmp_path, monkeypatch):
    path = save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "problem_with", lambda path: (path / "state.json").unlink())
    with pytest.raises(CheckpointError, match=rf"^{path}/state\.json can't be read: No such file or directory$"):
        find_checkpoint(tmp_path, "1")


def test_latest_is_by_number_and_not_by_name(tmp_path):
    for step in (9, 100, 20):
        save(tmp_path, step)
    assert [step_of(path) for path in checkpoints_in(tmp_path)] == [100, 20, 9]
    assert find_checkpoint(tmp_path).path == tmp_path / "step_100"


def test_best_is_by_score_and_of_equal_ones_the_newest(tmp_path):
    for step, score in ((1, 5.0), (2, 7.0), (3, 7.0), (4, None), (5, -1.0)):
        save(tmp_path, step, score)
    assert best_of(tmp_path) == tmp_path / "step_3"
    assert find_checkpoint(tmp_path, "best").path == tmp_path / "step_3"


def test_no_number_is_better_than_none(tmp_path):
    for step, score in ((1, 5.0), (2, float("nan")), (3, 2.0), (4, float("nan"))):
        save(tmp_path, step, score)
    assert best_of(tmp_path) == tmp_path / "step_1"


def test_the_best_is_not_silently_exchanged_for_another(tmp_path):
    save(tmp_path, 1, 1.0)
    flip(save(tmp_path, 2, 2.0) / "policy.safetensors")
    with pytest.raises(CheckpointError, match=r"step_2/policy\.safetensors is damaged"):
        find_checkpoint(tmp_path, "best")


@pytest.mark.parametrize("which", ["2", "step_2"])
def test_a_step_by_number_or_name(tmp_path, which):
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert find_checkpoint(tmp_path, which).state["iteration"] == 2


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint with a return"):
        find_checkpoint(tmp_path, "best")
    save(tmp_path, 10)
    save(tmp_path, 20)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 15; there are: 20, 10$"):
        find_checkpoint(tmp_path, "15")
    with pytest.raises(CheckpointError, match="no checkpoint with a return"):
        find_checkpoint(tmp_path, "best")


def test_other_directories_are_no_checkpoints(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step_two").mkdir()
    (tmp_path / "step_3.old").mkdir()
    (tmp_path / "step_4").write_text("a file")
    assert checkpoints_in(tmp_path) == [tmp_path / "step_1"]
    assert problem_with(tmp_path / "step_1") is None
    assert problem_with(tmp_path / "step_two") is not None


def test_arrays_that_could_not_be_read_are_not_written():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    with pytest.raises(CheckpointError, match=r"^checkpoint: x is bfloat16, which no checkpoint can hold"):
        pack({"x": np.zeros((2, 3), bfloat16)})
