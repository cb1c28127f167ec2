"""The policies that come with the repository: they load, act, and are small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import drq

FOLDER = Path(__file__).parent.parent / "policies"
FILES = sorted(FOLDER.glob("*.drq"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_policy_acts_on_frames_of_its_task(file: Path) -> None:
    policy = drq.load(file)
    frame = np.random.default_rng(0).integers(0, 256, (84, 84, policy.spec.frame_shape[0]), np.uint8)
    action = policy.act(frame)
    if policy.spec.action_kind == "discrete":
        assert 0 <= int(action) < policy.spec.action_size
    else:
        assert action.shape == (policy.spec.action_size,)
        assert np.abs(action).max() <= 1
    assert policy.spec.task.split("/")[1] == file.stem


def test_there_are_three_of_control_and_three_games_in_forty_megabytes() -> None:
    families = [drq.load(file).spec.task.split("/")[0] for file in FILES]
    assert sorted(families) == ["atari"] * 3 + ["dmc"] * 3
    assert sum(file.stat().st_size for file in FILES) < 40e6
    assert (FOLDER.parent / "docs/images/policies.webp").stat().st_size < 3e6
    told = (FOLDER / "README.md").read_text()
    assert all(f"`{file.name}`" in told for file in FILES)
