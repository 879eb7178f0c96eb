// The driver's own pool of host memory, which a program has without any library: cuMemAllocFromPoolAsync and cuMemFreeAsync
// on a pool whose location is the host. Threads with a stream each, as in benches/peers/torch_host.cpp.
//
//   take_give        allocate 64 KiB and free it again, both in stream order; the CPU may not touch the memory
//   take_sync_give   the same with cuStreamSynchronize in between, after which the CPU may write, and one byte written
//   host_alloc_N     no pool: cuMemHostAlloc of N bytes and cuMemFreeHost, by one thread
//
// Prints lines of: name threads median-ns lower-quartile upper-quartile.
#include <cuda.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "check.h"

using Clock = std::chrono::steady_clock;

constexpr size_t kLen = 64 << 10;
constexpr int kRounds = 7;
constexpr int kPairs = 8000;  // in a turn, over all threads

void operate(CUmemoryPool pool, CUstream stream, bool sync, int pairs) {
  for (int i = 0; i < pairs; ++i) {
    CUdeviceptr at = 0;
    CHECK(cuMemAllocFromPoolAsync(&at, kLen, pool, stream));
    if (sync) {
      CHECK(cuStreamSynchronize(stream));
      *reinterpret_cast<volatile char*>(at) = 1;
    }
    CHECK(cuMemFreeAsync(at, stream));
  }
}

int main(int argc, char** argv) {
  std::vector<int> counts;
  for (int i = 1; i < argc; ++i) {
    counts.push_back(std::atoi(argv[i]));
  }
  if (counts.empty()) {
    counts = {1, 2, 4, 8, 16};
  }
  CUdevice device;
  CUcontext context;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CHECK(cuCtxSetCurrent(context));
  CUmemPoolProps props = {};
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.location.type = CU_MEM_LOCATION_TYPE_HOST;
  CUmemoryPool pool;
  CHECK(cuMemPoolCreate(&pool, &props));
  // Without a threshold each synchronisation would return all free memory to the system.
  cuuint64_t keep = UINT64_MAX;
  CHECK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
  CUmemAccessDesc access = {};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = 0;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CHECK(cuMemPoolSetAccess(pool, &access, 1));
  for (int threads : counts) {
    if (threads < 1 || threads > 256) {
      std::fprintf(stderr, "usage: driver_pool [THREADS...]\n");
      return 2;
    }
    for (bool sync : {false, true}) {
      std::barrier barrier(threads);
      std::vector<std::vector<double>> times(threads, std::vector<double>(kRounds));
      std::vector<std::thread> running;
      for (int n = 0; n < threads; ++n) {
        running.emplace_back([&, n] {
          CHECK(cuCtxSetCurrent(context));
          CUstream stream;
          CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
          for (int round = 0; round < kRounds; ++round) {
            operate(pool, stream, sync, std::max(1, 500 / threads));
            CHECK(cuStreamSynchronize(stream));
            barrier.arrive_and_wait();
            auto start = Clock::now();
            operate(pool, stream, sync, kPairs / threads);
            double ns = std::chrono::duration<double, std::nano>(Clock::now() - start).count();
            times[n][round] = ns / (kPairs / threads);
            CHECK(cuStreamSynchronize(stream));
            barrier.arrive_and_wait();
          }
        });
      }
      for (auto& thread : running) {
        thread.join();
      }
      std::vector<double> means;
      for (int round = 0; round < kRounds; ++round) {
        double sum = 0;
        for (int n = 0; n < threads; ++n) {
          sum += times[n][round];
        }
        means.push_back(sum / threads);
      }
      std::sort(means.begin(), means.end());
      std::printf("driver_pool_%s %d %.1f %.1f %.1f\n", sync ? "take_sync_give" : "take_give", threads,
                  means[kRounds / 2], means[kRounds / 4], means[kRounds - 1 - kRounds / 4]);
      std::fflush(stdout);
    }
  }
  for (size_t bytes : {size_t{4} << 10, size_t{16} << 20}) {
    std::vector<double> times;
    for (int round = 0; round < 21; ++round) {
      void* block = nullptr;
      auto start = Clock::now();
      CHECK(cuMemHostAlloc(&block, bytes, CU_MEMHOSTALLOC_PORTABLE));
      CHECK(cuMemFreeHost(block));
      times.push_back(std::chrono::duration<double, std::nano>(Clock::now() - start).count());
    }
    std::sort(times.begin(), times.end());
    std::printf("driver_host_alloc_%zu 1 %.1f %.1f %.1f\n", bytes, times[10], times[5], times[15]);
    std::fflush(stdout);
  }
  std::_Exit(0);
}
