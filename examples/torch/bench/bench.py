"""torch's own pinned allocator against the pool, in one process by turns. Prints a line for each measurement.

    PINPOOL_LIBRARY=folder PYTHONPATH=.. python3 bench.py [hook|waste|server|python ...]
"""

import ctypes
import gc
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import torch

import pinpool_torch
from pinpool_torch import _build

HERE = pathlib.Path(__file__).resolve().parent
MIB = 1 << 20


def compile_loops():
    root = pathlib.Path(torch.__file__).resolve().parent
    out = pathlib.Path(tempfile.gettempdir()) / f"pinpool_hook_{torch.__version__}.so"
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-w", f"-I{root}/include", str(HERE / "hook.cpp"),
               f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib", "-o", str(out)]
    if not out.exists() or out.stat().st_mtime < (HERE / "hook.cpp").stat().st_mtime:
        subprocess.run(command, check=True)
    loops = ctypes.CDLL(str(out))
    loops.bench_pairs.restype = loops.bench_server.restype = ctypes.c_double
    loops.bench_pairs.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    loops.bench_server.argtypes = [ctypes.c_int] * 3 + [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return loops


def use(ours):
    """Torch's own allocator or the pool, with no copy under way."""
    gc.collect()
    torch.cuda.synchronize()
    pinpool_torch._shim.pinpool_torch_use(ours)


def by_turns(measure, turns=5):
    """The medians of torch's own and of the pool."""
    values = ([], [])
    for turn in range(turns + 1):
        for ours in (0, 1):
            use(ours)
            value = measure()
            if turn > 0:  # the first pins the memory
                values[ours].append(value)
    return [statistics.median(v) for v in values]


def line(name, unit, own, ours, aim):
    print(f"{name:42} torch {own:10.3f}  pinpool {ours:10.3f} {unit:5} times {own / ours if ours else 0:7.2f}  aim {aim}",
          flush=True)


def hook():
    loops = compile_loops()
    for threads, event, aim in ((1, 0, ">= 1"), (16, 0, ">= 50 (100)"), (1, 1, ">= 1"), (16, 1, ">= 10 (20)")):
        own, ours = by_turns(lambda: loops.bench_pairs(threads, MIB, event, 200) / 1000)
        line(f"C++ 1 MiB, {threads} threads{', event' if event else ''}", "us", own, ours, aim)


def python():
    device = torch.empty(MIB, dtype=torch.uint8, device="cuda")

    def pairs(work, count=3000):
        start = time.perf_counter()
        for _ in range(count):
            work()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count * 1e6

    for name, work in (
        ("Python empty(pin_memory=True) 1 MiB", lambda: torch.empty(MIB, dtype=torch.uint8, pin_memory=True)),
        ("Python the same, 64 KiB copied",
         lambda: device[:65536].copy_(torch.empty(65536, dtype=torch.uint8, pin_memory=True), non_blocking=True)),
    ):
        line(name, "us", *by_turns(lambda: pairs(work)), ">= 1")
    source = torch.ones(MIB // 4, dtype=torch.uint8)
    line("Python pin_memory() 256 KiB", "us", *by_turns(lambda: pairs(source.pin_memory, 1000)), ">= 1")


def sizes(count, largest, seed=0):
    """Bytes of tensors that servers of common models pin: pages of keys and values, states of tokens, ids, images."""
    rng = random.Random(seed)
    hidden = (1024, 1536, 2048, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
    out = []
    while len(out) < count:
        kind = rng.random()
        if kind < 0.35:  # states of some tokens
            size = rng.randint(1, 600) * rng.choice(hidden) * rng.choice((1, 2, 4))
        elif kind < 0.6:  # pages of keys and values: tokens, heads, head size, key and value
            size = rng.choice((16, 32, 64, 256)) * rng.choice((1, 2, 4, 8)) * rng.choice((64, 80, 96, 128, 192)) * 2 * 2
        elif kind < 0.8:  # ids, positions, slots, block tables
            size = rng.randint(1, 8192) * rng.choice((4, 8))
        elif kind < 0.9:  # images
            size = rng.choice((224, 336, 378, 448, 490, 560)) ** 2 * 3 * rng.choice((1, 2, 4))
        else:  # logits of some rows
            size = rng.randint(1, 8) * rng.choice((32000, 32768, 50257, 128256, 129280, 151936, 201088)) * 2
        if 0 < size <= largest:
            out.append(size)
    return out


def waste():
    """10,000 tensors, 500 alive at a time: what is taken for what was asked."""
    trace = sizes(10_000, 16 * MIB)
    for ours in (0, 1):
        use(ours)
        torch._C._host_emptyCache()
        live, asked, taken, worst = [], 0, 0, 0.0
        for i, size in enumerate(trace):
            live.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
            if len(live) == 500 or i + 1 == len(trace):
                if ours:
                    now, bytes_ = pinpool_torch.stats(), sum(t.numel() for t in live)
                    part = now["block_bytes"]
                else:  # each block is the next power of two
                    bytes_ = sum(t.numel() for t in live)
                    part = sum(1 << (t.numel() - 1).bit_length() for t in live)
                asked, taken, worst = asked + bytes_, taken + part, max(worst, part / bytes_)
                live.clear()
        pinned = pinpool_torch.stats()["pinned_bytes"] if ours else torch.cuda.host_memory_stats()["allocated_bytes.current"]
        print(f"waste of 10,000 tensors, {'pinpool' if ours else 'torch'}: {100 * (taken / asked - 1):.1f} % above what was "
              f"asked, worst 500 {100 * (worst - 1):.1f} %, pinned {pinned / MIB:.0f} MiB  aim <= 12.5 %", flush=True)


def server():
    trace = sizes(2000, 2 * MIB, seed=1)
    loops, workers, steps, warm = compile_loops(), 8, 700, 200
    array = (ctypes.c_int64 * len(trace))(*trace)

    def in_cpp():
        latencies = (ctypes.c_double * (workers * (steps - warm)))()
        return loops.bench_server(workers, steps, warm, array, len(trace), latencies), sorted(latencies)

    def in_python():
        latencies, sources = [], [torch.ones(size, dtype=torch.uint8) for size in trace[:200]]

        def work(worker):
            rng, stream = random.Random(worker), torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for step in range(150):
                    start = time.perf_counter()
                    batch = [rng.choice(sources).pin_memory().to("cuda", non_blocking=True) for _ in range(8)]
                    batch[0][:64].cpu()
                    if step >= 50:
                        latencies.append((time.perf_counter() - start) * 1e6)

        start = time.perf_counter()
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        return workers * 150 / (time.perf_counter() - start), sorted(latencies)

    for name, run, turns in (("C++", in_cpp, 3), ("Python", in_python, 2)):
        for ours in (0, 1):  # what is pinned is counted for each loop
            use(ours)
            torch._C._host_emptyCache()
        results = ([], [])
        for _ in range(turns):
            for ours in (0, 1):
                use(ours)
                rate, latencies = run()
                results[ours].append((rate, latencies[len(latencies) // 2], latencies[len(latencies) * 99 // 100]))
        own, ours = ([statistics.median(column) for column in zip(*rows)] for rows in results)
        for i, what, aim in ((1, "p50", "<= torch"), (2, "p99", "< torch")):
            line(f"server loop in {name}, {what} of a step", "us", own[i], ours[i], aim)
        line(f"server loop in {name}, steps", "/s", own[0], ours[0], ">= torch")
        use(0)
        pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"] / MIB
        line(f"server loop in {name}, pinned", "MiB", pinned, pinpool_torch.stats()["pinned_bytes"] / MIB, "times >= 2")


if __name__ == "__main__":
    torch.cuda.init()
    before = time.perf_counter()
    pinpool_torch.install(capacity=8 << 30, device="cuda:0")
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}, install {time.perf_counter() - before:.1f} s", flush=True)
    for part in sys.argv[1:] or ("hook", "waste", "server", "python"):
        try:
            globals()[part]()
        except Exception as error:
            print(f"{part} FAILED: {type(error).__name__}: {error}", flush=True)
