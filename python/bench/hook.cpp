// Loops of C++ threads over torch's hook, for bench.py: no interpreter in the way. `at::getHostAllocator` is what torch
// itself calls at each use; which allocator it answers with, bench.py chooses between the loops.
#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

using Clock = std::chrono::steady_clock;

// Runs `work(thread, stream)` on so many threads at once, each with a stream of its own. The seconds; after an exception
// of one, negative.
template <typename F>
static double on_threads(int threads, F work) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false}, failed{false};
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i) {
    all.emplace_back([&, i] {
      try {
        auto stream = c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(c10::Device(c10::kCUDA, 0));
        for (ready.fetch_add(1); !go.load();) {
          std::this_thread::yield();
        }
        work(i, stream);
      } catch (const c10::Error& error) {
        fprintf(stderr, "bench: %s\n", error.what_without_backtrace());
        ready.fetch_add(1);
        failed.store(true);
      }
    });
  }
  while (ready.load() < threads) {
    std::this_thread::yield();
  }
  auto start = Clock::now();
  go.store(true);
  for (auto& thread : all) {
    thread.join();
  }
  return failed.load() ? -1 : std::chrono::duration<double>(Clock::now() - start).count();
}

extern "C" {
// Nanoseconds that one allocation and its return take a thread, with an event of the thread's stream or without.
double bench_pairs(int threads, size_t bytes, int event, int millis) {
  std::atomic<uint64_t> pairs{0};
  auto seconds = on_threads(threads, [&](int, c10::Stream stream) {
    uint64_t done = 0;
    for (auto end = Clock::now() + std::chrono::milliseconds(millis); Clock::now() < end;) {
      for (int i = 0; i < 16; ++i, ++done) {
        auto* allocator = at::getHostAllocator(c10::kCUDA);
        auto data = allocator->allocate(bytes);
        if (event) {
          allocator->record_event(data.get(), data.get_context(), stream);
        }
      }
    }
    pairs.fetch_add(done);
  });
  return seconds < 0 || pairs.load() == 0 ? -1 : seconds * 1e9 * threads / static_cast<double>(pairs.load());
}

// Bytes that are alive, and the most that were so far.
struct Alive {
  std::atomic<int64_t> now{0}, most{0};

  void change(int64_t bytes) {
    auto sum = now.fetch_add(bytes) + bytes;
    for (auto most_so_far = most.load(); sum > most_so_far && !most.compare_exchange_weak(most_so_far, sum);) {
    }
  }
};

static int64_t power_of_two(int64_t bytes) {
  int64_t power = 1;
  while (power < bytes) {
    power *= 2;
  }
  return power;
}

// A server: each worker makes steps of 8 pinned tensors that go to the device and are dropped at once, and waits for a
// small result. The latencies of the steps after `warm`, in microseconds; the steps a second, or -1. `peaks`: the most bytes
// of these tensors that were in use at once, each from its allocation to the end of its step; and the same with each
// rounded up to a power of two.
double bench_server(
    int workers, int steps, int warm, const int64_t* sizes, int count, double* latencies, int64_t* peaks) {
  Alive asked, rounded;
  auto seconds = on_threads(workers, [&](int worker, c10::Stream stream) {
    c10::StreamGuard guard(stream);
    std::mt19937 random(worker);
    auto pinned = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
    for (int step = 0; step < steps; ++step) {
      auto start = Clock::now();
      std::vector<at::Tensor> batch;
      int64_t bytes = 0, powers = 0;
      for (int i = 0; i < 8; ++i) {
        auto size = sizes[random() % count];
        bytes += size, powers += power_of_two(size);
        asked.change(size), rounded.change(power_of_two(size));
        auto host = at::empty({size}, pinned);
        memset(host.data_ptr(), step, std::min<int64_t>(host.numel(), 4096));
        batch.push_back(host.to(c10::Device(c10::kCUDA, 0), at::kByte, /*non_blocking=*/true));
      }
      auto result = batch.back().slice(0, 0, 64).to(c10::Device(c10::kCPU), at::kByte, /*non_blocking=*/true);
      stream.synchronize();
      asked.change(-bytes), rounded.change(-powers);
      TORCH_CHECK(result.data_ptr<uint8_t>()[0] == static_cast<uint8_t>(step), "a step has the bytes of another");
      if (step >= warm) {
        latencies[worker * (steps - warm) + step - warm] =
            std::chrono::duration<double, std::micro>(Clock::now() - start).count();
      }
    }
  });
  peaks[0] = asked.most.load(), peaks[1] = rounded.most.load();
  return seconds < 0 ? -1 : workers * steps / seconds;
}
}
