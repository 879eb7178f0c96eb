// The kernels that spread packed bytes over device memory, and collect them. kernels.ptx is made of this file by .ci/ptx;
// mod.rs beside it loads and launches them, with 16 blocks of 512 threads.
//
// A warp copies a row. The rows of all runs are counted through, and the warps of the grid take them by turns, so that
// many small runs keep all warps as busy as one large run does. Each lane reads the description of a row, 32 rows
// a warp at a time, since a read of device memory takes longer than a short row's copy. The lanes then copy the rows
// together, one after the other.
//
// Reads and writes are 16 bytes wide where the two sides are congruent modulo 16, 4 bytes where they are congruent
// modulo 4, and else a byte. A lane has four of them in flight. No row of a launch overlaps another one on the side
// that is written, nor anything that is read: so no order between rows matters.
//
// The source needs no headers, of CUDA or C++.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u32 u128 __attribute__((ext_vector_type(4)));

// Device memory. Plain pointers would be generic ones, whose accesses are slower.
#define GLOBAL __attribute__((address_space(1)))
#define DEVICE static inline __attribute__((device, always_inline))
#define KERNEL extern "C" __attribute__((global, launch_bounds(512)))

// As `SpreadRow`, `SpreadRun` and `SPREAD_RUNS` in src/device/mod.rs, and `Runs` in mod.rs.
struct Row {
    u64 place;
    u32 offset;
    u32 len;
};
struct Run {
    u64 packed;
    u64 table;
    u32 rows;
};
struct Runs {
    Run run[32];
    u32 count;
};

static const u32 LANES = 32;
static const u32 ALL = 0xffffffff;

DEVICE u32 shuffle(u32 value, u32 lane) { return __nvvm_shfl_sync_idx_i32(ALL, value, lane, 31); }

DEVICE u64 shuffle64(u64 value, u32 lane) {
    return (u64)shuffle((u32)(value >> 32), lane) << 32 | shuffle((u32)value, lane);
}

// Copies `count` elements. The last ones of each lane are in flight together too, so that a row of up to 128 elements
// takes as long as one read.
template <typename T> DEVICE void elements(u64 to, u64 from, u64 count, u32 lane) {
    T GLOBAL *target = (T GLOBAL *)to;
    const T GLOBAL *source = (const T GLOBAL *)from;
    u64 at = lane;
    for (; at + 3 * LANES < count; at += 4 * LANES) {
        T a = source[at], b = source[at + LANES], c = source[at + 2 * LANES], d = source[at + 3 * LANES];
        target[at] = a;
        target[at + LANES] = b;
        target[at + 2 * LANES] = c;
        target[at + 3 * LANES] = d;
    }
    // At most three are left.
    T a = 0, b = 0, c = 0;
    if (at < count) a = source[at];
    if (at + LANES < count) b = source[at + LANES];
    if (at + 2 * LANES < count) c = source[at + 2 * LANES];
    if (at < count) target[at] = a;
    if (at + LANES < count) target[at + LANES] = b;
    if (at + 2 * LANES < count) target[at + 2 * LANES] = c;
}

// Copies a row whose sides are congruent modulo the size of `T`, by elements between the multiples of that, and by bytes
// before and after.
template <typename T> DEVICE void wide(u64 to, u64 from, u64 len, u32 lane) {
    const u64 size = sizeof(T);
    u64 head = (0 - to) & (size - 1);
    if (head > len) head = len;
    u64 count = (len - head) / size;
    u64 tail = (len - head) % size, last = len - tail;
    u8 first = 0, final = 0;
    if (lane < head) first = ((const u8 GLOBAL *)from)[lane];
    if (lane < tail) final = ((const u8 GLOBAL *)(from + last))[lane];
    elements<T>(to + head, from + head, count, lane);
    if (lane < head) ((u8 GLOBAL *)to)[lane] = first;
    if (lane < tail) ((u8 GLOBAL *)(to + last))[lane] = final;
}

DEVICE void copy(u64 to, u64 from, u64 len, u32 lane) {
    u64 apart = to ^ from;
    if ((apart & 15) == 0) {
        wide<u128>(to, from, len, lane);
    } else if ((apart & 3) == 0) {
        wide<u32>(to, from, len, lane);
    } else {
        elements<u8>(to, from, len, lane);
    }
}

// Copies the rows that fall to this warp, one way or the other.
template <bool SPREAD> DEVICE void all(const Runs &runs) {
    u32 thread = __nvvm_read_ptx_sreg_tid_x(), threads = __nvvm_read_ptx_sreg_ntid_x();
    u32 lane = thread % LANES;
    u64 warp = (u64)__nvvm_read_ptx_sreg_ctaid_x() * (threads / LANES) + thread / LANES;
    u64 warps = (u64)__nvvm_read_ptx_sreg_nctaid_x() * (threads / LANES);
    // This lane's row, counted over all runs; the run that it is in, and the first row of that.
    u64 row = warp + lane * warps, first = 0;
    u32 run = 0;
    for (;;) {
        while (run < runs.count && row - first >= runs.run[run].rows) {
            first += runs.run[run].rows;
            run += 1;
        }
        bool there = run < runs.count;
        u64 place = 0, packed = 0;
        u32 len = 0;
        if (there) {
            const u128 GLOBAL *table = (const u128 GLOBAL *)runs.run[run].table;
            u128 text = table[row - first];
            place = (u64)text.y << 32 | text.x;
            packed = runs.run[run].packed + text.z;
            len = text.w;
        }
        // Later lanes have later rows, so those without one are the last.
        u32 count = __builtin_popcount(__nvvm_vote_ballot_sync(ALL, there));
        for (u32 from = 0; from < count; from += 1) {
            u64 at = shuffle64(place, from), in = shuffle64(packed, from);
            u64 bytes = shuffle(len, from);
            if (SPREAD) {
                copy(at, in, bytes, lane);
            } else {
                copy(in, at, bytes, lane);
            }
        }
        if (count < LANES) return;
        row += LANES * warps;
    }
}

KERNEL void pinpool_spread(const Runs runs) { all<true>(runs); }

KERNEL void pinpool_collect(const Runs runs) { all<false>(runs); }
