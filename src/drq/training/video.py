"""Videos of episodes."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drq.errors import UserError

NO_FFMPEG = "Videos need ffmpeg: pip install imageio-ffmpeg, or go without (--eval.no-video, no --video)."


def ffmpeg_available() -> bool:
    """Whether a video can be encoded here."""
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        return False
    return True


def check_video(path: Path) -> None:
    """Refuses what no video can be written to, before an episode is played for it."""
    if path.suffix not in (".mp4", ".mkv", ".mov", ".avi"):
        raise UserError(f"{path} does not end in .mp4: name the video so.")
    if not ffmpeg_available():
        raise UserError(NO_FFMPEG)


def save_video(path: Path, frames: list[NDArray[np.uint8]]) -> None:
    """Writes an mp4 that browsers play. The file appears whole or not at all."""
    import imageio.v2 as imageio

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.unfinished{path.suffix}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            imageio.mimsave(unfinished, [_even(frame) for frame in frames], fps=25, macro_block_size=1)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _even(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The encoder takes even sides only."""
    height, width = frame.shape[:2]
    return np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
