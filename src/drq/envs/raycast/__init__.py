"""The control suite's images without OpenGL: MuJoCo's abstract scene, drawn by casting rays."""

from drq.envs.raycast.cpu import SOURCES, compiler, draw, require_compiler
from drq.envs.raycast.scene import FRAME_WORDS, GEOM_WORDS, MAX_GEOMS, Assets, Driver, RayCamera, Scene

__all__ = [
    "FRAME_WORDS",
    "GEOM_WORDS",
    "MAX_GEOMS",
    "SOURCES",
    "Assets",
    "Driver",
    "RayCamera",
    "Scene",
    "compiler",
    "draw",
    "require_compiler",
]
