/* Between the pool and libcuda.so.1: remembers the stream that was created last.
 *
 * The pool's own streams have no public handle, and the bench of the reaper has to put a kernel on one. Built as a shared
 * library that depends on libcuda.so.1, and named by PINPOOL_LIBCUDA, this serves the calls that create streams; every other one is
 * looked up in the library itself, then in those that it depends on, and so is the driver's.
 *
 *     cc -shared -fPIC -o spy.so spy.c -Wl,--no-as-needed -l:libcuda.so.1 -ldl
 */
#include <dlfcn.h>
#include <stddef.h>

static void *volatile last;

static void *real(const char *name) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return driver ? dlsym(driver, name) : NULL;
}

static unsigned noted(unsigned code, void **stream) {
    if (code == 0) last = *stream;
    return code;
}

unsigned cuStreamCreate(void **stream, unsigned flags) {
    unsigned (*call)(void **, unsigned) = (unsigned (*)(void **, unsigned))real("cuStreamCreate");
    return call ? noted(call(stream, flags), stream) : 500; /* CUDA_ERROR_NOT_FOUND */
}

unsigned cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    unsigned (*call)(void **, unsigned, int) =
        (unsigned (*)(void **, unsigned, int))real("cuStreamCreateWithPriority");
    return call ? noted(call(stream, flags, priority), stream) : 500;
}

void *spy_last_stream(void) { return last; }
