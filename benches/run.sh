#!/usr/bin/env bash
# Measures pinpool beside its peers on one machine with a GPU. Each part writes one text file.
#
#   benches/run.sh OUT [PART...]   writes OUT/PART.txt of each part named, or of all
#   benches/run.sh bundle          packs target/gpu.tgz, for a machine that has a GPU and no Rust: there
#                                  `tar xzf target/gpu.tgz -C target`, then as above, from a copy of the repository
#
# All parts together take some nine minutes on 16 cores with an H200, 40 GiB of memory, page cache included, and 20 GiB of
# disk in TMPDIR. After 530 s (SECONDS_IN_ALL) what is left is skipped: name those parts in another run.
#
# The executables are those of target/gpu, which is brought up to date first where there is cargo. The peers in C++ are
# compiled by g++ in the run, against CUDA's headers (CUDA_HOME, else /usr/local/cuda) and PyTorch's; those in Python need
# a `python3` with PyTorch for CUDA; the two versions of safetensors come with target/gpu. A peer that is missing is
# told in its part's file, and counts as a command that failed.
#
# A file begins with the day, the machine, the versions, and then has the output of each command. The lines that
# benches/pages.py reads are `name threads median lower-quartile upper-quartile` (after an @, of pinpool's own benches),
# `gate: ...`, and rows of Markdown. The exit status is 1 if a command failed, and 0 also where a gate is missed.
#
# Without a GPU the parts run on the host device, much shortened, which only shows that they run.
set -uo pipefail

PARTS=(checkout completion tensors kv_tier bulk copier pinning torch scale streams telemetry)
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/.." || exit 2
bin="$PWD/target/gpu"

# --- the bundle

build() {
    local -a benches=(bulk checkout completion copier kv_tier pinning scale streams telemetry tensors)
    local built
    # Neither symbols nor debug information: a bundle is to be small.
    export CARGO_PROFILE_RELEASE_DEBUG=0 CARGO_PROFILE_RELEASE_STRIP=true
    export CARGO_PROFILE_BENCH_DEBUG=0 CARGO_PROFILE_BENCH_STRIP=true
    mkdir -p "$bin" || return
    built="$(cargo bench --locked --no-run --workspace --all-features "${benches[@]/#/--bench=}" --message-format=json)" || return
    printf '%s\n' "$built" | python3 -c '
import json, os, shutil, sys

for line in filter(str.strip, sys.stdin):
    message = json.loads(line)
    if message.get("reason") != "compiler-artifact":
        continue
    if message.get("executable") and message["target"]["kind"] == ["bench"]:
        shutil.copy2(message["executable"], os.path.join(sys.argv[1], message["target"]["name"]))
' "$bin" || return
    git describe --always --dirty --exclude '*' >"$bin/revision"
    local version wheels
    # The Python package, as from its wheel.
    bash .ci/torch || return
    wheels="$(mktemp -d)"
    python3 -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$wheels" ./python || return
    rm -rf "$bin/python"
    python3 -m zipfile -e "$wheels"/*.whl "$bin/python" || return
    rm -rf "$wheels"
    # The Python of GPU machines is at least 3.10, which is what these wheels are for.
    for version in 0.8.0 0.9.0rc1; do
        [ -d "$bin/safetensors-$version" ] && continue
        wheels="$(mktemp -d)"
        if python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$wheels" \
            --python-version 3.12 --implementation cp --platform "manylinux2014_$(uname -m)" "safetensors==$version"; then
            python3 -m zipfile -e "$wheels"/*.whl "$bin/safetensors-$version"
        else
            echo "no wheel of safetensors $version: the run will skip it" >&2
        fi
        rm -rf "$wheels"
    done
}

[ $# -ge 1 ] || {
    sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
if command -v cargo >/dev/null; then
    build || exit 1
fi
if [ "$1" = bundle ]; then
    tar czf target/gpu.tgz -C target gpu && ls -lh target/gpu.tgz
    exit
fi
[ -x "$bin/checkout" ] || {
    echo "there is neither cargo nor $bin" >&2
    exit 2
}

# --- the machine

mkdir -p "$1" || exit 2
out="$(cd "$1" && pwd)"
shift
wanted=("$@")
[ $# -gt 0 ] || wanted=("${PARTS[@]}")
for name in "${wanted[@]}"; do
    [[ " ${PARTS[*]} " == *" $name "* ]] || {
        echo "no part is named $name; they are: ${PARTS[*]}" >&2
        exit 2
    }
done
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
end=$((SECONDS + ${SECONDS_IN_ALL:-530}))
failed=0
export PYTHONUNBUFFERED=1 XDG_CACHE_HOME="$work/cache" PYTHONPATH="$bin/python${PYTHONPATH:+:$PYTHONPATH}"

if card="$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)" && [ "$card" ]; then
    gpu=1
    card="${card/, /, driver }"
    # A bench that finds no GPU is then an error.
    export PINPOOL_REQUIRE=cuda:0
else
    gpu=0
    card="no GPU: nothing here counts"
    export PINPOOL_BENCH_QUICK=1
fi
memory="$(awk '/^MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo)"
processor="$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
machine="$card; $(nproc) cores, $processor, $memory, Linux $(uname -r), huge pages $(
    sed 's/.*\[\(.*\)\].*/\1/' /sys/kernel/mm/transparent_hugepage/enabled 2>/dev/null), memlock $(ulimit -l)"
versions="pinpool $(cat "$bin/revision")"
versions+="$(python3 -c '
import torch
print(", PyTorch", torch.__version__)
import triton
print(", Triton", triton.__version__)' 2>/dev/null | tr -d '\n')"
for folder in "$bin"/safetensors-*; do
    [ -d "$folder" ] && versions+=", safetensors ${folder##*-}"
done
cuda="${CUDA_HOME:-/usr/local/cuda}"
[ -x "$cuda/bin/nvcc" ] && versions+=", CUDA $("$cuda/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')"

# --- the peers in C++

# Where PyTorch and CUDA's runtime are, as variables of the shell; fails if one is missing.
torch_facts() {
    python3 - <<'PYTHON'
import os, shlex, sys
import torch
root = os.path.dirname(torch.__file__)
site = os.path.dirname(root)
major = torch.version.cuda.split(".")[0]
homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", f"{site}/nvidia/cu{major}", f"{site}/nvidia/cuda_runtime"]
headers = [f"{home}/include" for home in homes if os.path.exists(f"{home}/include/cuda_runtime_api.h")]
runtimes = [f"{home}/{lib}" for home in homes for lib in ("lib64", "lib")]
runtimes = [folder for folder in runtimes if os.path.exists(f"{folder}/libcudart.so.{major}")]
if not headers or not runtimes:
    sys.exit(f"cuda_runtime_api.h or libcudart.so.{major} is not in any of {homes}")
abi = int(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True))
for name, value in dict(root=root, include=headers[0], lib=runtimes[0], cudart=f"libcudart.so.{major}", abi=abi).items():
    print(f"{name}={shlex.quote(str(value))}")
PYTHON
}

# compile NAME: of benches/peers, into the work folder.
compile() {
    local facts root include lib cudart abi
    local -a flags=(-std=c++20 -O2 -pthread -o "$work/$1" "$here/peers/$1.cpp")
    if [ "$1" != torch_host ]; then
        "${CXX:-g++}" "${flags[@]}" -I"$cuda/include" -L"$cuda/lib64/stubs" -lcuda
        return
    fi
    facts="$(torch_facts)" || return
    eval "$facts"
    "${CXX:-g++}" "${flags[@]}" "-D_GLIBCXX_USE_CXX11_ABI=$abi" -isystem "$root/include" \
        -isystem "$root/include/torch/csrc/api/include" -isystem "$include" -L"$root/lib" -L"$lib" \
        -Wl,-rpath,"$root/lib" -Wl,-rpath,"$lib" -Wl,--no-as-needed -ltorch -ltorch_cuda -ltorch_cpu -lc10_cuda -lc10 \
        "-l:$cudart" -Wl,--unresolved-symbols=ignore-in-shared-libs
}

is_wanted() { [[ " ${wanted[*]} " == *" $1 "* ]]; }
peers=()
is_wanted checkout && peers+=(torch_host driver_pool)
is_wanted completion && [[ " ${peers[*]-} " != *torch_host* ]] && peers+=(torch_host)
{ is_wanted tensors || is_wanted bulk; } && peers+=(plain_pipeline)
is_wanted copier && peers+=(plain_gather)
if [ "$gpu" = 1 ]; then
    # All at once, before anything is measured.
    for peer in "${peers[@]}"; do
        compile "$peer" >"$work/$peer.log" 2>&1 &
    done
    if is_wanted torch; then
        PYTHONPATH="$PYTHONPATH:python/bench" python3 -c 'import bench; bench.compile_loops()' >"$work/loops.log" 2>&1 &
    fi
    wait
    echo "the peers are compiled: $SECONDS s"
fi

# --- the parts

# run LIMIT COMMAND...: appends the command's output to its part's file.
run() {
    local limit="$1" since=$SECONDS rc=0 line
    shift
    line="$*"
    line="${line//"$bin/"/}" line="${line//"$work/"/}" line="${line//"$PWD/"/}"
    printf '\n$ %s\n' "$line" >>"$file"
    ((limit > end - SECONDS)) && limit=$((end - SECONDS))
    if ((limit < 3)); then
        echo "# skipped: no time is left" >>"$file"
        failed=1
        return
    fi
    timeout -k 5 "$limit" "$@" >>"$file" 2>"$work/errors" || rc=$?
    if [ -s "$work/errors" ]; then
        head -n 60 "$work/errors" | sed 's/^/# /' >>"$file"
    fi
    if [ "$rc" != 0 ]; then
        failed=1
        echo "# FAILED with status $rc (124: longer than $limit s)" >>"$file"
        tail -n 8 "$file"
    fi
    echo "== $name: $line: status $rc, $((SECONDS - since)) s"
}

# peer LIMIT COMMAND...: the same of a program that needs a GPU; one that was not compiled is skipped.
peer() {
    local program="${2##*/}"
    if [ "$gpu" = 0 ]; then
        printf '\n# skipped without a GPU: %s\n' "$program" >>"$file"
    elif [[ "$2" == "$work/"* ]] && ! [ -x "$2" ]; then
        { echo; tail -n 5 "$work/$program.log"; echo "$program: skipped, it does not compile"; } | sed 's/^/# /' >>"$file"
        echo "== $name: $program does not compile"
        failed=1
    else
        run "$@"
    fi
}

# With a GPU the first words, else the others: what a shortened run is given.
if_gpu() { [ "$gpu" = 1 ] && echo "$1" || echo "${2-}"; }

checkout() {
    local threads few
    threads="$(if_gpu 1,4,16 1,2)"
    few="$(if_gpu "--rounds 11 --operations 40000")"
    run 90 env PINPOOL_BENCH_THREADS="$threads" "$bin/checkout" --only checkout_return,on_a_stream $few
    peer 60 "$work/torch_host" take ${threads//,/ }
    peer 60 "$work/driver_pool" ${threads//,/ }
    run 60 env PINPOOL_BENCH_THREADS="$(if_gpu 1,16 1,2)" "$bin/checkout" \
        --only checkout_return_64_live,cross_thread_return,churn_65536,hand_over $few
}

completion() {
    run 60 "$bin/completion" --only track $(if_gpu "--rounds 15")
    peer 60 "$work/torch_host" copy 1 16
    run 40 "$bin/completion" --only latency
    run 40 "$bin/completion" --only reaper
}

tensors() {
    local files="$work/files" folder installed=-
    mkdir "$files"
    run 120 "$bin/tensors" $(if_gpu "--large-mib 16384") --files "$files"
    # In one run, by turns: each first load is that of a process.
    for _ in 1 2 3; do
        run 20 "$bin/tensors" --first "$files/large.safetensors"
        for folder in pinpool "$bin"/safetensors-0.9*; do
            peer 40 python3 "$here/peers/safetensors_load.py" "$folder" first-8 "$files/large.safetensors"
        done
    done
    for folder in pinpool "$bin"/safetensors-*; do
        [ -d "$folder" ] || [ "$folder" = pinpool ] || folder=$installed
        [[ "$folder" == *-0.9* ]] &&
            peer 40 python3 "$here/peers/safetensors_load.py" "$folder" first-16 "$files/large.safetensors"
        peer 90 python3 "$here/peers/safetensors_load.py" "$folder" 2 "$files/large.safetensors" "$files/small.safetensors"
    done
    rm -rf "$files"
    peer 60 "$work/plain_pipeline" files 8 16
}

kv_tier() {
    run 60 "$bin/kv_tier"
    peer 80 python3 "$here/peers/vllm_blocks.py"
}

bulk() {
    run 120 "$bin/bulk" $(if_gpu "--mib 4096 --file-mib 8192")
    peer 60 "$work/plain_pipeline" memory 8 16
}

copier() {
    run 40 "$bin/copier"
    peer 40 "$work/plain_gather"
}

pinning() { run 90 "$bin/pinning" $(if_gpu "--gib 24" "--rounds 1"); }

torch() {
    [ -s "$work/loops.log" ] && sed 's/^/# /' "$work/loops.log" >>"$file"
    peer 90 python3 python/bench/bench.py hook server python
}

scale() { run 120 "$bin/scale"; }
streams() { run 60 "$bin/streams" $(if_gpu "" --quick); }
telemetry() { run 60 "$bin/telemetry" $(if_gpu "--quads 100" --quick); }

for name in "${PARTS[@]}"; do
    is_wanted "$name" || continue
    file="$out/$name.txt"
    printf '# day: %s\n# machine: %s\n# versions: %s\n' "$(date -u +%F)" "$machine" "$versions" >"$file"
    "$name"
done
echo "all parts: $SECONDS s"
grep -h '^gate: ' "$out"/*.txt
exit $failed
