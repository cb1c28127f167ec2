"""From an environment's own picture to the frame that an agent sees: channels, bytes, grey, size."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from PIL import Image

from drq.envs.area import AreaAverage, Resize
from drq.errors import UserError


def image_channels(space: spaces.Space[Any]) -> int | None:
    """Channels of an image observation; None where observations are no images.

    Images are Boxes of uint8 with two axes or three, or of floats in [0, 1] with three.
    """
    if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3):
        return None
    if space.dtype != np.uint8 and not _is_image_of_floats(space):
        return None
    if len(space.shape) == 2:
        return 1
    return next((channels for channels in (space.shape[2], space.shape[0]) if channels in (1, 3)), None)


def _is_image_of_floats(space: spaces.Box) -> bool:
    """A matrix of floats is more often no picture."""
    floats = np.issubdtype(space.dtype, np.floating) and len(space.shape) == 3
    return bool(floats and space.low.min() >= 0 and space.high.max() <= 1)


def channels_last(image: NDArray[Any]) -> NDArray[np.uint8]:
    """An image in any of the layouts taken, uint8 or floats in [0, 1], as bytes of (height, width, channels)."""
    if image.ndim == 2:
        image = image[..., None]
    elif image.ndim == 3 and image.shape[2] not in (1, 3) and image.shape[0] in (1, 3):
        image = image.transpose(1, 2, 0)
    if image.ndim != 3 or image.shape[2] not in (1, 3):
        raise UserError(
            f"An image of shape {image.shape} was given: give (height, width, channels) or (channels, height, width) "
            "with 1 or 3 channels, one frame and not a stack."
        )
    if np.issubdtype(image.dtype, np.floating):
        if not (image.min() >= 0 and image.max() <= 1):
            raise UserError("An image of floats is not within [0, 1]: give those, or uint8 values from 0 to 255.")
        image = np.rint(image * 255).astype(np.uint8)
    if image.dtype != np.uint8:
        raise UserError(f"Pixels of type {image.dtype} were given: give uint8 values from 0 to 255.")
    return image


def resized(image: NDArray[np.uint8], size: int, how: Resize) -> NDArray[np.uint8]:
    """(height, width, channels) squeezed to a square; an image of that size is handed on as it is."""
    height, width, channels = image.shape
    if (height, width) == (size, size):
        return image
    if how == "area" and size <= min(height, width) and height * width <= 2**16:
        average = AreaAverage(height, width, size)
        return np.stack([average(image[..., channel]) for channel in range(channels)], axis=-1)
    picture = Image.fromarray(image[..., 0] if channels == 1 else image).resize((size, size), Image.Resampling.BOX)
    return np.asarray(picture).reshape(size, size, channels)


def frame_of(image: NDArray[Any], shape: tuple[int, ...], how: Resize = "box") -> NDArray[np.uint8]:
    """A new array (channels, size, size) with what an agent of such frames sees of an image of any size."""
    channels, size, _ = shape
    image = channels_last(image)
    if image.shape[2] == 3 and channels == 1:
        image = np.asarray(Image.fromarray(image).convert("L"))[..., None]
    if image.shape[2] != channels:
        raise UserError("A grey image was given and the policy was trained in colour: give 3 channels.")
    return resized(image, size, how).transpose(2, 0, 1).copy(order="C")
