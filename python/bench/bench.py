"""torch's own pinned allocator against the pool, in one process by turns. Prints a line for each measurement.

    python3 bench.py [hook|waste|server|python ...]
"""

import ctypes
import gc
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

import torch

import pinpool.torch

HERE = pathlib.Path(__file__).resolve().parent
MIB = 1 << 20


def compile_loops():
    root = pathlib.Path(torch.__file__).resolve().parent
    out = pathlib.Path(tempfile.gettempdir()) / f"pinpool_hook_{torch.__version__}.so"
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", "-w", f"-I{root}/include", str(HERE / "hook.cpp"),
               f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib", "-o", str(out)]
    if not out.exists() or out.stat().st_mtime < (HERE / "hook.cpp").stat().st_mtime:
        subprocess.run(command, check=True)
    loops = ctypes.CDLL(str(out))
    loops.bench_pairs.restype = loops.bench_server.restype = ctypes.c_double
    loops.bench_pairs.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    loops.bench_server.argtypes = [ctypes.c_int] * 3 + [ctypes.c_void_p, ctypes.c_int] + [ctypes.c_void_p] * 2
    return loops


def use(ours):
    """Torch's own allocator or the pool, with no copy under way."""
    gc.collect()
    torch.cuda.synchronize()
    pinpool.torch._shim.pinpool_torch_use(ours)


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
    print(f"{name:40} torch {own:9.3f}  pinpool {ours:9.3f} {unit:4} times {own / ours:7.2f}  aim {aim}", flush=True)


def hook():
    loops = compile_loops()
    for threads, event, aim in ((1, 0, ">= 1"), (16, 0, ">= 50 (100)"), (1, 1, ">= 1"), (16, 1, ">= 10 (20)")):
        values = by_turns(lambda: loops.bench_pairs(threads, MIB, event, 200) / 1000)
        line(f"C++ 1 MiB, {threads} threads{', event' if event else ''}", "us", *values, aim)


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
    """Bytes of tensors that servers of common models pin."""
    rng, out = random.Random(seed), []
    hidden = (1024, 1536, 2048, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
    vocabularies = (32000, 32768, 50257, 128256, 129280, 151936, 201088)
    any_of = rng.choice
    kinds = (
        (7, lambda: rng.randint(1, 600) * any_of(hidden) * any_of((1, 2, 4))),  # states of some tokens
        # Pages of keys and values: tokens, heads, the head's size.
        (5, lambda: any_of((16, 32, 64, 256)) * any_of((1, 2, 4, 8)) * any_of((64, 80, 96, 128, 192)) * 4),
        (4, lambda: rng.randint(1, 8192) * any_of((4, 8))),  # ids, positions, slots
        (2, lambda: any_of((224, 336, 378, 448, 490, 560)) ** 2 * 3 * any_of((1, 2, 4))),  # images
        (2, lambda: rng.randint(1, 8) * any_of(vocabularies) * 2),  # logits of some rows
    )
    while len(out) < count:
        size = rng.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]()
        if size <= largest:
            out.append(size)
    return out


def waste():
    """10,000 tensors, 500 alive at a time: what is taken for what was asked. Torch takes the next power of two."""
    trace = sizes(10_000, 16 * MIB)
    for name, ours in (("torch", 0), ("pinpool", 1)):
        use(ours)
        torch._C._host_emptyCache()
        asked, taken, worst = 0, 0, 0.0
        for i in range(0, len(trace), 500):
            live = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in trace[i:i + 500]]
            wanted = sum(trace[i:i + 500])
            powers = sum(1 << (n - 1).bit_length() for n in trace[i:i + 500])
            part = pinpool.torch.stats()["block_bytes"] if ours else powers
            asked, taken, worst = asked + wanted, taken + part, max(worst, part / wanted)
            del live
        pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"] / MIB
        print(f"waste of 10,000 tensors, {name}: {100 * (taken / asked - 1):.1f} % above what was asked, worst 500 "
              f"{100 * (worst - 1):.1f} %, pinned {pinned:.0f} MiB  aim <= 12.5 %", flush=True)


def server():
    """Batches of 8 tensors a step, 8 workers. What is pinned: by each allocator's own loops since it was emptied."""
    loops, workers, steps, warm = compile_loops(), 8, 700, 200
    for name, largest in (("<= 256 KiB", MIB // 4), ("<= 16 MiB", 16 * MIB)):
        trace = sizes(2000, largest, seed=1)
        array = (ctypes.c_int64 * len(trace))(*trace)
        results, pinned, peaks = ([], []), [0, 0], ([], [])
        torch._C._host_emptyCache()
        for turn in range(3):
            for ours in (0, 1):
                use(ours)
                latencies = (ctypes.c_double * (workers * (steps - warm)))()
                most = (ctypes.c_int64 * 2)()
                rate = loops.bench_server(workers, steps, warm, array, len(trace), latencies, most)
                assert rate > 0
                peaks[ours].append([bytes / MIB for bytes in most])
                ordered = sorted(latencies)
                results[ours].append((1e6 / rate, ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]))
                pinned[ours] = torch.cuda.host_memory_stats()["allocated_bytes.current"] / MIB
        own, ours = ([statistics.median(column) for column in zip(*rows)] for rows in results)
        for i, what in enumerate(("time a step of all", "p50 of a step", "p99 of a step")):
            line(f"server, {name}, {what}", "us", own[i], ours[i], ">= 1")
        line(f"server, {name}, pinned", "MiB", *pinned, ">= 2")
        # What no allocator can do without, and what of the rest comes from rounding.
        for who, all_of, taken in (("torch", peaks[0], pinned[0]), ("pinpool", peaks[1], pinned[1])):
            asked, rounded = (max(column) for column in zip(*all_of))
            print(f"server, {name}, {who}: {asked:.2f} MiB in use at once at most ({rounded:.2f} in powers of two), pinned "
                  f"{taken:.1f}, {taken / asked:.2f} times as much", flush=True)


if __name__ == "__main__":
    torch.cuda.init()
    pinpool.torch.install(capacity=8 << 30, device="cuda:0", initial=32 * MIB, largest=32 * MIB)
    for part in sys.argv[1:] or ("hook", "server", "waste", "python"):
        globals()[part]()
