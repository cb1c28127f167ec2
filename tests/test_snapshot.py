"""Tensors as they were, fetched while others overwrite them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from drq.engine import Snapshot


def test_another_thread_gets_what_there_was(device: str) -> None:
    """Also of a layout that is not the usual one, and while the GPU is busy with what comes after."""
    changing = torch.zeros(64, 32, 50, 50, device=device).contiguous(memory_format=torch.channels_last)
    count = torch.zeros((), dtype=torch.int64)
    with ThreadPoolExecutor(1) as elsewhere:
        fetched = []
        for _ in range(5):
            changing += 1
            count += 1
            fetched.append(elsewhere.submit(Snapshot.of({"changing": changing, "count": count}).on_host))
        changing += 1
        for number, future in enumerate(fetched, start=1):
            there = future.result()
            assert there["changing"].device.type == "cpu"
            assert (there["changing"] == number).all()
            assert int(there["count"]) == number
