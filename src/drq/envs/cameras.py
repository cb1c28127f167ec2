"""Cameras of MuJoCo's models, drawn with OpenGL: one, or those of many models at once.

Nothing here imports mujoco at the top: see rendering.py.
"""

from __future__ import annotations

import atexit
import math
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drq.envs.rendering import drawing_errors, require_rendering

FAST_SHADOW_SIZE = 512
"""Texels along a side of the shadow map with `render=fast`; the control suite's own models have 2,048."""

_TILES = 0
"""Which of a context's auxiliary buffers holds the tiles."""
_MAX_GEOMS = 10_000
"""As many as mujoco.Renderer draws by default."""
_SPARE_GEOMS = 10
"""Room in a scene beyond what is shown in it: MuJoCo takes a place before it leaves out what cannot be seen."""


class Camera:
    """One camera of a model, drawn into an off-screen buffer of the image's size.

    dm_control's own buffer is 640 x 480 whatever the size of the image; the pixels are the same. An OpenGL
    context belongs to the thread that made it: use a camera only in the thread that created it.
    """

    def __init__(self, model: Any, size: int, camera: int, shadow_size: int | None) -> None:
        """`model` is a mujoco.MjModel. `shadow_size` replaces the model's own shadow map, unless None."""
        require_rendering()
        with drawing_errors():
            import mujoco

            _set_buffer(model, size, shadow_size)
            self._renderer = mujoco.Renderer(model, size, size)
        self.model = model
        self._camera = camera
        _close_at_exit(self)

    def draw(self, data: Any) -> NDArray[np.uint8]:
        """An RGB image (size, size, 3) of the state in `data`, a mujoco.MjData."""
        self._renderer.update_scene(data, self._camera, _shown())
        image: NDArray[np.uint8] = self._renderer.render()
        return image

    def close(self) -> None:
        # mujoco 3.17 clears up in whichever context is current, another camera's perhaps, unless there is none.
        if context := self._renderer._gl_context:
            context.free()
        self._renderer.close()


class Tiles:
    """Pictures drawn in one OpenGL context and read back together.

    Reading back waits until the GPU has drawn, and while CUDA keeps it busy each wait lasts until its turn to draw
    comes: one wait for all is what this is for. Each picture is drawn by itself at the origin and then copied to its
    tile. Drawn in place, at another offset, colours would differ from `Camera`'s in the last bit here and there.

    What is uploaded when a context is made (meshes, textures, terrain) is that of one model for all pictures. Like a
    `Camera`, this belongs to the thread that created it.
    """

    def __init__(self, model: Any, size: int, count: int, shadow_size: int | None) -> None:
        """`count` tiles; the other arguments are those of `Camera`."""
        require_rendering()
        self._size = size
        self._columns, self._rows = grid(count)
        with drawing_errors():
            import mujoco

            _set_buffer(model, size, shadow_size)
            self._gl = mujoco.GLContext(size, size)
            self._gl.make_current()
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150.value)
            mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
            mujoco.mjr_addAux(_TILES, self._columns * size, self._rows * size, 0, self._context)
        _close_at_exit(self)

    def draw(self, scenes: Mapping[int, Any]) -> dict[int, NDArray[np.uint8]]:
        """RGB images (size, size, 3) of the scenes (mujoco.MjvScene), each numbered as the tile it shall have."""
        import mujoco
        from OpenGL import GL

        size = self._size
        self._gl.make_current()
        for number, scene in scenes.items():
            mujoco.mjr_render(mujoco.MjrRect(0, 0, size, size), scene, self._context)
            row, column = divmod(number, self._columns)
            left, bottom = column * size, row * size
            GL.glBindFramebuffer(GL.GL_DRAW_FRAMEBUFFER, int(self._context.auxFBO[_TILES]))
            GL.glBlitFramebuffer(
                *(0, 0, size, size), *(left, bottom, left + size, bottom + size), GL.GL_COLOR_BUFFER_BIT, GL.GL_NEAREST
            )
            mujoco.mjr_restoreBuffer(self._context)
        tiles = np.empty((self._rows, size, self._columns, size, 3), dtype=np.uint8)
        mujoco.mjr_setAux(_TILES, self._context)
        GL.glReadPixels(*(0, 0, self._columns * size, self._rows * size), GL.GL_RGB, GL.GL_UNSIGNED_BYTE, tiles)
        mujoco.mjr_restoreBuffer(self._context)
        # OpenGL counts rows of pixels from below.
        return {number: tiles[number // self._columns, ::-1, number % self._columns] for number in scenes}

    def close(self) -> None:
        self._gl.free()
        self._context.free()


class TiledCamera:
    """The same camera of several models, drawn as `Tiles`: they share what is uploaded, that of the first."""

    def __init__(self, models: Sequence[Any], size: int, camera: int, shadow_size: int | None) -> None:
        """`models` are mujoco.MjModel; the other arguments are those of `Camera`."""
        self.models = list(models)
        self._camera = camera
        self._shadow_size = shadow_size
        self._tiles = self.tiles(size, len(models))
        import mujoco

        self._scenes = [mujoco.MjvScene(model, maxgeom=_MAX_GEOMS) for model in models]

    def draw(self, states: Mapping[int, Any]) -> dict[int, NDArray[np.uint8]]:
        """RGB images (size, size, 3) of the states (mujoco.MjData), each numbered as its model is."""
        for number, state in states.items():
            update_scene(self._scenes[number], self.models[number], state, self._camera)
        return self._tiles.draw({number: self._scenes[number] for number in states})

    def scene(self, number: int, state: Any) -> Any:
        """What there is to draw of a state of the model with that number, in a mujoco.MjvScene of its own.

        Neither a later state nor a change of the model (places, sizes, colours) changes it. Taking it needs no
        OpenGL. It is some 0.15 MB large (dog, with its skin, 0.7 MB), where a copy of a mujoco.MjData reserves more
        than 10 MB.
        """
        import mujoco

        model, largest = self.models[number], self._scenes[number]
        update_scene(largest, model, state, self._camera)
        scene = mujoco.MjvScene(model, maxgeom=largest.ngeom + _SPARE_GEOMS)
        update_scene(scene, model, state, self._camera)
        return scene

    def tiles(self, size: int, count: int) -> Tiles:
        """So many tiles of any size for scenes of this camera. Who asks for them closes them."""
        return Tiles(self.models[0], size, count, self._shadow_size)

    def close(self) -> None:
        self._tiles.close()


def grid(count: int) -> tuple[int, int]:
    """Columns and rows of the squarest grid with so many tiles."""
    columns = math.ceil(math.sqrt(count))
    return columns, math.ceil(count / columns)


def _set_buffer(model: Any, size: int, shadow_size: int | None) -> None:
    """Settles the sizes of buffers that a context made for the model will have."""
    model.vis.global_.offwidth = size
    model.vis.global_.offheight = size
    if shadow_size is not None:
        model.vis.quality.shadowsize = shadow_size


def update_scene(scene: Any, model: Any, data: Any, camera: int) -> None:
    """Fills a mujoco.MjvScene with what the camera of that number sees of a state, a mujoco.MjData."""
    import mujoco

    everything = mujoco.mjtCatBit.mjCAT_ALL.value
    mujoco.mjv_updateScene(model, data, _shown(), None, _fixed(camera), everything, scene)


@cache
def _shown() -> Any:
    """What is drawn, as mujoco.MjvOption: all but the rays of range finders (quadruped has some), as in the suite."""
    import mujoco

    options = mujoco.MjvOption()
    options.flags[mujoco.mjtVisFlag.mjVIS_RANGEFINDER] = False
    return options


@cache
def _fixed(camera: int) -> Any:
    import mujoco

    view = mujoco.MjvCamera()
    view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, camera
    return view


_open_cameras: weakref.WeakSet[Camera | Tiles] = weakref.WeakSet()


def _close_at_exit(camera: Camera | Tiles) -> None:
    _open_cameras.add(camera)
    _close_cameras_at_exit()


@cache
def _close_cameras_at_exit() -> None:
    """Registered once, after mujoco has registered the end of OpenGL, so that it runs before it."""
    atexit.register(_close_cameras)


def _close_cameras() -> None:
    for camera in _open_cameras:
        camera.close()
