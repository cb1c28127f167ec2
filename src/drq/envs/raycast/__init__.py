"""The control suite's images without OpenGL: MuJoCo's abstract scene, drawn by casting rays."""

from drq.envs.raycast.cpu import SOURCES, RayCamera, compiler, draw, require_compiler
from drq.envs.raycast.scene import FRAME_WORDS, GEOM_WORDS, MAX_GEOMS, Assets, Driver, Scene, SceneReader, pack_assets

__all__ = [
    "FRAME_WORDS",
    "GEOM_WORDS",
    "MAX_GEOMS",
    "SOURCES",
    "Assets",
    "Driver",
    "RayCamera",
    "Scene",
    "SceneReader",
    "compiler",
    "draw",
    "pack_assets",
    "require_compiler",
]
