"""safetensors' own loaders for PyTorch: the seconds of each load of FILE onto the GPU.

    python3 benches/peers/safetensors_load.py FILE ROUNDS [FOLDER]

FOLDER is that of an unpacked wheel, which comes before the version that is installed. Each line is of one load: the
version, the way, its threads, the seconds. The ways are `load_file`, and where the version has it `prefetch`, whose tensors
are compared with those of `load_file`.
"""
import os
import sys
import time

for folder in sys.argv[3:]:
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
except ImportError:
    sys.exit("there is no safetensors for Python")
if not torch.cuda.is_available():
    sys.exit("this PyTorch has no GPU")


def whole(path, _threads):
    return load_file(path, device="cuda:0")


def prefetch(path, threads):
    with safetensors.safe_open(path, "pt", device="cuda:0") as file, file.prefetch(threads=threads) as loader:
        return dict(loader)


path, rounds = sys.argv[1], int(sys.argv[2])
ways = [("load_file", whole, 1)]
if hasattr(safetensors.safe_open, "prefetch"):
    ways += [("prefetch", prefetch, threads) for threads in (8, 16)]
for name, load, threads in ways:
    for _ in range(rounds):
        torch.cuda.synchronize()
        since = time.perf_counter()
        tensors = load(path, threads)
        torch.cuda.synchronize()
        print(safetensors.__version__, name, threads, time.perf_counter() - since)
        del tensors
    if load is not whole:
        right, tensors = whole(path, 1), load(path, threads)
        # As bytes: a NaN is not equal to itself.
        same = lambda key: torch.equal(*(each[key].reshape(-1).view(torch.uint8) for each in (right, tensors)))
        if right.keys() != tensors.keys() or not all(map(same, right)):
            sys.exit(f"{name} by {threads} threads: other bytes than load_file's")
        del right, tensors
