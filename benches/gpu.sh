#!/usr/bin/env bash
# Runs the benches that need a GPU, and their peers, in one go of a few minutes, and writes a table of each to a folder.
#   benches/gpu.sh OUT [EXECUTABLES]
# EXECUTABLES is a folder with the bench executables `completion`, `pinning` and `overlap` (stripped ones of another
# machine will do); without it they are built here. In the environment: PIN_GIB, what is pinned (24), and SECONDS_BEHIND,
# how long the reaper's kernel runs (10).
#
# OUT/machine.txt says where it ran, OUT/NAME.txt what each part printed, OUT/gates.txt the gates of all parts, and
# OUT/lines.txt all figures as lines of: name threads median quartile quartile (ns, unless the name has another unit),
# ours beside the peers'. Ends 1 if a part failed, 0 otherwise, whether the gates hold or not.
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
    benches=(completion pinning overlap)
    (cd "$here/.." && cargo bench --no-run "${benches[@]/#/--bench=}" --message-format=json) >"$work/built" || exit 1
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
    timeout "$limit" "$@" >"$out/$name.txt" 2>"$work/errors" || rc=$?
    if [ -s "$work/errors" ]; then
        { echo "--- standard error"; head -n 60 "$work/errors"; } >>"$out/$name.txt"
    fi
    if [ "$rc" != 0 ]; then
        failed=1
        echo "FAILED with status $rc (124: longer than $limit s)" >>"$out/$name.txt"
        tail -n 20 "$out/$name.txt"
    fi
    echo "== $name: status $rc, $((SECONDS - since)) s"
}

part track 90 "$bin/completion" --only track
part latency 45 "$bin/completion" --only latency
# The reaper's kernel needs the handle of the pool's stream.
spy=
for folder in $(ldconfig -p 2>/dev/null | sed -n 's|.*=> \(/.*\)/libcuda\.so\.1$|\1|p') \
    ${LD_LIBRARY_PATH:+${LD_LIBRARY_PATH//:/ }} /usr/local/cuda/compat /usr/local/nvidia/lib64; do
    [ -e "$folder/libcuda.so.1" ] || continue
    if "${CC:-cc}" -shared -fPIC -o "$work/spy.so" "$here/driver/spy.c" -L"$folder" \
        -Wl,--no-as-needed,--allow-shlib-undefined -l:libcuda.so.1 -ldl; then
        spy="$work/spy.so"
        break
    fi
done
[ "$spy" ] || echo "spy.c could not be built: copies stand in for the kernel"
part reaper 45 env ${spy:+PINPOOL_LIBCUDA="$spy"} "$bin/completion" --only reaper --seconds "${SECONDS_BEHIND:-10}"
part pinning 120 "$bin/pinning" --gib "${PIN_GIB:-24}"
part overlap 45 "$bin/overlap"
part peers 150 bash "$here/peers/run.sh"

grep -h '^gate: ' "$out"/{track,latency,reaper,pinning,overlap}.txt >"$out/gates.txt"
{
    sed -n 's/^@ //p' "$out"/{track,latency,reaper,pinning,overlap}.txt
    grep -v '^#' "$out/peers.txt" | grep -E '^[a-z0-9_]+ [0-9]+ [0-9.]+ '
} >"$out/lines.txt"
echo
cat "$out/gates.txt"
exit $failed
