"""Episodes in a window."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from drq.errors import UserError


def open_window() -> Callable[[NDArray[np.uint8]], None]:
    """A window on this machine's screen; what is returned puts a picture into it, and waits a moment."""
    import matplotlib.pyplot as plt
    from matplotlib import get_backend

    if get_backend().lower() in ("agg", "pdf", "svg", "ps", "cairo", "template"):
        raise UserError("There is no screen for --render human here: write a video instead (--video episode.mp4).")
    figure = plt.figure("drq eval")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()

    def show(picture: NDArray[np.uint8]) -> None:
        if not plt.fignum_exists(figure.number):
            raise KeyboardInterrupt  # closed by the user
        axes.clear()
        axes.set_axis_off()
        axes.imshow(picture)
        plt.pause(0.02)

    return show
