"""For tests on a CUDA device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_waiting() -> Iterator[None]:
    """An operation that waits for the device is an error, until the end of the context, however it is left."""
    torch.cuda.synchronize()
    _set_mode("error")
    try:
        yield
    finally:
        _set_mode("default")


@contextmanager
def waiting() -> Iterator[None]:
    """Within :func:`without_waiting`: here it may."""
    _set_mode("default")
    try:
        yield
    finally:
        _set_mode("error")


def _set_mode(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
