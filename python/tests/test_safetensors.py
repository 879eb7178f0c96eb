"""Loads, in host memory, and on a simulated GPU with a stand-in for torch."""

import inspect
import itertools
import os
import random
import threading

import numpy
import pytest

import pinpool
from conftest import MIB, SIM, in_use, until
from pinpool.safetensors import load_file, safe_open, weights
from test_process import EXITS, run
from standin import KINDS, Block, allocating, arrays, gone, path, same, torch, write  # noqa: F401

WINDOW = MIB // 2


def test_in_host_memory(path, arrays, tmp_path):
    loaded = load_file(path, framework="np")
    assert list(loaded) == list(arrays) and same(loaded, arrays)
    loaded["layer.7"][:] = 0  # the file is not written to
    keep = lambda name: name.endswith("7")  # noqa: E731
    assert same(dict(weights(iter([path]), "host", keep=keep)), arrays)
    with safe_open(path, framework="np") as opened:
        assert opened.keys() == sorted(arrays) and opened.offset_keys() == list(arrays)
        assert opened.metadata() == {"format": "test"}
        assert same({"layer.7": opened.get_tensor("layer.7")}, arrays)
        assert opened.get_slice("scalar")[...] == 3.5
        part, (_, array) = opened.get_slice("layer.9"), arrays["layer.9"]
        assert part.get_shape() == list(array.shape) and part.get_dtype() == arrays["layer.9"][0]
        for index in [..., slice(None), 2, -1, slice(3, 5), (slice(2, 4), slice(1, 7)), (0, 1)]:
            assert numpy.array_equal(part[index], array[index]), index
        meta, start = opened.get_tensor_meta("layer.1"), arrays["layer.0"][1].nbytes
        assert (meta.dtype, meta.shape) == ("F16", list(arrays["layer.1"][1].shape))
        assert meta.data_offsets == (start, start + arrays["layer.1"][1].nbytes)
        with pytest.raises(pinpool.ArgumentError, match="no tensor 'other'"):
            opened.get_tensor("other")
        with pytest.raises(IndexError, match="row 99"):
            part[99]
        with pytest.raises(pinpool.ArgumentError, match="to a GPU"):
            opened.prefetch()
    bare = write(tmp_path / "bare.safetensors", {"a": arrays["layer.1"]})
    assert safe_open(bare, "np").metadata() is None
    opened = safe_open(path, framework="np")
    write(tmp_path / "new", {"layer.7": ("U8", numpy.zeros(7, "u1"))})
    os.replace(tmp_path / "new", path)
    assert same({"layer.7": opened.get_tensor("layer.7")}, arrays), "it has the file that it opened"


def test_programs_of_safetensors_need_no_change(path, arrays):
    """The same names and arguments, and the same results."""
    original = pytest.importorskip("safetensors").safe_open
    with original(path, framework="np") as theirs, safe_open(path, framework="np") as ours:
        for name in ["keys", "offset_keys", "metadata"]:
            assert getattr(theirs, name)() == getattr(ours, name)(), name
        for name in arrays:
            assert theirs.get_slice(name).get_shape() == ours.get_slice(name).get_shape()
            assert theirs.get_slice(name).get_dtype() == ours.get_slice(name).get_dtype()
            assert same({name: theirs.get_tensor(name)}, {name: ours.get_tensor(name)})
        if hasattr(original, "get_tensor_meta"):
            one, two = theirs.get_tensor_meta("layer.7"), ours.get_tensor_meta("layer.7")
            assert (one.dtype, one.shape, tuple(one.data_offsets)) == (
                two.dtype,
                two.shape,
                two.data_offsets,
            )
    for name, call in inspect.getmembers(original, callable):
        if name.startswith("_") or not getattr(call, "__text_signature__", None):
            continue
        known = inspect.signature(getattr(safe_open, name)).parameters
        for argument in inspect.signature(call).parameters.values():
            assert argument.name == "self" or known[argument.name].kind == argument.kind, name


def test_errors(path, tmp_path):
    with pytest.raises(pinpool.Error, match="nowhere"):
        load_file(tmp_path / "nowhere", framework="np")
    with pytest.raises(pinpool.ArgumentError, match="xpu"):
        load_file(path, "xpu:0")
    with pytest.raises(pinpool.ArgumentError, match='framework "tf"'):
        load_file(path, framework="tf")
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(pinpool.ArgumentError, match=r"bad\.safetensors"):
        load_file(bad, "host")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_tensors_of_torch(torch, path, arrays, device):
    pool = pinpool.Pool("cuda:0", 8 * MIB, allow_unpinned=True)
    loaded = load_file(path, device, pool=pool)
    assert list(loaded) == list(arrays) and same(loaded, arrays)
    last = loaded.popitem()[1]
    del loaded
    assert not gone()
    del last
    until(gone)
    until(lambda: in_use(pool) == 0)
    with pytest.raises(pinpool.ArgumentError, match="the pool is of host"):
        load_file(path, device, pool=pinpool.Pool("host", MIB, allow_unpinned=True))


def test_a_load_follows_what_the_stream_was_given(torch, gpu, path, arrays):
    """torch may hand out memory that its current stream still writes to."""
    stale = gpu.made("cuMemAlloc_v2", 32 * MIB)

    def reused(made, name, *words):
        address = made(name, *words)
        if name == "cuMemAlloc_v2":
            gpu("cuMemcpyDtoDAsync_v2", address, stale, words[0], torch.stream)
        return address

    with allocating(torch, reused):
        loaded = dict(safe_open(path, "pt", "cuda:0").prefetch(window=WINDOW))
    gpu("cuStreamSynchronize", torch.stream)
    assert same(loaded, arrays)
    del loaded
    until(gone)
    gpu("cuMemFree_v2", stale)


def test_rows_are_all_that_is_loaded(torch, path, arrays):
    opened = safe_open(path, "pt", "cuda:0")
    rows = {"layer.5": slice(2, 4), "empty": None, "layer.3": slice(-2, None), "layer.8": None}
    picked = {name: arrays[name][1][part or slice(None)] for name, part in rows.items()}
    loader = opened.prefetch(dict(rows), threads=2)
    in_order = [name for name in arrays if name in rows]
    assert loader.names() == in_order and len(loader) == 4
    tensors = dict(loader)
    assert list(tensors) == in_order and same(tensors, picked)
    assert (
        Block.most
        == sum(max(256, -(-array.nbytes // 256) * 256) for array in picked.values()) - 256
    )
    part, array = opened.get_slice("layer.5"), arrays["layer.5"][1]
    for index in [slice(1, 3), 1, (slice(0, 2), slice(5, 9)), (..., slice(0, 2)), ...]:
        got = part[index]
        assert numpy.array_equal(got.array(), array[index]), index
        assert got.is_clone == bool(got.picks), "a view would keep all of it"
    for plan, why in [
        ({"layer.5": slice(0, 4, 2)}, "step 1"),
        ({"scalar": slice(0, 1)}, "first dimension"),
        ({"other": None}, "no tensor 'other'"),
    ]:
        with pytest.raises(pinpool.ArgumentError, match=why):
            opened.prefetch(plan)


def test_each_tensor_is_taken_once_in_any_order_by_any_thread(torch, path, arrays):
    for seed, ahead in itertools.product(range(4), [1, 3]):
        loader = safe_open(path, "pt", "cuda:0").prefetch(window=WINDOW, ahead=ahead)
        names = list(arrays)[::-1]
        if seed:
            random.Random(seed).shuffle(names)
        taken, loader_names = {}, iter(names[:30])

        def work(loader=loader, names=loader_names, taken=taken):
            for name in names:
                taken[name] = loader.take(name)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 30
        with pytest.raises(pinpool.ArgumentError, match="was taken"):
            loader.take(names[0])
        with pytest.raises(pinpool.ArgumentError, match="not in the plan"):
            loader.take("other")
        left = dict(loader)
        assert list(left) == [name for name in arrays if name in names[30:]]
        assert same(taken | left, arrays)
        del taken, left, threads, thread, work
        until(gone)


def test_a_window_is_given_up_while_a_thread_waits_for_it(torch, path, arrays):
    loader = safe_open(path, "pt", "cuda:0").prefetch(window=4 * WINDOW, ahead=1)
    claimed = loader._claim("layer.0")
    for name in [name for name in arrays if loader._home[name] > 0]:
        loader.take(name)
    assert loader._counts[0] > 0 and not loader._open
    assert same({"layer.0": loader._wait(*claimed)}, arrays)


def test_weights_take_little_memory(torch, path, arrays, tmp_path):
    """Of two files; of a program that copies each tensor and drops it; also of one that never takes
    some, for which the rest is not held up."""
    other = write(tmp_path / "2.safetensors", {f"other.{n}": a for n, a in arrays.items()})
    largest = max(array.nbytes for _, array in arrays.values()) + 256
    expected = arrays | {f"other.{name}": array for name, array in arrays.items()}
    for window, ahead in [(1, 1), (WINDOW, 1), (2 * MIB, 2)]:
        Block.most, seen = 0, []
        for name, tensor in weights([path, other], ahead=ahead, window=window):
            assert same({name: tensor}, expected)
            seen.append(name)
        assert seen == list(expected)
        assert Block.most <= max(window, largest) * (ahead + 1)
        del tensor
        until(gone)
    Block.most = 0
    loader, late = safe_open(path, "pt", "cuda:0").prefetch(window=2 * WINDOW, ahead=2), 0
    for number in (number for number in range(40) if number % 4):
        name = f"layer.{number}"
        late += loader._home[name] >= loader._next
        assert same({name: loader.take(name)}, arrays)
    assert late <= 1, "the windows behind are under way, though those before have tensors left"
    assert Block.most <= max(2 * WINDOW, largest) * 4
    loader.close()
    until(gone)
    with pytest.raises(pinpool.ArgumentError, match="closed"):
        next(iter(loader))


def test_a_loop_that_is_broken_off(torch, path):
    pool = pinpool.Pool("cuda:0", 8 * MIB, allow_unpinned=True)
    tensors = weights([path], "cuda:0", pool=pool, window=WINDOW)
    assert Block.alive == 0, "it is lazy"
    name, tensor = next(tensors)
    assert name == "layer.0" and tensor.shape
    del tensor, tensors
    until(gone)
    until(lambda: in_use(pool) == 0)


def test_memory_that_torch_refuses(torch, path, arrays):
    """Nothing is lost: what could not be loaded may be taken again."""
    loader = safe_open(path, "pt", "cuda:0").prefetch(window=WINDOW, ahead=1)
    empty, taken = torch.empty, {}

    def refuses(size, dtype, device):
        raise MemoryError("torch has none")

    torch.empty = refuses
    with pytest.raises(MemoryError, match="torch has none"):
        for name, tensor in loader:
            taken[name] = tensor
    with pytest.raises(MemoryError, match="torch has none"):
        load_file(path, "cuda:0")
    torch.empty = empty
    taken |= dict(loader)
    assert list(taken) == list(arrays) and same(taken, arrays)


def test_a_file_that_is_written_to(torch, path):
    """The error comes in the place of a tensor, and again when that is asked for again."""
    loader = safe_open(path, "pt", "cuda:0").prefetch(window=WINDOW)
    os.utime(path, (1, 1))
    for _ in range(2):
        with pytest.raises(pinpool.ArgumentError, match="was written to"):
            dict(loader)
    [name] = [loader._order[0]]
    with pytest.raises(pinpool.ArgumentError, match="was written to"):
        loader.take(name)
    assert name in loader._left


@pytest.mark.skipif(not SIM, reason="PINPOOL_TEST_SIM names no simulation")
def test_a_process_that_ends_under_a_load(tmp_path, path):
    """With a loader that was forgotten, and with threads that go on loading."""
    start = f"""
import sys, threading, time
import pinpool, standin
from conftest import Gpu
from pinpool.safetensors import safe_open, weights
pinpool.Device("cuda:0")
sys.modules["torch"] = standin.stand_in(Gpu())
loader = safe_open({str(path)!r}, "pt", "cuda").prefetch(window=1 << 19)
"""
    threads = f"""
def work():
    while True:
        for name, tensor in weights([{str(path)!r}], window=1 << 19):
            pass
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)"""
    for way in ["kept = next(iter(loader))", threads] * EXITS:
        run(start + way, tmp_path)


@pytest.mark.skipif(not SIM, reason="PINPOOL_TEST_SIM names no simulation")
def test_a_load_that_is_given_up_waits_for_no_interpreter(tmp_path, path):
    """A thread that has the interpreter's lock may wait for memory that is being pinned, as torch does
    with the hook: here it opens a pool."""
    program = f"""
import ctypes, sys
import pinpool, standin
from conftest import Gpu, MIB
from pinpool import _native
from pinpool.safetensors import safe_open

class Options(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("device", ctypes.c_char_p), ("capacity", ctypes.c_uint64),
                ("initial", ctypes.c_uint64), ("allow_unpinned", ctypes.c_uint32),
                ("name", ctypes.c_char_p), ("largest", ctypes.c_uint64),
                ("thread_cache", ctypes.c_uint64), ("backing", ctypes.c_uint64)]

pinpool.Device("cuda:0")
sys.modules["torch"] = standin.stand_in(Gpu())
for turn in range(5):
    loader = safe_open({str(path)!r}, "pt", "cuda").prefetch(window=1 << 19)
    next(iter(loader))
    del loader
    options, pool = Options(ctypes.sizeof(Options), b"cuda:0", 4 * MIB, MIB), ctypes.c_void_p()
    opened = ctypes.PyDLL(_native.__file__).pinpool_open
    assert opened(ctypes.byref(options), ctypes.byref(pool)) == 0
"""
    run(program, tmp_path)


def test_torch_itself(path, arrays):
    """On the CPU, and on a machine with a GPU without the simulation."""
    torch = pytest.importorskip("torch")
    devices = ["cpu"] if SIM or not torch.cuda.is_available() else ["cpu", "cuda"]
    for device in devices:
        loaded = load_file(path, device)
        assert list(loaded) == list(arrays)
        for name, tensor in (loaded | dict(weights([path], device, window=WINDOW))).items():
            assert tensor.device.type == device and tensor.shape == arrays[name][1].shape, name
            assert same({name: tensor.cpu().numpy()}, arrays)
        assert safe_open(path, "pt", device).get_slice("layer.9")[1:3, 2].shape == (2,)
