"""The load format `private` of SGLang, written against 0.5.23."""

# mypy: disable-error-code="import-not-found,misc,no-any-return,unused-ignore"

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader import loader

from . import _servers

_log = logging.getLogger("sglang.pinpool")


class PrivateModelLoader(loader.DefaultModelLoader):
    """SGLang's default loader, with the tensors of safetensors files from pinpool."""

    def __init__(self, load_config: Any) -> None:
        self._options, rest = _servers.options(load_config.model_loader_extra_config)
        # SGLang's own code finds the files as by default.
        super().__init__(
            dataclasses.replace(
                load_config, load_format=LoadFormat.AUTO, model_loader_extra_config=rest
            )
        )

    def _get_weights_iterator(self, *source: Any, **state: Any) -> _servers.Weights:
        make = functools.partial(super()._get_weights_iterator, *source, **state)
        one = "safetensors_weights_iterator"
        names = [one, f"buffered_multi_thread_{one}"]
        return _servers.replacing(loader, names, self._weights, make, _log)

    def _weights(self, files: list[str]) -> _servers.Weights:
        return _servers.load(files, self._options, None, _log, True)
