"""Videos of episodes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen

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
    import imageio_ffmpeg

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.unfinished{path.suffix}")
    height, width = _even(frames[0]).shape[:2]
    pictures = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", "25", "-i", "-")
    coded = ("-vcodec", "h264", "-pix_fmt", "yuv420p")
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *pictures, *coded, f"file:{unfinished}"]
    if any(frame.shape != frames[0].shape for frame in frames):
        raise OSError("its pictures are not all of one size")
    try:
        # Not by imageio: it leaves ffmpeg's words on the terminal and does not ask whether it failed. In a group of its
        # own, so that a terminal's Ctrl-C does not cut the video off.
        with Popen(command, stdin=PIPE, stderr=PIPE, process_group=0) as encoder:
            assert encoder.stdin is not None
            with suppress(BrokenPipeError):  # it says why
                for frame in frames:
                    encoder.stdin.write(_even(frame).tobytes())
            _, said = encoder.communicate()
        if encoder.returncode:
            first = said.decode(errors="replace").partition("\n")[0]
            raise OSError(first.rpartition(": ")[2] or f"ffmpeg ended with {encoder.returncode}")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _even(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The encoder takes even sides only."""
    height, width = frame.shape[:2]
    return np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
