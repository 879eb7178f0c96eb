"""The load format `pinpool` of vLLM, written against 0.25.1 and 0.33.0."""

# mypy: disable-error-code="import-not-found,misc,no-any-return,unused-ignore"

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

from safetensors import safe_open
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.model_loader import default_loader, weight_utils

from . import _servers

_log = logging.getLogger("vllm.pinpool")


class PinpoolModelLoader(default_loader.DefaultModelLoader):
    """vLLM's default loader, with the tensors of safetensors files from pinpool."""

    def __init__(self, load_config: Any) -> None:
        self._options, rest = _servers.options(load_config.model_loader_extra_config)
        # vLLM's own code knows no format "pinpool": to it, files are found as by default.
        super().__init__(
            dataclasses.replace(load_config, load_format="auto", model_loader_extra_config=rest)
        )

    def _get_weights_iterator(self, source: Any) -> _servers.Weights:
        make = functools.partial(super()._get_weights_iterator, source)
        if self.load_config.safetensors_load_strategy == "torchao":
            _log.info("vLLM puts the tensors of this checkpoint together itself, without pinpool")
            return make()
        one = "safetensors_weights_iterator"
        names = [one, f"multi_thread_{one}"]
        return _servers.replacing(default_loader, names, self._weights, make, _log)

    def _weights(self, files: list[str]) -> _servers.Weights:
        # Engram's tables may exceed the device's memory: they stay on the CPU where vLLM says so.
        engram = getattr(get_current_vllm_config_or_none(), "engram_config", None)
        on_cpu = weight_utils._ENGRAM_WEIGHT_RE.search if engram and engram.cpu_offload else None

        def keep(name: str) -> bool:
            elsewhere = weight_utils.should_skip_weight(name, self.local_expert_ids)
            return not elsewhere and not (on_cpu and on_cpu(name))

        show = self.load_config.use_tqdm_on_load
        yield from _servers.load(files, self._options, keep, _log, show)
        for file in files if on_cpu else []:
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in filter(on_cpu, opened.keys()):
                    yield name, opened.get_tensor(name)
