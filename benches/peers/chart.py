"""Makes a table and a plot of a run of benches/hot.sh: nanoseconds of taking and giving back 64 KiB, by threads.

usage: chart.py LINES TABLE.md PLOT.svg
"""

import math
import sys

ROWS = [
    ("checkout_return_two_fetch_adds", "two atomic increments, of nothing", "#888888"),
    ("checkout_return_pinpool", "pinpool", "#c02020"),
    ("checkout_return_parking_lot_vec", "a free list behind a mutex", "#2060c0"),
    ("cupy_take_give", "CuPy's pool, from Python", "#b08000"),
    ("torch_take_give_65536", "PyTorch's allocator, from C++", "#208040"),
    ("on_a_stream_pinpool_held", "pinpool, held on a stream", "#e08080"),
    ("torch_take_record_give_65536", "PyTorch's, recorded on a stream", "#80c090"),
    ("driver_pool_take_give", "the driver's host pool, in a stream's order", "#6030a0"),
    ("driver_pool_take_sync_give", "the same, and the CPU may write", "#a080d0"),
]


def figure(ns):
    return f"{ns:,.1f}" if ns < 100 else f"{ns:,.0f}"


def table(figures, threads):
    lines = ["| ns, take and give back 64 KiB | " + " | ".join(f"{n} threads" if n > 1 else "1 thread" for n in threads) + " |"]
    lines.append("| --- |" + " --- |" * len(threads))
    for name, title, _ in ROWS:
        if any((name, n) in figures for n in threads):
            cells = [figure(figures[name, n]) if (name, n) in figures else "" for n in threads]
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    ours = figures.get(("checkout_return_pinpool", threads[-1]))
    theirs = figures.get(("torch_take_give_65536", threads[-1]))
    if ours and theirs:
        lines += ["", f"PyTorch's over pinpool with {threads[-1]} threads: {theirs / ours:,.0f}."]
    return "\n".join(lines) + "\n"


def plot(figures, threads):
    left, top, width, height, right = 70, 40, 460, 420, 330
    low, high = 0, 6  # powers of ten, in ns

    def x(n):
        span = math.log2(threads[-1]) or 1
        return left + width * math.log2(n) / span

    def y(ns):
        return top + height * (1 - (math.log10(max(ns, 1)) - low) / (high - low))

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + right} {top + height + 60}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="22" font-size="15">Taking and giving back 64 KiB: ns for each thread, by threads</text>',
    ]
    for power in range(low, high + 1):
        at = y(10**power)
        out.append(f'<line x1="{left}" y1="{at:.1f}" x2="{left + width}" y2="{at:.1f}" stroke="#dddddd"/>')
        out.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{10**power:,}</text>')
    for n in threads:
        out.append(f'<text x="{x(n):.1f}" y="{top + height + 22}" text-anchor="middle">{n}</text>')
    ends = []
    for name, title, colour in ROWS:
        points = [(x(n), y(figures[name, n])) for n in threads if (name, n) in figures]
        if not points:
            continue
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points]
        ends.append((points[-1][1], title, colour))
    # Names beside the last points, moved down where they would meet.
    last = -100.0
    for at, title, colour in sorted(ends):
        last = max(at, last + 17)
        out.append(f'<text x="{left + width + 12}" y="{last + 4:.1f}" fill="{colour}">{title}</text>')
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    lines, markdown, svg = sys.argv[1:]
    figures = {}
    with open(lines, encoding="utf-8") as file:
        for line in file:
            name, threads, median, *_ = line.split()
            figures[name, int(threads)] = float(median)
    counts = {n for (name, n) in figures if name == "checkout_return_pinpool"}
    counts = sorted(counts or {n for _, n in figures})
    with open(markdown, "w", encoding="utf-8") as file:
        file.write(table(figures, counts))
    with open(svg, "w", encoding="utf-8") as file:
        file.write(plot(figures, counts))


main()
