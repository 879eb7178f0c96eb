#!/usr/bin/env bash
# Runs the benches that need a GPU, and their peers, in one run of a few minutes, and writes their tables to a folder. Uses
# 28 GiB of memory, since the results are of larger copies than the benches' defaults, which use at most 4 GiB.
#   benches/gpu.sh OUT [EXECUTABLES]
# EXECUTABLES is a folder with the bench executables `completion`, `pinning`, `copier`, `kv_tier`, `bulk` and
# `tensors`, and optionally `checkout` (stripped executables of another machine are enough); without it all are built here. In the
# environment: PIN_GIB, the memory to pin (24), SECONDS_BEHIND, how long the reaper's kernel runs (10),
# PINPOOL_BENCH_THREADS for `checkout` (1,16), and SAFETENSORS_WHEELS, full paths of unpacked wheels of safetensors with
# commas between them, to measure these versions in place of the installed one.
#
# OUT/machine.txt describes the machine. OUT/tables.txt has the output of each part, OUT/checkout.txt that of `checkout`
# (which uses no GPU, but shows the machine's speed), OUT/gates.txt the gates of all parts, and OUT/lines.txt all figures, of
# pinpool and of the peers, as lines of: name threads median quartile quartile (ns, unless the name has another unit). The
# exit status is 1 if a part failed, else 0, also where a gate is missed.
set -uo pipefail
out="${1:?usage: benches/gpu.sh OUT [EXECUTABLES]}"
here="$(cd "$(dirname "$0")" && pwd)"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
failed=0
export PINPOOL_REQUIRE="${PINPOOL_REQUIRE-cuda:0}"

if [ $# -gt 1 ]; then
    bin="$(cd "$2" && pwd)" || exit 2
else
    bin="$work/bin"
    mkdir "$bin"
    benches=(completion pinning copier kv_tier bulk tensors checkout)
    (cd "$here/.." && cargo bench --workspace --no-run "${benches[@]/#/--bench=}" --message-format=json) >"$work/built" || exit 1
    for bench in "${benches[@]}"; do
        path="$(sed -n 's/.*"executable":"\([^"]*\/'"$bench"'-[^"]*\)".*/\1/p' "$work/built" | tail -n 1)"
        ln -s "$path" "$bin/$bench"
    done
fi

{
    date -u +%Y-%m-%d
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv,noheader
    echo "$(nproc) cores, $(awk '/^MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo), kernel $(uname -r)"
    echo "memlock $(ulimit -l) KiB, huge pages $(cat /sys/kernel/mm/transparent_hugepage/enabled 2>/dev/null)"
    nvcc --version 2>/dev/null | tail -n 2
} >"$out/machine.txt" 2>&1
cat "$out/machine.txt"

# part NAME SECONDS COMMAND...
part() {
    local name="$1" limit="$2" since=$SECONDS rc=0
    shift 2
    timeout "$limit" "$@" >"$work/$name.txt" 2>"$work/errors" || rc=$?
    if [ -s "$work/errors" ]; then
        { echo "--- standard error"; head -n 60 "$work/errors"; } >>"$work/$name.txt"
    fi
    if [ "$rc" != 0 ]; then
        failed=1
        echo "FAILED with status $rc (124: longer than $limit s)" >>"$work/$name.txt"
        tail -n 20 "$work/$name.txt"
    fi
    echo "== $name: status $rc, $((SECONDS - since)) s"
}

part track 90 "$bin/completion" --only track
part latency 45 "$bin/completion" --only latency
part reaper 45 "$bin/completion" --only reaper --seconds "${SECONDS_BEHIND:-10}"
part pinning 120 "$bin/pinning" --gib "${PIN_GIB:-24}"
part copier 90 "$bin/copier"
part kv_tier 60 "$bin/kv_tier"
# One after the other on a machine that others may use too: each has its peak beside it.
part vllm 60 python3 "$here/peers/vllm_blocks.py"
part bulk 120 "$bin/bulk" --mib 4096 --file-mib 8192
# Run from the repository's root, since the bench finds its peer by a relative path.
part tensors 120 env -C "$here/.." "$bin/tensors" --large-mib 4096 ${SAFETENSORS_WHEELS:+--wheels "$SAFETENSORS_WHEELS"}
part plain 60 bash -c 'g++ -std=c++20 -O2 -pthread -o "$0/plain_pipeline" "$1/peers/plain_pipeline.cpp" \
    -I"${CUDA_HOME:-/usr/local/cuda}/include" -L"${CUDA_HOME:-/usr/local/cuda}/lib64/stubs" -lcuda && "$0/plain_pipeline"' \
    "$work" "$here"
part gather 40 bash -c 'g++ -std=c++20 -O2 -pthread -o "$0/plain_gather" "$1/peers/plain_gather.cpp" \
    -I"${CUDA_HOME:-/usr/local/cuda}/include" -L"${CUDA_HOME:-/usr/local/cuda}/lib64/stubs" -lcuda && "$0/plain_gather"' \
    "$work" "$here"
part peers 150 bash "$here/peers/run.sh"

if [ -x "$bin/checkout" ]; then
    part checkout 150 env PINPOOL_BENCH_THREADS="${PINPOOL_BENCH_THREADS:-1,16}" "$bin/checkout" --only checkout_return \
        --rounds 21 --operations 60000
    mv "$work/checkout.txt" "$out/checkout.txt"
fi

cd "$work" || exit 2
for name in track latency reaper pinning copier kv_tier vllm bulk tensors plain gather peers; do
    printf '==== %s\n' "$name"
    cat "$name.txt"
    echo
done >"$out/tables.txt"
grep -h '^gate: ' {track,latency,reaper,pinning,copier,kv_tier,bulk,tensors}.txt >"$out/gates.txt"
{
    sed -n 's/^@ //p' {track,latency,reaper,pinning,copier,kv_tier,bulk,tensors}.txt
    cat vllm.txt plain.txt gather.txt peers.txt | grep -v '^#' | grep -E '^[a-z0-9_]+ [0-9]+ [0-9.]+ '
} >"$out/lines.txt"
echo
cat "$out/gates.txt"
exit $failed
