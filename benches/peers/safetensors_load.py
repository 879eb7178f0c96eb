"""safetensors' own loaders for PyTorch, of one version, or pinpool's of the same names: how long each load of FILE onto
the GPU takes.

    python3 benches/peers/safetensors_load.py FOLDER ROUNDS FILE...
    python3 benches/peers/safetensors_load.py FOLDER first-THREADS FILE

FOLDER is that of an unpacked wheel, which comes before the version that is installed; `-` takes the installed one, and
`pinpool` the Python package. The ways are `load_file`, and where the version has it `prefetch`, by 8 and by 16 threads;
of pinpool also `weights`. The first load of each way is left out, and its tensors are compared with those of `load_file`
of safetensors. `first-8` measures the process's first
load alone, by `prefetch`, which pins its memory; GPU and context are ready before it. Prints lines of: name threads
median lower-quartile upper-quartile.
"""
import os
import sys
import time

folder, rounds, files = sys.argv[1], sys.argv[2], sys.argv[3:]
if folder not in ("-", "pinpool"):
    if not os.path.isdir(os.path.join(folder, "safetensors")):
        sys.exit(f"{folder} has no safetensors")
    sys.path.insert(0, folder)
try:
    import torch
except ImportError:
    sys.exit("there is no PyTorch")
try:
    import safetensors
    from safetensors.torch import load_file
    reference = load_file
    if folder == "pinpool":
        from pinpool import safetensors
        from pinpool.safetensors import load_file
except ImportError as error:
    sys.exit(f"there is no such package for Python: {error}")
if not torch.cuda.is_available():
    sys.exit("this PyTorch has no GPU")
torch.ones(1, device="cuda:0")
NAME = "pinpool_python" if folder == "pinpool" else f"safetensors_{safetensors.__version__.replace('-rc.', 'rc')}"


def whole(path, _threads):
    return load_file(path, device="cuda:0")


def prefetch(path, threads):
    with safetensors.safe_open(path, "pt", device="cuda:0") as file, file.prefetch(threads=threads) as loader:
        return dict(loader)


def weights(path, _threads):
    return dict(safetensors.weights([path], "cuda:0"))


def line(name, threads, values):
    values = sorted(values)
    at = lambda q: values[round((len(values) - 1) * q)]
    print(f"{name} {threads} {at(0.5):.1f} {at(0.25):.1f} {at(0.75):.1f}", flush=True)


def same(right, tensors):
    # As bytes: a NaN is not equal to itself.
    equal = lambda key: torch.equal(*(each[key].reshape(-1).view(torch.uint8) for each in (right, tensors)))
    return right.keys() == tensors.keys() and all(map(equal, right))


def timed(load, path, threads):
    torch.cuda.synchronize()
    since = time.perf_counter()
    tensors = load(path, threads)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - since
    del tensors
    return seconds


def main():
    has_prefetch = hasattr(safetensors.safe_open, "prefetch")
    print(f"# {NAME}, torch {torch.__version__}", flush=True)
    if rounds.startswith("first-"):
        if has_prefetch:
            threads = int(rounds.removeprefix("first-"))
            line(f"{NAME}_prefetch_first_ms", threads, [timed(prefetch, files[0], threads) * 1e3])
        return
    ways = [("load_file", whole, 1)]
    if folder == "pinpool":
        ways += [("prefetch", prefetch, 1), ("weights", weights, 1)]
    elif has_prefetch:
        ways += [("prefetch", prefetch, 8), ("prefetch", prefetch, 16)]
    for path in files:
        stem, size = os.path.basename(path).split(".")[0], os.path.getsize(path)
        for name, load, threads in ways:
            seconds = [timed(load, path, threads) for _ in range(int(rounds) + 1)]
            rates = [size / each / 1e6 for each in seconds[1:]]
            line(f"{NAME}_{name}_{stem}_mb_per_s", threads, rates)
            is_reference = load is whole and folder != "pinpool"
            if not is_reference and not same(reference(path, device="cuda:0"), load(path, threads)):
                sys.exit(f"{name} by {threads} threads: other bytes than safetensors' load_file")


main()
