"""Draws figures of benches/results as SVG, with the standard library alone.

    benches/plot.py                                  writes docs/speed.svg, the picture of the README
    benches/plot.py --check                          fails if docs/speed.svg is not what the files give
    benches/plot.py --run LINES TABLE.md PLOT.svg    the table and the picture of one run of benches/hot.sh

A line of the raw files is: name threads median lower-quartile upper-quartile; the medians are drawn.
"""

import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches" / "results" / "current"
PICTURE = ROOT / "docs" / "speed.svg"
# The files behind the README's picture. The second and the third are from one machine.
CHECKOUT = RESULTS / "checkout.txt"
LOAD = RESULTS / "tensors.txt"
LOAD_PLAIN = RESULTS / "plain.txt"

# Name in the files, title, colour on white, colour on black, whether the README's picture has it.
ROWS = [
    ("checkout_return_two_fetch_adds", "two atomic increments (no pool)", "#6e7781", "#8b949e", False),
    ("checkout_return_pinpool", "pinpool", "#cf222e", "#ff7b72", True),
    ("checkout_return_parking_lot_vec", "a free list behind a mutex", "#0969da", "#79c0ff", True),
    ("cupy_take_give", "CuPy's pool, from Python", "#9a6700", "#e3b341", False),
    ("torch_take_give_65536", "PyTorch's allocator, from C++", "#1a7f37", "#7ee787", True),
    ("on_a_stream_pinpool_held", "pinpool, held on a stream", "#cf222e", "#ff7b72", True),
    ("torch_take_record_give_65536", "PyTorch's, used on a stream", "#1a7f37", "#7ee787", True),
    ("driver_pool_take_give", "the driver's host pool", "#8250df", "#d2a8ff", True),
    ("driver_pool_take_sync_give", "the driver's, synced for the CPU", "#8250df", "#d2a8ff", True),
]
# Drawn with dashes: the rows in which a stream uses the buffer, beside the same pool without a stream.
DASHED = {"on_a_stream_pinpool_held", "torch_take_record_give_65536", "driver_pool_take_sync_give"}

# Title, name in LOAD, name in LOAD_PLAIN.
LOADS = [
    ("64 tensors of 64 MiB", "large", "file"),
    ("16,384 tensors of 16 KiB", "small", "small"),
]
# The times of the first two begin with a path, so they include reading the header and allocating device memory. Those of
# the other two include neither, and the loop moves plain bytes of a file.
BARS = [
    ("pinpool: open, allocate, load", "#cf222e", "#ff7b72"),
    ("safetensors' load_file: the same", "#0969da", "#79c0ff"),
    ("pinpool: load alone", "#cf222e", "#ff7b72"),
    ("a plain loop in C++: the bytes alone", "#6e7781", "#8b949e"),
]


def read(path):
    """The medians of a file's lines, by name and threads. A bench begins its lines with @; other text is skipped."""
    figures = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.removeprefix("@ ").split()
        if len(words) == 5 and words[1].isdigit():
            figures[words[0], int(words[1])] = float(words[2])
    return figures


def figure(ns):
    return f"{ns:,.1f}" if ns < 100 else f"{ns:,.0f}"


def table(figures, threads):
    heads = [f"{n} threads" if n > 1 else "1 thread" for n in threads]
    lines = ["| ns, take and give back 64 KiB | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(threads)]
    for name, title, *_ in ROWS:
        if any((name, n) in figures for n in threads):
            cells = [figure(figures[name, n]) if (name, n) in figures else "" for n in threads]
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    pinpool = figures.get(("checkout_return_pinpool", threads[-1]))
    theirs = figures.get(("torch_take_give_65536", threads[-1]))
    if pinpool and theirs:
        lines += ["", f"PyTorch's over pinpool with {threads[-1]} threads: {theirs / pinpool:,.0f}."]
    return "\n".join(lines) + "\n"


def text(x, y, words, colour="ink", **attributes):
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{colour}"{more}>{words}</text>'


def checkout(figures, threads, rows, top):
    """Lines over the number of threads, both axes logarithmic, each named beside its last point."""
    left, width, height, high = 70, 400, 300, 5

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
    for name, title, *_ in rows:
        points = [(x(n), y(figures[name, n])) for n in threads if (name, n) in figures]
        if not points:
            continue
        dashes = ' stroke-dasharray="6 4"' if name in DASHED else ""
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        out.append(f'<polyline points="{path}" class="l-{name}"{dashes}/>')
        out += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" class="f-{name}"/>' for px, py in points]
        last = max(n for n in threads if (name, n) in figures)
        ends.append((points[-1][1], f"{title}: {figure(figures[name, last])} ns", name))
    # Where two names would overlap the upper one is moved up, beginning with the lowest line.
    above = top + 60 + height + 100
    for at, title, name in sorted(ends, reverse=True):
        above = min(at, above - 18)
        out.append(text(left + width + 14, above + 4, title, f"f-{name}"))
    return out, top + 60 + height + 30


def loads(pinpool, plain, top):
    """A bar for each way to load, in groups; the link's speed from pinned memory is a line through all of them."""
    left, width, height, full = 330, 400, 20, 60
    out = [
        text(70, top + 8, "Load a checkpoint from the page cache to the GPU", font_size=16),
        text(70, top + 28, "GB/s until all tensors are there; more is better", "dim"),
    ]
    y = top + 48
    for title, name, file in LOADS:
        out.append(text(70, y + 15, title, font_weight="bold"))
        y += 24
        rows = [("open", 8), ("python", 1), ("load", 8)]
        figures = [pinpool[f"tensors_mb_per_s_{name}_{row}", threads] for row, threads in rows]
        figures.append(plain[f"plain_{file}_mb_per_s", 8])
        for number, ((way, *_), mb) in enumerate(zip(BARS, figures)):
            length = width * mb / 1000 / full
            out.append(text(left - 10, y + 15, way, f"f-bar{number}", text_anchor="end"))
            out.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{height}" class="f-bar{number}"/>')
            if length > 100:
                out.append(text(left + length - 8, y + 15, f"{mb / 1000:.1f}", "paper", text_anchor="end"))
            else:
                out.append(text(left + length + 8, y + 15, f"{mb / 1000:.{1 if mb >= 1000 else 2}f}", f"f-bar{number}"))
            y += height + 5
        y += 8
    peak = plain["plain_link_mb_per_s_up", 1] / 1000
    at = left + width * peak / full
    out.append(f'<line x1="{at:.1f}" y1="{top + 52}" x2="{at:.1f}" y2="{y - 6}" class="peak"/>')
    out.append(text(at + 60, y + 10, f"the link from pinned memory: {peak:.1f}", "dim", text_anchor="end"))
    return out, y + 26


def document(parts, height):
    # The second set is for a dark background. There are no CSS variables, since many viewers do not support them.
    colours = [("paper", "#ffffff", "#0d1117"), ("ink", "#1f2328", "#f0f6fc"), ("dim", "#59636e", "#9198a1")]
    colours += [(f"f-{row[0]}", *row[2:4]) for row in ROWS] + [(f"f-bar{n}", *bar[1:]) for n, bar in enumerate(BARS)]
    strokes = [("grid", "#d1d9e0", "#3d444d"), ("peak", "#59636e", "#9198a1")]
    strokes += [(f"l-{row[0]}", *row[2:4]) for row in ROWS]

    def rules(night):
        fills = [f".{name} {{ fill: {pair[night]}; }}" for name, *pair in colours]
        return fills + [f".{name} {{ stroke: {pair[night]}; }}" for name, *pair in strokes]

    style = rules(0) + ["polyline { fill: none; stroke-width: 2; }", ".peak { stroke-dasharray: 2 3; }"]
    style += ["@media (prefers-color-scheme: dark) {", *rules(1), "}"]
    head = '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="14" '
    head += f'viewBox="0 0 860 {height:.0f}">'
    paper = '<rect width="100%" height="100%" class="paper"/>'
    return "\n".join([head, "<style>", *style, "</style>", paper, *parts, "</svg>"]) + "\n"


def threads_of(figures):
    return sorted({n for name, n in figures if name == "checkout_return_pinpool"} or {n for _, n in figures})


def picture():
    figures = read(CHECKOUT)
    first, bottom = checkout(figures, threads_of(figures), [row for row in ROWS if row[4]], 20)
    second, bottom = loads(read(LOAD), read(LOAD_PLAIN), bottom + 40)
    return document(first + second, bottom)


def main(arguments):
    if arguments[:1] == ["--run"] and len(arguments) == 4:
        lines, markdown, svg = map(pathlib.Path, arguments[1:])
        figures = read(lines)
        threads = threads_of(figures)
        markdown.write_text(table(figures, threads), encoding="utf-8")
        parts, bottom = checkout(figures, threads, ROWS, 20)
        svg.write_text(document(parts, bottom), encoding="utf-8")
    elif arguments == ["--check"]:
        if not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != picture():
            sys.exit("docs/speed.svg is not what benches/results gives: run benches/plot.py")
    elif not arguments:
        PICTURE.write_text(picture(), encoding="utf-8")
    else:
        sys.exit(__doc__)


main(sys.argv[1:])
