"""torch's pinned memory from a pinpool pool.

    import torch, pinpool_torch
    pinpool_torch.install(capacity=8 << 30)

From then on `pin_memory()`, `torch.empty(..., pin_memory=True)`, DataLoader(pin_memory=True) and non-blocking copies of
the program use the pool. Install right after `import torch`, before the first pinned tensor: torch's list of allocators
has no lock. The pool is opened at the first pinned tensor, so that a program can still fork and choose its device.
"""

import ctypes
import os

import torch

from . import _build

__all__ = ["Buffer", "buffer", "forget", "install", "stats", "trim"]

# The versions of torch that the shim was tested with. The hook is no stable interface of torch's.
TESTED = ("2.11",)
# As in pinpool.h.
BACKINGS = {None: 0, "registered": 1, "host_alloc": 2}
_shim = None
_library = None


class _Stats(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t)] + [
        (name, ctypes.c_uint64)
        for name in ("pinned_bytes", "blocks", "block_bytes", "requested_bytes", "allocations", "frees", "holds")
    ]


def install(
    capacity=None, device=None, *, initial=0, largest=0, wait=10.0, backing=None, library=None, any_version=False
):
    """Takes the place of torch's allocator of pinned memory.

    capacity: the bound on pinned bytes; a quarter of the machine's memory unless given.
    device: "cuda:0", or "cuda:0,cuda:1" for all of these; else the device that is current when the pool is opened.
    initial: bytes that are pinned when the pool is opened, which is at the first pinned tensor; else an eighth of the
        capacity, between 256 MiB and 1 GiB.
    largest: the largest block that the pool serves, by which it grows at least; torch's own allocator serves larger
        ones. A little less than 256 MiB unless given.
    backing: "registered" (the fastest to pin) or "host_alloc" (memory that the driver allocates); whichever the device
        does best unless given.
    wait: how many seconds an allocation waits for memory that copies still use, before torch.OutOfMemoryError.
    library: the folder of libpinpool.so and pinpool.h; else $PINPOOL_LIBRARY, else what pkg-config says.
    any_version: also with a version of torch that the shim was not tested with.
    """
    global _shim, _library
    version = torch.__version__.split("+")[0]
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is built without CUDA: install a build for CUDA")
    if not any_version and ".".join(version.split(".")[:2]) not in TESTED:
        raise RuntimeError(
            f"pinpool_torch is tested with torch {', '.join(TESTED)}, and this is {torch.__version__}: install one of "
            "these, or try install(any_version=True), which compiles the shim against this version's headers, and run "
            "tests/test_torch.py before you rely on it"
        )
    if backing not in BACKINGS:
        raise ValueError(f"backing is one of {', '.join(map(repr, BACKINGS))}, and not {backing!r}")
    if _shim is None:
        folder, include = _build.find(library)
        library = os.path.join(folder, "libpinpool.so")
        _library = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        _shim = _declare(ctypes.CDLL(_build.shim(folder, include)))
        _declare_library(_library)
    if capacity is None:
        capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    device = (device or "").encode()
    wait_ms = round(wait * 1000)
    if _shim.pinpool_torch_install(device, capacity, initial, largest, wait_ms, BACKINGS[backing]) != 0:
        raise RuntimeError(_shim.pinpool_torch_error().decode())


def stats():
    """The pool's numbers: pinned_bytes, blocks, block_bytes, requested_bytes, allocations, holds and others."""
    out = _Stats(size=ctypes.sizeof(_Stats))
    _check(_library.pinpool_get_stats(_pool(), ctypes.byref(out)))
    return {name: getattr(out, name) for name, _ in _Stats._fields_[1:]}


def trim():
    """Unpins what is not in use, and returns how many bytes."""
    out = ctypes.c_uint64()
    _check(_library.pinpool_trim(_pool(), ctypes.byref(out)))
    return out.value


def forget(stream):
    """To be called before a stream that torch did not make (torch.cuda.ExternalStream, or a raw CUstream) is destroyed:
    the pool names it to the driver no more."""
    _check(_library.pinpool_forget_stream(_pool(), getattr(stream, "cuda_stream", stream)))


def buffer(bytes):
    """A `Buffer` of so many bytes of pinned memory."""
    return Buffer(bytes)


class Buffer:
    """Pinned memory for what is not torch: `view()` (and `memoryview(buffer)` from Python 3.12 on) and DLPack.

    Views and DLPack tensors keep the block. When the last of them and the buffer are gone, it is used again as soon as
    no copy uses it: copies by torch are known; before dropping what something else copies from, call `hold`.
    """

    def __init__(self, bytes):
        self._shared = None
        self._pool = _pool()
        start = ctypes.c_void_p()
        self._shared = _shim.pinpool_torch_buffer(bytes, ctypes.byref(start))
        if not self._shared:
            raise torch.OutOfMemoryError(_shim.pinpool_torch_error().decode())
        self.address, self.nbytes = start.value or 0, bytes

    def __del__(self):
        if self._shared:
            _shim.pinpool_torch_buffer_drop(self._shared)
            self._shared = None

    def __len__(self):
        return self.nbytes

    def view(self):
        """A writable memoryview, which keeps the block."""
        if self.nbytes == 0:
            return memoryview(bytearray())
        array = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        array.owner = self
        return memoryview(array).cast("B")

    def __buffer__(self, flags):
        return self.view()

    def __dlpack_device__(self):
        return (3, 0)  # kDLCUDAHost

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if copy or (dl_device is not None and tuple(map(int, dl_device)) not in ((1, 0), (3, 0))):
            raise BufferError("this memory is on the host, and exported as it is")
        # torch exports its own pinned tensors as kDLCPU, too, and imports no capsule of kDLCUDAHost.
        kind = int(dl_device[0]) if dl_device is not None else 1
        tensor = _shim.pinpool_torch_dlpack(self._shared, kind)
        return _capsule(tensor, b"dltensor", ctypes.cast(_shim.pinpool_torch_capsule_end, ctypes.c_void_p))

    def hold(self, stream=None):
        """Keeps the block until what is queued on the stream (torch's or a raw CUstream; the current one) is complete."""
        raw = torch.cuda.current_stream().cuda_stream if stream is None else getattr(stream, "cuda_stream", stream)
        _check(_library.pinpool_hold(self._pool, self.address, raw))

    def idle(self):
        """Whether no copy is known to use the block, so that it may be written to."""
        out = ctypes.c_uint32()
        _check(_library.pinpool_is_idle(self._pool, self.address, ctypes.byref(out)))
        return bool(out.value)


# A capsule keeps a pointer to its name: this literal lives as long as the module's code.
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _pool():
    if _shim is None:
        raise RuntimeError("pinpool_torch.install() comes first")
    torch.cuda.init()
    pool = _shim.pinpool_torch_pool()
    if not pool:
        raise RuntimeError(_shim.pinpool_torch_error().decode())
    return pool


def _check(status):
    if status != 0:
        raise RuntimeError(f"pinpool: {_library.pinpool_last_error().decode()} (status {status})")


def _declare(shim):
    c = ctypes
    for name, result, arguments in (
        ("install", c.c_int, [c.c_char_p] + [c.c_uint64] * 4 + [c.c_uint32]),
        ("error", c.c_char_p, []),
        ("use", None, [c.c_int]),
        ("pool", c.c_void_p, []),
        ("buffer", c.c_void_p, [c.c_size_t, c.c_void_p]),
        ("buffer_drop", None, [c.c_void_p]),
        ("dlpack", c.c_void_p, [c.c_void_p, c.c_int]),
    ):
        function = getattr(shim, f"pinpool_torch_{name}")
        function.restype, function.argtypes = result, arguments
    return shim


def _declare_library(library):
    c = ctypes
    library.pinpool_last_error.restype = c.c_char_p
    for name in ("forget_stream", "get_stats", "trim"):
        getattr(library, f"pinpool_{name}").argtypes = [c.c_void_p, c.c_void_p]
    for name in ("hold", "is_idle"):
        getattr(library, f"pinpool_{name}").argtypes = [c.c_void_p, c.c_void_p, c.c_void_p]
