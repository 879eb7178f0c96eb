#!/usr/bin/env bash
# Builds and runs the peers that the machine has. A peer that is missing is skipped, with a message.
#   benches/peers/run.sh [--take] [THREADS...]     default: 1 2 4 8 16; --take: without copies
# Prints lines of: name threads median-ns lower-quartile upper-quartile. Needs a C++20 compiler, and for PyTorch a
# `python3` with a PyTorch built for CUDA, and CUDA's headers and runtime (CUDA_HOME, /usr/local/cuda, or the packages that
# come with PyTorch).
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
build="$(mktemp -d)"
trap 'rm -rf "$build"' EXIT

# Prints variables for the shell: where PyTorch and CUDA are installed.
if ! facts="$(python3 - <<'PYTHON'
import os, shlex, sys
try:
    import torch
except ImportError:
    sys.exit("there is no PyTorch")
if torch.version.cuda is None:
    sys.exit("this PyTorch has no CUDA")
root = os.path.dirname(torch.__file__)
site = os.path.dirname(root)
major = torch.version.cuda.split(".")[0]
homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", f"{site}/nvidia/cu{major}", f"{site}/nvidia/cuda_runtime"]
headers = [f"{home}/include" for home in homes if home]
runtimes = [f"{home}/{lib}" for home in homes if home for lib in ("lib64", "lib")]
headers = [d for d in headers if os.path.exists(f"{d}/cuda_runtime_api.h")]
runtimes = [d for d in runtimes if os.path.exists(f"{d}/libcudart.so.{major}")]
if not headers or not runtimes:
    sys.exit(f"cuda_runtime_api.h or libcudart.so.{major} is not in any of {homes}")
facts = dict(torch_version=torch.__version__, torch_root=root, cuda_include=headers[0], cuda_lib=runtimes[0],
             cudart=f"libcudart.so.{major}", abi=int(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True)))
for name, value in facts.items():
    print(f"{name}={shlex.quote(str(value))}")
PYTHON
)"; then
    echo "# torch: skipped"
    exit 0
fi
eval "$facts"
echo "# torch $torch_version"
"${CXX:-g++}" -std=c++20 -O2 -pthread "-D_GLIBCXX_USE_CXX11_ABI=$abi" -o "$build/torch_host" "$here/torch_host.cpp" \
    -isystem "$torch_root/include" -isystem "$torch_root/include/torch/csrc/api/include" -isystem "$cuda_include" \
    -L"$torch_root/lib" -L"$cuda_lib" -Wl,-rpath,"$torch_root/lib" -Wl,-rpath,"$cuda_lib" \
    -Wl,--no-as-needed -ltorch -ltorch_cuda -ltorch_cpu -lc10_cuda -lc10 "-l:$cudart" \
    -Wl,--unresolved-symbols=ignore-in-shared-libs
"$build/torch_host" "$@"
