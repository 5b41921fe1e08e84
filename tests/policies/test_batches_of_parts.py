"""Batches whose parts are arrays of their own, and masks that have an array for each index of an action."""

import numpy as np
import pytest
from command_line import SMALL

from lockstep import load_policy

DOORS = ("small_worlds:Doors-v0", *SMALL, "--env.action-mask", "info", "--stop-at-step", 256)
LANTERN = ("small_worlds:Lantern-v0", *SMALL, "--normalize.observations", "--stop-at-step", 256)
SEEN = np.eye(3, dtype=np.float32)


def lantern(cameras=3, speeds=3, colours=3):
    view = {"camera": np.zeros((cameras, 6, 6, 3), np.uint8)}
    return {"view": view, "speed": np.zeros((speeds, 2), np.float32), "colour": np.zeros(colours, int)}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"speeds": 2}, r"part 'colour' is of shape \(3,\) and part 'speed' of \(2, 2\)"),
        ({"colours": 2}, r"part 'colour' is of shape \(2,\) and part 'speed' of \(3, 2\)"),
        ({"cameras": 4}, r"part 'view/camera' is of shape \(4, 6, 6, 3\) and part 'speed' of \(3, 2\)"),
    ],
)
def test_parts_of_unlike_lengths_are_one_line(trained, parts, said):
    policy = load_policy(trained(*LANTERN).path)
    assert policy(lantern()).shape == policy.value(lantern()).shape == (3,)
    for use in (policy, policy.value, policy.predict):
        with pytest.raises(ValueError, match=f"^observation: {said}; a batch has equally many of each$"):
            use(lantern(**parts))


def test_a_part_that_has_no_batch_is_one_line_too(trained):
    policy = load_policy(trained(*LANTERN).path)
    with pytest.raises(ValueError, match=r"^observation: part 'colour' is of shape \(\) and part 'speed' of \(3, 2\)"):
        policy(lantern() | {"colour": 1})


def test_masks_are_as_many_as_observations(trained):
    policy = load_policy(trained(*DOORS).path)
    for count in (2, 4):
        with pytest.raises(ValueError, match=f"^action_mask: {count} masks for 3 observations; give one for all"):
            policy(SEEN, action_mask=np.ones((count, 5)))
        with pytest.raises(ValueError, match=f"^action_mask: {count} masks for 3 observations; give one for all"):
            policy(SEEN, action_mask=(np.ones((count, 3)), np.ones((count, 2))))
    with pytest.raises(
        ValueError, match=r"^action_mask: its parts don't fit together; needed are 5 numbers, or arrays"
    ):
        policy(SEEN, action_mask=(np.ones((3, 3)), np.ones((2, 2))))


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_mask_may_be_an_array_for_each_index(trained, kind):
    policy = load_policy(trained(*DOORS).path)
    first, second = np.array([[0, 1, 0], [1, 0, 1], [0, 0, 1]]), np.array([[0, 1], [1, 1], [1, 0]])
    flat = np.concatenate([first, second], -1)
    for single in range(3):
        wanted = policy.probabilities(SEEN[single], flat[single])
        found = policy.probabilities(SEEN[single], kind([first[single], second[single]]))
        assert all(map(np.array_equal, found, wanted))
    wanted = policy.probabilities(SEEN, flat)
    assert any((part == 0).any() for part in wanted)
    for masks in (kind([first, second]), kind([kind(pair) for pair in zip(first, second, strict=True)])):
        assert all(map(np.array_equal, policy.probabilities(SEEN, masks), wanted))
    for_all = policy.probabilities(SEEN, kind([first[0], second[0]]))
    assert all(map(np.array_equal, for_all, policy.probabilities(SEEN, flat[0])))
    assert policy.predict(SEEN, action_masks=kind([first[0], second[0]]))[0].tolist() == [[1, 1]] * 3
