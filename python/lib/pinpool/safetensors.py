"""Checkpoints in the safetensors format: a file, an index or a folder.

    from pinpool.safetensors import load_file

    tensors = load_file("model.safetensors", device="cuda:0")  # torch tensors on the GPU
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ._native import Checkpoint, Landed, Pool
from .errors import ArgumentError, UnsupportedError

__all__ = ["load_file", "safe_open"]

# The types that torch and numpy name otherwise than by their letters and bits.
_NAMES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
_KINDS = {"F": "float", "I": "int", "U": "uint"}


def _type(module: Any, name: str) -> Any:
    """A type of torch's or numpy's."""
    plain = re.fullmatch(r"([FIU])(8|16|32|64)", name)
    found = getattr(module, _KINDS[plain[1]] + plain[2] if plain else _NAMES.get(name, ""), None)
    if found is None:
        raise UnsupportedError(f"{module.__name__} has no type {name}: name the tensors to load")
    return found


class _Torch:
    """Tensors of torch, each a view of its file's block of torch's own memory."""

    def __init__(self, device: str) -> None:
        import torch  # type: ignore[import-not-found, unused-ignore]

        self.torch, self.device = torch, torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = f"cuda:{self.device.index}"
        self.behind: int | None = torch.cuda.current_stream(self.device).cuda_stream
        self.blocks: list[tuple[int, Any]] = []

    def type(self, name: str) -> Any:
        return _type(self.torch, name)

    def memory(self, nbytes: int) -> tuple[int, Any]:
        block = self.torch.empty(nbytes, dtype=self.torch.uint8, device=self.device)
        self.blocks.append((block.data_ptr(), block))
        return self.blocks[-1]

    def tensor(self, landed: Landed, name: str, shape: list[int], nbytes: int) -> Any:
        dtype = self.type(name)
        if nbytes == 0:
            return self.torch.empty(shape, dtype=dtype, device=self.device)
        for start, block in self.blocks:
            offset = landed.address - start
            if 0 <= offset < block.numel():
                return block[offset : offset + nbytes].view(dtype).view(shape)
        raise AssertionError("a tensor lies in no block")


class _Numpy:
    """Arrays of numpy, in memory of their own."""

    name, memory, behind = "host", None, None

    def __init__(self) -> None:
        import numpy

        self.numpy = numpy

    def type(self, name: str) -> Any:
        return _type(self.numpy, name)

    def tensor(self, landed: Landed, name: str, shape: list[int], _nbytes: int) -> Any:
        return self.numpy.frombuffer(landed.read(), self.type(name)).reshape(shape)


def _kind(device: str) -> _Torch | _Numpy:
    if device in ("cpu", "host"):
        return _Numpy()
    if device == "cuda" or device.startswith("cuda:"):
        return _Torch(device)
    raise ArgumentError(f'no tensors are known for "{device}"; give "cuda", "cuda:N" or "host"')


class safe_open:
    """A checkpoint of which tensors are loaded by name, with the methods of safetensors' own class
    `safe_open` that have the same names here.

    device: "cuda:N" for tensors of torch, "host" for arrays of numpy. pool: a pool of that device,
    through which the copies go; unless given, one of 256 MiB.
    """

    def __init__(
        self, filename: str | os.PathLike[str], device: str = "host", *, pool: Pool | None = None
    ) -> None:
        self._checkpoint = Checkpoint(filename)
        self._device = str(device)
        name = _kind(self._device).name
        self._pool = pool or Pool(name, allow_unpinned=name == "host")

    def keys(self) -> list[str]:
        """The names, sorted."""
        return sorted(self._checkpoint.names())

    def offset_keys(self) -> list[str]:
        """The names, in the order in which the tensors lie in the files."""
        return self._checkpoint.names()

    def metadata(self) -> dict[str, str]:
        """The metadata of all files together."""
        texts = [json.loads(text) for text in self._checkpoint.metadata()]
        return {key: value for text in texts for key, value in text.items()}

    def get_tensor(self, name: str) -> Any:
        """Loads one tensor. Each call sets up a load: `tensors` loads many together."""
        return dict(self.tensors([name]))[name]

    def tensors(self, names: list[str] | None = None) -> Iterator[tuple[str, Any]]:
        """Loads tensors, all unless they are named. Gives each as soon as it has landed, in the
        order of the files. A loop that is broken off cancels the rest."""
        kind, known = _kind(self._device), {}
        for name in self.offset_keys() if names is None else names:
            found = self._checkpoint.describe(name)
            if found is None:
                raise ArgumentError(f"the checkpoint has no tensor {name!r}")
            # Refused before anything is copied.
            kind.type(found[0])
            known[name] = found
        load = self._checkpoint.load(self._pool, set(known), kind.memory, kind.behind)

        def landed() -> Iterator[tuple[str, Any]]:
            try:
                for each in load:
                    yield each.name, kind.tensor(each, *known[each.name])
            finally:
                load.close()

        return landed()

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass


def load_file(
    filename: str | os.PathLike[str], device: str = "host", *, pool: Pool | None = None
) -> dict[str, Any]:
    """All tensors of a checkpoint, by name: of torch on "cuda:N", of numpy on "host"."""
    return dict(safe_open(filename, device, pool=pool).tensors())
