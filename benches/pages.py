#!/usr/bin/env python3
"""Makes the figures of the pages from the files that benches/run.sh wrote, with the standard library alone.

    benches/pages.py           writes docs/speed.svg, and the figures of README.md and docs/benchmarks.md
    benches/pages.py --check   fails if one of them is not what the files give

The files are those of the only folder in benches/results. In the pages each place for figures lies between
`<!-- figures: NAME -->` and `<!-- end -->`; the function NAME below makes it, or changes what is there. A row of a table
whose figures are not in the files is left out; a sentence whose figure is not there is an error.
"""

import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"]
PICTURE = ROOT / "docs" / "speed.svg"
MONTHS = "January February March April May June July August September October November December".split()


class Part:
    """What one file has: its head, figures by name and threads (median, quartiles), gates, and rows of Markdown. Of a part
    that was not run: nothing."""

    def __init__(self, path=None):
        self.head, self.figures, self.bytes, self.gates, self.rows, self.torch = {}, {}, {}, [], [], []
        for line in path.read_text(encoding="utf-8").splitlines() if path else ():
            words = line.removeprefix("@ ").split()
            if head := re.fullmatch(r"# (day|machine|versions): (.*)", line):
                self.head[head[1]] = head[2]
            elif re.fullmatch(r"(@ )?[\w.]+ \d+( -?[\d.]+){3}", line):
                self.figures.setdefault((words[0], int(words[1])), []).append([float(word) for word in words[2:]])
            elif gate := re.fullmatch(r"gate: (.*): ([\d.]+) \(quartiles [^)]*\), (at \w+ .*): (.*)", line):
                self.gates.append(gate.groups())
            elif size := re.match(r"(large|small): (\d+) bytes", line):
                self.bytes[size[1]] = int(size[2])
            elif line.startswith("| "):
                self.rows.append(line)
            elif row := re.fullmatch(r"(.*\S) +torch +([\d.]+) +pinpool +([\d.]+) (\w+) +times +([\d.]+) +aim .*", line):
                self.torch.append(row.groups())
        if "no GPU" in self.head.get("machine", ""):
            sys.exit(f"{path} is of a machine without a GPU")

    def get(self, name, threads=1):
        """The median; of a figure that was measured several times, the median of these."""
        values = sorted(each[0] for each in self.figures.get((name, threads), []))
        return values[(len(values) - 1) // 2] if values else None


def read():
    folders = [path for path in sorted((ROOT / "benches" / "results").iterdir()) if path.is_dir()]
    if len(folders) != 1:
        sys.exit(f"benches/results has {len(folders)} folders, not one")
    return {path.stem: Part(path) for path in sorted(folders[0].glob("*.txt"))}


PARTS = read()


def part(name):
    return PARTS.get(name) or Part()


def needed(name, figure, threads=1):
    value = part(name).get(figure, threads)
    if value is None:
        sys.exit(f"{name}.txt has no line of {figure} with {threads} threads")
    return value


# --- figures as text ---------------------------------------------------------------------------------------------------


def ns(value):
    return None if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def gb(mega):
    return None if mega is None else f"{mega / 1000:.{1 if mega >= 1000 else 2}f}"


def share(permille):
    return None if permille is None else f"{permille / 1000:.2f}"


def plain(value):
    return None if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def over(a, b):
    return None if a is None or b is None else f"{a / b:.2f}"


def table(heads, rows):
    lines = [[row[0], *(cell or "" for cell in row[1:])] for row in rows if any(row[1:])]
    if not lines:
        return ""
    lines = [heads, ["---"] * len(heads), *lines]
    return "\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def gates(*names):
    rows = [(what, seen, bound, verdict) for name in names for what, seen, bound, verdict in part(name).gates]
    return table(["gate", "seen", "wanted", ""], rows)


# --- the places in the pages -------------------------------------------------------------------------------------------


def day(head):
    year, month, _ = head["day"].split("-")
    return f"{MONTHS[int(month) - 1]} {year}"


def machine(_):
    """The caption of the picture."""
    heads = [part(name).head for name in ("checkout", "tensors")]
    each = []
    for head in heads:
        words = re.match(r"(.*), driver (\d+)\S*; (\d+ cores)", head["machine"])
        each.append(f"{words[1]}, driver {words[2]}, {words[3]}, {day(head)}")
    return each[0] if each[0] == each[1] else f"{each[0]}; the loads: {each[1]}"


def pageable(_):
    """Two figures of the README's reason why."""
    up = [needed("bulk", name) for name in ("plain_pageable_mb_per_s_up", "plain_link_mb_per_s_up")]
    card = re.match(r"(?:NVIDIA )?(\w+)", part("bulk").head["machine"])[1]
    return f"one {card} takes 1 GiB at {up[0] / 1000:.0f} GB/s from pageable memory and at {up[1] / 1000:.0f} GB/s from pinned memory"


def measured(_):
    """Which peers the README's table of costs is of."""
    head = part("checkout").head
    versions = re.findall(r"(?:PyTorch|CUDA) [\d.]*\d", head["versions"])
    return f"{day(head)} with {' and '.join(versions)}"


def costs(text):
    """Sets the last cell of each row of the README's table."""
    pairs = lambda name: "{} / {}".format(*(f"{needed('checkout', name, n):,.0f}" for n in (1, 16)))
    cost = {
        "pinpool": f"{pairs('checkout_return_pinpool')} ns; used on a stream {pairs('on_a_stream_pinpool_held')} ns",
        "PyTorch's caching host allocator": f"{pairs('torch_take_give_65536')} ns; used on a stream {pairs('torch_take_record_give_65536')}",
        "the driver's pool": f"{pairs('driver_pool_take_give')} ns",
        "cudarc's `PinnedHostSlice`": f"{needed('checkout', 'driver_host_alloc_4096') / 1e6:.1f} ms for 4 KiB",
    }
    lines = text.split("\n")
    for number, line in enumerate(lines):
        cells = line.split(" | ")
        for name, figure in cost.items():
            if cells[0].startswith(f"| {name}"):
                lines[number] = " | ".join([*cells[:-1], f"{figure} |"])
    return "\n".join(lines)


def files(_):
    groups = {}
    for name, each in PARTS.items():
        groups.setdefault(tuple(each.head[key] for key in ("day", "machine", "versions")), []).append(f"`{name}`")
    return table(["files", "day", "machine", "versions"], [(", ".join(names), *head) for head, names in groups.items()])


THREADS = (1, 4, 16)
COSTS = [
    ("two atomic increments, for comparison", "checkout_return_two_fetch_adds"),
    ("pinpool", "checkout_return_pinpool"),
    ("a free list behind a mutex", "checkout_return_parking_lot_vec"),
    ("PyTorch's caching host allocator, from C++", "torch_take_give_65536"),
    ("the same, used on a stream (`record_event`)", "torch_take_record_give_65536"),
    ("pinpool, held on a stream", "on_a_stream_pinpool_held"),
    ("the driver's host pool (`cuMemAllocFromPoolAsync`)", "driver_pool_take_give"),
    ("the same, and a synchronise after which the CPU may write", "driver_pool_take_sync_give"),
    ("no pool: `cuMemHostAlloc` and `cuMemFreeHost` of 4 KiB", "driver_host_alloc_4096"),
    ("of 16 MiB", "driver_host_alloc_16777216"),
]


def checkout(_):
    of = part("checkout")
    heads = ["", "1 thread", *(str(n) for n in THREADS[1:])]
    return table(heads, [(title, *(ns(of.get(name, n)) for n in THREADS)) for title, name in COSTS])


def patterns(_):
    of = part("checkout")
    live = [(f"one of 64 live buffers of eight sizes is replaced, {n} thread{'s' * (n > 1)}",
             *(ns(of.get(f"checkout_return_64_live_{who}", n)) for who in ("pinpool", "parking_lot_vec", "glibc")))
            for n in (1, 16)]
    return table(["", "pinpool", "a free list behind a mutex", "glibc"], live) + table(["", "pinpool", "beside it"], [
        ("taken on one thread and returned on another, the work of the first (the second's)",
         *(f"{ns(of.get(f'cross_thread_return_{who}_maker', 2))} ({ns(of.get(f'cross_thread_return_{who}_dropper', 2))})"
           if of.get(f"cross_thread_return_{who}_maker", 2) else None for who in ("pinpool", "bare_handle"))),
        ("4 KiB in a pool with half of 65,536 segments out, after random returns; in a new pool",
         ns(of.get("churn_65536_churned")), ns(of.get("churn_65536_empty"))),
        ("the same in bursts of 256", ns(of.get("churn_65536_churned_bursts")), ns(of.get("churn_65536_empty_bursts"))),
        ("from the return of a segment until the thread that waits has it; by a mutex and a condition variable",
         ns(of.get("hand_over_pinpool", 2)), ns(of.get("hand_over_mutex_and_condvar", 2))),
    ])


def completion(_):
    of = part("completion")
    ways = [
        ("copies alone", "track_bare_{}", "torch_copy_bare_{}"),
        ("an event by hand for each", "track_event_{}", "torch_copy_event_{}"),
        ("a fresh buffer of the pool for each", "track_pool_fresh_{}", "torch_copy_record_{}"),
        ("a buffer that the thread keeps", "track_pool_kept_{}", ""),
        ("one buffer for all copies", "track_pool_shared_{}", ""),
    ]
    sizes = [(size, n) for size in (4096, 65536) for n in (1, 16)]
    heads = ["", *(f"{size >> 10} KiB, {n} thread{'s' * (n > 1)}" for size, n in sizes)]
    def cell(name, other, size, n):
        own, theirs = of.get(name.format(size), n), of.get(other.format(size), n)
        return own and ns(own) + (f" ({ns(theirs)})" if theirs else "")
    rows = [(title, *(cell(name, other, *each) for each in sizes)) for title, name, other in ways]
    latency = [
        ("an event, polled without a pause", "polled"),
        ("`InFlight::wait`", "pool_wait"),
        ("an event with blocking sync", "blocking"),
        ("an awaited handle, on an executor that sleeps", "pool_await"),
    ]
    idle = [(title, ns(of.get(f"latency_{name}_4096")), ns(of.get(f"latency_{name}_idle_4096"))) for title, name in latency]
    return table(heads, rows) + table(["a copy of 4 KiB until it is known to be done", "back to back", "after 2 ms without work"], idle) + gates("completion")


WHEELS = [("pinpool's Python package, `load_file`", "pinpool_python_load_file", 1),
          ("pinpool's Python package, `prefetch`", "pinpool_python_prefetch", 1),
          ("pinpool's Python package, `weights`", "pinpool_python_weights", 1),
          ("safetensors 0.8, `load_file`", "safetensors_0.8.0_load_file", 1),
          ("safetensors 0.9.0rc1, `load_file`", "safetensors_0.9.0rc1_load_file", 1),
          ("safetensors 0.9.0rc1, `prefetch`, 8 threads", "safetensors_0.9.0rc1_prefetch", 8),
          ("safetensors 0.9.0rc1, `prefetch`, 16 threads", "safetensors_0.9.0rc1_prefetch", 16)]


def files_of(of):
    """The checkpoints, as titles."""
    return {name: f"{of.bytes[name] >> 20:,} MiB in {count} tensors" for name, count in (("large", "64"), ("small", "16,384"))}


def tensors(_):
    of = part("tensors")
    both = lambda name, n: [gb(of.get(name.format(file), n)) for file in ("large", "small")]
    rows = [("pinpool: header read and device memory allocated within the time (no PyTorch tensors)", *both("tensors_mb_per_s_{}_open", 8))]
    rows += [(title, *both(f"{name}_{{}}_mb_per_s", n)) for title, name, n in WHEELS]
    rows += [("pinpool: checkpoint opened, device memory there", *both("tensors_mb_per_s_{}_load", 8)),
             ("a plain loop in C++, as many bytes of a file without tensors (4 GiB; 256 MiB)",
              gb(of.get("plain_file_mb_per_s", 8)), gb(of.get("plain_small_mb_per_s", 8))),
             ("pinned memory, nothing read", gb(of.get("plain_link_mb_per_s_up")), None)]
    return table(["", *(files_of(of).values())], rows)


def first(_):
    of = part("tensors")
    own = of.get("tensors_first_load_ms", 8)
    python = of.get("pinpool_python_prefetch_first_ms", 8)
    rows = [("pinpool: pool, header, device memory and load, 8 threads", plain(own), ""),
            ("pinpool's Python package: `prefetch` into PyTorch tensors", plain(python), "")]
    rows += [(f"safetensors 0.9.0rc1: `prefetch` into PyTorch tensors, {n} threads", plain(theirs), over(python or own, theirs))
             for n in (8, 16) if (theirs := of.get("safetensors_0.9.0rc1_prefetch_first_ms", n))]
    heads = ["", "ms", "the Python package's time over it (wanted: at most 0.7)" if python else "pinpool's time over it"]
    return table(heads, rows) + gates("tensors")


def bulk(_):
    of = part("bulk")
    peak = {"up": of.get("link_mb_per_s_up"), "down": of.get("link_mb_per_s_down"), "both": of.get("link_mb_per_s_both")}
    rows = [(f"pinned memory, nothing staged, {way}", gb(rate), None, None) for way, rate in peak.items()]
    for title, name, way, loop in [
        ("a file of 8 GiB in the page cache, 8 threads", "bulk_mb_per_s_file_8", "up", ("plain_loop_mb_per_s_file_8", 8)),
        ("touched memory to the device, 8 threads", "bulk_mb_per_s_slice_8", "up", ("plain_slice_mb_per_s", 8)),
        ("16 threads", "bulk_mb_per_s_slice_16", "up", ("plain_slice_mb_per_s", 16)),
        ("the device to touched memory, 8 threads", "bulk_mb_per_s_touched_8", "down", ("plain_touched_mb_per_s", 8)),
        ("16 threads", "bulk_mb_per_s_touched_16", "down", ("plain_touched_mb_per_s", 16)),
        ("the device to a new vector, 8 threads", "bulk_mb_per_s_fresh_8", "down", None),
        ("16 threads", "bulk_mb_per_s_fresh_16", "down", None),
        ("both directions by one copier of 16 threads", "bulk_mb_per_s_both_8_one", "both", None),
        ("by two copiers of 8 threads each", "bulk_mb_per_s_both_8", "both", ("plain_both_mb_per_s", 8)),
        ("the driver's own copy of pageable memory, up", "plain_pageable_mb_per_s_up", "up", None),
        ("down", "plain_pageable_mb_per_s_down", "down", None),
    ]:
        rate = of.get(name)
        rows.append((title, gb(rate), over(rate, peak[way]), loop and gb(of.get(*loop))))
    return table(["GB/s", "", "of the pinned peak", "a plain loop of as many threads in C++"], rows) + gates("bulk")


def pieces(_):
    of = part("copier")
    link = {way: of.get(f"plain_link_mb_per_s_{way}") for way in ("up", "down")}
    loop = {way: over(of.get(f"plain_gather_mb_per_s_{way}", 8), link[way]) for way in link}
    rows = [("pinpool", share(of.get("pageable_up_16k_permille")), share(of.get("pageable_down_16k_permille"))),
            ("packed by a plain loop of 8 threads in C++", loop["up"], loop["down"])]
    lone = [(title, plain(of.get(f"lone_{name}_4096")), plain(of.get(f"lone_{name}_4096_idle")))
            for title, name in [("`Stream::upload` and `wait`", "stream"), ("`Stream::upload_blocking`", "blocking"),
                                ("`Copier::upload_slice`", "slice"), ("`Stream::download_blocking`", "down"),
                                ("`Copier::download_slice`", "slice_down")]]
    return (table(["16,384 pieces of 16 KiB, of the pinned peak", "up", "down"], rows)
            + table(["ns, a lone copy of 4 KiB", "back to back", "after 2 ms without work"], lone) + gates("copier"))


def kv_tier(_):
    of, sizes = part("kv_tier"), (4, 16, 32)
    rows = [(title, *(share(of.get(f"kv_{name}_{kib}k_permille")) for kib in sizes)) for title, name in [
        ("load, the example, lists and places included", "load"),
        ("load, the copier's pages alone", "pages_load"),
        ("load, vLLM's batch", "vllm_batch_load"),
        ("load, vLLM's kernel", "vllm_triton_load"),
        ("store, the example", "store"),
        ("store, the copier's pages alone", "pages_store"),
        ("store, vLLM's batch", "vllm_batch_store"),
        ("the end of a load beside a kernel for each layer, over the earliest that the layers allow", "stalls"),
    ]]
    return table(["pages of", *(f"{kib} KiB" for kib in sizes)], rows) + gates("kv_tier")


def hook(_):
    return table(["", "torch", "pool", "", "times"], [(what, own, ours, unit, times) for what, own, ours, unit, times in part("torch").torch])


def pinning(_):
    of = part("pinning")
    rows = [(title, plain(of.get(f"pin_gb_per_s_{name}", n)), plain(of.get(f"unpin_gb_per_s_{name}", n)),
             plain(of.get(f"first_checkout_ms_{name}", n)), plain(of.get(f"neighbour_worst_ms_{name}", n)))
            for title, name, n in [("one `cuMemHostAlloc` of 8 GiB", "host_alloc", 1),
                                   ("pinpool, 24 GiB, 8 threads", "pool_8", 8), ("4 threads", "pool_4", 4)]]
    return table(["", "pins, GB/s", "unpins, GB/s", "first checkout after, ms",
                  "longest `cuMemGetInfo` of another process, ms"], rows) + gates("pinning")


def telemetry(_):
    of = part("telemetry")
    rows = [(title, plain(of.get(f"telemetry_{name}"))) for title, name in [
        ("`Sampler::poll`", "poll_us"), ("`Pool::stats`", "stats_us"), ("`Pool::snapshot`", "snapshot_us"),
        ("`Pool::stuck`, a thousand buffers, none of them old enough", "stuck_us_a_thousand"), ("all of them", "stuck_all_us_a_thousand")]]
    return table(["us of the caller's, 25,000 of 50,000 segments out", ""], rows) + gates("telemetry")


def printed(name):
    """A table that the bench itself prints."""
    return lambda _: "\n" + "".join(f"{row}\n" for row in part(name).rows)


PLACES = dict(machine=machine, pageable=pageable, measured=measured, costs=costs, files=files, checkout=checkout, patterns=patterns,
              completion=completion, tensors=tensors, first=first, bulk=bulk, pieces=pieces, kv_tier=kv_tier, hook=hook,
              pinning=pinning, telemetry=telemetry, scale=printed("scale"), streams=printed("streams"))


NOTHING = "\nThe files have no figures of this.\n"


def made(page):
    def place(match):
        text = PLACES[match[2]](match[3])
        return f"{match[1]}{text if text.strip() else NOTHING}{match[4]}"

    text = page.read_text(encoding="utf-8")
    return re.sub(r"(<!-- figures: (\w+) -->)(.*?)(<!-- end -->)", place, text, flags=re.S)


# --- the picture -------------------------------------------------------------------------------------------------------

# Name in the file, title, colour on white, colour on black.
LINES = [
    ("checkout_return_pinpool", "pinpool", "#cf222e", "#ff7b72"),
    ("checkout_return_parking_lot_vec", "a free list behind a mutex", "#0969da", "#79c0ff"),
    ("torch_take_give_65536", "PyTorch's allocator, from C++", "#1a7f37", "#7ee787"),
    ("on_a_stream_pinpool_held", "pinpool, held on a stream", "#cf222e", "#ff7b72"),
    ("torch_take_record_give_65536", "PyTorch's, used on a stream", "#1a7f37", "#7ee787"),
    ("driver_pool_take_give", "the driver's host pool", "#8250df", "#d2a8ff"),
    ("driver_pool_take_sync_give", "the driver's, synced for the CPU", "#8250df", "#d2a8ff"),
]
# Drawn with dashes: the rows in which a stream uses the buffer, beside the same pool without a stream.
DASHED = {"on_a_stream_pinpool_held", "torch_take_record_give_65536", "driver_pool_take_sync_give"}

# Title, name in the file, threads, colours. The times of the first three include reading the header and allocating device
# memory. Those of the other two include neither, and the loop moves plain bytes of a file.
BARS = [
    ("pinpool: open, allocate, load", "tensors_mb_per_s_{}_open", 8, "#cf222e", "#ff7b72"),
    ("safetensors 0.9.0rc1, prefetch: the same", "safetensors_0.9.0rc1_prefetch_{}_mb_per_s", 16, "#0969da", "#79c0ff"),
    ("safetensors 0.8, load_file: the same", "safetensors_0.8.0_load_file_{}_mb_per_s", 1, "#0969da", "#79c0ff"),
    ("pinpool: load alone", "tensors_mb_per_s_{}_load", 8, "#cf222e", "#ff7b72"),
    ("a plain loop in C++: the bytes alone", "plain_{}_mb_per_s", 8, "#6e7781", "#8b949e"),
]


def text(x, y, words, colour="ink", **attributes):
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{colour}"{more}>{words}</text>'


def draw_costs(of, top):
    """Lines over the number of threads, both axes logarithmic, each named beside its last point."""
    left, width, height, high, threads = 70, 400, 300, 5, THREADS

    def x(n):
        return left + width * math.log2(n) / (math.log2(threads[-1]) or 1)

    def y(ns):
        return top + 60 + height * (1 - min(math.log10(max(ns, 1)) / high, 1))

    out = [
        text(left, top + 8, "Take a buffer of 64 KiB and give it back", font_size=16),
        text(left, top + 28, "time per pair as one thread sees it; less is better", "dim"),
    ]
    for power, name in enumerate(["1 ns", "10 ns", "100 ns", "1 µs", "10 µs", "100 µs"]):
        at = y(10**power)
        out.append(f'<line x1="{left}" y1="{at:.1f}" x2="{left + width}" y2="{at:.1f}" class="grid"/>')
        out.append(text(left - 8, at + 4, name, "dim", text_anchor="end"))
    for n in threads:
        out.append(text(x(n), top + 60 + height + 20, f"{n} thread{'s' if n > 1 else ''}", "dim", text_anchor="middle"))
    ends = []
    for name, title, *_ in LINES:
        points = [(x(n), y(of.get(name, n))) for n in threads if of.get(name, n)]
        if not points:
            continue
        dashes = ' stroke-dasharray="6 4"' if name in DASHED else ""
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        out.append(f'<polyline points="{path}" class="l-{name}"{dashes}/>')
        out += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" class="f-{name}"/>' for px, py in points]
        last = max(n for n in threads if of.get(name, n))
        ends.append((points[-1][1], f"{title}: {ns(of.get(name, last))} ns", name))
    # Where two names would overlap the upper one is moved up, beginning with the lowest line.
    above = top + 60 + height + 100
    for at, title, name in sorted(ends, reverse=True):
        above = min(at, above - 18)
        out.append(text(left + width + 14, above + 4, title, f"f-{name}"))
    return out, top + 60 + height + 30


def draw_loads(of, top):
    """A bar for each way to load, in groups; the link's speed from pinned memory is a line through all of them."""
    left, width, height, full = 340, 400, 20, 60
    out = [
        text(70, top + 8, "Load a checkpoint from the page cache to the GPU", font_size=16),
        text(70, top + 28, "GB/s until all tensors are there; more is better", "dim"),
    ]
    y = top + 48
    for name, title in files_of(of).items():
        out.append(text(70, y + 15, title, font_weight="bold"))
        y += 24
        for number, (way, figure, threads, *_) in enumerate(BARS):
            figure = figure.format({"large": "file"}.get(name, name) if figure.startswith("plain") else name)
            mb = of.get(figure, threads)
            if mb is None:
                continue
            length = width * mb / 1000 / full
            out.append(text(left - 10, y + 15, way, f"f-bar{number}", text_anchor="end"))
            out.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{height}" class="f-bar{number}"/>')
            if length > 100:
                out.append(text(left + length - 8, y + 15, gb(mb), "paper", text_anchor="end"))
            else:
                out.append(text(left + length + 8, y + 15, gb(mb), f"f-bar{number}"))
            y += height + 5
        y += 8
    peak = of.get("plain_link_mb_per_s_up") / 1000
    at = left + width * peak / full
    out.append(f'<line x1="{at:.1f}" y1="{top + 52}" x2="{at:.1f}" y2="{y - 6}" class="peak"/>')
    out.append(text(at + 60, y + 10, f"the link from pinned memory: {peak:.1f}", "dim", text_anchor="end"))
    return out, y + 26


def document(parts, height):
    # The second set is for a dark background. There are no CSS variables, since many viewers do not support them.
    colours = [("paper", "#ffffff", "#0d1117"), ("ink", "#1f2328", "#f0f6fc"), ("dim", "#59636e", "#9198a1")]
    colours += [(f"f-{row[0]}", *row[2:4]) for row in LINES] + [(f"f-bar{n}", *bar[3:]) for n, bar in enumerate(BARS)]
    strokes = [("grid", "#d1d9e0", "#3d444d"), ("peak", "#59636e", "#9198a1")]
    strokes += [(f"l-{row[0]}", *row[2:4]) for row in LINES]

    def rules(night):
        fills = [f".{name} {{ fill: {pair[night]}; }}" for name, *pair in colours]
        return fills + [f".{name} {{ stroke: {pair[night]}; }}" for name, *pair in strokes]

    style = rules(0) + ["polyline { fill: none; stroke-width: 2; }", ".peak { stroke-dasharray: 2 3; }"]
    style += ["@media (prefers-color-scheme: dark) {", *rules(1), "}"]
    head = '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="14" '
    head += f'viewBox="0 0 860 {height:.0f}">'
    paper = '<rect width="100%" height="100%" class="paper"/>'
    return "\n".join([head, "<style>", *style, "</style>", paper, *parts, "</svg>"]) + "\n"


def picture():
    first, bottom = draw_costs(part("checkout"), 20)
    second, bottom = draw_loads(part("tensors"), bottom + 40)
    return document(first + second, bottom)


def main(arguments):
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    wanted = {page: made(page) for page in PAGES} | {PICTURE: picture()}
    differ = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if arguments and differ:
        names = ", ".join(str(path.relative_to(ROOT)) for path in differ)
        sys.exit(f"not what benches/results gives: {names}; run benches/pages.py")
    for path in differ:
        path.write_text(wanted[path], encoding="utf-8")


main(sys.argv[1:])
