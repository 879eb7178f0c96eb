"""Buffers that are held for streams of the program's, on a simulated GPU.

The simulation does queued work as late as the driver's rules allow: a copy runs when a call asks
about it. So memory that is used again too early has the wrong bytes each time.
"""

import gc
import os
import signal
import threading

import numpy
import pytest

import pinpool
from conftest import MIB, in_use, until

SIZE = 600_000


@pytest.fixture
def pool(gpu):
    with pinpool.Pool("cuda:0", 8 * MIB, allow_unpinned=True) as made:
        yield made
        gpu.sim("hang false")
        gc.collect()
        until(lambda: in_use(made) == 0)


def filled(pool, byte):
    buffer = pool.checkout(SIZE)
    memoryview(buffer)[:] = bytes([byte]) * SIZE
    return buffer


def on_the_device(gpu, pool, stream):
    buffer = pool.checkout(SIZE)
    gpu.download(buffer, stream)
    buffer.hold(stream)
    buffer.wait(20)
    return set(bytes(buffer))


def test_up_and_down(gpu, pool):
    stream = gpu.stream()
    buffer = filled(pool, 7)
    gpu.upload(buffer, stream)
    buffer.hold(stream)
    until(lambda: buffer.ready)
    memoryview(buffer)[:1] = b"x"
    assert on_the_device(gpu, pool, stream) == {7}


def test_what_a_device_wrote_is_not_zeroed(gpu, pool):
    """Not even in a buffer that was held for a stream before anybody knew its address."""
    stream = gpu.stream()
    first = filled(pool, 8)
    gpu.upload(first, stream)
    first.hold(stream)
    buffer = pool.checkout(SIZE)
    buffer.hold(stream)
    gpu.download(buffer, stream)
    buffer.hold(stream)
    buffer.wait(20)
    assert set(bytes(buffer)) == {8}


def test_a_held_buffer_is_not_the_cpus(gpu, pool):
    gpu.sim("hang true")
    stream = gpu.stream()
    buffer = filled(pool, 7)
    gpu.upload(buffer, stream)
    buffer.hold(stream)
    assert not buffer.ready
    for refused in [memoryview, numpy.from_dlpack]:
        with pytest.raises(pinpool.StateError, match=r"wait\(\)"):
            refused(buffer)
    with pytest.raises(pinpool.TimeoutError, match="timed out after"):
        buffer.wait(0.1)
    assert not buffer.ready
    gpu.sim("hang false")
    buffer.wait(20)
    assert buffer.ready and set(bytes(buffer)) == {7}
    # It is an ordinary buffer again.
    buffer.release()


def test_memory_in_flight_is_not_used_again(gpu, pool):
    """Nothing completes; the buffers are deleted, and what is checked out meanwhile is
    elsewhere."""
    stream = gpu.stream()
    gpu.sim("hang true")
    addresses = set()
    for _ in range(4):
        buffer = filled(pool, 7)
        addresses.add(buffer.address)
        gpu.upload(buffer, stream)
        buffer.hold(stream)
        buffer.release() if len(addresses) % 2 else None
        del buffer
    others = []
    while True:
        try:
            other = pool.checkout(SIZE, timeout=0)
        except pinpool.ExhaustedError:
            break
        assert other.address not in addresses
        memoryview(other)[:] = b"\x01" * SIZE
        others.append(other)
    del other
    # A request that waits gets the memory when the copies are complete.
    got = []
    waits = threading.Thread(target=lambda: got.append(pool.checkout(SIZE, timeout=60).address))
    waits.start()
    until(lambda: pool.stats()["waiting"] == 1)
    gpu.sim("hang false")
    waits.join()
    assert got and got[0] in addresses
    others.clear()
    assert on_the_device(gpu, pool, stream) == {7}


def test_several_holds(gpu, pool):
    streams = [gpu.stream() for _ in range(3)]
    memories = [gpu.made("cuMemAlloc_v2", SIZE) for _ in streams]
    gpu.sim("hang true")
    buffer = filled(pool, 9)
    for stream, memory in zip(streams, memories):
        for _ in range(2):
            gpu.upload(buffer, stream, memory)
            buffer.hold(stream)
    # One stream is complete, and others are not.
    gpu.sim("hang false")
    buffer.wait(20)
    memoryview(buffer)[:] = b"\x00" * SIZE
    for stream, memory in zip(streams, memories):
        gpu.memory, old = memory, gpu.memory
        assert on_the_device(gpu, pool, stream) == {9}
        gpu.memory = old
        gpu("cuMemFree_v2", memory)


def test_a_hold_with_views_says_so_and_holds(gpu, pool):
    gpu.sim("hang true")
    stream = gpu.stream()
    buffer = filled(pool, 7)
    array = numpy.from_dlpack(buffer)
    gpu.upload(buffer, stream)
    with pytest.raises(pinpool.StateError, match="held all the same"):
        buffer.hold(stream)
    with pytest.raises(pinpool.StateError):
        memoryview(buffer)
    del buffer, array
    assert in_use(pool) >= SIZE
    gpu.sim("hang false")


def test_the_default_streams(gpu, pool):
    for stream in [0, 1, 2]:
        buffer = filled(pool, 3)
        gpu.upload(buffer, stream)
        buffer.hold(stream)
        buffer.wait(20)


def test_a_graph_keeps_what_was_held_in_its_capture(gpu, pool):
    stream = gpu.stream()
    buffer = filled(pool, 5)
    gpu("cuStreamBeginCapture_v2", stream, 0)
    gpu.upload(buffer, stream)
    buffer.hold(stream)
    graph = gpu.word()
    gpu("cuStreamEndCapture", stream, graph.address)
    with pytest.raises(pinpool.TimeoutError):
        buffer.wait(0.05)
    del buffer
    assert in_use(pool) >= SIZE
    executable = gpu.made("cuGraphInstantiateWithFlags", graph.value, 0)
    gpu("cuGraphLaunch", executable, stream)
    gpu("cuStreamSynchronize", stream)
    assert on_the_device(gpu, pool, stream) == {5}
    gpu("cuGraphExecDestroy", executable)
    gpu("cuGraphDestroy", graph.value)


def test_a_refused_hold(gpu, pool):
    buffer = filled(pool, 3)
    with pytest.raises(pinpool.Error, match="cuStreamGetCtx"):
        buffer.hold(0x40)
    gpu.known = gpu.violations()
    assert buffer.ready and bytes(buffer)[:1] == b"\x03"


def test_an_interrupt_ends_a_wait_for_a_hold(gpu, pool):
    stream = gpu.stream()
    gpu.sim("hang true")
    buffer = filled(pool, 3)
    gpu.upload(buffer, stream)
    buffer.hold(stream)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        buffer.wait()
    assert not buffer.ready
    gpu.sim("hang false")
    buffer.wait(20)


def test_one_thread_waits_and_others_are_told(gpu, pool):
    stream = gpu.stream()
    gpu.sim("hang true")
    buffer = filled(pool, 3)
    gpu.upload(buffer, stream)
    buffer.hold(stream)
    thread = threading.Thread(target=buffer.wait, args=(20,))
    thread.start()

    def told():
        try:
            memoryview(buffer)
        except pinpool.StateError as error:
            return "another thread waits" in str(error)

    until(told)
    for refused in [buffer.wait, buffer.release, lambda: buffer.pinned]:
        with pytest.raises(pinpool.StateError, match="another thread waits"):
            refused()
    gpu.sim("hang false")
    thread.join()
    assert buffer.ready


def test_the_host_has_no_such_streams():
    pool = pinpool.Pool("host", MIB, allow_unpinned=True)
    with pytest.raises(pinpool.UnsupportedError, match="no streams"):
        pool.checkout(10).hold(0)
