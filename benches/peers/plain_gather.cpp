// Plain loops beside a copier's pieces: the packing written by hand, and the driver's own copies of pieces in their places.
//
//   plain_packing_mb_per_s_up, _down     pieces of 16 KiB of ordinary memory, in no order, into segments or out of them; no device
//   plain_gather_mb_per_s_up, _down      the same to the device and back: two segments a thread, one stream, an event for each
//   plain_batch_mb_per_s_up, _down       pinned pieces of 16 KiB between random places by cuMemcpyBatchAsync, a stream a thread
//   plain_link_mb_per_s_up, _down        one copy of the same length
//
// Bytes are checked once for each way. Prints lines of: name threads median lower-quartile upper-quartile.
//   plain_gather [THREADS...]     default: 8 12 (batches: 1 2 3)
#include <cuda.h>
#include <immintrin.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace {

using Clock = std::chrono::steady_clock;
using Byte = unsigned char;

constexpr size_t kMiB = 1 << 20;
constexpr size_t kBytes = 256 * kMiB;
constexpr size_t kPiece = 16 << 10;
constexpr size_t kCount = kBytes / kPiece;
constexpr size_t kSegment = 2 * kMiB;
constexpr int kSegments = 2;
constexpr int kMost = 32;
constexpr int kRounds = 7;

CUcontext context;
CUdeviceptr device;
CUstream streams[kMost];
Byte *segments, *pinned;
std::vector<Byte*> pieces;
std::vector<size_t> order, places;

void demand(bool equal, const char* what) {
  if (equal) return;
  std::fprintf(stderr, "%s: wrong bytes\n", what);
  std::_Exit(1);
}

// The threads are started before the clock, as the queue's helpers are.
double seconds(int threads, const std::function<void(int)>& work) {
  std::atomic<int> ready{0}, done{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i) {
    all.emplace_back([&, i] {
      CHECK(cuCtxSetCurrent(context));
      ++ready;
      while (!go) _mm_pause();
      work(i);
      ++done;
    });
  }
  while (ready < threads) _mm_pause();
  auto since = Clock::now();
  go = true;
  while (done < threads) _mm_pause();
  double taken = std::chrono::duration<double>(Clock::now() - since).count();
  for (auto& thread : all) thread.join();
  return taken;
}

void row(const std::string& name, int threads, const std::function<void(int)>& work, const std::function<void()>& before = [] {}) {
  std::vector<double> rates;
  for (int i = 0; i <= kRounds; ++i) {
    before();
    double taken = seconds(threads, work);
    if (i > 0) rates.push_back(static_cast<double>(kBytes) / taken / 1e6);
  }
  std::sort(rates.begin(), rates.end());
  std::printf("%s %d %.1f %.1f %.1f\n", name.c_str(), threads, rates[kRounds / 2], rates[kRounds / 4],
              rates[kRounds - 1 - kRounds / 4]);
  std::fflush(stdout);
}

void wait(CUevent event) {
  while (cuEventQuery(event) == CUDA_ERROR_NOT_READY) _mm_pause();
}

// One thread's part: neighbours on the device, anywhere on the host.
void gather(int number, std::atomic<size_t>& next, bool down, bool alone) {
  constexpr size_t kPer = kSegment / kPiece;
  CUevent events[kSegments];
  size_t first[kSegments];
  bool used[kSegments] = {};
  for (auto& event : events) CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  auto segment = [&](int k) { return segments + (static_cast<size_t>(number) * kSegments + k) * kSegment; };
  auto finish = [&](int k) {
    if (!used[k]) return;
    used[k] = false;
    if (!alone) wait(events[k]);
    for (size_t i = 0; down && i < kPer; ++i) std::memcpy(pieces[order[first[k] + i]], segment(k) + i * kPiece, kPiece);
  };
  for (int k = 0;; k = (k + 1) % kSegments) {
    finish(k);
    size_t at = next.fetch_add(kPer);
    if (at >= kCount) break;
    for (size_t i = 0; !down && i < kPer; ++i) std::memcpy(segment(k) + i * kPiece, pieces[order[at + i]], kPiece);
    if (!alone) {
      if (down) {
        CHECK(cuMemcpyDtoHAsync(segment(k), device + at * kPiece, kSegment, streams[0]));
      } else {
        CHECK(cuMemcpyHtoDAsync(device + at * kPiece, segment(k), kSegment, streams[0]));
      }
      CHECK(cuEventRecord(events[k], streams[0]));
    }
    used[k] = true;
    first[k] = at;
  }
  for (int k = 0; k < kSegments; ++k) finish(k);
  for (auto& event : events) CHECK(cuEventDestroy(event));
}

// One thread's part: pieces between random places, in batches, eight batches outstanding.
void batches(int number, std::atomic<size_t>& next, bool down) {
  const size_t per = down ? 256 : 64;
  constexpr int kAhead = 8;
  CUevent events[kAhead];
  for (auto& event : events) CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  std::vector<CUdeviceptr> to(per), from(per);
  std::vector<size_t> lengths(per, kPiece);
  CUmemcpyAttributes attributes;
  std::memset(&attributes, 0, sizeof attributes);
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  size_t start = 0;
  int n = 0;
  for (;; ++n) {
    size_t at = next.fetch_add(per);
    if (at >= kCount) break;
    for (size_t i = 0; i < per; ++i) {
      auto host = reinterpret_cast<CUdeviceptr>(pinned + order[at + i] * kPiece);
      auto there = device + places[at + i] * kPiece;
      to[i] = down ? host : there;
      from[i] = down ? there : host;
    }
    if (n >= kAhead) wait(events[n % kAhead]);
    CHECK(cuMemcpyBatchAsync(to.data(), from.data(), lengths.data(), per, &attributes, &start, 1, streams[number]));
    CHECK(cuEventRecord(events[n % kAhead], streams[number]));
  }
  CHECK(cuStreamSynchronize(streams[number]));
  for (auto& event : events) CHECK(cuEventDestroy(event));
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> counts;
  for (int i = 1; i < argc; ++i) counts.push_back(std::clamp(std::atoi(argv[i]), 1, kMost));
  if (counts.empty()) counts = {8, 12};
  CUdevice gpu;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&gpu, 0));
  CHECK(cuDevicePrimaryCtxRetain(&context, gpu));
  CHECK(cuCtxSetCurrent(context));
  for (auto& stream : streams) CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&device, 2 * kBytes));
  CHECK(cuMemHostAlloc(reinterpret_cast<void**>(&segments), kMost * kSegments * kSegment, 0));
  CHECK(cuMemHostAlloc(reinterpret_cast<void**>(&pinned), kBytes, 0));
  std::memset(segments, 1, kMost * kSegments * kSegment);
  std::memset(pinned, 1, kBytes);
  for (size_t i = 0; i < kCount; ++i) {
    pieces.push_back(static_cast<Byte*>(std::malloc(kPiece)));
    std::memset(pieces[i], static_cast<int>(i * 7 + 3), kPiece);
    order.push_back(i);
    places.push_back(i);
  }
  std::mt19937 random(7);
  std::shuffle(order.begin(), order.end(), random);
  std::shuffle(places.begin(), places.end(), random);

  row("plain_link_mb_per_s_up", 1, [](int) { CHECK(cuMemcpyHtoD(device, pinned, kBytes)); });
  row("plain_link_mb_per_s_down", 1, [](int) { CHECK(cuMemcpyDtoH(pinned, device, kBytes)); });
  std::atomic<size_t> next;
  auto again = [&] { next = 0; };
  for (int threads : counts) {
    row("plain_packing_mb_per_s_up", threads, [&](int i) { gather(i, next, false, true); }, again);
    row("plain_gather_mb_per_s_up", threads, [&](int i) { gather(i, next, false, false); }, again);
    for (auto* piece : pieces) std::memset(piece, 0, kPiece);
    row("plain_gather_mb_per_s_down", threads, [&](int i) { gather(i, next, true, false); }, again);
    for (size_t i = 0; i < kCount; ++i) {
      bool right = pieces[i][0] == static_cast<Byte>(i * 7 + 3);
      demand(right && std::memcmp(pieces[i], pieces[i] + 1, kPiece - 1) == 0, "plain_gather");
    }
  }
  for (int threads : {1, 2, 3}) {
    for (size_t i = 0; i < kCount; ++i) std::memset(pinned + i * kPiece, static_cast<int>(i * 5 + 1), kPiece);
    row("plain_batch_mb_per_s_up", threads, [&](int i) { batches(i, next, false); }, again);
    std::memset(pinned, 0, kBytes);
    row("plain_batch_mb_per_s_down", threads, [&](int i) { batches(i, next, true); }, again);
    for (size_t i = 0; i < kCount; ++i) {
      Byte* piece = pinned + i * kPiece;
      demand(piece[0] == static_cast<Byte>(i * 5 + 1) && std::memcmp(piece, piece + 1, kPiece - 1) == 0, "plain_batch");
    }
  }
  return 0;
}
