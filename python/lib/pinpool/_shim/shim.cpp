// torch's pinned memory from a pinpool pool, by torch's own hook: at::setHostAllocator replaces the allocator that
// `pin_memory()`, `torch.empty(pin_memory=True)`, DataLoader and non-blocking copies ask for pinned memory.
//
// How: `Allocator` implements at::HostAllocator on pinpool's C interface. A block's address is its DataPtr's context,
// so that nothing is allocated beside the block. `record_event` makes the pool hold the block until what is queued on
// the stream so far is complete, for any address inside a block. The C entry points at the end are for `pinpool.torch`.
//
// Why no object here has a destructor: torch frees tensors until the process is gone, after static destructors too.
// The pool, the allocator and the lists are made once and never destroyed; the system takes back the memory.
//
// Built with torch's headers alone: CUDA's are not needed, since torch's guards answer for streams and devices.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/headeronly/version.h>

#include <dlfcn.h>
#include <pinpool.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

namespace {

// Pinpool's functions. Looked up in the library of the Python module, not by the loader in all that is loaded: a process
// may have another copy of pinpool, whose pools are not this one's.
#define PINPOOL_FUNCTIONS(each) \
  each(alloc) each(free) each(get_stats) each(hold) each(hold_on) each(last_error) each(open) each(trim)
#define PINPOOL_MEMBER(name) decltype(&pinpool_##name) name;
struct {
  PINPOOL_FUNCTIONS(PINPOOL_MEMBER)
} pinpool{};

// What a thread keeps: 4 MiB of each size.
constexpr uint64_t kThreadCache = 32 << 20;

struct Options {
  std::string device; // "": the device that is current when the pool is opened
  uint64_t capacity, initial, largest;
  uint32_t backing;
};

// Constant-initialised and trivially destroyed: the deleter of a tensor that outlives everything reads it.
std::atomic<pinpool_pool*> g_pool{nullptr};
std::atomic<int> g_device{-1}; // the pool's first
std::atomic<uint64_t> g_wait_ms{0};
std::mutex* g_open = new std::mutex;
Options* g_options = new Options{};

// Opens the pool at the first call. Late, since it initialises CUDA: a server forks and sets devices after `install`.
C10_NOINLINE pinpool_pool* open_pool() {
  std::lock_guard<std::mutex> guard(*g_open);
  if (auto* pool = g_pool.load(std::memory_order_acquire)) {
    return pool;
  }
  std::string device = g_options->device;
  if (device.empty()) {
    device = "cuda:" + std::to_string(int(c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice().index()));
  }
  pinpool_options wanted{};
  wanted.size = sizeof(wanted);
  wanted.device = device.c_str();
  wanted.capacity = g_options->capacity;
  wanted.initial = g_options->initial;
  wanted.largest = g_options->largest;
  wanted.thread_cache = kThreadCache;
  wanted.backing = g_options->backing;
  wanted.name = "torch";
  pinpool_pool* pool = nullptr;
  auto status = pinpool.open(&wanted, &pool);
  TORCH_CHECK(status == PINPOOL_OK, "pinpool: the pool on ", device, " was not opened: ", pinpool.last_error());
  if (device.rfind("cuda:", 0) == 0) {
    g_device.store(std::stoi(device.substr(5)), std::memory_order_relaxed);
  }
  // Pairs with the acquire loads: a thread that sees the pool sees its device.
  g_pool.store(pool, std::memory_order_release);
  return pool;
}

inline pinpool_pool* the_pool() {
  auto* pool = g_pool.load(std::memory_order_acquire);
  return C10_LIKELY(pool != nullptr) ? pool : open_pool();
}

// The block is used again when its holds are over. A forked child cannot give back what its parent allocated; nor is
// there anything that a deleter could do about an error.
void release(void* block) {
  if (block != nullptr) {
    pinpool.free(g_pool.load(std::memory_order_acquire), block);
  }
}

// Keeps the block at `address` until what is queued on `stream` so far is complete; a stream that is captured: for as
// long as the graph exists. False: no block is there.
bool hold(const void* address, c10::Stream stream) {
  auto* pool = g_pool.load(std::memory_order_acquire);
  if (pool == nullptr || address == nullptr) {
    return false;
  }
  auto index = stream.device_index();
  auto* raw = stream.native_handle();
  auto status = C10_LIKELY(index == g_device.load(std::memory_order_relaxed))
      ? pinpool.hold(pool, address, raw)
      : pinpool.hold_on(pool, address, ("cuda:" + std::to_string(int(index))).c_str(), raw);
  if (C10_LIKELY(status == PINPOOL_OK || status == PINPOOL_UNKNOWN)) {
    return status == PINPOOL_OK;
  }
  // In a captured graph waiting protects nothing.
  TORCH_CHECK(status != PINPOOL_CAPTURING, "pinpool: the graph cannot hold pinned memory: ", pinpool.last_error());
  // Without a hold the block could be used again under the copy. Waiting is slow and right.
  TORCH_WARN_ONCE("pinpool: copies on a stream of cuda:", std::to_string(int(index)), " are waited for: ", pinpool.last_error());
  stream.synchronize();
  return true;
}

class Allocator final : public at::HostAllocator {
 public:
  explicit Allocator(at::HostAllocator* before) : before_(before) {}

  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    }
    // Alignment 0 is 64 bytes, as torch aligns tensors in host memory.
    void* block = nullptr;
    auto status = pinpool.alloc(the_pool(), bytes, 0, g_wait_ms.load(std::memory_order_relaxed), &block);
    if (C10_UNLIKELY(status != PINPOOL_OK)) {
      return refused(status, bytes);
    }
    at::DataPtr data{block, block, &release, c10::Device(c10::kCPU)};
    // What the graph reads by this address, it reads at each replay: the graph keeps the block, copied or not.
    if (C10_UNLIKELY(captures_.load(std::memory_order_relaxed) != 0)) {
      hold_captured(block);
    }
    return data;
  }

  // The context is the block's address, as raw_allocate and raw_deallocate require.
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* dest, const void* src, std::size_t bytes) const override {
    default_copy_data(dest, src, bytes);
  }

  // `address` may lie anywhere inside the block. What is not of the pool was pinned before `install`: torch's own
  // allocator knows it, or it is foreign.
  bool record_event(void* address, void* context, c10::Stream stream) override {
    return hold(address, stream) || (context != address && hold(context, stream)) ||
        before_->record_event(address, context, stream);
  }

  void empty_cache() override {
    uint64_t bytes = 0;
    if (auto* pool = g_pool.load(std::memory_order_acquire)) {
      pinpool.trim(pool, &bytes);
    }
    before_->empty_cache();
  }

  // Requests are the pool's blocks, what torch calls allocated is what is pinned. The pool counts no peaks: they are
  // of what these calls saw.
  at::HostStats get_stats() override {
    std::lock_guard<std::mutex> guard(stats_mutex_);
    pinpool_stats now{};
    now.size = sizeof(now);
    auto* pool = g_pool.load(std::memory_order_acquire);
    if (pool != nullptr && pinpool.get_stats(pool, &now) == PINPOOL_OK) {
      auto set = [](at::Stat& stat, uint64_t value) {
        stat.current = static_cast<int64_t>(value);
        stat.peak = std::max(stat.peak, stat.current);
      };
      set(stats_.active_requests, now.blocks);
      set(stats_.active_bytes, now.block_bytes);
      set(stats_.allocated_bytes, now.pinned_bytes);
      stats_.active_requests.allocated = static_cast<int64_t>(now.allocations - base_.allocations);
      stats_.active_requests.freed = static_cast<int64_t>(now.frees - base_.frees);
    }
    return stats_;
  }

  void reset_accumulated_stats() override {
    auto now = get_stats().active_requests;
    std::lock_guard<std::mutex> guard(stats_mutex_);
    base_.allocations += now.allocated;
    base_.frees += now.freed;
  }

  void reset_peak_stats() override {
    std::lock_guard<std::mutex> guard(stats_mutex_);
    for (auto* stat : {&stats_.active_requests, &stats_.active_bytes, &stats_.allocated_bytes}) {
      stat->peak = 0;
    }
  }

  // Between these two, `filter` says which streams the capture is on. Graphs keep the pool's blocks themselves. Torch's
  // own allocator is told, too: it serves the largest blocks, and knows the graphs from before `install`.
  void begin_allocate_to_pool(c10::MempoolId_t id, std::function<bool(c10::Stream)> filter) override {
    before_->begin_allocate_to_pool(id, filter);
    std::unique_lock<std::shared_mutex> guard(captures_mutex_);
    filters_.emplace_back(id, std::move(filter));
    captures_.store(filters_.size(), std::memory_order_relaxed);
  }

  void end_allocate_to_pool(c10::MempoolId_t id) override {
    before_->end_allocate_to_pool(id);
    std::unique_lock<std::shared_mutex> guard(captures_mutex_);
    auto ended = [&](auto& capture) { return capture.first == id; };
    filters_.erase(std::remove_if(filters_.begin(), filters_.end(), ended), filters_.end());
    captures_.store(filters_.size(), std::memory_order_relaxed);
  }

  void release_pool(c10::MempoolId_t id) override {
    before_->release_pool(id);
  }

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 14)
  // The history of pinned memory is kept by torch's own allocator, and has what that allocator serves.
  void record_history(bool enabled, c10::CachingDeviceAllocator::CreateContextFn context, size_t max_entries,
      c10::CachingDeviceAllocator::RecordContext when, bool clear) override {
    before_->record_history(enabled, context, max_entries, when, clear);
  }

  bool is_history_enabled() const override {
    return before_->is_history_enabled();
  }

  std::vector<at::HostSegmentInfo> get_segments() override {
    return before_->get_segments();
  }

  std::vector<c10::CachingDeviceAllocator::TraceEntry> get_traces() override {
    return before_->get_traces();
  }

  void record_external_register(void* address, size_t bytes) override {
    before_->record_external_register(address, bytes);
  }

  void record_external_unregister(void* address) override {
    before_->record_external_unregister(address);
  }
#endif

 private:
  // Holds the block for the graph whose capture the current stream is in, if it is in one.
  void hold_captured(void* block) {
    c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
    auto stream = cuda.getStream(cuda.getDevice());
    std::shared_lock<std::shared_mutex> guard(captures_mutex_);
    if (std::any_of(filters_.begin(), filters_.end(), [&](auto& capture) { return capture.second(stream); })) {
      hold(block, stream);
    }
  }

  // A block that is larger than the pool's largest comes from torch's own allocator. All else is an error.
  C10_NOINLINE at::DataPtr refused(pinpool_status status, size_t bytes) {
    // Text alone: numbers that this file's iostreams format crash where torch has brought an older libstdc++ along.
    std::string why = pinpool.last_error(), amount = std::to_string(bytes);
    if (status == PINPOOL_INVALID) {
      TORCH_WARN_ONCE("pinpool: torch's own allocator serves ", amount, " bytes: ", why, " (install's `largest`)");
      return before_->allocate(bytes);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, status != PINPOOL_EXHAUSTED && status != PINPOOL_TIMEOUT, "pinpool: no ", amount,
        " bytes of pinned memory: ", why, ". pinpool.torch.install(capacity=...) sets the bound, wait=... for how long "
        "an allocation waits for memory that comes back");
    TORCH_CHECK(false, "pinpool: no ", amount, " bytes of pinned memory: ", why);
  }

  at::HostAllocator* const before_;
  std::atomic<size_t> captures_{0};
  std::shared_mutex captures_mutex_;
  std::vector<std::pair<c10::MempoolId_t, std::function<bool(c10::Stream)>>> filters_;
  std::mutex stats_mutex_;
  pinpool_stats base_{}; // the counts at the last reset
  at::HostStats stats_;
};

Allocator* g_ours = nullptr;
at::HostAllocator* g_before = nullptr;

} // namespace

extern "C" {
// Takes the place of torch's allocator. Not while another thread pins: torch's list of allocators has no lock.
// `library`: what dlopen gave for the Python module's. Null, or why not.
const char* pinpool_torch_install(void* library, const char* device, uint64_t capacity, uint64_t initial,
    uint64_t largest, uint64_t wait_ms, uint32_t backing) {
  try {
    if (g_pool.load(std::memory_order_acquire) != nullptr) {
      return "the pool is open already: install once, before the first pinned tensor";
    }
    *g_options = {device, capacity, initial, largest, backing};
    g_wait_ms.store(wait_ms, std::memory_order_relaxed);
    if (g_ours == nullptr) {
#define PINPOOL_LOOKUP(name) \
  pinpool.name = reinterpret_cast<decltype(pinpool.name)>(dlsym(library, "pinpool_" #name)); \
  TORCH_CHECK(pinpool.name != nullptr, "the library has no pinpool_" #name);
      PINPOOL_FUNCTIONS(PINPOOL_LOOKUP)
      g_before = at::getHostAllocator(c10::kCUDA);
      g_ours = new Allocator(g_before);
    }
    // Torch's own is registered with priority 0.
    at::setHostAllocator(c10::kCUDA, g_ours, 1);
    return nullptr;
  } catch (const c10::Error& error) {
    static auto* text = new std::string;
    *text = error.what_without_backtrace();
    return text->c_str();
  }
}

// For comparisons: torch's own allocator again (0) or the pool's (1), while no pinned memory is in use by a copy.
void pinpool_torch_use(int ours) {
  at::setHostAllocator(c10::kCUDA, ours ? g_ours : g_before, 1);
}

// The pool; null before the first pinned tensor.
pinpool_pool* pinpool_torch_pool() {
  return g_pool.load(std::memory_order_acquire);
}
}
