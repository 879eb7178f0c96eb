"""What the load formats for vLLM and SGLang share.

A server's own loader goes on to find the files, and to do all that comes after its iterator of
weights. Only while it makes this iterator, those functions of its module that read safetensors are
replaced by one that has the tensors from pinpool.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import safetensors

Weights = Iterator[tuple[str, Any]]


def options(config: Any) -> tuple[dict[str, int], Any]:
    """Pinpool's part of the model loader's extra config, and the rest, which the server checks."""
    if not isinstance(config, dict):
        return {}, config
    ours = {key: config[key] for key in ("window", "ahead") if key in config}
    for key, value in ours.items():
        if type(value) is not int or value < 1:
            what = "bytes" if key == "window" else "windows"
            raise ValueError(f'"{key}" in the extra config is a number of {what}, at least 1, not {value!r}')
    return ours, {key: value for key, value in config.items() if key not in ours}


def replacing(
    module: Any,
    names: list[str],
    weights: Callable[[list[str]], Weights],
    make: Callable[[], Weights],
    log: logging.Logger,
) -> Weights:
    """What `make` returns if the functions of the module that have these names are `weights`."""
    asked = False

    def ours(files: list[str], *_arguments: Any, **_keywords: Any) -> Weights:
        nonlocal asked
        asked = True
        return weights(files)

    theirs = {name: getattr(module, name) for name in names}
    try:
        for name in names:
            setattr(module, name, ours)
        made = make()
    finally:
        for name, function in theirs.items():
            setattr(module, name, function)
    if not asked:
        log.warning("these files are not safetensors: they are loaded without pinpool")
    return made


def load(
    files: list[str],
    options: dict[str, int],
    keep: Callable[[str], bool] | None,
    log: logging.Logger,
    show: bool,
) -> Weights:
    """The weights, on the current GPU. Shows on the way how far they are, if it is to, in the first
    process of several; says at the end how long they took."""
    import torch
    from tqdm.auto import tqdm

    if torch.version.cuda is None:
        raise ValueError("pinpool's load format is for NVIDIA GPUs: use another --load-format")
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    start, nbytes = time.perf_counter(), 0
    with tqdm(
        total=sum(os.path.getsize(file) for file in files),
        desc="Loading weights with pinpool",
        unit="B",
        unit_scale=True,
        disable=not (show and first),
    ) as bar:
        for name, tensor in safetensors.weights(sorted(files), "cuda", keep=keep, **options):
            size = tensor.numel() * tensor.element_size()
            nbytes += size
            bar.update(size)
            yield name, tensor
    seconds = time.perf_counter() - start
    log.info(
        "pinpool loaded %.2f GB of weights in %.2f s, what the model did with them included: %.1f GB/s",
        nbytes / 1e9,
        seconds,
        nbytes / 1e9 / max(seconds, 1e-9),
    )
