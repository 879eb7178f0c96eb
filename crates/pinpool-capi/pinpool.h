// A pool of page-locked ("pinned") host memory, as an allocator for programs in C, C++ and Python.
//
// A block is known by the addresses inside it. `pinpool_hold` keeps it until the work that is queued on a stream is
// complete, whether or not it is freed meanwhile: so a copy never reads memory that is another block by then.
//
// Every function that can fail returns a `pinpool_status`, and nothing is changed by a call that fails, but where the
// function says otherwise. All functions may be called on all threads at once, but for `pinpool_close`. In the child of
// a fork they fail with PINPOOL_FORKED; the pool stays the parent's.
//
// Made by cbindgen from crates/pinpool-capi/src: edit that.

#ifndef PINPOOL_H
#define PINPOOL_H

#include <stddef.h>
#include <stdint.h>

// The interface's version. It changes when a program with an older header could go wrong.
#define PINPOOL_ABI_VERSION 1

// Memory of the system, registered with the device (`cuMemHostRegister`): pins fastest.
#define PINPOOL_BACKING_REGISTERED 1

// Memory that the device's driver allocates (CUDA: `cuMemHostAlloc`; Ascend: `aclrtMallocHost`).
#define PINPOOL_BACKING_HOST_ALLOC 2

// A pool of pinned memory.
typedef struct pinpool_pool pinpool_pool;

// How a call ended: `PINPOOL_OK` or another number, with cause and remedy in `pinpool_last_error`.
typedef int32_t pinpool_status;

// How a pool is opened. Fields that are 0 have their defaults.
typedef struct pinpool_options {
  // `sizeof(pinpool_options)`: later versions have more fields.
  size_t size;
  // The devices that use the pool, with commas: `"cuda:0"`, `"cuda:0,cuda:1"`, `"acl:0"`,
  // `"host"`, or `"auto"`, like null. The memory is near the first.
  const char *device;
  // The cap on the pool's bytes. 0: 256 MiB.
  uint64_t capacity;
  // The bytes to start with: `pinpool_open` returns when the first are pinned. 0: an eighth of
  // the capacity, between 256 MiB and 1 GiB. The pool grows as it is used.
  uint64_t initial;
  // Not 0: serve memory that is not pinned where the system refuses. 0: that is an error.
  uint32_t allow_unpinned;
  // The pool's name in logs and metrics. Null: a number.
  const char *name;
  // The longest block to be served. The pool grows by pieces of that size, rounded up. 0: a
  // little less than 256 MiB, and than the capacity.
  uint64_t largest;
  // The bytes that a thread may keep for its next allocations, which take no lock then. 0: a
  // 32nd of the capacity, between 256 KiB and 64 MiB.
  uint64_t thread_cache;
  // `PINPOOL_BACKING_REGISTERED`, `PINPOOL_BACKING_HOST_ALLOC`, or 0: what the device does best.
  uint64_t backing;
} pinpool_options;

// A pool's numbers.
typedef struct pinpool_stats {
  // Set by the caller: `sizeof(pinpool_stats)`.
  size_t size;
  // Bytes that are page-locked.
  uint64_t pinned_bytes;
  // Blocks that are allocated and not freed.
  uint64_t blocks;
  // Bytes of these blocks and of those that are held for a stream or a graph, rounding included.
  uint64_t block_bytes;
  // The lengths that were asked for, of the blocks that are allocated and not freed.
  uint64_t requested_bytes;
  // Blocks allocated since the pool was opened.
  uint64_t allocations;
  // Blocks freed since then.
  uint64_t frees;
  // Holds taken since then.
  uint64_t holds;
} pinpool_stats;

// The call has done what it says.
#define PINPOOL_OK 0

// The pool or the system has no memory for the request now. The same call may succeed later.
#define PINPOOL_EXHAUSTED 1

// An argument makes no sense, or this device cannot do it. The same call fails again.
#define PINPOOL_INVALID 2

// The address lies in no block of this pool.
#define PINPOOL_UNKNOWN 3

// A capture of the stream into a graph is in the way.
#define PINPOOL_CAPTURING 4

// The device cannot be used until the process ends.
#define PINPOOL_LOST 5

// The device, or its driver, is not here.
#define PINPOOL_UNAVAILABLE 6

// The call was made in the child of a fork. The pool is the parent's.
#define PINPOOL_FORKED 7

// A mistake of the library.
#define PINPOOL_INTERNAL 8

// The time is over.
#define PINPOOL_TIMEOUT 9

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// `PINPOOL_ABI_VERSION` of the library. A program compares it with its header's.
uint32_t pinpool_abi_version(void);

// The version of the library, as text.
const char *pinpool_version(void);

// Opens the devices and builds a pool.
//
// `PINPOOL_UNAVAILABLE` without the device or its driver; `PINPOOL_INVALID` for options that make
// no sense; `PINPOOL_EXHAUSTED` where the memory cannot be pinned. Then `*pool` is null.
//
// # Safety
// `options` is null (defaults), or its texts end with a zero byte. `pool` can be written.
pinpool_status pinpool_open(const struct pinpool_options *options,
                            struct pinpool_pool **pool);

// Closes a pool when every block is freed and no hold is under way, for which it waits
// `timeout_ms` at most. The pool allocates nothing from the first call on. After `PINPOOL_TIMEOUT`
// it still exists: free blocks, and call again. After `PINPOOL_OK` it does not. Null is closed.
//
// A program that ends need not close its pools.
//
// # Safety
// `pool` is null or a pool that is not closed, and no other call that names it is under way or
// follows one that has returned `PINPOOL_OK`.
pinpool_status pinpool_close(struct pinpool_pool *pool,
                             uint64_t timeout_ms);

// Allocates a block of at least `bytes` bytes, which starts at a multiple of `align` (a power of
// two of at most 2 MiB; 0: 64). Its content is undefined. Where the pool has none, the call waits
// for at most `timeout_ms` milliseconds until it has grown or a block has come back: 0 does not
// wait for either, `UINT64_MAX` waits without a limit. 0 bytes are one.
//
// `PINPOOL_EXHAUSTED`, or `PINPOOL_TIMEOUT` after a wait; `PINPOOL_INVALID` for a length or an
// alignment that no block of this pool can have. Then `*block` is null.
//
// # Safety
// `pool` is a pool. `block` can be written.
pinpool_status pinpool_alloc(struct pinpool_pool *pool,
                             size_t bytes,
                             size_t align,
                             uint64_t timeout_ms,
                             void **block);

// Frees a block. Its memory is allocated again when every hold on it is over; the call does not
// wait for that. Null is freed.
//
// `PINPOOL_UNKNOWN` if no block starts there.
//
// # Safety
// `pool` is a pool. Nothing uses the block any more, but for the work that a hold on it covers.
pinpool_status pinpool_free(struct pinpool_pool *pool,
                            void *block);

// Keeps the block that `address` lies in, freed or not, until everything queued on a stream by now
// is complete; if the stream is being captured, for as long as the graph and what is made from it
// exist. The stream is a raw `CUstream` (or `aclrtStream`) of the pool's first device. A block may
// be held many times.
//
// Many holds share an event, which is recorded up to a millisecond later. So a hold may also wait
// for work that is queued meanwhile.
//
// `PINPOOL_UNKNOWN` if the address lies in no block. After an error nothing more is kept than
// before: free the block when the stream is known to be done with it.
//
// # Safety
// `pool` is a pool. `stream` is a stream, and exists until `pinpool_forget_stream` has returned
// `PINPOOL_OK` and its work is complete. It neither enters nor leaves a capture during the call.
pinpool_status pinpool_hold(struct pinpool_pool *pool,
                            const void *address,
                            void *stream);

// Like `pinpool_hold`, for a stream of the pool's device with that name (`"cuda:1"`).
//
// # Safety
// As for `pinpool_hold`. `device` ends with a zero byte.
pinpool_status pinpool_hold_on(struct pinpool_pool *pool,
                               const void *address,
                               const char *device,
                               void *stream);

// To be called before a stream is destroyed that blocks were held for: then the holds on it have
// their events, and the pool names the stream no more. The call waits for nothing.
//
// An error if an event cannot be recorded: call again. `PINPOOL_CAPTURING` during a capture.
//
// # Safety
// As for `pinpool_hold`. No other thread holds blocks for the stream meanwhile.
pinpool_status pinpool_forget_stream(struct pinpool_pool *pool,
                                     void *stream);

// The start and the length of the block that `address` lies in. Null where one is not asked for.
//
// `PINPOOL_UNKNOWN` if it lies in none.
//
// # Safety
// `pool` is a pool. `start` and `bytes` are null or can be written.
pinpool_status pinpool_find(struct pinpool_pool *pool,
                            const void *address,
                            void **start,
                            size_t *bytes);

// Whether no hold on the block is under way: 1, so that the CPU may write to it again, or 0.
//
// `PINPOOL_UNKNOWN` if the address lies in no block.
//
// # Safety
// `pool` is a pool. `idle` can be written.
pinpool_status pinpool_is_idle(struct pinpool_pool *pool,
                               const void *address,
                               uint32_t *idle);

// Unpins whole regions that no block uses. `bytes`, unless null, is how much.
//
// # Safety
// `pool` is a pool. `bytes` is null or can be written.
pinpool_status pinpool_trim(struct pinpool_pool *pool,
                            uint64_t *bytes);

// Reads a pool's numbers.
//
// # Safety
// `pool` is a pool. `stats` can be written, and its size is set.
pinpool_status pinpool_get_stats(struct pinpool_pool *pool,
                                 struct pinpool_stats *stats);

// The text of the calling thread's last error: what failed, and what to do. It is valid until the
// next call that fails on this thread. Empty if none has failed yet.
const char *pinpool_last_error(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PINPOOL_H */
