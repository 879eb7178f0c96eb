"""The plugin for vLLM: `vllm serve MODEL --load-format pinpool`.

vLLM finds and calls it by itself, in each of its processes, unless its variable `VLLM_PLUGINS` names
others only. With `PINPOOL_TORCH=1` in the environment, torch's pinned memory comes from a pool too.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import logging
import os

# Below vLLM's own logger, so that its handlers print it.
_log = logging.getLogger("vllm.pinpool")
_hooked = False


def register() -> None:
    """Makes the load format known. vLLM calls it, perhaps several times, and would not survive an
    exception: an error is logged, and the server goes on without."""
    try:
        from vllm.model_executor import model_loader

        if "pinpool" not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
            from ._vllm_loader import PinpoolModelLoader

            model_loader.register_model_loader("pinpool")(PinpoolModelLoader)
    except Exception:
        _log.exception("pinpool's load format is not to be had: use another --load-format")
    global _hooked
    if os.environ.get("PINPOOL_TORCH") == "1" and not _hooked:
        _hooked = True
        try:
            from . import torch

            torch.install()
        except Exception:
            _log.exception("torch's pinned memory stays torch's own, though PINPOOL_TORCH is 1")
