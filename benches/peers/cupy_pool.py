"""CuPy's pool of pinned memory, called from Python as its users call it: allocate 64 KiB, write one byte, free.

Python's threads take turns (unless the interpreter is a free-threaded one), so N threads make each one N times slower. The
pool does not track streams. Prints lines of: name threads median-ns lower-quartile upper-quartile.
"""

import os
import statistics
import sys
import threading
import time
import traceback

import cupy
import numpy

LEN, ROUNDS, PAIRS = 64 << 10, 7, 20000


def operate(pool, pairs):
    for _ in range(pairs):
        block = pool.malloc(LEN)
        numpy.frombuffer(block, numpy.uint8, 1)[0] = 1
        del block


def measure(pool, threads):
    barrier = threading.Barrier(threads)
    times = [[0.0] * ROUNDS for _ in range(threads)]

    def work(n):
        try:
            turns(n)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # The others wait for this one.

    def turns(n):
        cupy.cuda.Device(0).use()
        for turn in range(ROUNDS):
            operate(pool, 200)
            barrier.wait()
            start = time.perf_counter_ns()
            operate(pool, PAIRS // threads)
            times[n][turn] = (time.perf_counter_ns() - start) / (PAIRS // threads)
            barrier.wait()

    running = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    means = [sum(column) / threads for column in zip(*times)]
    low, mid, high = statistics.quantiles(means, n=4)
    print(f"cupy_take_give {threads} {mid:.1f} {low:.1f} {high:.1f}", flush=True)


def main():
    cupy.cuda.Device(0).use()
    pool = cupy.cuda.PinnedMemoryPool()
    for threads in [int(arg) for arg in sys.argv[1:]] or [1, 2, 4, 8, 16]:
        measure(pool, threads)


main()
