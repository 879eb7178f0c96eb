// PyTorch's caching host allocator, called from C++ as PyTorch's own copies call it: the peer that a server built on libtorch
// would use in pinpool's place. Measured as benches/checkout and benches/completion.rs measure the pool: threads with a
// stream each, contenders in turn, a mean over the threads, the median of the rounds.
//
//   take_give          allocate, and free by dropping the pointer
//   take_record_give   the same, with record_event for the thread's stream in between; no copy
//   copy_bare          cudaMemcpyAsync from one block of memory from cudaHostAlloc, nothing else
//   copy_event         the same and cudaEventRecord of its own event, without timing
//   copy_record        allocate, cudaMemcpyAsync, record_event, free
//
// The copies go in batches (128); after each batch the thread polls every 2 us until the last copy is complete. Blocks are
// allocated beforehand, so that no call of cudaHostAlloc is measured unless the allocator grows by itself.
//
// `take` measures the first two, `copy` the others. Prints lines of: name threads median-ns lower-quartile upper-quartile.
#include <ATen/Context.h>
#include <ATen/cuda/CachingHostAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

using Clock = std::chrono::steady_clock;

constexpr size_t kSmall = 4 << 10;
constexpr size_t kLarge = 64 << 10;
constexpr int kBatch = 128;
constexpr int kRounds = 15;
constexpr int kPairs = 40000;  // in a turn, over all threads
constexpr int kCopies = 8192;  // the same

void check(cudaError_t code, const char* call) {
  if (code != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(code));
    std::_Exit(1);
  }
}
#define CHECK(call) check(call, #call)

double since(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

at::HostAllocator* host() {
  return at::getHostAllocator(at::kCUDA);
}

void record(const at::DataPtr& block, c10::cuda::CUDAStream stream) {
  if (!host()->record_event(block.get(), block.get_context(), stream.unwrap())) {
    std::fprintf(stderr, "record_event does not know the block\n");
    std::_Exit(1);
  }
}

// A thread's own state.
struct Local {
  c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(false, 0);
  char* source = nullptr;  // room for a batch of the larger copies
  char* target = nullptr;
  std::vector<cudaEvent_t> events;

  Local() : events(kBatch) {
    void* pinned = nullptr;
    void* device = nullptr;
    CHECK(cudaHostAlloc(&pinned, kBatch * kLarge, cudaHostAllocPortable));
    CHECK(cudaMalloc(&device, kBatch * kLarge));
    source = static_cast<char*>(pinned);
    target = static_cast<char*>(device);
    for (auto& event : events) {
      CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
  }
  ~Local() {
    CHECK(cudaStreamSynchronize(stream.stream()));
    for (auto& event : events) {
      CHECK(cudaEventDestroy(event));
    }
    CHECK(cudaFree(target));
    CHECK(cudaFreeHost(source));
  }
};

// Polls every 2 us.
void wait(cudaEvent_t event) {
  for (;;) {
    cudaError_t code = cudaEventQuery(event);
    if (code == cudaSuccess) {
      return;
    }
    if (code != cudaErrorNotReady) {
      check(code, "cudaEventQuery");
    }
    auto start = Clock::now();
    while (since(start) < 2000) {
    }
  }
}

enum class Way { take_give, take_record_give, copy_bare, copy_event, copy_record };

struct Contender {
  const char* name;
  Way way;
  size_t len;
};

void batch(Way way, size_t len, Local& local) {
  auto stream = local.stream.stream();
  for (int i = 0; i < kBatch; ++i) {
    char* to = local.target + i * len;
    if (way == Way::copy_record) {
      at::DataPtr block = host()->allocate(len);
      CHECK(cudaMemcpyAsync(to, block.get(), len, cudaMemcpyHostToDevice, stream));
      record(block, local.stream);
      continue;
    }
    CHECK(cudaMemcpyAsync(to, local.source + i * len, len, cudaMemcpyHostToDevice, stream));
    if (way == Way::copy_event) {
      CHECK(cudaEventRecord(local.events[i], stream));
    }
  }
  if (way != Way::copy_event) {
    CHECK(cudaEventRecord(local.events[kBatch - 1], stream));
  }
  wait(local.events[kBatch - 1]);
}

// One thread's operations. Returns their number.
int operate(const Contender& contender, Local& local, int threads, bool warm) {
  switch (contender.way) {
    case Way::take_give:
    case Way::take_record_give: {
      int pairs = warm ? 1000 / threads : kPairs / threads;
      for (int i = 0; i < pairs; ++i) {
        at::DataPtr block = host()->allocate(contender.len);
        *static_cast<volatile char*>(block.get()) = 1;
        if (contender.way == Way::take_record_give) {
          record(block, local.stream);
        }
      }
      return pairs;
    }
    default: {
      int batches = warm ? 1 : std::max(1, kCopies / threads / kBatch);
      for (int i = 0; i < batches; ++i) {
        batch(contender.way, contender.len, local);
      }
      return batches * kBatch;
    }
  }
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>((values.size() - 1) * q + 0.5)];
}

void run(const std::vector<Contender>& contenders, int threads) {
  std::barrier barrier(threads);
  // By thread, contender and round.
  std::vector<std::vector<std::vector<double>>> times(
      threads, std::vector<std::vector<double>>(contenders.size(), std::vector<double>(kRounds)));
  std::vector<std::thread> running;
  for (int n = 0; n < threads; ++n) {
    running.emplace_back([&, n] {
      c10::cuda::set_device(0);
      Local local;
      for (int round = 0; round < kRounds; ++round) {
        for (size_t i = 0; i < contenders.size(); ++i) {
          size_t turn = (i + round) % contenders.size();
          operate(contenders[turn], local, threads, true);
          barrier.arrive_and_wait();
          auto start = Clock::now();
          int operations = operate(contenders[turn], local, threads, false);
          times[n][turn][round] = since(start) / operations;
          barrier.arrive_and_wait();
        }
      }
      barrier.arrive_and_wait();
    });
  }
  for (auto& thread : running) {
    thread.join();
  }
  for (size_t i = 0; i < contenders.size(); ++i) {
    std::vector<double> means;
    for (int round = 0; round < kRounds; ++round) {
      double sum = 0;
      for (int n = 0; n < threads; ++n) {
        sum += times[n][i][round];
      }
      means.push_back(sum / threads);
    }
    std::printf("torch_%s_%zu %d %.1f %.1f %.1f\n", contenders[i].name, contenders[i].len, threads,
                quantile(means, 0.5), quantile(means, 0.25), quantile(means, 0.75));
    std::fflush(stdout);
  }
}

int main(int argc, char** argv) {
  std::vector<int> counts;
  const std::string what = argc > 1 ? argv[1] : "";
  for (int i = 2; i < argc; ++i) {
    counts.push_back(std::atoi(argv[i]));
  }
  if (counts.empty()) {
    counts = {1, 2, 4, 8, 16};
  }
  for (int threads : counts) {
    if (threads < 1 || threads > 256 || (what != "take" && what != "copy")) {
      std::fprintf(stderr, "usage: torch_host take|copy [THREADS...]\n");
      return 2;
    }
  }
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  c10::cuda::set_device(0);
  CHECK(cudaFree(nullptr));
  int most = *std::max_element(counts.begin(), counts.end());
  // More blocks than can be in flight.
  for (size_t len : {kSmall, kLarge}) {
    std::vector<at::DataPtr> blocks;
    for (int i = 0; i < most * kBatch * 5 / 4; ++i) {
      blocks.push_back(host()->allocate(len));
    }
  }
  std::printf("# name threads ns quartile quartile\n");
  std::vector<Contender> contenders = {
      {"take_give", Way::take_give, kLarge},
      {"take_record_give", Way::take_record_give, kLarge},
  };
  if (what == "copy") {
    contenders = {
        {"copy_bare", Way::copy_bare, kSmall},
        {"copy_event", Way::copy_event, kSmall},
        {"copy_record", Way::copy_record, kSmall},
        {"copy_bare", Way::copy_bare, kLarge},
        {"copy_event", Way::copy_event, kLarge},
        {"copy_record", Way::copy_record, kLarge},
    };
  }
  for (int threads : counts) {
    run(contenders, threads);
  }
  std::fflush(stdout);
  // Ends without freeing thousands of blocks.
  std::_Exit(0);
}
