"""Pools and buffers, on each device."""

import ast
import ctypes
import os
import pathlib
import signal
import threading
import time

import numpy
import pytest

import pinpool
from conftest import MIB, in_use, until


def test_a_buffer_is_its_length_of_zeros(pool):
    for _ in range(3):
        buffer = pool.checkout(1000)
        assert len(buffer) == buffer.capacity == 1000 and buffer.ready and buffer.address % 64 == 0
        view = memoryview(buffer)
        assert view.nbytes == 1000 and not view.readonly and not any(view)
        view[:] = b"\xff" * 1000
        assert bytes(buffer) == b"\xff" * 1000
    # Who has the address may have a device write there: it is zeroed before, and not later.
    buffer = pool.checkout(1000)
    ctypes.memset(buffer.address, 7, 1000)
    assert bytes(buffer) == b"\x07" * 1000


def test_a_buffer_that_is_not_zeroed(pool):
    with pool.checkout(1000) as buffer:
        address = buffer.address
        ctypes.memset(address, 7, 1000)
    with pool.checkout(1000, zeroed=False) as buffer:
        assert buffer.address == address and bytes(buffer) == b"\x07" * 1000


@pytest.mark.parametrize(
    "view_of", [memoryview, lambda b: numpy.frombuffer(b, "u2"), numpy.from_dlpack]
)
def test_a_view_keeps_the_memory(pool, view_of):
    buffer = pool.checkout(4096)
    view = view_of(buffer)
    for refused in [
        buffer.release,
        lambda: buffer.resize(1),
        lambda: buffer.__exit__(None, None, None),
    ]:
        with pytest.raises(pinpool.StateError, match="memoryviews"):
            refused()
    part = view[1000:]
    del buffer, view
    assert in_use(pool) > 0
    part[0] = 5
    assert part[0] == 5
    del part
    assert in_use(pool) == 0


def test_a_released_buffer(pool):
    buffer = pool.checkout(64)
    buffer.release()
    buffer.release()
    assert in_use(pool) == 0
    for use in [
        memoryview,
        numpy.from_dlpack,
        lambda b: b.address,
        lambda b: b.ready,
        lambda b: b.wait(),
        lambda b: b.pinned,
    ]:
        with pytest.raises(pinpool.StateError, match="released"):
            use(buffer)
    assert issubclass(pinpool.StateError, BufferError)


def test_resize(pool):
    buffer = pool.checkout(100)
    memoryview(buffer)[:] = bytes(range(100))
    buffer.resize(10)
    assert len(buffer) == 10 and bytes(buffer) == bytes(range(10)) and buffer.capacity == 100
    buffer.resize(100)
    assert bytes(buffer) == bytes(range(100))
    with pytest.raises(pinpool.ArgumentError, match="101 bytes do not fit into 100"):
        buffer.resize(101)
    buffer.resize(0)
    assert bytes(buffer) == b""


def test_dlpack(pool, device):
    buffer = pool.checkout(256)
    expected = (3, 0) if device.startswith("cuda") and buffer.pinned else (1, 0)
    assert buffer.__dlpack_device__() == expected
    # A capsule that nobody takes deletes its tensor.
    buffer.__dlpack__(max_version=(1, 0))
    array = numpy.from_dlpack(buffer)
    assert array.dtype == numpy.uint8 and array.shape == (256,) and array.flags.writeable
    assert array.ctypes.data == buffer.address
    for wrong in [
        {},
        {"max_version": (0, 8)},
        {"max_version": (1, 0), "copy": True},
        {"max_version": (1, 0), "dl_device": (2, 0)},
    ]:
        with pytest.raises(BufferError, match="exported"):
            buffer.__dlpack__(**wrong)
    del array
    buffer.__dlpack__(max_version=(1, 1), dl_device=expected)
    buffer.release()


def test_a_tensor_is_deleted_by_a_thread_without_the_lock(pool):
    take = ctypes.pythonapi.PyCapsule_GetPointer
    take.restype, take.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    capsule = pool.checkout(256).__dlpack__(max_version=(1, 0))
    tensor = take(capsule, b"dltensor_versioned")
    used = b"used_dltensor_versioned"
    assert rename(capsule, used) == 0
    del capsule
    assert in_use(pool) > 0
    deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        ctypes.c_void_p.from_address(tensor + 16).value
    )
    thread = threading.Thread(target=deleter, args=(tensor,))
    thread.start()
    thread.join()
    assert in_use(pool) == 0


def test_errors(pool, device):
    for cause, error, also, text in [
        (lambda: pool.checkout(0), pinpool.ArgumentError, ValueError, "at least 1"),
        (lambda: pool.checkout(1 << 40), pinpool.ArgumentError, ValueError, "raise the capacity"),
        (
            lambda: pool.checkout(8 * MIB - 4096, timeout=-1),
            pinpool.ArgumentError,
            ValueError,
            "-1 seconds",
        ),
        (lambda: pinpool.Device("toaster:0"), pinpool.UnavailableError, Exception, "toaster"),
        (lambda: pinpool.Pool(device, 1), pinpool.ArgumentError, ValueError, "capacity"),
    ]:
        held = pool.checkout(MIB)
        with pytest.raises(error, match=text) as raised:
            cause()
        assert isinstance(raised.value, also) and isinstance(raised.value, pinpool.Error)
        del held
    with pytest.raises(OverflowError):
        pool.checkout(-1)


def fill(pool):
    """All of the memory, in buffers of a mebibyte."""
    held = []
    while True:
        try:
            held.append(pool.checkout(MIB, timeout=0))
        except pinpool.ExhaustedError as error:
            assert isinstance(error, MemoryError) and isinstance(error, pinpool.TransientError)
            assert "asked for" in str(error)
            return held


def test_a_wait_lets_other_threads_run_and_is_ended_by_a_return(pool):
    held = fill(pool)
    waiting = threading.Thread(target=lambda: held.append(pool.checkout(MIB, timeout=60)))
    waiting.start()
    until(lambda: pool.stats()["waiting"] == 1)
    held.pop(0)
    waiting.join()
    stats = pool.stats()
    assert (stats["waits"], stats["timeouts"]) == (1, 0)
    assert stats["exhausted"] == 1, "the one of fill: a wait is no refusal"


def test_a_wait_ends_at_its_deadline(pool):
    held = fill(pool)
    since = time.monotonic()
    with pytest.raises(pinpool.TimeoutError, match="asked for") as raised:
        pool.checkout(MIB, timeout=0.12)
    assert 0.12 <= time.monotonic() - since < 10 and isinstance(raised.value, TimeoutError)
    assert pool.stats()["waiting"] == 0 and len(held) > 3


@pytest.mark.parametrize("what", ["checkout", "close"])
def test_an_interrupt_ends_a_wait(pool, what):
    held = fill(pool)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.checkout(MIB) if what == "checkout" else pool.close(timeout=None)
    timer.join()
    assert pool.stats()["waiting"] == 0 and len(held) > 3


def test_many_threads(pool):
    """Each buffer has its own bytes for as long as it is there; and no request starves."""

    def work(number):
        for turn in range(300):
            size = 1 + (number * 7919 + turn * 104729) % 600_000
            with pool.checkout(size, timeout=60, zeroed=turn % 2 == 0) as buffer:
                with memoryview(buffer) as view:
                    view[:] = bytes([number]) * size
                    time.sleep(0)
                    wrong.extend(byte for byte in set(view[::97]) if byte != number)

    wrong = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and in_use(pool) == 0


def test_stats_regions_and_trim(device):
    pool = pinpool.Pool(
        pinpool.Device(device), capacity=4 * MIB, initial=MIB, allow_unpinned=True, name="of a test"
    )
    assert pool.name == "of a test" and pool.capacity == 4 * MIB and "of a test" in repr(pool)
    buffer = pool.checkout(1000)
    stats = pool.stats()
    assert stats["checkouts"] - stats["returns"] == 1 and stats["requested_bytes"] == 1000
    until(lambda: sum(region.len for region in pool.regions()) >= MIB)
    assert any(
        region.address <= buffer.address < region.address + region.len for region in pool.regions()
    )
    assert pool.trim() == 0
    buffer.release()
    until(lambda: pool.trim() > 0)
    until(lambda: pool.regions() == [])


def test_close(device):
    with pinpool.Pool(device, 4 * MIB, allow_unpinned=True) as pool:
        buffer = pool.checkout(100)
    with pytest.raises(pinpool.ClosedError, match="shut down"):
        pool.checkout(100)
    assert pool.close(timeout=0.12) is False
    memoryview(buffer)[:3] = b"abc"
    threading.Timer(0.1, buffer.release).start()
    assert pool.close(timeout=None) is True
    until(lambda: pool.regions() == [])


def test_the_stubs_are_current():
    """Each function, class and member is in the stub, and the other way round."""
    stub = ast.parse((pathlib.Path(pinpool.__file__).parent / "_native.pyi").read_text())
    named = [node for node in stub.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    assert {node.name for node in named} == {
        n for n in dir(pinpool._native) if not n.startswith("_")
    }
    for node in [node for node in named if isinstance(node, ast.ClassDef)]:
        native = getattr(pinpool._native, node.name)
        named = {part.name for part in node.body if isinstance(part, ast.FunctionDef)} - {
            "__new__",
            "__buffer__",
        }
        own = {
            name
            for name in vars(native)
            if not name.startswith("__") or name.startswith("__dlpack")
        }
        assert named - own <= {"__len__", "__enter__", "__exit__", "__iter__", "__next__"} and own <= named, node.name
    assert (pathlib.Path(pinpool.__file__).parent / "py.typed").exists()
