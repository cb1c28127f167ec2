"""Puts videos side by side into one small moving picture:

    python scripts/moving_picture.py docs/images/policies.webp a.mp4 b.mp4 ...

The videos are those of `drq eval policies/NAME.drq --episodes 1 --video NAME.mp4`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
from PIL import Image

SIDE, COLUMNS = 160, 3
"""Pixels of a video, and videos in a row."""
FPS, SECONDS = 12.5, 8.0


def frames(video: Path) -> list[Image.Image]:
    """Of one video, as many as the picture has; a shorter one begins again."""
    with imageio.get_reader(video) as reader:
        fps = float(reader.get_meta_data()["fps"])
        played = [Image.fromarray(frame) for frame in reader]
    wanted = (int(number / FPS * fps) % len(played) for number in range(round(FPS * SECONDS)))
    return [_fitted(played[number]) for number in wanted]


def _fitted(frame: Image.Image) -> Image.Image:
    """In the middle of a black square."""
    frame.thumbnail((SIDE, SIDE))
    square = Image.new("RGB", (SIDE, SIDE))
    square.paste(frame, ((SIDE - frame.width) // 2, (SIDE - frame.height) // 2))
    return square


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the picture: .webp")
    parser.add_argument("videos", type=Path, nargs="+")
    given = parser.parse_args()
    panels = np.stack([[np.asarray(frame) for frame in frames(video)] for video in given.videos])
    missing = -len(panels) % COLUMNS
    panels = np.concatenate([panels, np.zeros((missing, *panels.shape[1:]), np.uint8)])
    rows = panels.reshape(-1, COLUMNS, *panels.shape[1:])
    whole = rows.transpose(2, 0, 3, 1, 4, 5).reshape(panels.shape[1], len(rows) * SIDE, COLUMNS * SIDE, 3)
    first, *rest = (Image.fromarray(frame) for frame in whole)
    first.save(given.out, save_all=True, append_images=rest, duration=round(1000 / FPS), loop=0, quality=60, method=6)
    print(f"{given.out}: {given.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
