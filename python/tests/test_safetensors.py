"""Loads, on the host device, and on a simulated GPU with a stand-in for torch."""

import ctypes
import gc
import json
import sys
import types

import numpy
import pytest

import pinpool
from conftest import MIB, SIM, in_use, until
from pinpool.safetensors import load_file, safe_open

KINDS = {"F32": "f4", "F16": "f2", "I64": "i8", "U8": "u1", "BOOL": "?", "U16": "u2"}


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
    """A file as safetensors writes it."""
    header, at = {"__metadata__": {"format": "test"}}, 0
    for name, (kind, array) in arrays.items():
        offsets = [at, at + array.nbytes]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
        at += array.nbytes
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    body = b"".join(array.tobytes() for _, array in arrays.values())
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return file


def test_arrays_of_numpy(path, arrays):
    pool = pinpool.Pool("host", 8 * MIB, allow_unpinned=True)
    loaded = load_file(path, pool=pool)
    assert list(loaded) == list(arrays)
    for name, (_, array) in arrays.items():
        assert loaded[name].dtype == array.dtype and numpy.array_equal(loaded[name], array)
    until(lambda: in_use(pool) == 0)


def test_by_name(path, arrays):
    with safe_open(path) as opened:
        assert opened.keys() == sorted(arrays) and opened.offset_keys() == list(arrays)
        assert opened.metadata() == {"format": "test"}
        assert numpy.array_equal(opened.get_tensor("layer.7"), arrays["layer.7"][1])
        some = dict(opened.tensors(["layer.9", "scalar"]))
        assert set(some) == {"layer.9", "scalar"} and some["scalar"] == 3.5
        with pytest.raises(pinpool.ArgumentError, match="no tensor 'other'"):
            opened.get_tensor("other")


def test_errors(path, tmp_path):
    with pytest.raises(pinpool.Error, match="nowhere"):
        load_file(tmp_path / "nowhere")
    with pytest.raises(pinpool.ArgumentError, match="xpu"):
        load_file(path, "xpu:0")
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(pinpool.ArgumentError, match=r"bad\.safetensors"):
        load_file(bad)


class Block:
    """A stand-in for a tensor of torch: device memory that is freed when the last view is gone."""

    alive = 0

    def __init__(self, torch, nbytes):
        self.torch, self.nbytes = torch, nbytes
        self.address = torch.gpu.made("cuMemAlloc_v2", nbytes)
        Block.alive += 1

    def __del__(self):
        Block.alive -= 1
        self.torch.gpu("cuMemFree_v2", self.address)


class View:
    def __init__(self, block, offset, nbytes, dtype="uint8", shape=None):
        self.block, self.offset, self.nbytes, self.dtype, self.shape = (
            block,
            offset,
            nbytes,
            dtype,
            shape,
        )

    def data_ptr(self):
        return self.block.address + self.offset

    def numel(self):
        return self.nbytes

    def __getitem__(self, part):
        assert 0 <= part.start <= part.stop <= self.nbytes
        return View(self.block, self.offset + part.start, part.stop - part.start)

    def view(self, to):
        if isinstance(to, str):
            return View(self.block, self.offset, self.nbytes, to, self.shape)
        return View(self.block, self.offset, self.nbytes, self.dtype, to)

    def array(self):
        if self.block is None:
            return numpy.zeros(self.shape, self.dtype)
        data = ctypes.create_string_buffer(max(1, self.nbytes))
        gpu = self.block.torch.gpu
        stream = self.block.torch.stream
        gpu("cuMemcpyDtoHAsync_v2", ctypes.addressof(data), self.data_ptr(), self.nbytes, stream)
        gpu("cuStreamSynchronize", stream)
        return numpy.frombuffer(data.raw[: self.nbytes], self.dtype).reshape(self.shape)


@pytest.fixture
def torch(gpu, monkeypatch):
    torch = types.ModuleType("torch")
    torch.gpu, torch.stream = gpu, gpu.stream()
    for name in ["float32", "float16", "int64", "uint8", "bool", "uint16"]:
        setattr(torch, name, name)

    def device(kind, index=None):
        kind, _, number = kind.partition(":")
        return types.SimpleNamespace(type=kind, index=int(number) if number else index)

    def empty(size, dtype, device):
        assert device.index == 0
        if isinstance(size, int):
            return View(Block(torch, size), 0, size)
        return View(None, 0, 0, dtype, size)

    torch.device, torch.empty = device, empty
    stream = types.SimpleNamespace(cuda_stream=torch.stream)
    torch.cuda = types.SimpleNamespace(
        current_device=lambda: 0, current_stream=lambda device: stream
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def gone():
    """A thread of the library's lets go of device memory, and nobody has to call the package."""
    gc.collect()
    return Block.alive == 0


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_tensors_of_torch(torch, path, arrays, device):
    pool = pinpool.Pool("cuda:0", 8 * MIB, allow_unpinned=True)
    loaded = load_file(path, device, pool=pool)
    assert list(loaded) == list(arrays) and Block.alive == 1
    for name, (_, array) in arrays.items():
        assert numpy.array_equal(loaded[name].array(), array), name
    last = loaded.popitem()[1]
    del loaded
    assert last.block is None or not gone()
    del last
    until(gone)
    until(lambda: in_use(pool) == 0)


def test_a_load_follows_what_the_stream_was_given(torch, gpu, path, arrays):
    """torch may hand out memory that its current stream still writes to."""
    stale = gpu.made("cuMemAlloc_v2", 8 * MIB)
    made = gpu.made

    def reused(name, *words):
        address = made(name, *words)
        if name == "cuMemAlloc_v2":
            gpu("cuMemcpyDtoDAsync_v2", address, stale, words[0], torch.stream)
        return address

    gpu.made = reused
    try:
        loaded = load_file(path, "cuda:0")
    finally:
        del gpu.made
    gpu("cuStreamSynchronize", torch.stream)
    assert all(
        numpy.array_equal(loaded[name].array(), array) for name, (_, array) in arrays.items()
    )
    del loaded
    until(gone)
    gpu("cuMemFree_v2", stale)


def test_a_loop_that_is_broken_off(torch, path):
    pool = pinpool.Pool("cuda:0", 8 * MIB, allow_unpinned=True)
    tensors = safe_open(path, "cuda:0", pool=pool).tensors()
    name, tensor = next(tensors)
    assert name == "layer.0" and tensor.shape
    del tensor, tensors
    until(gone)
    until(lambda: in_use(pool) == 0)


def test_memory_that_torch_refuses(torch, path):
    def refuses(size, dtype, device):
        raise MemoryError("torch has none")

    torch.empty = refuses
    with pytest.raises(MemoryError, match="torch has none"):
        load_file(path, "cuda:0")


def test_torch_itself(path, arrays):
    """On a machine with a GPU and torch, without the simulation."""
    torch = pytest.importorskip("torch")
    if SIM or not torch.cuda.is_available():
        pytest.skip("no GPU, or the simulation is to be used")
    loaded = load_file(path, "cuda")
    for name, (_, array) in arrays.items():
        tensor = loaded[name]
        assert tensor.is_cuda and tensor.shape == array.shape, name
        assert numpy.array_equal(tensor.cpu().numpy(), array), name
