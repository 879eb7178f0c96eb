"""safetensors' own loader for PyTorch: seconds of each load of FILE onto the GPU, one a line.

    python3 benches/peers/safetensors_load.py FILE ROUNDS
"""
import sys
import time

try:
    import torch
except ImportError:
    sys.exit("there is no PyTorch")
try:
    from safetensors.torch import load_file
except ImportError:
    sys.exit("there is no safetensors for Python")
if not torch.cuda.is_available():
    sys.exit("this PyTorch has no GPU")

for _ in range(int(sys.argv[2])):
    torch.cuda.synchronize()
    since = time.perf_counter()
    tensors = load_file(sys.argv[1], device="cuda")
    torch.cuda.synchronize()
    print(time.perf_counter() - since)
    del tensors
