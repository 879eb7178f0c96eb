// Plain loops beside the copier: the staging written by hand. Two segments of page-locked memory for each thread, a few
// streams, an event for each copy, a counter from which the threads take the chunks.
//
//   plain_link_mb_per_s_up, _down, _both   page-locked memory, nothing staged
//   with `files`:
//   plain_read_mb_per_s                    a cached file into the segments by pread, no device
//   plain_file_mb_per_s                    a cached file to the device
//   plain_small_mb_per_s                   256 MiB of it: shows the loss at the start and the end of a load of that size
//   with `memory`:
//   plain_pageable_mb_per_s_up, _down      the driver's own copy of touched ordinary memory
//   plain_slice_mb_per_s                   touched ordinary memory to the device
//   plain_touched_mb_per_s                 the device to touched ordinary memory, by stores past the caches
//   plain_both_mb_per_s                    the last two at once, each with that many threads
//
// Bytes are checked once for each row. Prints lines of: name threads median lower-quartile upper-quartile.
//   plain_pipeline files|memory [THREADS...]     default: 8 16
#include <cuda.h>
#include <fcntl.h>
#include <immintrin.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace {

using Clock = std::chrono::steady_clock;
using Byte = unsigned char;

constexpr size_t kMiB = 1 << 20;
constexpr size_t kBytes = 1024 * kMiB;
constexpr size_t kFile = 4096 * kMiB;
constexpr size_t kSmall = 256 * kMiB;
constexpr size_t kChunk = 4 * kMiB;
constexpr int kSegments = 2;  // of each thread
constexpr int kStreams = 4;   // of each direction
constexpr int kMost = 16;     // threads
constexpr int kRounds = 5;

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::_Exit(1);
}

CUcontext context;
CUstream streams[2][kStreams];
Byte* segments[2];
int file;

double seconds(const std::function<void()>& work) {
  auto since = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - since).count();
}

void together(int threads, const std::function<void(int)>& work) {
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i) {
    all.emplace_back([&, i] {
      CHECK(cuCtxSetCurrent(context));
      work(i);
    });
  }
  for (auto& thread : all) thread.join();
}

Byte* ordinary(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) fail("mmap");
  return static_cast<Byte*>(at);
}

void read_all(Byte* to, size_t at) {
  for (size_t have = 0; have < kChunk;) {
    ssize_t n = pread(file, to + have, kChunk - have, static_cast<off_t>(at + have));
    if (n <= 0) fail("pread");
    have += static_cast<size_t>(n);
  }
}

// Both sides start on a cache line, and chunks are whole cache lines.
void past_the_caches(Byte* to, const Byte* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) {
    for (size_t half = 0; half < 64; half += 16) {
      auto part = _mm_load_si128(reinterpret_cast<const __m128i*>(from + i + half));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + half), part);
    }
  }
  _mm_sfence();
}

enum class Way { kRead, kFile, kSlice, kTouched };

void move(Way way, int threads, size_t bytes, Byte* memory, CUdeviceptr device) {
  std::atomic<size_t> next{0};
  const bool down = way == Way::kTouched;
  together(threads, [&](int number) {
    CUstream stream = streams[down][number % kStreams];
    CUevent events[kSegments];
    size_t where[kSegments];
    bool used[kSegments] = {};
    for (auto& event : events) CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    auto segment = [&](int k) { return segments[down] + (static_cast<size_t>(number) * kSegments + k) * kChunk; };
    auto finish = [&](int k) {
      if (!used[k]) return;
      used[k] = false;
      while (cuEventQuery(events[k]) == CUDA_ERROR_NOT_READY) usleep(5);
      if (down) past_the_caches(memory + where[k], segment(k), kChunk);
    };
    for (int k = 0;; k = (k + 1) % kSegments) {
      size_t at = next.fetch_add(kChunk);
      if (at >= bytes) break;
      finish(k);
      if (way == Way::kRead || way == Way::kFile) read_all(segment(k), at);
      if (way == Way::kSlice) std::memcpy(segment(k), memory + at, kChunk);
      if (way == Way::kRead) continue;
      if (down) {
        CHECK(cuMemcpyDtoHAsync(segment(k), device + at, kChunk, stream));
      } else {
        CHECK(cuMemcpyHtoDAsync(device + at, segment(k), kChunk, stream));
      }
      CHECK(cuEventRecord(events[k], stream));
      used[k] = true;
      where[k] = at;
    }
    for (int k = 0; k < kSegments; ++k) finish(k);
    for (auto& event : events) CHECK(cuEventDestroy(event));
  });
}

void row(const std::string& name, int threads, size_t bytes, const std::function<void()>& work) {
  std::vector<double> rates;
  for (int i = 0; i < kRounds; ++i) rates.push_back(static_cast<double>(bytes) / seconds(work) / 1e6);
  std::sort(rates.begin(), rates.end());
  std::printf("%s %d %.1f %.1f %.1f\n", name.c_str(), threads, rates[kRounds / 2], rates[kRounds / 4],
              rates[kRounds - 1 - kRounds / 4]);
  std::fflush(stdout);
}

void demand(bool equal, const char* what) {
  if (equal) return;
  std::fprintf(stderr, "%s: wrong bytes\n", what);
  std::_Exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what != "files" && what != "memory") {
    std::fprintf(stderr, "usage: plain_pipeline files|memory [THREADS...]\n");
    return 2;
  }
  std::vector<int> counts;
  for (int i = 2; i < argc; ++i) counts.push_back(std::clamp(std::atoi(argv[i]), 1, kMost));
  if (counts.empty()) counts = {8, 16};
  CUdevice device;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CHECK(cuCtxSetCurrent(context));
  for (auto& direction : streams) {
    for (auto& stream : direction) CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  }
  CUdeviceptr to_device, from_device;
  CHECK(cuMemAlloc(&to_device, kFile));
  CHECK(cuMemAlloc(&from_device, kBytes));
  for (auto& part : segments) {
    CHECK(cuMemHostAlloc(reinterpret_cast<void**>(&part), kMost * kSegments * kChunk, 0));
    std::memset(part, 1, kMost * kSegments * kChunk);
  }
  Byte *source = ordinary(kBytes), *target = ordinary(kBytes), *locked[2];
  for (size_t i = 0; i < kBytes; i += 8) {
    uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ULL;
    std::memcpy(source + i, &x, 8);
  }
  std::memset(target, 1, kBytes);
  for (auto& part : locked) CHECK(cuMemHostAlloc(reinterpret_cast<void**>(&part), kBytes, 0));
  std::memcpy(locked[0], source, kBytes);
  char name[] = "/tmp/plain-XXXXXX";
  file = mkstemp(name);
  if (file < 0) fail("mkstemp");
  unlink(name);
  for (size_t at = 0; what == "files" && at < kFile; at += kBytes) {
    for (size_t have = 0; have < kBytes;) {
      ssize_t n = write(file, source + have, kBytes - have);
      if (n <= 0) fail("write");
      have += static_cast<size_t>(n);
    }
  }
  auto verify = [&](CUdeviceptr at, const char* what) {
    CHECK(cuMemcpyDtoH(locked[1], at, kBytes));
    demand(std::memcmp(locked[1], source, kBytes) == 0, what);
    CHECK(cuMemsetD8(at, 0, kBytes));
  };

  row("plain_link_mb_per_s_up", 1, kBytes, [&] { CHECK(cuMemcpyHtoD(from_device, locked[0], kBytes)); });
  row("plain_link_mb_per_s_down", 1, kBytes, [&] { CHECK(cuMemcpyDtoH(locked[1], from_device, kBytes)); });
  row("plain_link_mb_per_s_both", 1, 2 * kBytes, [&] {
    CHECK(cuMemcpyHtoDAsync(to_device, locked[0], kBytes, streams[0][0]));
    CHECK(cuMemcpyDtoHAsync(locked[1], from_device, kBytes, streams[1][0]));
    CHECK(cuStreamSynchronize(streams[0][0]));
    CHECK(cuStreamSynchronize(streams[1][0]));
  });
  if (what == "memory") {
    row("plain_pageable_mb_per_s_up", 1, kBytes, [&] { CHECK(cuMemcpyHtoD(to_device, source, kBytes)); });
    verify(to_device, "plain_pageable_up");
    row("plain_pageable_mb_per_s_down", 1, kBytes, [&] { CHECK(cuMemcpyDtoH(target, from_device, kBytes)); });
    demand(std::memcmp(target, source, kBytes) == 0, "plain_pageable_down");
    std::memset(target, 1, kBytes);
  }
  for (int threads : counts) {
    if (what == "files") {
      row("plain_read_mb_per_s", threads, kFile, [&] { move(Way::kRead, threads, kFile, nullptr, 0); });
      row("plain_file_mb_per_s", threads, kFile, [&] { move(Way::kFile, threads, kFile, nullptr, to_device); });
      verify(to_device + kFile - kBytes, "plain_file");
      row("plain_small_mb_per_s", threads, kSmall, [&] { move(Way::kFile, threads, kSmall, nullptr, to_device); });
      continue;
    }
    row("plain_slice_mb_per_s", threads, kBytes, [&] { move(Way::kSlice, threads, kBytes, source, to_device); });
    verify(to_device, "plain_slice");
    row("plain_touched_mb_per_s", threads, kBytes, [&] { move(Way::kTouched, threads, kBytes, target, from_device); });
    demand(std::memcmp(target, source, kBytes) == 0, "plain_touched");
    std::memset(target, 1, kBytes);
    row("plain_both_mb_per_s", threads, 2 * kBytes, [&] {
      std::thread up([&] { move(Way::kSlice, threads, kBytes, source, to_device); });
      move(Way::kTouched, threads, kBytes, target, from_device);
      up.join();
    });
    verify(to_device, "plain_both up");
    demand(std::memcmp(target, source, kBytes) == 0, "plain_both down");
  }
  return 0;
}
