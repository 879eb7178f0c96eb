"""`from_pretrained` of transformers, with the weights loaded by pinpool.

    import pinpool.transformers

    pinpool.transformers.install()
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cuda")

It serves models of safetensors files of which all goes to one CUDA device (`device_map`). Any other
is loaded as without it: several devices, the CPU, offloading to disk, other files, MPS.

transformers opens each file, gets a slice object for each tensor, and then asks these for their
tensors in the natural order of the names, on up to four threads. So once the first is asked for,
all are loaded in that order and in windows, and a thread waits for its own. Each tensor comes out
in memory of its own, as without pinpool.
"""

from __future__ import annotations

import inspect
import re
import threading
import warnings
from contextvars import ContextVar
from typing import Any

from . import safetensors
from ._native import Checkpoint
from .errors import ArgumentError, UnsupportedError

__all__ = ["install", "uninstall"]

_TESTED = "5.17"

# Longer tensors go transformers' own way, which can keep them off the GPU.
_LONGEST = 4 << 30


class _Session:
    """The load of one model."""

    def __init__(self, device: str, window: int, ahead: int, alone: bool) -> None:
        """alone: it is not known in advance what is wanted, and each tensor is loaded when it is
        asked for."""
        if device == "cuda":
            import torch  # type: ignore[import-not-found, unused-ignore]

            # The one of this thread, whichever thread loads.
            device = f"cuda:{torch.cuda.current_device()}"
        self._device, self._window, self._ahead, self._alone = device, window, ahead, alone
        self._lock = threading.Lock()
        self._opened: dict[Any, safetensors.safe_open] = {}
        # The file of each tensor, and those that are still to be taken from the loader.
        self._files: dict[str, Any] = {}
        self._waiting: set[tuple[Any, str]] = set()
        self._loader: safetensors.PrefetchLoader | None = None

    def open(self, file: Any) -> None:
        self._opened[file] = safetensors.safe_open(file, "pt", self._device)

    def slice(self, file: Any, name: str) -> None:
        self._files[name] = file

    def _start(self) -> safetensors.PrefetchLoader | None:
        """Starts to load what there is a slice of."""
        from transformers import core_model_loading  # type: ignore[import-not-found, unused-ignore]

        self._alone = True
        try:
            checkpoint = Checkpoint(list(self._opened))
        except ArgumentError as error:
            # Such as a name that two files have: transformers knows which of them it takes.
            warnings.warn(f"pinpool loads each tensor by itself: {error}", stacklevel=2)
            return None
        names = sorted(self._files, key=core_model_loading.dot_natural_key)
        parts = {name: safetensors._Part.of(checkpoint, name) for name in names}
        plan = {name: part for name, part in parts.items() if part.nbytes <= _LONGEST}
        to = safetensors._place("pt", self._device, None)
        assert isinstance(to, safetensors._Gpu)
        self._waiting = {(self._files[name], name) for name in plan}
        return safetensors.PrefetchLoader(to, checkpoint, plan, self._window, self._ahead)

    def get(self, file: Any, name: str, index: Any) -> Any:
        """A tensor or a part of it, on the GPU. None: it is not for pinpool."""
        opened = self._opened[file]
        if index is not Ellipsis:
            return opened.get_slice(name)[index]
        start, end = opened.get_tensor_meta(name).data_offsets
        if end - start > _LONGEST:
            return None
        with self._lock:
            if not self._alone:
                self._loader = self._start()
            loader, is_waiting = self._loader, (file, name) in self._waiting
            self._waiting.discard((file, name))
        if loader is None or not is_waiting:
            return opened.get_tensor(name)
        tensor = loader.take(name)
        # Its block has others too, unless it fills a window.
        return tensor if end - start >= self._window else tensor.clone()

    def close(self) -> None:
        """Ends the load. What the threads gave to the GPU is complete afterwards, whichever stream
        the program goes on with."""
        with self._lock:
            if self._loader is not None:
                self._loader.close()
        import torch  # type: ignore[import-not-found, unused-ignore]

        torch.cuda.synchronize(torch.device(self._device))


class _Opened:
    """What safetensors opened, but for the loading of whole tensors and parts of them."""

    def __init__(self, stock: Any, session: _Session, file: Any) -> None:
        self._stock, self._session, self._file = stock, session, file
        session.open(file)

    def get_slice(self, name: str) -> _Slice:
        self._session.slice(self._file, name)
        return _Slice(self._stock.get_slice(name), self._session, self._file, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def __enter__(self) -> _Opened:
        self._stock.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stock.__exit__(*raised)


class _Slice:
    """A slice object of safetensors, of which tensors come on the GPU."""

    def __init__(self, stock: Any, session: _Session, file: Any, name: str) -> None:
        self._stock, self._session, self._file, self._name = stock, session, file, name

    def __getitem__(self, index: Any) -> Any:
        tensor = self._session.get(self._file, self._name, index)
        return self._stock[index] if tensor is None else tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def _device(device_map: dict[str, Any] | None) -> str | None:
    """The CUDA device that the whole model goes to."""
    places = {str(place) for place in (device_map or {}).values()}
    place = places.pop() if len(places) == 1 else ""
    place = f"cuda:{place}" if place.isdigit() else place
    return place if re.fullmatch(r"cuda(:\d+)?", place) else None


# What `install` has replaced: the name's module or class, the name, and what it was.
_replaced: list[tuple[Any, str, Any]] = []


def install(*, window: int = safetensors._WINDOW, ahead: int = safetensors._AHEAD) -> None:
    """From now on `from_pretrained` loads through pinpool. A second call changes the options.

    window, ahead: the device memory beside the model's own, (ahead + 1) windows of so many bytes.
    With tensor parallelism each rank reads its own rows only, when transformers asks for them.

    Tested with transformers 5.17: another version gets a warning, and an error if it lacks what is
    replaced. Raises UnsupportedError for that.
    """
    import transformers
    from transformers import core_model_loading, modeling_utils

    if not transformers.__version__.startswith(f"{_TESTED}."):
        is_version = f"this is transformers {transformers.__version__}"
        warnings.warn(f"{is_version}, and pinpool was tested with {_TESTED}", stacklevel=2)
    uninstall()
    model = getattr(modeling_utils, "PreTrainedModel", None)
    load: Any = getattr(model, "_load_pretrained_model", None)
    signature = inspect.signature(load) if load else inspect.Signature()
    has_key = hasattr(core_model_loading, "dot_natural_key")
    if (
        "load_config" not in signature.parameters
        or not hasattr(modeling_utils, "safe_open")
        or not has_key
    ):
        raise UnsupportedError(
            f"transformers {transformers.__version__} does not load models as pinpool expects it; "
            f"install {_TESTED}, or use pinpool.safetensors"
        )
    stock_open = modeling_utils.safe_open
    current: ContextVar[_Session | None] = ContextVar("pinpool.transformers", default=None)

    def safe_open(filename: Any, *arguments: Any, **named: Any) -> Any:
        opened, session = stock_open(filename, *arguments, **named), current.get()
        return opened if session is None else _Opened(opened, session, filename)

    def load_pretrained_model(*arguments: Any, **named: Any) -> Any:
        config = signature.bind(*arguments, **named).arguments["load_config"]
        device = _device(config.device_map)
        if device is None:
            return load(*arguments, **named)
        session = _Session(device, window, ahead, config.device_mesh is not None)
        token = current.set(session)
        try:
            return load(*arguments, **named)
        finally:
            current.reset(token)
            session.close()

    for owner, name, value in [
        (modeling_utils, "safe_open", safe_open),
        (model, "_load_pretrained_model", staticmethod(load_pretrained_model)),
    ]:
        _replaced.append((owner, name, inspect.getattr_static(owner, name)))
        setattr(owner, name, value)


def uninstall() -> None:
    """`from_pretrained` is as it was before `install`."""
    while _replaced:
        setattr(*_replaced.pop())
