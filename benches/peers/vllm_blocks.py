"""vLLM's two ways to move blocks of a cache between pinned memory and the device, for the blocks of benches/kv_tier.rs.

    python3 benches/peers/vllm_blocks.py [--blocks N] [--pages KIB,KIB] [--rounds N]

A block has a page in each of 64 planes of the device; on the host its pages are one row. Blocks are in no order on either
side. As vLLM 0.33 does it (v1/kv_offload/cpu):

  batch   one cuMemcpyBatchAsync over the pages of all blocks, however many, by the driver's own call; sources of a load
          may be read in any order, those of a store in the stream's
  triton  loads alone: a kernel of 12 programs that reads pinned memory itself, a page at a time; vLLM takes it below
          28 KiB a page and from 16 pages on

A figure is the wall time from the making of the address lists (by numpy, as vLLM makes them) to the end of the copies, the
median of rounds. The peak is the best of five copies of 64 MiB on one stream, before each round. Every byte is compared
after each way. Prints lines of: name threads median lower-quartile upper-quartile.
"""
import argparse
import ctypes
import sys
import time

try:
    import numpy as np
    import torch
except ImportError:
    sys.exit("there is no PyTorch")
if not torch.cuda.is_available():
    sys.exit("this PyTorch has no GPU")
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

PLANES = 64
WHOLE = 64 << 20
PROGRAMS = 12
IN_STREAM_ORDER, IN_ANY_ORDER = 1, 3  # cuda.h: CUmemcpySrcAccessOrder

driver = ctypes.CDLL("libcuda.so.1")


def batch(to, source, lengths, stream, order):
    """The driver's call of CUDA 12.8: with the index of the copy that failed."""
    attributes = (ctypes.c_uint32 * 6)(order)
    first, fault = ctypes.c_size_t(0), ctypes.c_size_t(0)
    pointer = lambda array: ctypes.c_void_p(array.ctypes.data)
    code = driver.cuMemcpyBatchAsync(
        pointer(to), pointer(source), pointer(lengths), ctypes.c_size_t(len(to)), ctypes.byref(attributes),
        ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(fault), ctypes.c_void_p(stream.cuda_stream),
    )
    if code != 0:
        sys.exit(f"cuMemcpyBatchAsync: error {code} at copy {fault.value}")


if triton:

    @triton.jit
    def copy_pages(source, to, lengths, count, CHUNK: tl.constexpr):
        page = tl.program_id(0)
        words = tl.arange(0, CHUNK // 8)
        while page < count:
            read = tl.load(source + page).to(tl.pointer_type(tl.int64))
            write = tl.load(to + page).to(tl.pointer_type(tl.int64))
            length = tl.load(lengths + page) // 8
            for start in range(0, length, CHUNK // 8):
                at = start + words
                tl.store(write + at, tl.load(read + at, mask=at < length, other=0), mask=at < length)
            page += tl.num_programs(0)


def by_triton(to, source, lengths, chunk):
    there = lambda array: torch.from_numpy(array).to("cuda", non_blocking=True)
    copy_pages[(min(PROGRAMS, len(to)),)](there(source), there(to), there(lengths), len(to), CHUNK=chunk)


def peak(host, device, stream, upload):
    best = float("inf")
    for _ in range(5):
        since = time.perf_counter()
        with torch.cuda.stream(stream):
            (device if upload else host).copy_(host if upload else device, non_blocking=True)
        stream.synchronize()
        best = min(best, time.perf_counter() - since)
    return WHOLE / best


def line(name, values):
    values = sorted(values)
    at = lambda q: values[round((len(values) - 1) * q)]
    print(f"{name} 1 {at(0.5):.1f} {at(0.25):.1f} {at(0.75):.1f}", flush=True)


def rows(blocks, page, rounds, stream):
    kib, total = page >> 10, blocks * PLANES * page
    # Twice as many places as blocks on each side, so that neighbours are apart.
    host = torch.empty((2 * blocks, PLANES * page), dtype=torch.uint8, pin_memory=True)
    cache = torch.zeros((PLANES, 2 * blocks, page), dtype=torch.uint8, device="cuda")
    whole = (torch.ones(WHOLE, dtype=torch.uint8, pin_memory=True), torch.ones(WHOLE, dtype=torch.uint8, device="cuda"))
    random = np.random.default_rng(page)
    sent = torch.from_numpy(random.integers(0, 256, (2 * blocks, PLANES * page), dtype=np.uint8))
    planes = np.arange(PLANES, dtype=np.int64)[:, None]

    def addresses(rows, places):
        on_host = host.data_ptr() + rows[None, :] * (PLANES * page) + planes * page
        on_device = cache.data_ptr() + (planes * 2 * blocks + places[None, :]) * page
        return on_host.ravel(), on_device.ravel(), np.full(blocks * PLANES, page, dtype=np.int64)

    def once(way, rows, places):
        with torch.cuda.stream(stream):
            since = time.perf_counter()
            on_host, on_device, lengths = addresses(rows, places)
            if way == "triton_load":
                by_triton(on_device, on_host, lengths, min(triton.next_power_of_2(page), 16 << 10))
            elif way == "batch_load":
                batch(on_device, on_host, lengths, stream, IN_ANY_ORDER)
            else:
                batch(on_host, on_device, lengths, stream, IN_STREAM_ORDER)
            stream.synchronize()
            return total / (time.perf_counter() - since)

    for way in ["batch_load", "triton_load", "batch_store"]:
        if way == "triton_load" and not triton:
            print("# triton: skipped, there is no Triton")
            continue
        rates, links, shares = [], [], []
        for turn in range(rounds + 1):
            rows, places = (random.permutation(2 * blocks)[:blocks].astype(np.int64) for _ in range(2))
            chosen, where = torch.from_numpy(rows), torch.from_numpy(places)
            upload = way != "batch_store"
            if upload:
                host.copy_(sent)
                cache.zero_()
            else:
                host.zero_()
                cache[:, where.cuda()] = sent[chosen].view(blocks, PLANES, page).transpose(0, 1).contiguous().cuda()
            torch.cuda.synchronize()
            link = peak(*whole, stream, upload)
            rate = once(way, rows, places)
            if upload:
                came = cache[:, where.cuda()].transpose(0, 1).contiguous().view(blocks, -1).cpu()
            else:
                came = host[chosen]
            if not torch.equal(came, sent[chosen]):
                sys.exit(f"{way}, pages of {kib} KiB: wrong bytes")
            if turn > 0:
                rates.append(rate / 1e6)
                links.append(link / 1e6)
                shares.append(rate / link * 1e3)
        line(f"kv_vllm_{way}_{kib}k_mb_per_s", rates)
        line(f"kv_vllm_{way}_{kib}k_permille", shares)
        line(f"kv_vllm_link_{way}_{kib}k_mb_per_s", links)


options = argparse.ArgumentParser()
options.add_argument("--blocks", type=int, default=256)
options.add_argument("--pages", default="4,16,32")
options.add_argument("--rounds", type=int, default=9)
options = options.parse_args()
print(f"# torch {torch.__version__}, triton {triton.__version__ if triton else None}, {torch.cuda.get_device_name()}")
for kib in options.pages.split(","):
    rows(options.blocks, int(kib) << 10, options.rounds, torch.cuda.Stream())
