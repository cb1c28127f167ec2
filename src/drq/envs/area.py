"""Pictures made smaller by averaging over areas, to the bit as OpenCV's INTER_AREA does it.

Ours because the emulator hands over whole screens, and OpenCV would be a dependency for this one function; the times of
a step in `atari_emulator.py` are with it.
"""

from __future__ import annotations

from itertools import count
from math import ceil, floor, gcd
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

Resize = Literal["box", "area"]
"""How pictures become smaller. box: the mean of the pixels whose centres lie in a pixel's box (Pillow's BOX). area: the
mean over a pixel's area, those at its edges counted by their share (OpenCV's INTER_AREA, Atari's way)."""

_NEAR_HALF = np.float32(0.499)
"""A mean further than this from the nearest whole number may be rounded either way by the errors of float32, which
are below 0.0002 here. In 84 x 84 pixels of an Atari screen (means of 200 parts) only exact halves are."""
_ONE_THREADS_WORK = 2**17
"""As many products a matrix multiplication may have for OpenBLAS to leave it to the calling thread."""


class AreaAverage:
    """Makes grey pictures of one shape, of at most 65,536 pixels, smaller.

    Sums of bytes with whole-numbered weights are then exact in float32 in whichever order, so that two products of
    matrices decide nearly every pixel. Where the mean lies halfway between two grey levels OpenCV's own order and
    roundings decide, so those few pixels are computed as it does. A reduction by whole numbers in both directions,
    which OpenCV sums in integers, may differ in such pixels.
    """

    def __init__(self, height: int, width: int, size: int) -> None:
        """To `size` rows and columns, no more than there are."""
        rows, columns = _shares(height, size), _shares(width, size)
        self._parts = np.float32(rows.shape[1] * columns.shape[1])
        self._row_shares, self._column_shares = rows, np.ascontiguousarray(columns.T)
        self._source = np.empty((height, width), dtype=np.float32)
        self._short = np.empty((size, width), dtype=np.float32)
        self._means = np.empty((size, size), dtype=np.float32)
        self._distance = np.empty_like(self._means)
        self._near_half = np.empty(size * size, dtype=bool)
        # The same memory as blocks: shares repeat every few rows and columns.
        self._source_blocks = self._source.reshape(-1, rows.shape[1], width)
        self._short_blocks = self._short.reshape(-1, rows.shape[0], width)
        pieces = _pieces(size * width // columns.shape[1], columns.size)
        self._short_lines = self._short.reshape(pieces, -1, columns.shape[1])
        self._mean_lines = self._means.reshape(pieces, -1, columns.shape[0])
        # For each pixel: where its taps lie in the source, row by row, and what each column and row of them weighs.
        (row_places, row_weights), (column_places, column_weights) = _taps(height, size), _taps(width, size)
        places = row_places[:, None, :, None] * width + column_places[None, :, None, :]
        self._places = places.reshape(size * size, *places.shape[2:])
        self._column_weights = np.tile(column_weights[:, None, :], (size, 1, 1))
        self._row_weights = np.repeat(row_weights, size, axis=0)

    def __call__(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """(height, width) to (size, size), in a new array."""
        means, distance = self._means, self._distance
        np.copyto(self._source, picture)
        np.matmul(self._row_shares, self._source_blocks, out=self._short_blocks)
        np.matmul(self._short_lines, self._column_shares, out=self._mean_lines)
        np.divide(means, self._parts, out=means)
        np.rint(means, out=distance)
        small = distance.astype(np.uint8)
        np.subtract(means, distance, out=distance)
        np.abs(distance, out=distance)
        np.greater(distance.reshape(-1), _NEAR_HALF, out=self._near_half)
        (halves,) = self._near_half.nonzero()
        if len(halves):
            small.reshape(-1)[halves] = self._as_opencv(halves)
        return small

    def _as_opencv(self, pixels: NDArray[np.intp]) -> Floats:
        """Some pixels: columns first, then rows; every product and every sum rounded to float32, in that order."""
        taps = self._source.take(self._places.take(pixels, axis=0))
        along_columns = _sum_in_order(taps * self._column_weights.take(pixels, axis=0))
        sums = _sum_in_order(along_columns * self._row_weights.take(pixels, axis=0))
        return np.rint(sums, out=sums)


def _pieces(lines: int, products: int) -> int:
    """How many equal pieces to multiply lines in, at so many products a line, that another thread is not woken."""
    return next(n for n in count(1) if lines % n == 0 and lines // n * products <= _ONE_THREADS_WORK)


def _sum_in_order(values: Floats) -> Floats:
    """Over the last axis, from the first to the last."""
    total: Floats = values[..., 0]
    for place in range(1, values.shape[-1]):
        total = total + values[..., place]
    return total


def _shares(length: int, size: int) -> Floats:
    """How much of each source pixel falls to each pixel, in whole numbers, until that begins to repeat: (pixels,
    source pixels)."""
    common = gcd(length, size)
    sources, pixels = length // common, size // common
    pixel, source = np.arange(pixels)[:, None], np.arange(sources)
    overlap = np.minimum((pixel + 1) * sources, (source + 1) * pixels) - np.maximum(pixel * sources, source * pixels)
    shares: Floats = np.maximum(overlap, 0).astype(np.float32)
    return shares


def _taps(length: int, size: int) -> tuple[NDArray[np.intp], Floats]:
    """OpenCV's table: the source pixels of each pixel with their weights, both (size, taps). Ones too many weigh 0."""
    scale = length / size
    places = np.zeros((size, ceil(scale) + 2), dtype=np.intp)
    weights = np.zeros(places.shape, dtype=np.float32)
    for pixel in range(size):
        begin, end = pixel * scale, (pixel + 1) * scale
        width = min(scale, length - begin)
        last = min(floor(end), length - 1)
        first = min(ceil(begin), last)
        taps = [(source, 1 / width) for source in range(first, last)]
        if first - begin > 1e-3:
            taps.insert(0, (first - 1, (first - begin) / width))
        if end - last > 1e-3:
            taps.append((last, min(end - last, 1.0, width) / width))
        for place, (source, weight) in enumerate(taps):
            places[pixel, place], weights[pixel, place] = source, weight
    used = int(np.count_nonzero(weights, axis=1).max())
    return places[:, :used], weights[:, :used]
