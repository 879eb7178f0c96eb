"""Tests of `pinpool.torch` with torch on a GPU: `torch_gpu.py [name ...]` runs all of them or those named, four at a time,
each in a process of its own, so that one that dies or hangs ends no other. They compare bytes, not only that calls
return. It ends with 77 where torch or a GPU is missing.

`TORCH_TESTS` names torch's own `test_cuda.py`, whose tests of pinned memory then run, too; they need `expecttest`."""

import ctypes
import gc
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pinpool.torch

try:
    import torch
    from torch.utils.data import DataLoader
except ImportError as error:
    print(error)
    sys.exit(77)
if not torch.cuda.is_available():
    print("torch finds no GPU")
    sys.exit(77)

MIB = 1 << 20
SLOW = 200_000_000  # cycles of a GPU: some 0.1 s, which a copy waits behind

def pinned(size, value=None):
    tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return tensor if value is None else tensor.fill_(value)


def spoil(size, count=32):
    """Allocates and overwrites: what is used again too early changes now."""
    return [pinned(size, 0xEE) for _ in range(count)]


def drained():
    gc.collect()
    torch.cuda.synchronize()
    deadline = time.monotonic() + 5
    while pinpool.torch.stats()["blocks"] or pinpool.torch.stats()["block_bytes"]:
        assert time.monotonic() < deadline, pinpool.torch.stats()
        time.sleep(0.01)


def script(text, code=0, install="capacity=256 << 20"):
    """A program of its own, which must end by itself with that code."""
    text = f"import os, sys, torch, pinpool.torch\npinpool.torch.install({install})\n{text}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=50)
    assert done.returncode == code, f"code {done.returncode}\n{text}\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def scripts(*all_of_them):
    """Several at once, each with its code."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda one: script(*one), all_of_them))


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        return {"x": torch.full((1 + i % 50, 997), i % 251, dtype=torch.uint8)[:1], "i": i}


def test_memory():
    for size in (0, 1, 7, 64, 4097, MIB, 3 * MIB + 1):
        tensor = pinned(size, 5)
        assert size == 0 or tensor.is_pinned() and tensor.data_ptr() % 64 == 0 and bool((tensor == 5).all())
    source = torch.arange(100_000, dtype=torch.float64).view(100, 1000)[:, ::2]
    copy = source.pin_memory()
    assert copy.is_pinned() and torch.equal(copy, source) and copy[3:7, 5:].is_pinned() and not source.is_pinned()
    back = torch.full((MIB,), 9, dtype=torch.uint8, device="cuda").to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    assert back.is_pinned() and bool((back == 9).all())
    stats = torch.cuda.host_memory_stats()
    assert stats["active_requests.current"] == pinpool.torch.stats()["blocks"] == 3, stats
    torch.cuda.reset_peak_host_memory_stats()
    torch.cuda.reset_accumulated_host_memory_stats()
    assert torch.cuda.host_memory_stats()["active_requests.allocated"] == 0
    tensor = copy = back = None
    drained()
    big = pinned(300 * MIB, 1)  # more than the pool's largest block: torch's own allocator has it
    assert big.is_pinned() and int(big[::MIB].to("cuda", non_blocking=True).sum()) == 300
    assert pinpool.torch.stats()["blocks"] == 0
    torch._C._host_emptyCache()
    assert pinpool.torch.stats()["pinned_bytes"] <= stats["allocated_bytes.peak"]
    script("torch.cuda.memory._set_allocator_settings('pinned_use_background_threads:True')\n"
           "assert torch.ones(1 << 20, pin_memory=True).is_pinned()")


def test_early_reuse():
    """Blocks that a queued copy reads, by an address inside them and on two streams, serve no allocation before."""
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    for turn in range(5):
        host = pinned(MIB, 7)
        first, last, out = host.data_ptr(), host.data_ptr() + MIB, []
        for stream, part in ((one, slice(100, 5000)), (two, slice(MIB // 2, MIB))):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLOW if stream is two else SLOW // 20)
                out.append(host[part].to("cuda", non_blocking=True))
        del host
        one.synchronize()
        others = spoil(MIB)
        assert two.query() or all(t.data_ptr() >= last or t.data_ptr() + MIB <= first for t in others)
        torch.cuda.synchronize()
        assert all(bool((t == 7).all()) for t in out), turn
        del others, out
    drained()


def test_streams_of_others():
    """Streams that torch did not make are destroyed at any moment after `forget`."""
    cudart, handle = torch.cuda.cudart(), ctypes.c_ulonglong(0)
    for turn in range(300):
        cudart.cudaStreamCreate(ctypes.addressof(handle))
        stream = torch.cuda.ExternalStream(handle.value)
        with torch.cuda.stream(stream):
            there = pinned(4096, turn % 251).to("cuda", non_blocking=True)
        time.sleep(turn % 10 * 50e-6)
        pinpool.torch.forget(stream)
        stream.synchronize()
        cudart.cudaStreamDestroy(handle.value)
        assert bool((there == turn % 251).all()), turn
    drained()


def test_threads():
    """16 threads: pin_memory and non-blocking copies, tensors dropped at once, every byte checked."""
    bad = []

    def work(n):
        rng, stream, checks = random.Random(n), torch.cuda.Stream(), []
        with torch.cuda.stream(stream):
            for i in range(150):
                value = rng.randrange(256)
                source = torch.full((rng.randint(1, MIB),), value, dtype=torch.uint8)
                there = source.pin_memory().to("cuda", non_blocking=True)
                back = there.to("cpu", non_blocking=True)
                checks.append((there == value).all())
                if i % 10 == 0:
                    stream.synchronize()
                    if not bool((back == value).all()) or not torch.stack(checks).all().item():
                        bad.append((n, i))
                    checks.clear()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert not bad, bad
    drained()


def test_dataloader():
    """Worker processes by fork, after the pool is open."""
    pinned(1)
    for workers in (0, 4):
        seen = 0
        for batch in DataLoader(Data(), batch_size=16, num_workers=workers, pin_memory=True):
            assert batch["x"].is_pinned()
            there = batch["x"].to("cuda", non_blocking=True)
            wanted = (batch["i"] % 251).to("cuda", non_blocking=True).view(-1, 1, 1)
            assert bool((there == wanted).all())
            seen += len(batch["i"])
        assert seen == 400
    batch = there = wanted = None
    drained()


def test_fork():
    kept = pinned(MIB, 3)
    child = os.fork()
    if child == 0:
        try:
            kept = None  # the parent's block, which a child cannot give back
            try:
                torch.empty(10, pin_memory=True)
            except RuntimeError:
                os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((kept == 3).all()) and pinpool.torch.stats()["blocks"] == 1
    # A program that forks before its first pinned tensor has a pool in each process.
    script("child = os.fork()\nassert torch.ones(9, pin_memory=True).is_pinned()\n"
           "assert child == 0 or os.waitpid(child, 0)[1] == 0")


def test_graphs():
    """A graph keeps what it copies from and to: allocated before the capture or during it."""
    there, stream = torch.zeros(MIB, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    host = pinned(MIB, 7)
    back = pinned(MIB, 0)
    (there + there.clone()).zero_()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        inner = pinned(MIB, 2)
        there.copy_(host, non_blocking=True)
        twice = there + inner.to("cuda", non_blocking=True)
        back.copy_(twice, non_blocking=True)
        unused = pinned(100)
    del host, inner, unused
    for _ in range(3):
        others = spoil(MIB)
        there.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert bool((there == 7).all()) and bool((back == 9).all())
        del others
    assert pinpool.torch.stats()["block_bytes"] >= 3 * MIB
    assert pinpool.torch.stats()["blocks"] == 1
    del graph, back
    drained()


def test_dlpack():
    """Tensors and arrays of one pinned memory: it is held though torch does not know the copy, by any address in it."""
    import numpy

    tensor = pinned(MIB, 6)
    array, view = tensor.numpy(), torch.from_dlpack(tensor)[4096:]
    assert numpy.from_dlpack(tensor).ctypes.data == tensor.data_ptr() and view.is_pinned()
    torch.cuda._sleep(SLOW)
    there = view.to("cuda", non_blocking=True)
    assert not pinpool.torch.idle(tensor) and pinpool.torch.stats()["blocks"] == 1
    del tensor, view
    assert int(array.sum()) == 6 * MIB and pinpool.torch.stats()["blocks"] == 1
    del array
    others = spoil(MIB)
    assert bool((there == 6).all())
    del others
    kept = pinned(MIB)
    pinpool.torch.hold(kept[100:])
    torch.cuda.synchronize()
    for _ in range(500):
        if pinpool.torch.idle(kept):
            break
        time.sleep(0.01)
    assert pinpool.torch.idle(kept)
    del kept
    drained()


def test_lmcache_4830():
    """Blocks copied to a cache from pinned temporaries that are dropped while the copies wait: through DLPack by torch,
    and by a raw pointer, with a hold. Torch's own allocator knows of neither."""
    cudart = ctypes.CDLL(next(line.split()[-1] for line in open("/proc/self/maps") if "libcudart.so" in line))
    cudart.cudaMemcpyAsync.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    block, count = 64 << 10, 200
    cache = torch.empty(count, block, dtype=torch.uint8, device="cuda")

    def store(ours, raw):
        stream = torch.cuda.current_stream()
        pinpool.torch._shim.pinpool_torch_use(ours)
        torch.cuda.synchronize()
        torch.cuda._sleep(2 * SLOW)
        for i in range(count):
            if raw:
                host = pinned(block, i)
                assert cudart.cudaMemcpyAsync(cache[i].data_ptr(), host.data_ptr(), block, 1, stream.cuda_stream) == 0
                if ours:
                    pinpool.torch.hold(host, stream)
            else:
                host = pinned(2 * block)[block:].fill_(i)
                cache[i].copy_(torch.from_dlpack(host), non_blocking=True)
            host = None
        torch.cuda.synchronize()
        wanted = torch.arange(count, dtype=torch.uint8, device="cuda").view(-1, 1)
        return int((cache != wanted).any(dim=1).sum())

    for raw in (False, True):
        found = [store(ours, raw) for ours in (0, 1)]
        print(f"  {'raw pointer' if raw else 'DLPack'}: corrupt of {count}: torch {found[0]}, pinpool {found[1]}")
        assert found[1] == 0
    drained()


def test_exits():
    copy = f"x = torch.ones({MIB}, pin_memory=True)\ntorch.cuda._sleep({SLOW})\ny = x.to('cuda', non_blocking=True)\n"
    keep = "import builtins\nbuiltins.x, builtins.t = x, torch.from_dlpack(x)[99:]\n"
    thread = "import threading, time\ndef work(): kept = torch.ones(99, pin_memory=True); time.sleep(99)\n" \
             "threading.Thread(target=work, daemon=True).start(); time.sleep(0.5)\n"
    scripts((copy,), (copy + keep + "sys.exit(3)", 3), (copy + "os._exit(4)", 4), (copy + thread,))


def test_exhausted():
    out = script("held = []\ntry:\n    while True: held.append(torch.empty(2 << 20, pin_memory=True))\n"
                 "except torch.OutOfMemoryError as error: print(len(held), error)\n"
                 "held.clear()\nassert torch.empty(2 << 20, pin_memory=True).is_pinned()",
                 install="capacity=256 << 20, wait=0.2")
    assert 20 <= int(out.split()[0]) <= 64 and "capacity" in out, out


def test_install_comes_first():
    out = script("torch.ones(3, pin_memory=True)\ntry: pinpool.torch.install()\nexcept pinpool.Error as error: print(error)")
    assert "install once" in out, out


def test_torchs_own():
    if tests := os.environ.get("TORCH_TESTS"):
        script("import runpy\nsys.argv = ['test_cuda.py', '-v', '-k', 'pin', '-k', 'host_memory']\n"
               f"runpy.run_path({tests!r}, run_name='__main__')", install="capacity=4 << 30")


def run(name):
    command = [sys.executable, "-X", "faulthandler", __file__, "--one", name]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, text = "no end", (late.stdout or b"").decode()
    result = f"{'FAIL' if code else 'ok  '} {name} ({time.perf_counter() - start:.1f} s, {code})"
    print(f"{result}\n{text[-6000:]}", end="", flush=True)
    return code == 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        pinpool.torch.install(capacity=4 << 30, device="cuda:0")
        globals()[f"test_{sys.argv[2]}"]()
        sys.exit()
    names = sys.argv[1:] or [name[5:] for name in globals() if name.startswith("test_")]
    with ThreadPoolExecutor(4) as pool:
        good = list(pool.map(run, names))
    print(f"{sum(good)} of {len(good)} passed")
    sys.exit(not all(good))
