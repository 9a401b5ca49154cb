"""Record of what a run was started with: its data files, its modules, the machine and the time."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftproof.runs.sources import History, Module, Sources, file_of

if TYPE_CHECKING:
    from driftproof.config import Config


def provenance(settings: Config, histories: Sequence[History]) -> Sources:
    """Record for a run that starts now.

    Args:
        settings: The configuration.
        histories: Market bars used in training.
    """
    from driftproof.config.names import named_modules

    modules = [
        Module(name=name, path=str(getattr(sys.modules[name], "__file__", None) or ""))
        for name in dict.fromkeys(named_modules(settings))
        if name in sys.modules
    ]
    return Sources(
        histories=list(histories),
        files=[file_of(setting, path) for setting, path in named_files(settings)],
        modules=modules,
        started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=machine(settings.run.device),
    )


def named_files(settings: Config) -> Iterator[tuple[str, Path]]:
    """Files named in the environment's arguments, with the configuration path of each."""
    for section in ("kwargs", "evaluation_kwargs"):
        for setting, value in _texts(getattr(settings.env, section), f"env.{section}"):
            if "\0" not in value and len(value) < 4096 and (path := Path(value)).is_file():
                yield setting, path


def machine(device: str) -> str:
    """The machine as text: system, processor, cores, and the device of the networks."""
    import torch

    is_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    where = torch.cuda.get_device_name() if is_cuda else "on the CPU"
    return f"{platform.system()} {platform.machine()}, {_processor()}{os.cpu_count()} cores, {where}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((f"{line.partition(':')[2].strip()}, " for line in lines if line.startswith("model name")), "")


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts(part, f"{path}.{key}")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _texts(part, f"{path}.{i}")
