"""The plugin for SGLang: `--load-format private`.

SGLang leaves that format's loader to others, under a name of its own package, and has no registry of
formats. It finds and calls the plugin by itself, in each of its processes, unless its variable
`SGLANG_PLUGINS` names others only.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from typing import Any

_log = logging.getLogger("sglang.pinpool")
_NAME = "sglang.private.private_model_loader"


def _loader(name: str) -> Any:
    if name != "PrivateModelLoader":
        raise AttributeError(name)
    from ._sglang_loader import PrivateModelLoader

    return PrivateModelLoader


def register() -> None:
    """Puts the loader in its place. An error is logged, and the server goes on without."""
    try:
        if _NAME in sys.modules:
            return
        if importlib.util.find_spec("sglang.private"):
            _log.warning("--load-format private is another package's, and not pinpool's")
            return
        # The loader needs most of SGLang, so it is imported when it is asked for.
        module = types.ModuleType(_NAME, "Pinpool's loader.")
        module.__getattr__ = _loader  # type: ignore[method-assign]
        sys.modules[_NAME] = module
    except Exception:
        _log.exception("pinpool's loader is not to be had: use another --load-format")
