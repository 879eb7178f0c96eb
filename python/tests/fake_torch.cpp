// What the shim of `pinpool.torch` uses of torch, for tests without torch, compiled with torch's headers. A stream's
// number is its handle. The allocator that was there before pins nothing, and counts what it is asked.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/headeronly/version.h>

#include <cstdlib>
#include <cstring>
#include <string>

#define NEWER (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14)

namespace {
std::string g_text; // the last error or warning
at::HostAllocator* g_allocator = nullptr;
uint8_t g_priority = 0;
int64_t g_current = 0; // the current stream

c10::Stream stream_of(int device, int64_t handle) {
  return c10::Stream(c10::Stream::UNSAFE, {c10::kCUDA, static_cast<c10::DeviceIndex>(device)}, handle);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {c10::kCUDA, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_of(0, g_current); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

struct Before final : at::HostAllocator {
  int64_t allocated = 0, recorded = 0, emptied = 0, captures = 0, synchronized = 0;

  at::DataPtr allocate(size_t bytes) override {
    ++allocated;
    void* block = malloc(bytes);
    return {block, block, &free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return ++recorded, false; }
  void empty_cache() override { ++emptied; }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  void begin_allocate_to_pool(c10::MempoolId_t, std::function<bool(c10::Stream)>) override { ++captures; }
  void end_allocate_to_pool(c10::MempoolId_t) override { --captures; }
  void release_pool(c10::MempoolId_t) override {}
#if NEWER
  bool history = false;
  bool is_history_enabled() const override { return history; }
  void record_external_register(void*, size_t) override { history = true; }
#endif
};
Guard g_guard;
Before g_before;
} // namespace

namespace at {
HostAllocator* getHostAllocator(DeviceType) { return g_allocator; }
void setHostAllocator(DeviceType, HostAllocator* allocator, uint8_t priority) {
  if (priority >= g_priority) {
    g_allocator = allocator, g_priority = priority;
  }
}
} // namespace at

namespace c10 {
Error::Error(SourceLocation, std::string msg) : msg_(msg), what_without_backtrace_(msg), caller_(nullptr) {}
#if NEWER
NotImplementedError::NotImplementedError(SourceLocation at, std::string msg) : Error(at, msg) {}
OutOfMemoryError::OutOfMemoryError(SourceLocation at, std::string msg) : Error(at, msg) {}
#endif
const char* Error::what() const noexcept { return msg_.c_str(); }
Warning::Warning(warning_variant_t type, const SourceLocation& at, std::string msg, bool verbatim)
    : type_(type), source_location_(at), msg_(msg), verbatim_(verbatim) {}
const std::string& Warning::msg() const { return msg_; }
void warn(const Warning& warning) { g_text = warning.msg(); }
std::ostream& operator<<(std::ostream& out, DeviceType) { return out; }
bool Allocator::is_simple_data_ptr(const DataPtr& data) const { return data.get() == data.get_context(); }
void Allocator::default_copy_data(void* to, const void* from, size_t bytes) const { memcpy(to, from, bytes); }
void* Stream::native_handle() const { return reinterpret_cast<void*>(id()); }
void Stream::synchronize() const { ++g_before.synchronized; }

namespace WarningUtils {
bool get_warnAlways() noexcept(true) { return true; }
} // namespace WarningUtils

namespace detail {
void deleteNothing(void*) {}
void torchCheckFail(const char*, const char*, uint32_t, const std::string& msg) { throw Error({}, msg); }
void torchCheckFail(const char*, const char*, uint32_t, const char* msg) { throw Error({}, msg); }
void torchInternalAssertFail(const char*, const char*, uint32_t, const char*, const std::string&) { abort(); }
} // namespace detail

namespace impl {
std::array<std::atomic<const DeviceGuardImplInterface*>, static_cast<size_t>(DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES)>
    device_guard_impl_registry;
} // namespace impl
} // namespace c10

// What the tests call.
extern "C" {
void fake_start() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)] = &g_guard;
  at::setHostAllocator(c10::kCUDA, &g_before, 0);
}
const char* fake_text() { return g_text.c_str(); }
void fake_drop(at::DataPtr* data) { delete data; }
void* fake_address(at::DataPtr* data) { return data->get(); }

// Null with the text of the error, which begins with its kind.
at::DataPtr* fake_pin(size_t bytes) {
  try {
    return new at::DataPtr(g_allocator->allocate(bytes));
  } catch (const c10::OutOfMemoryError& error) {
    g_text = std::string("OutOfMemoryError: ") + error.what();
  } catch (const c10::Error& error) {
    g_text = std::string("Error: ") + error.what();
  }
  return nullptr;
}

int fake_record(char* address, void* context, int device, int64_t stream) {
  return g_allocator->record_event(address, context, stream_of(device, stream));
}

void fake_capture(int64_t stream, int begins) {
  g_current = stream;
  if (begins) {
    g_allocator->begin_allocate_to_pool({0, 1}, [=](c10::Stream asked) { return asked.id() == stream; });
  } else {
    g_allocator->end_allocate_to_pool({0, 1});
  }
}

void fake_empty_cache() { g_allocator->empty_cache(); }
void fake_reset() { g_allocator->reset_accumulated_stats(), g_allocator->reset_peak_stats(); }

// Whether torch's own allocator keeps the history; older versions have none.
int fake_keeps_history() {
#if NEWER
  g_allocator->record_external_register(nullptr, 1);
  return g_allocator->is_history_enabled();
#endif
  return true;
}

void fake_numbers(int64_t* out) {
  auto stats = g_allocator->get_stats();
  int64_t numbers[] = {stats.active_requests.current, stats.active_requests.allocated, stats.active_bytes.current,
      stats.active_bytes.peak, stats.allocated_bytes.current, g_before.allocated, g_before.recorded, g_before.emptied,
      g_before.captures, g_before.synchronized};
  memcpy(out, numbers, sizeof(numbers));
}
}
