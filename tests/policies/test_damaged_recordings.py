"""A file that isn't a recording, or says what no memory holds, is one line."""

import io
import json
import zipfile

import numpy as np
import pytest

from lockstep.policies.recordings import Recording, read_recording, write_recording

FACTS = {"policy": "run", "config": {}, "environment": {}}


def saved(array):
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def larger_than_memory():
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"shape": (10**13, 4), "fortran_order": False, "descr": "<f4"})
    return content.getvalue()


@pytest.fixture
def recording(tmp_path):
    rows = np.zeros((3, 4), np.float32)
    made = Recording(rows, np.zeros(3, np.int64), np.zeros(3, np.int64), np.zeros((1, 4)), FACTS)
    write_recording(tmp_path / "a.npz", made)
    return tmp_path / "a.npz"


def with_member(path, name, content):
    with zipfile.ZipFile(path) as file:
        members = {each: file.read(each) for each in file.namelist()} | {f"{name}.npy": content}
    with zipfile.ZipFile(path, "w") as file:
        for each, what in members.items():
            file.writestr(each, what)


def test_one_that_is_whole_is_read(recording):
    assert read_recording(recording).facts == FACTS


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("observations", larger_than_memory(), "Unable to allocate"),
        ("observations", saved(np.zeros(2)), "another format"),
        ("observations", saved(np.array([None])), "Object arrays cannot be loaded"),
        ("facts", saved(np.array("[" * 100_000)), "recursion"),
        ("facts", saved(np.array("5")), "int"),
        ("facts", saved(np.array(json.dumps({"format": 1, "config": {}, "environment": {}}))), "its facts lack policy"),
    ],
    ids=["huge", "short", "objects", "deep", "number", "no policy"],
)
def test_anything_else_is_one_line(recording, name, content, said):
    with_member(recording, name, content)
    with pytest.raises(ValueError, match=said) as caught:
        read_recording(recording)
    assert str(caught.value).startswith(f"recording: {recording} is none: ")
    assert "\n" not in str(caught.value)


def test_a_byte_that_is_another_is_one_line_or_changes_nothing(tmp_path):
    """Wherever it is: in what is compressed, in its sums, or in what the file says of itself."""
    numbers = np.random.default_rng(0).integers(0, 9, (500, 4)).astype(np.float32)
    path = tmp_path / "a.npz"
    write_recording(path, Recording(numbers, np.zeros(500, np.int64), np.zeros(500, np.int64), np.zeros((1, 4)), FACTS))
    whole, refused = path.read_bytes(), 0
    for at in range(0, len(whole), max(1, len(whole) // 400)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :])
        try:
            found = read_recording(path)
        except ValueError as error:
            refused += 1
            assert str(error).startswith(f"recording: {path} is none: ")  # noqa: PT017
        else:
            np.testing.assert_array_equal(found.observations, numbers)
            assert found.facts == FACTS
    assert refused > 200
