"""torch's pinned memory from a pool.

    import torch
    import pinpool.torch

    pinpool.torch.install(capacity=8 << 30)

From then on `pin_memory()`, `torch.empty(..., pin_memory=True)`, DataLoader(pin_memory=True) and
non-blocking copies of the program use the pool. Install right after `import torch`, before the
first pinned tensor: torch's list of allocators has no lock. The pool is opened at the first pinned
tensor, so that a program can still fork and choose its device.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import platform
import re
import subprocess
from typing import Any

from . import __version__, _native, errors
from ._shim import build

__all__ = ["forget", "hold", "idle", "install", "stats", "trim"]

# The versions of torch that the shim compiles with. The hook is no stable interface of torch's.
TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
# As in pinpool.h, like the statuses and the fields below.
_BACKINGS = {None: 0, "registered": 1, "host_alloc": 2}
_ERRORS: dict[int, type[errors.Error]] = {
    1: errors.ExhaustedError,
    4: errors.CaptureError,
    5: errors.DeviceLostError,
    6: errors.UnavailableError,
    7: errors.ForkedError,
    8: errors.InternalError,
    9: errors.TimeoutError,
}
_NUMBERS = [
    "pinned_bytes",
    "blocks",
    "block_bytes",
    "requested_bytes",
    "allocations",
    "frees",
    "holds",
]


class _Stats(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t)] + [(name, ctypes.c_uint64) for name in _NUMBERS]


# The C interface, which is in the module's library.
_library = ctypes.CDLL(_native.__file__)
_library.pinpool_last_error.restype = ctypes.c_char_p
_shim: Any = None
# Whether the pool is one of several devices.
_several = False


def install(
    capacity: int | None = None,
    device: str | None = None,
    *,
    initial: int = 0,
    largest: int = 0,
    wait: float = 10.0,
    backing: str | None = None,
    any_version: bool = False,
) -> None:
    """Takes the place of torch's allocator of pinned memory.

    capacity: the bound on pinned bytes; a quarter of the machine's memory unless given.
    device: "cuda:0", or "cuda:0,cuda:1" for all of these; else the device that is current when the
        pool is opened.
    initial: bytes that are pinned when the pool is opened, which is at the first pinned tensor;
        else an eighth of the capacity, between 256 MiB and 1 GiB.
    largest: the largest block that the pool serves, by which it grows at least; torch's own
        allocator serves larger ones. A little less than 256 MiB unless given.
    wait: how many seconds an allocation waits for memory that copies still use, before
        torch.OutOfMemoryError.
    backing: "registered" (the fastest to pin) or "host_alloc" (memory that the driver allocates);
        whichever the device does best unless given.
    any_version: also with a version of torch that the shim was not tested with.
    """
    global _shim, _several
    import torch  # type: ignore[import-not-found, unused-ignore]

    if torch.version.cuda is None:
        raise errors.UnsupportedError(
            f"torch {torch.__version__} is built without CUDA: install a build for CUDA"
        )
    if not any_version and ".".join(torch.__version__.split(".")[:2]) not in TESTED:
        raise errors.UnsupportedError(
            f"the hook is tested with torch {', '.join(TESTED)}, and this is {torch.__version__}: "
            "install one of these, or try install(any_version=True), and run the tests of pinpool's "
            "repository, python/tests/torch_gpu.py, before you rely on it"
        )
    if backing not in _BACKINGS:
        known = ", ".join(map(repr, _BACKINGS))
        raise errors.ArgumentError(f"backing is one of {known}, and not {backing!r}")
    if _shim is None:
        try:
            _shim = _load(torch)
        except OSError as error:
            raise errors.UnsupportedError(
                f"the shim for torch {torch.__version__} does not load: {error}"
            ) from error
        _shim.pinpool_torch_install.restype = ctypes.c_char_p
        _shim.pinpool_torch_pool.restype = ctypes.c_void_p
    if capacity is None:
        capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    refusal = _shim.pinpool_torch_install(
        ctypes.c_void_p(_library._handle),
        (device or "").encode(),
        *map(ctypes.c_uint64, (capacity, initial, largest, round(wait * 1000))),
        _BACKINGS[backing],
    )
    if refusal is not None:
        raise errors.Error(refusal.decode())
    _several = "," in (device or "")


def stats() -> dict[str, int]:
    """The pool's numbers; 0 before the first pinned tensor."""
    out = _Stats(size=ctypes.sizeof(_Stats))
    if _pool():
        _call("get_stats", ctypes.byref(out))
    return {name: getattr(out, name) for name in _NUMBERS}


def trim() -> int:
    """Unpins what is not in use, and returns how many bytes."""
    out = ctypes.c_uint64()
    if _pool():
        _call("trim", ctypes.byref(out))
    return out.value


def hold(tensor: Any, stream: Any = None) -> None:
    """Keeps the memory of a pinned tensor until what is queued on the stream (torch's; unless
    given, its current one) is complete: for a copy that torch does not know of, to be called after
    it is queued and before the tensor is dropped. The tensor, or the view that it is, may begin
    anywhere in the pinned memory.

    A raw `CUstream` is one of the pool's device; of the first, where the pool has several."""
    if stream is None:
        import torch

        stream = torch.cuda.current_stream()
    raw, device = _raw(stream), getattr(stream, "device_index", None)
    # These mean the default streams of whichever device is current.
    if device is None and _several and raw.value in (None, 1, 2):
        raise errors.ArgumentError(
            "the handle of a default stream does not say which of the pool's devices it is on: "
            "give torch's stream, as of torch.cuda.default_stream(device)"
        )
    name = None if device is None else f"cuda:{device}".encode()
    _call("hold_on", ctypes.c_void_p(tensor.data_ptr()), ctypes.c_char_p(name), raw)


def idle(tensor: Any) -> bool:
    """Whether no copy is known to use the pinned tensor's memory, so that it may be written to."""
    out = ctypes.c_uint32()
    _call("is_idle", ctypes.c_void_p(tensor.data_ptr()), ctypes.byref(out))
    return bool(out.value)


def forget(stream: Any) -> None:
    """To be called before a stream that torch did not make (torch.cuda.ExternalStream, or a raw
    `CUstream`) is destroyed: the pool names it to the driver no more."""
    if _pool():
        _call("forget_stream", _raw(stream))


def _pool() -> int | None:
    """The pool's address; None before the first pinned tensor."""
    if _shim is None:
        raise errors.Error("pinpool.torch.install() comes first")
    pool: int | None = _shim.pinpool_torch_pool()
    return pool


def _raw(stream: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(getattr(stream, "cuda_stream", stream))


def _call(name: str, *arguments: Any) -> None:
    pool = _pool()
    if pool is None:
        raise errors.ArgumentError("no tensor has been pinned since install()")
    status = getattr(_library, f"pinpool_{name}")(ctypes.c_void_p(pool), *arguments)
    if status != 0:
        kind = _ERRORS.get(status, errors.ArgumentError)
        raise kind(_library.pinpool_last_error().decode())


def _load(torch: Any) -> ctypes.CDLL:
    path = _built(torch)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        if path.parent == build.FOLDER:
            raise
    # It is damaged, or the system has changed.
    return ctypes.CDLL(str(_built(torch, anew=True)))


def _built(torch: Any, anew: bool = False) -> pathlib.Path:
    """The shim for this torch: the wheel's own, or compiled now and kept for the next process."""
    version = str(torch.__version__)
    # What is not a release has the interface of some day.
    release = re.fullmatch(r"(\d+)\.(\d+)\.\d+(\+.*)?", version)
    if release:
        path = build.FOLDER / f"torch_{release[1]}_{release[2]}.so"
        if path.exists():
            return path
    include = pathlib.Path(torch.__file__).resolve().parent / "include"
    # Machines that share a home each have their own.
    machine = [platform.machine(), *platform.libc_ver()]
    key = hashlib.sha256(" ".join([build.COMPILER, *build.FLAGS, *machine]).encode())
    interface = include / "ATen/core/CachingHostAllocator.h"
    why = f"the shim for torch {version} is not in the wheel, and cannot be compiled: "
    try:
        for file in (build.FOLDER / "shim.cpp", build.FOLDER / "pinpool.h", interface):
            key.update(file.read_bytes())
    except OSError as error:
        raise errors.UnsupportedError(
            f"{why}{error}; install torch from a wheel, which has its headers"
        ) from error
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        raise errors.UnsupportedError(
            f"{why}{cache} is no absolute path of a folder for it; name one by $XDG_CACHE_HOME"
        )
    path = pathlib.Path(cache, "pinpool", f"{version}-{__version__}-{key.hexdigest()[:16]}.so")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path.parent)
        if path.exists():
            _check_owner(path)
            if not anew:
                return path
        build.build(include, path)
    except subprocess.CalledProcessError as error:
        raise errors.UnsupportedError(
            f"{why}it compiles with torch {', '.join(TESTED)} and g++ 10 or later, but "
            f"{build.COMPILER} says:\n{error.stderr[-4000:]}"
        ) from error
    except OSError as error:
        if error.filename == build.COMPILER:
            ready = [each.stem[6:].replace("_", ".") for each in build.FOLDER.glob("torch_*.so")]
            raise errors.UnsupportedError(
                f"{why}there is no {error.filename}. Install g++ 10 or later, or name one by $CXX. "
                f"None is needed with torch {' or '.join(sorted(ready)) or '(none)'}"
            ) from error
        raise errors.UnsupportedError(
            f"{why}{error}; name a folder that can be written by $XDG_CACHE_HOME"
        ) from error
    return path


def _check_owner(path: pathlib.Path) -> None:
    """Refuses what another user could have written: its code would run as this one."""
    status = path.stat()
    if status.st_uid != os.getuid():
        why = f"belongs to the user {status.st_uid}, and this is {os.getuid()}: remove it"
    elif status.st_mode & 0o022:
        why = f"can be written by other users: remove it if one may have, else chmod go-w {path}"
    else:
        return
    raise errors.UnsupportedError(
        f"the compiled shim is not loaded: {path} {why}, or name another folder by $XDG_CACHE_HOME"
    )
