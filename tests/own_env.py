"""An environment as a user would write it: the file is imported from wherever it lies."""

import gymnasium
import numpy as np


class Lamp(gymnasium.Env):
    """Match the lamp's brightness; actions from -2 to 2, a picture of 30 x 40."""

    observation_space = gymnasium.spaces.Box(0, 255, (30, 40, 3), np.uint8)
    action_space = gymnasium.spaces.Box(-2.0, 2.0, (1,))

    def __init__(self, gain: float = 1.0) -> None:
        self.gain = gain

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.level, self.steps = int(self.np_random.integers(50, 200)), 0
        return self.picture(), {}

    def picture(self):
        picture = np.full((30, 40, 3), self.level, np.uint8)
        picture[:, :20, 1] = 10 * self.steps
        return picture

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        miss = abs(self.gain * float(action[0]) - (self.level - 125) / 40)
        return self.picture(), 1.0 - miss / 4, False, self.steps >= 14, {}


class Told(Lamp):
    """The same, with more to tell in `info`."""

    late = False

    def step(self, action):
        *step, _ = super().step(action)
        told = {"is_success": np.bool_(self.level > 125), "miss": np.float32(self.steps), "level": self.level}
        rest = {"name": "lamp", "picture": self.picture(), "far": 10**400, "nothing": np.nan, "of": {"r": 1.0}, 3: 4.0}
        return *step, told | rest | ({"came late": np.array(self.steps)} if Told.late else {})


class Alone(Lamp):
    """The same, once in a process, as of some emulators."""

    living = 0

    def __init__(self) -> None:
        super().__init__()
        if Alone.living:
            raise RuntimeError("there is one already")
        Alone.living += 1

    def close(self):
        Alone.living -= 1


class Dim(gymnasium.ObservationWrapper):
    """A wrapper of the user's."""

    def observation(self, observation):
        return observation // 2


if "Lamp-v0" not in gymnasium.registry:
    gymnasium.register("Lamp-v0", Lamp)
    gymnasium.register("Told-v0", Told)
    gymnasium.register("Alone-v0", Alone)
