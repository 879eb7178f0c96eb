// torch's pinned memory from a pinpool pool, by torch's own hook: at::setHostAllocator replaces the allocator that
// `pin_memory()`, `torch.empty(pin_memory=True)`, DataLoader and non-blocking copies ask for pinned memory.
//
// How: `Allocator` implements at::HostAllocator on pinpool's C interface. A block's address is its DataPtr's context,
// so that nothing is allocated beside the block. `record_event` makes the pool hold the block until what is queued on
// the stream so far is complete, for any address inside a block. The C entry points at the end are for ctypes.
//
// Why no object here has a destructor: torch frees tensors until the process is gone, after static destructors too.
// The pool, the allocator and the lists are made once and never destroyed; the system takes back the memory.
//
// Built with torch's headers alone: CUDA's are not needed, since torch's guards answer for streams and devices.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/dlpack.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <pinpool.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

// The alignment of torch's own tensors in host memory.
constexpr size_t kAlign = 64;

struct Options {
  std::string device; // "": the device that is current when the pool is opened
  uint64_t capacity, initial;
};

// Constant-initialised and trivially destroyed: the deleter of a tensor that outlives everything reads it.
std::atomic<pinpool_pool*> g_pool{nullptr};
std::atomic<int> g_device{-1}; // -1: the pool has several, and says itself which streams it takes
std::atomic<uint64_t> g_wait_ms{0};
std::mutex* g_open = new std::mutex;
Options* g_options = new Options{};
thread_local char g_error[512];

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
  pinpool_options wanted{sizeof(wanted), device.c_str(), g_options->capacity, g_options->initial, 0, "torch"};
  pinpool_pool* pool = nullptr;
  auto status = pinpool_open(&wanted, &pool);
  TORCH_CHECK(status == PINPOOL_OK, "pinpool: the pool on ", device, " was not opened: ", pinpool_last_error());
  if (device.rfind("cuda:", 0) == 0 && device.find(',') == std::string::npos) {
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
    pinpool_free(g_pool.load(std::memory_order_acquire), block);
  }
}

// Keeps the block at `address` until what is queued on `stream` so far is complete; a stream that is captured: for as
// long as the graph exists. False: no block is there.
bool hold(const void* address, c10::Stream stream) {
  auto* pool = g_pool.load(std::memory_order_acquire);
  if (pool == nullptr || address == nullptr) {
    return false;
  }
  // The pool's events do not fit a stream of another device.
  auto index = g_device.load(std::memory_order_relaxed);
  bool fits = index < 0 || stream.device_index() == index;
  void* start = nullptr;
  size_t bytes = 0;
  auto status =
      fits ? pinpool_hold(pool, address, stream.native_handle()) : pinpool_find(pool, address, &start, &bytes);
  if (C10_LIKELY((fits && status == PINPOOL_OK) || status == PINPOOL_UNKNOWN)) {
    return status == PINPOOL_OK;
  }
  // In a captured graph waiting protects nothing.
  TORCH_CHECK(status != PINPOOL_CAPTURING, "pinpool: the graph cannot hold pinned memory: ", pinpool_last_error());
  // Without a hold the block could be used again under the copy. Waiting is slow and right.
  TORCH_WARN_ONCE("pinpool: copies on this stream are waited for, since the pool cannot hold memory for it (device ",
      static_cast<int>(stream.device_index()), ", pool on ", index, "): ", pinpool_last_error());
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
    auto* pool = the_pool();
    // A capture waits for nothing: the holds that would end are perhaps on its own stream.
    bool captures = C10_UNLIKELY(captures_.load(std::memory_order_relaxed) != 0);
    auto wait = captures ? 0 : g_wait_ms.load(std::memory_order_relaxed);
    void* block = nullptr;
    auto status = pinpool_alloc(pool, bytes, kAlign, wait, &block);
    if (C10_UNLIKELY(status != PINPOOL_OK)) {
      refuse(status, bytes);
    }
    at::DataPtr data{block, block, &release, c10::Device(c10::kCPU)};
    // What the graph reads by this address, it reads at each replay: the graph keeps the block, copied or not.
    if (captures) {
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
      pinpool_trim(pool, &bytes);
    }
    before_->empty_cache();
  }

  // Requests are the pool's blocks, what torch calls allocated is what is pinned. The pool's peaks have no reset: after
  // one, a peak is the present value until the pool makes a new one.
  at::HostStats get_stats() override {
    at::HostStats out;
    pinpool_stats now{};
    now.size = sizeof(now);
    if (auto* pool = g_pool.load(std::memory_order_acquire); !pool || pinpool_get_stats(pool, &now) != PINPOOL_OK) {
      return out;
    }
    std::lock_guard<std::mutex> guard(stats_mutex_);
    auto peak = [](uint64_t now, uint64_t peak, uint64_t before) { return int64_t(peak > before ? peak : now); };
    out.active_requests.current = out.active_requests.peak = int64_t(now.blocks);
    out.active_requests.allocated = int64_t(now.allocations - base_.allocations);
    out.active_requests.freed = int64_t(now.frees - base_.frees);
    out.active_bytes.current = int64_t(now.block_bytes);
    out.active_bytes.peak = peak(now.block_bytes, now.peak_block_bytes, peaks_.peak_block_bytes);
    out.allocated_bytes.current = int64_t(now.pinned_bytes);
    out.allocated_bytes.peak = peak(now.pinned_bytes, now.peak_pinned_bytes, peaks_.peak_pinned_bytes);
    return out;
  }

  void reset_accumulated_stats() override {
    reset(base_);
  }

  void reset_peak_stats() override {
    reset(peaks_);
  }

  // Between these two, `filter` says which streams the capture is on. Graphs keep the blocks themselves, so a pool id
  // needs no memory of its own, and `release_pool` has nothing to give back.
  void begin_allocate_to_pool(c10::MempoolId_t id, std::function<bool(c10::Stream)> filter) override {
    std::unique_lock<std::shared_mutex> guard(captures_mutex_);
    filters_.emplace_back(id, std::move(filter));
    captures_.store(filters_.size(), std::memory_order_relaxed);
  }

  void end_allocate_to_pool(c10::MempoolId_t id) override {
    std::unique_lock<std::shared_mutex> guard(captures_mutex_);
    auto it = std::find_if(filters_.begin(), filters_.end(), [&](auto& capture) { return capture.first == id; });
    TORCH_CHECK(it != filters_.end(), "pinpool: no capture allocates to this pool");
    filters_.erase(it);
    captures_.store(filters_.size(), std::memory_order_relaxed);
  }

  void release_pool(c10::MempoolId_t) override {}

 private:
  void reset(pinpool_stats& since) {
    std::lock_guard<std::mutex> guard(stats_mutex_);
    since.size = sizeof(since);
    if (auto* pool = g_pool.load(std::memory_order_acquire)) {
      pinpool_get_stats(pool, &since);
    }
  }

  // Holds the block for the graph whose capture the current stream is in, if it is in one.
  void hold_captured(void* block) {
    c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
    auto stream = cuda.getStream(cuda.getDevice());
    std::shared_lock<std::shared_mutex> guard(captures_mutex_);
    if (std::any_of(filters_.begin(), filters_.end(), [&](auto& capture) { return capture.second(stream); })) {
      hold(block, stream);
    }
  }

  [[noreturn]] C10_NOINLINE static void refuse(pinpool_status status, size_t bytes) {
    std::string why = pinpool_last_error();
    TORCH_CHECK_WITH(OutOfMemoryError, status != PINPOOL_EXHAUSTED && status != PINPOOL_TIMEOUT, "pinpool: no ", bytes,
        " bytes of pinned memory: ", why, ". pinpool_torch.install(capacity=...) sets the bound, wait=... for how long "
        "an allocation waits for memory that comes back");
    TORCH_CHECK(false, "pinpool: no ", bytes, " bytes of pinned memory: ", why);
  }

  at::HostAllocator* const before_;
  std::atomic<size_t> captures_{0};
  std::shared_mutex captures_mutex_;
  std::vector<std::pair<c10::MempoolId_t, std::function<bool(c10::Stream)>>> filters_;
  std::mutex stats_mutex_;
  pinpool_stats base_{}, peaks_{};
};

Allocator* g_ours = nullptr;
at::HostAllocator* g_before = nullptr;

// A block with several owners: a Python buffer and the DLPack tensors made of it. The last one gives it back.
struct Shared {
  std::atomic<size_t> owners{1};
  void* block;
  int64_t bytes;

  static void drop(Shared* shared) {
    // Release and acquire: each owner's accesses come before the memory's next use.
    if (shared->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      release(shared->block);
      delete shared;
    }
  }
};

template <typename F>
auto guarded(F call, decltype(call()) failed) -> decltype(call()) {
  try {
    return call();
  } catch (const std::exception& error) {
    // c10::Error's `what` has a backtrace after the message.
    auto* c10_error = dynamic_cast<const c10::Error*>(&error);
    snprintf(g_error, sizeof(g_error), "%s", c10_error ? c10_error->what_without_backtrace() : error.what());
    return failed;
  }
}

} // namespace

// The interpreter's own, there when Python has loaded this library.
extern "C" {
__attribute__((weak)) int PyCapsule_IsValid(void* capsule, const char* name);
__attribute__((weak)) void* PyCapsule_GetPointer(void* capsule, const char* name);

const char* pinpool_torch_error() {
  return g_error;
}

// Takes the place of torch's allocator. Not while another thread pins: torch's list of allocators has no lock.
int pinpool_torch_install(const char* device, uint64_t capacity, uint64_t initial, uint64_t wait_ms) {
  return guarded(
      [&] {
        TORCH_CHECK(g_pool.load(std::memory_order_acquire) == nullptr, "the pool is open already: install once");
        TORCH_CHECK(pinpool_abi_version() == PINPOOL_ABI_VERSION, "libpinpool.so is not of the pinpool.h of the build");
        *g_options = {device, capacity, initial};
        g_wait_ms.store(wait_ms, std::memory_order_relaxed);
        if (g_ours == nullptr) {
          g_before = at::getHostAllocator(c10::kCUDA);
          g_ours = new Allocator(g_before);
        }
        // Torch's own is registered with priority 0.
        at::setHostAllocator(c10::kCUDA, g_ours, 1);
        return 0;
      },
      -1);
}

// For comparisons: torch's own allocator again (0) or the pool's (1), while no pinned memory is in use by a copy.
void pinpool_torch_use(int ours) {
  at::setHostAllocator(c10::kCUDA, ours ? g_ours : g_before, 1);
}

// The pool, opened where it is not yet; null with `pinpool_torch_error`.
pinpool_pool* pinpool_torch_pool() {
  return guarded([] { return the_pool(); }, static_cast<pinpool_pool*>(nullptr));
}

void* pinpool_torch_buffer(size_t bytes, void** start) {
  return guarded(
      [&]() -> void* {
        auto data = g_ours->allocate(bytes);
        *start = data.get();
        return new Shared{{1}, data.release_context(), static_cast<int64_t>(bytes)};
      },
      nullptr);
}

void pinpool_torch_buffer_drop(void* buffer) {
  Shared::drop(static_cast<Shared*>(buffer));
}

// A DLPack tensor of the buffer's bytes that owns the block as the buffer does. `kind`: kDLCUDAHost or kDLCPU.
void* pinpool_torch_dlpack(void* buffer, int kind) {
  auto* shared = static_cast<Shared*>(buffer);
  shared->owners.fetch_add(1, std::memory_order_relaxed);
  auto* tensor = new DLManagedTensor{};
  tensor->dl_tensor.data = shared->block;
  tensor->dl_tensor.device = {static_cast<DLDeviceType>(kind), 0};
  tensor->dl_tensor.ndim = 1;
  tensor->dl_tensor.dtype = {kDLUInt, 8, 1};
  tensor->dl_tensor.shape = &shared->bytes;
  tensor->manager_ctx = shared;
  tensor->deleter = [](DLManagedTensor* self) {
    Shared::drop(static_cast<Shared*>(self->manager_ctx));
    delete self;
  };
  return tensor;
}

// The destructor of a capsule that holds a DLPack tensor: a consumer that took the tensor has renamed the capsule.
void pinpool_torch_capsule_end(void* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor")) {
    auto* tensor = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    tensor->deleter(tensor);
  }
}
}
