"""A stand-in for torch on the simulated GPU, and checkpoints for tests of loads."""

import contextlib
import ctypes
import gc
import json
import sys
import threading
import types

import numpy
import pytest

from conftest import until

KINDS = {"F32": "f4", "F16": "f2", "I64": "i8", "U8": "u1", "BOOL": "?", "U16": "u2"}
TYPES = ["float32", "float16", "int64", "uint8", "bool", "uint16"]


def write(path, arrays, metadata=None):
    """A file as safetensors writes it."""
    header, at = {} if metadata is None else {"__metadata__": metadata}, 0
    for name, (kind, array) in arrays.items():
        offsets = [at, at + array.nbytes]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
        at += array.nbytes
    text = json.dumps(header).encode()
    body = b"".join(array.tobytes() for _, array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


@pytest.fixture
def arrays():
    random = numpy.random.default_rng(1)
    made = {}
    for number in range(40):
        kind = list(KINDS)[number % len(KINDS)]
        shape = (int(random.integers(1, 60)), int(random.integers(1, 4000)))
        made[f"layer.{number}"] = kind, (random.integers(0, 2, shape) * number).astype(KINDS[kind])
    made["scalar"] = "F32", numpy.array(3.5, "f4")
    made["empty"] = "F32", numpy.zeros((0, 4), "f4")
    return made


@pytest.fixture
def path(arrays, tmp_path):
    return write(tmp_path / "model.safetensors", arrays, {"format": "test"})


class Block:
    """Device memory that is freed when the last view is gone. Counts what there is, in bytes."""

    alive = most = 0
    # The collector may end a block while the thread makes another.
    lock = threading.RLock()

    def __init__(self, torch, nbytes):
        self.torch, self.nbytes = torch, nbytes
        torch.gpu("cuCtxSetCurrent", torch.gpu.context)  # on whichever thread
        self.address = torch.gpu.made("cuMemAlloc_v2", nbytes)
        with Block.lock:
            Block.alive += nbytes
            Block.most = max(Block.most, Block.alive)

    def __del__(self):
        with Block.lock:
            Block.alive -= self.nbytes
        self.torch.gpu("cuCtxSetCurrent", self.torch.gpu.context)  # here, too
        self.torch.gpu("cuMemFree_v2", self.address)


class View:
    """A tensor: a part of a block, and how numpy would pick from what is downloaded of it."""

    is_clone = False

    def __init__(self, block, offset, nbytes, dtype="uint8", shape=None, picks=()):
        self.block, self.offset, self.nbytes = block, offset, nbytes
        self.dtype, self.shape, self.picks = dtype, shape, picks

    def data_ptr(self):
        return self.block.address + self.offset

    def __getitem__(self, part):
        if self.shape is not None:
            at = self.block, self.offset, self.nbytes, self.dtype, self.shape
            return View(*at, (*self.picks, part))
        assert 0 <= part.start <= part.stop <= self.nbytes
        return View(self.block, self.offset + part.start, part.stop - part.start)

    def view(self, dtype):
        return View(self.block, self.offset, self.nbytes, dtype, self.shape)

    def reshape(self, shape):
        return View(self.block, self.offset, self.nbytes, self.dtype, tuple(shape))

    def clone(self):
        copy = View(Block(self.block.torch, max(1, self.nbytes)), 0, self.nbytes, *self.what())
        self.block.torch.gpu(
            "cuMemcpyDtoDAsync_v2", copy.data_ptr(), self.data_ptr(), self.nbytes, 0
        )
        copy.is_clone = True
        # The memory may be freed before the copy is over.
        self.block.torch.gpu("cuStreamSynchronize", 0)
        return copy

    def what(self):
        return self.dtype, self.shape, self.picks

    def array(self):
        data = ctypes.create_string_buffer(max(1, self.nbytes))
        gpu, stream = self.block.torch.gpu, self.block.torch.stream
        if self.nbytes:
            at = ctypes.addressof(data)
            gpu("cuMemcpyDtoHAsync_v2", at, self.data_ptr(), self.nbytes, stream)
            gpu("cuStreamSynchronize", stream)
        array = numpy.frombuffer(data.raw[: self.nbytes], self.dtype).reshape(self.shape)
        for pick in self.picks:
            array = array[pick]
        return array


def stand_in(gpu):
    """A module in the place of torch."""
    torch = types.ModuleType("torch")
    torch.gpu, torch.stream, torch.calls = gpu, gpu.stream(), []
    for name in TYPES:
        setattr(torch, name, name)

    def device(kind, index=None):
        kind, _, number = kind.partition(":")
        return types.SimpleNamespace(type=kind, index=int(number) if number else index)

    def empty(size, dtype, device):
        assert device.index == 0 and dtype == "uint8"
        torch.calls.append("empty")
        return View(Block(torch, size), 0, size)

    torch.device, torch.empty = device, empty
    stream = types.SimpleNamespace(cuda_stream=torch.stream)
    torch.cuda = types.SimpleNamespace(
        current_device=lambda: 0,
        current_stream=lambda device: stream,
        synchronize=lambda device: torch.calls.append("synchronize"),
    )
    return torch


@pytest.fixture
def torch(gpu, monkeypatch):
    until(gone)  # what an earlier test had
    Block.most = 0
    torch = stand_in(gpu)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def gone():
    """A thread of the library's lets go of device memory, and nobody has to call the package."""
    gc.collect()
    return Block.alive == 0


def same(tensors, arrays):
    """Each tensor has the bytes of its array."""
    for name, tensor in tensors.items():
        expected = arrays[name][1] if isinstance(arrays[name], tuple) else arrays[name]
        got = tensor.array() if isinstance(tensor, View) else tensor
        assert got.dtype == expected.dtype and numpy.array_equal(got, expected), name
    return True


@contextlib.contextmanager
def allocating(torch, wrapped):
    """torch's memory comes from `wrapped`, which gets the true call."""
    made = torch.gpu.made
    torch.gpu.made = lambda *call: wrapped(made, *call)
    try:
        yield
    finally:
        del torch.gpu.made
