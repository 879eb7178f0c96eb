/* The C interface, used by a program in C: on the host device, and with "cuda" as its argument on a simulated driver,
 * which it loads itself to make streams and copies of its own. It says the first check that fails, and returns 1. */

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pinpool.h"

#define CHECK(so)                                                                                            \
    do {                                                                                                     \
        if (!(so)) {                                                                                         \
            fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__, #so, pinpool_last_error());            \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

#ifndef ROUNDS
#define ROUNDS 2000
#endif
enum { MIB = 1 << 20, THREADS = 8 };

static pinpool_pool *open_pool(const char *device, uint64_t capacity) {
    pinpool_options options = {.size = sizeof options, .device = device, .capacity = capacity, .allow_unpinned = 1};
    pinpool_pool *pool = NULL;
    CHECK(pinpool_open(&options, &pool) == PINPOOL_OK);
    return pool;
}

static pinpool_stats stats_of(pinpool_pool *pool) {
    pinpool_stats stats = {.size = sizeof stats};
    CHECK(pinpool_get_stats(pool, &stats) == PINPOOL_OK);
    return stats;
}

/* A pool that was not opened is null, whatever was there before, and the error says why. */
static void refuses(const pinpool_options *options, pinpool_status status, const char *why) {
    pinpool_pool *pool = (pinpool_pool *)&pool;
    CHECK(pinpool_open(options, &pool) == status && pool == NULL);
    CHECK(strstr(pinpool_last_error(), why));
}

static void close_pool(pinpool_pool *pool) { CHECK(pinpool_close(pool, 10000) == PINPOOL_OK); }

static void wrong_options(void) {
    pinpool_pool *pool = NULL;
    pinpool_options options = {.size = 0};
    size_t wrong[] = {0, 1, sizeof(size_t), sizeof options - 1, sizeof options + sizeof(size_t), SIZE_MAX};
    for (int i = 0; i < 6; i++) {
        options.size = wrong[i];
        refuses(&options, PINPOOL_INVALID, "sizeof");
    }
    options = (pinpool_options){.size = sizeof options, .device = "toaster:0"};
    refuses(&options, PINPOOL_UNAVAILABLE, "toaster");
    options.device = "\xff";
    refuses(&options, PINPOOL_INVALID, "");
    options = (pinpool_options){.size = sizeof options, .device = "host", .capacity = 1};
    refuses(&options, PINPOOL_INVALID, "");
    CHECK(pinpool_open(&options, NULL) == PINPOOL_INVALID);
    options = (pinpool_options){.size = sizeof options, .device = "host", .backing = 3};
    refuses(&options, PINPOOL_INVALID, "PINPOOL_BACKING_");

    /* A program with an older header: the fields that it does not have are not read. */
    options = (pinpool_options){.size = offsetof(pinpool_options, capacity), .device = "host", .capacity = 1};
    CHECK(pinpool_open(&options, &pool) == PINPOOL_OK);
    close_pool(pool);
}

static void blocks(const char *device) {
    pinpool_pool *pool = open_pool(device, 8 * MIB);
    char *block = NULL;
    CHECK(pinpool_alloc(pool, 1000, 0, 0, (void **)&block) == PINPOOL_OK);
    CHECK((uintptr_t)block % 64 == 0);
    memset(block, 7, 1000);

    void *start = NULL;
    size_t bytes = 0;
    CHECK(pinpool_find(pool, block + 999, &start, &bytes) == PINPOOL_OK);
    CHECK(start == block && bytes == 1000);
    CHECK(pinpool_find(pool, block, NULL, NULL) == PINPOOL_OK);
    CHECK(pinpool_find(pool, block + 1000, &start, &bytes) == PINPOOL_UNKNOWN);
    CHECK(pinpool_find(pool, block - 1, &start, &bytes) == PINPOOL_UNKNOWN);
    CHECK(pinpool_find(pool, &bytes, &start, &bytes) == PINPOOL_UNKNOWN);
    CHECK(strstr(pinpool_last_error(), "no block"));
    /* Only its start frees a block, and only once. */
    CHECK(pinpool_free(pool, block + 1) == PINPOOL_UNKNOWN);
    CHECK(stats_of(pool).blocks == 1 && stats_of(pool).requested_bytes == 1000);
    CHECK(pinpool_free(pool, block) == PINPOOL_OK);
    CHECK(pinpool_free(pool, block) == PINPOOL_UNKNOWN);
    CHECK(pinpool_free(pool, NULL) == PINPOOL_OK);

    void *page = NULL;
    CHECK(pinpool_alloc(pool, 5000, 4096, 0, &page) == PINPOOL_OK);
    CHECK((uintptr_t)page % 4096 == 0);
    CHECK(pinpool_free(pool, page) == PINPOOL_OK);
    void *none = &page;
    CHECK(pinpool_alloc(pool, 5000, 3, 0, &none) == PINPOOL_INVALID && none == NULL);
    CHECK(pinpool_alloc(pool, 64 * MIB, 0, 0, &none) == PINPOOL_INVALID);

    /* Blocks of no bytes have addresses of their own. */
    void *empty[2];
    for (int i = 0; i < 2; i++) CHECK(pinpool_alloc(pool, 0, 0, 0, &empty[i]) == PINPOOL_OK);
    CHECK(empty[0] && empty[0] != empty[1]);
    CHECK(pinpool_find(pool, empty[1], &start, &bytes) == PINPOOL_OK && start == empty[1] && bytes == 0);
    for (int i = 0; i < 2; i++) CHECK(pinpool_free(pool, empty[i]) == PINPOOL_OK);

    /* Blocks are as large as the options say, here from the driver's own memory. */
    pinpool_options large = {.size = sizeof large, .device = device, .capacity = 700ull * MIB, .allow_unpinned = 1};
    large.backing = PINPOOL_BACKING_HOST_ALLOC;
    for (int i = 0; i < 2; i++) {
        pinpool_pool *wide = NULL;
        CHECK(pinpool_open(&large, &wide) == PINPOOL_OK);
        CHECK(pinpool_alloc(wide, 300 * MIB, 0, 10000, &none) == (i ? PINPOOL_OK : PINPOOL_INVALID));
        CHECK(pinpool_free(wide, none) == PINPOOL_OK);
        close_pool(wide);
        large.largest = 300ull * MIB;
    }

    /* A full pool. */
    void *all[64];
    int have = 0;
    while (have < 64 && pinpool_alloc(pool, MIB, 0, 0, &all[have]) == PINPOOL_OK) have++;
    CHECK(have >= 4 && have < 9);
    CHECK(pinpool_alloc(pool, MIB, 0, 0, &none) == PINPOOL_EXHAUSTED);
    CHECK(pinpool_alloc(pool, MIB, 0, 20, &none) == PINPOOL_TIMEOUT);
    CHECK(none == NULL);

    /* It is closed when everything is back. */
    CHECK(pinpool_close(pool, 0) == PINPOOL_TIMEOUT);
    CHECK(strstr(pinpool_last_error(), "free them"));
    CHECK(pinpool_alloc(pool, 1, 0, 0, &none) == PINPOOL_INVALID);
    for (int i = 0; i < have; i++) CHECK(pinpool_free(pool, all[i]) == PINPOOL_OK);
    pinpool_stats stats = stats_of(pool);
    CHECK(stats.blocks == 0 && stats.requested_bytes == 0 && stats.block_bytes == 0);
    CHECK(stats.allocations == stats.frees && stats.allocations == (uint64_t)have + 4);
    close_pool(pool);
    CHECK(pinpool_close(NULL, 0) == PINPOOL_OK);
}

static void wrong_arguments(const char *device) {
    pinpool_pool *pool = open_pool(device, 2 * MIB);
    pinpool_stats stats = {.size = sizeof(size_t)};
    CHECK(pinpool_get_stats(pool, &stats) == PINPOOL_INVALID);
    stats = (pinpool_stats){.size = offsetof(pinpool_stats, blocks), .blocks = 77};
    CHECK(pinpool_get_stats(pool, &stats) == PINPOOL_OK);
    CHECK(stats.size == offsetof(pinpool_stats, blocks) && stats.pinned_bytes > 0 && stats.blocks == 77);
    CHECK(pinpool_get_stats(pool, NULL) == PINPOOL_INVALID);
    void *block = NULL;
    CHECK(pinpool_alloc(NULL, 1, 0, 0, &block) == PINPOOL_INVALID);
    CHECK(pinpool_alloc(pool, 1, 0, 0, NULL) == PINPOOL_INVALID);
    CHECK(pinpool_alloc(pool, 1, 0, 0, &block) == PINPOOL_OK);
    CHECK(pinpool_is_idle(pool, block, NULL) == PINPOOL_INVALID);
    CHECK(pinpool_hold_on(pool, block, "cuda:77", NULL) == PINPOOL_INVALID);
    CHECK(pinpool_hold(pool, &stats, NULL) == PINPOOL_UNKNOWN);
    CHECK(pinpool_free(pool, block) == PINPOOL_OK);
    uint64_t trimmed = 0;
    CHECK(pinpool_trim(pool, &trimmed) == PINPOOL_OK && trimmed > 0);
    CHECK(stats_of(pool).size == sizeof stats);
    close_pool(pool);
}

/* A child of a fork may free what it has copies of, and nothing happens. */
static void forks(const char *device) {
    pinpool_pool *pool = open_pool(device, 2 * MIB);
    void *block = NULL;
    CHECK(pinpool_alloc(pool, 100, 0, 0, &block) == PINPOOL_OK);
    pid_t child = fork();
    if (child == 0) {
        void *other = block;
        pinpool_pool *opened = pool;
        int right = pinpool_free(pool, NULL) == PINPOOL_OK && pinpool_close(NULL, 0) == PINPOOL_OK &&
                    pinpool_open(NULL, &opened) == PINPOOL_FORKED && !opened && pinpool_free(pool, block) == PINPOOL_FORKED && pinpool_alloc(pool, 1, 0, 0, &other) == PINPOOL_FORKED && !other &&
                    pinpool_close(pool, 0) == PINPOOL_FORKED && strstr(pinpool_last_error(), "fork");
        /* By way of another program: to valgrind the memory of threads that a child does not have looks leaked. */
        execlp(right ? "true" : "false", "answer", (char *)NULL);
        _exit(2);
    }
    int status = 1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(pinpool_free(pool, block) == PINPOOL_OK);
    close_pool(pool);
}

/* Threads that free what others have allocated: each block has its own bytes for as long as it is there. */
static struct {
    pinpool_pool *pool;
    pthread_mutex_t lock;
    struct { unsigned char *at; size_t len; } slots[64];
} shared = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void *worker(void *seed) {
    unsigned random = (unsigned)(uintptr_t)seed * 2654435761u + 1;
    for (int round = 0; round < ROUNDS; round++) {
        random = random * 1664525u + 1013904223u;
        size_t len = 1 + (random >> 8) % 20000;
        unsigned char *mine = NULL;
        CHECK(pinpool_alloc(shared.pool, len, 0, 10000, (void **)&mine) == PINPOOL_OK);
        unsigned char byte = (unsigned char)((uintptr_t)mine >> 6);
        memset(mine, byte, len);
        int slot = (random >> 4) % 64;
        pthread_mutex_lock(&shared.lock);
        unsigned char *theirs = shared.slots[slot].at;
        size_t bytes = shared.slots[slot].len;
        shared.slots[slot].at = mine, shared.slots[slot].len = len;
        pthread_mutex_unlock(&shared.lock);
        if (!theirs) continue;
        byte = (unsigned char)((uintptr_t)theirs >> 6);
        for (size_t i = 0; i < bytes; i++) CHECK(theirs[i] == byte);
        void *start = NULL;
        size_t found = 0;
        CHECK(pinpool_find(shared.pool, theirs + bytes - 1, &start, &found) == PINPOOL_OK);
        CHECK(start == theirs && found == bytes);
        CHECK(pinpool_free(shared.pool, theirs) == PINPOOL_OK);
    }
    return NULL;
}

static void threads(const char *device) {
    shared.pool = open_pool(device, 16 * MIB);
    pthread_t all[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&all[i], NULL, worker, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(all[i], NULL) == 0);
    pinpool_stats stats = stats_of(shared.pool);
    CHECK(stats.allocations == THREADS * ROUNDS && stats.blocks == stats.allocations - stats.frees);
    for (int i = 0; i < 64; i++) CHECK(pinpool_free(shared.pool, shared.slots[i].at) == PINPOOL_OK);
    close_pool(shared.pool);
}

/* --- on a simulated driver -------------------------------------------------------------------------------------- */

static void *driver;

typedef unsigned (*call)(uintptr_t, uintptr_t, uintptr_t, uintptr_t);

/* A call of the driver with up to four words, which succeeds. */
static void cu(const char *name, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d) {
    call function;
    *(void **)&function = dlsym(driver, name);
    if (!function || function(a, b, c, d) != 0) fprintf(stderr, "%s is not there, or has failed\n", name), exit(1);
}

static uintptr_t new_stream(void) {
    uintptr_t stream = 0;
    cu("cuStreamCreate", (uintptr_t)&stream, 1, 0, 0);
    return stream;
}

/* What the simulated driver answers to a command. */
static const char *sim(const char *command) {
    static char answer[65536];
    size_t (*ask)(const char *, char *, size_t);
    *(void **)&ask = dlsym(driver, "sim_cuda");
    if (!ask) fprintf(stderr, "the driver is not the simulated one\n"), exit(1);
    size_t length = ask(command, answer, sizeof answer - 1);
    CHECK(length < sizeof answer);
    answer[length] = 0;
    return answer;
}

/* How often a hold's event was recorded. */
static int recorded(void) {
    const char *line = strstr(sim("report"), "call cuEventRecord ");
    return line ? atoi(line + strlen("call cuEventRecord ")) : 0;
}

static uint32_t is_idle(pinpool_pool *pool, const void *address) {
    uint32_t idle = 9;
    CHECK(pinpool_is_idle(pool, address, &idle) == PINPOOL_OK);
    return idle;
}

/* Everything that holds the block completes. */
static void becomes_idle(pinpool_pool *pool, const void *block) {
    for (int i = 0; i < 5000 && !is_idle(pool, block); i++) usleep(1000);
    CHECK(is_idle(pool, block) == 1);
}

/* A stream is forgotten before it is destroyed: its hold has an event then. */
static void forget(pinpool_pool *pool, uintptr_t stream) {
    CHECK(pinpool_forget_stream(pool, (void *)stream) == PINPOOL_OK);
    cu("cuStreamSynchronize", stream, 0, 0, 0);
    cu("cuStreamDestroy_v2", stream, 0, 0, 0);
}

static void holds(void) {
    pinpool_pool *pool = open_pool("cuda:0,cuda:1", 4 * MIB);
    uintptr_t context = 0, stream = 0, memory = 0, graph = 0;
    cu("cuDevicePrimaryCtxRetain", (uintptr_t)&context, 0, 0, 0);
    cu("cuCtxSetCurrent", context, 0, 0, 0);
    stream = new_stream();
    cu("cuMemAlloc_v2", (uintptr_t)&memory, MIB, 0, 0);

    char *block = NULL, *other = NULL, back[8] = {0};
    CHECK(pinpool_alloc(pool, MIB, 0, 0, (void **)&block) == PINPOOL_OK);
    CHECK(is_idle(pool, block) == 1);

    /* Nothing completes: a freed block is not allocated again, however often memory is asked for. */
    sim("hang true");
    strcpy(block, "first");
    cu("cuMemcpyHtoDAsync_v2", memory, (uintptr_t)block, MIB, stream);
    CHECK(pinpool_hold(pool, block + 12345, (void *)stream) == PINPOOL_OK);
    CHECK(pinpool_hold_on(pool, block, "cuda:0", (void *)stream) == PINPOOL_OK);
    CHECK(is_idle(pool, block + 5) == 0);
    CHECK(pinpool_free(pool, block) == PINPOOL_OK);
    CHECK(pinpool_is_idle(pool, block, &(uint32_t){0}) == PINPOOL_UNKNOWN);
    pinpool_stats stats = stats_of(pool);
    CHECK(stats.blocks == 0 && stats.block_bytes >= MIB && stats.holds == 2);
    for (int i = 0; i < 3; i++) {
        if (pinpool_alloc(pool, MIB, 0, 0, (void **)&other) != PINPOOL_OK) continue;
        CHECK(other != block);
        strcpy(other, "later");
    }
    CHECK(pinpool_close(pool, 50) == PINPOOL_TIMEOUT);
    sim("hang false");
    cu("cuMemcpyDtoHAsync_v2", (uintptr_t)back, memory, sizeof back, stream);
    cu("cuStreamSynchronize", stream, 0, 0, 0);
    CHECK(strcmp(back, "first") == 0);
    /* (It was closed for new blocks above.) What is left goes with the process. */

    pool = open_pool("cuda:0", 4 * MIB);
    CHECK(pinpool_alloc(pool, 4096, 0, 0, (void **)&block) == PINPOOL_OK);
    CHECK(pinpool_hold(pool, block, NULL) == PINPOOL_OK);        /* the legacy default stream */
    CHECK(pinpool_hold(pool, block, (void *)2) == PINPOOL_OK);   /* this thread's own */
    becomes_idle(pool, block);

    /* Many holds share an event, and one that cannot be recorded is recorded later. */
    int before = recorded();
    for (int i = 0; i < 800; i++) CHECK(pinpool_hold(pool, block + i, (void *)stream) == PINPOOL_OK);
    CHECK(recorded() - before < 300);
    sim("fail cuEventRecord 1 2 false");
    CHECK(pinpool_hold(pool, block, (void *)stream) == PINPOOL_OK);
    becomes_idle(pool, block);

    uintptr_t streams[40];
    for (int i = 0; i < 40; i++) {
        streams[i] = new_stream();
        CHECK(pinpool_hold(pool, block, (void *)streams[i]) == PINPOOL_OK);
    }
    for (int i = 0; i < 40; i++) forget(pool, streams[i]);
    /* At whatever moment: the pool's own thread may be about to record the event, too. */
    for (int i = 0; i < 500; i++) {
        stream = new_stream();
        CHECK(pinpool_hold(pool, block, (void *)stream) == PINPOOL_OK);
        usleep(i % 10 * 20);
        forget(pool, stream);
    }
    becomes_idle(pool, block);
    CHECK(pinpool_forget_stream(pool, (void *)0x1234) == PINPOOL_OK);

    /* A graph keeps what was held during its capture, on a stream that the pool does not know yet, too. */
    stream = new_stream();
    cu("cuStreamBeginCapture_v2", stream, 0, 0, 0);
    cu("cuMemcpyHtoDAsync_v2", memory, (uintptr_t)block, 4096, stream);
    CHECK(pinpool_hold(pool, block + 1, (void *)stream) == PINPOOL_OK);
    cu("cuStreamEndCapture", stream, (uintptr_t)&graph, 0, 0);
    CHECK(pinpool_free(pool, block) == PINPOOL_OK);
    CHECK(stats_of(pool).block_bytes >= 4096);
    cu("cuGraphDestroy", graph, 0, 0, 0);
    for (int i = 0; i < 5000 && stats_of(pool).block_bytes > 0; i++) usleep(1000);
    CHECK(stats_of(pool).block_bytes == 0);

    /* A call that the driver refuses keeps nothing, and says why. */
    CHECK(pinpool_alloc(pool, 4096, 0, 0, (void **)&block) == PINPOOL_OK);
    CHECK(pinpool_hold(pool, block, (void *)0x40) != PINPOOL_OK);
    CHECK(strstr(pinpool_last_error(), "cuStreamGetCtx"));
    CHECK(is_idle(pool, block) == 1);
    CHECK(pinpool_free(pool, block) == PINPOOL_OK);
    close_pool(pool);

    /* The only rule that was broken is the last one above. */
    const char *violation = strstr(sim("report"), "violation ");
    if (violation) fprintf(stderr, "%.200s\n", violation);
    CHECK(violation && strncmp(violation, "violation STR-1 cuStreamGetCtx", 30) == 0);
    CHECK(!strstr(violation + 1, "violation "));
}

int main(int count, char **arguments) {
    const char *device = count > 1 && strcmp(arguments[1], "cuda") == 0 ? "cuda:0" : "host";
    CHECK(pinpool_abi_version() == PINPOOL_ABI_VERSION && strchr(pinpool_version(), '.'));
    wrong_options();
    blocks(device);
    wrong_arguments(device);
    forks(device);
    threads(device);
    if (count > 1) {
        driver = dlopen(getenv("PINPOOL_LIBCUDA"), RTLD_NOW);
        if (!driver) fprintf(stderr, "%s\n", dlerror()), exit(1);
        holds();
    }
    puts("all of it");
    return 0;
}
