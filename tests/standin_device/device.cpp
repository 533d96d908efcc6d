// Device `sim`: stands in for CUDA where there is no GPU. It is PyTorch's PrivateUse1, so the package's code meets it
// through the same interfaces as CUDA: device types, dispatch, storages, streams, events, pinned memory, autograd's
// device threads, the caching allocator.
//
// As on CUDA: a tensor of this device and one of the host (or of another `sim` index) in one operation raise; memory is
// counted per device, freed memory stays in a cache per stream until it is emptied, and more than the limit raises
// OutOfMemoryError; a copy with non_blocking between the device and pinned memory has happened only after the stream was
// waited for (its target holds NaN bytes until then, and with a source that is not pinned it happens at once); a read
// back to the host is counted.
//
// Not as on CUDA: kernels run at once, on the host's memory, by the host's kernels (only the copies above are late), so
// numbers are the host's, speed says nothing, and a race between two kernels cannot be seen. Random numbers are drawn
// from the host's generator. There are no graphs, no IPC handles, no profiler.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>

namespace {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 8;
constexpr int POOL = 32; // streams of a device's pool, handed out in turn, as on CUDA
constexpr size_t ROUND = 512;

// Reads back and copies, by which tests count what a GPU would wait for.
struct Counters {
  std::atomic<int64_t> reads{0}, read_bytes{0}, writes{0}, streams{0}, late_copies{0};
};
Counters counters;

thread_local int current_device = 0;
thread_local c10::StreamId current_stream[DEVICES] = {};
thread_local bool in_fallback = false; // copies inside an operation's host kernel are no copies

// --- streams: copies that have been asked for and have not happened ------------------------------------------------

std::recursive_mutex pending_mutex;
std::map<std::pair<int, c10::StreamId>, std::deque<std::function<void()>>> pending;
std::atomic<int> next_stream{0};

void finish(int device, c10::StreamId stream) {
  std::lock_guard<std::recursive_mutex> lock(pending_mutex);
  auto& queue = pending[{device, stream}];
  while (!queue.empty()) {
    auto copy = std::move(queue.front());
    queue.pop_front();
    copy();
  }
}

void finish_device(int device) {
  for (c10::StreamId stream = 0; stream <= POOL; stream++)
    finish(device, stream);
}

// --- memory ----------------------------------------------------------------------------------------------------------

struct Block {
  void* memory;
  size_t size;
  int device;
  c10::StreamId stream;
};

struct SimAllocator final : c10::DeviceAllocator {
  std::mutex mutex;
  size_t limit[DEVICES], reserved[DEVICES] = {}, outside[DEVICES] = {};
  c10::CachingDeviceAllocator::DeviceStats stats[DEVICES];
  std::multimap<std::tuple<int, c10::StreamId, size_t>, void*> cache;

  SimAllocator() {
    std::fill_n(limit, DEVICES, size_t(4) << 30);
  }

  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device;
    const c10::Device place(SIM, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0)
      return {nullptr, nullptr, &release, place};
    const size_t size = (bytes + ROUND - 1) / ROUND * ROUND;
    std::lock_guard<std::mutex> lock(mutex);
    void* memory = take(device, current_stream[device], size);
    stats[device].allocated_bytes[0].increase(size);
    stats[device].allocation[0].increase(1);
    auto* block = new Block{memory, size, device, current_stream[device]};
    return {memory, block, &release, place};
  }

  void* take(int device, c10::StreamId stream, size_t size) {
    auto found = cache.find({device, stream, size});
    if (found != cache.end()) {
      void* memory = found->second;
      cache.erase(found);
      return memory;
    }
    if (reserved[device] + outside[device] + size > limit[device]) {
      stats[device].num_alloc_retries++;
      drop(device);
    }
    if (reserved[device] + outside[device] + size > limit[device]) {
      stats[device].num_ooms++;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "sim out of memory. Tried to allocate ", size, " bytes on sim:", device, ", which has ",
          limit[device], " bytes; this process has reserved ", reserved[device], ", others ", outside[device], ".");
    }
    void* memory = std::aligned_alloc(ROUND, size);
    std::memset(memory, 0xFF, size); // NaN where memory is read before it was written
    reserved[device] += size;
    stats[device].reserved_bytes[0].increase(size);
    return memory;
  }

  void drop(int device) {
    for (auto at = cache.begin(); at != cache.end();) {
      if (std::get<0>(at->first) == device) {
        const size_t size = std::get<2>(at->first);
        std::free(at->second);
        reserved[device] -= size;
        stats[device].reserved_bytes[0].decrease(size);
        at = cache.erase(at);
      } else {
        ++at;
      }
    }
  }

  static void release(void* context);

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::mutex> lock(mutex);
    for (int device = 0; device < DEVICES; device++)
      drop(device);
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    return stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    stats[device].allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    stats[device].allocated_bytes[0].reset_peak();
    stats[device].reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    const size_t taken = reserved[device] + outside[device];
    return {limit[device] > taken ? limit[device] - taken : 0, limit[device]};
  }
};

SimAllocator& allocator() {
  static auto* made = new SimAllocator(); // never deleted: tensors may outlive static objects
  return *made;
}

void SimAllocator::release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block == nullptr)
    return;
  auto& self = allocator();
  std::lock_guard<std::mutex> lock(self.mutex);
  self.cache.insert({{block->device, block->stream, block->size}, block->memory});
  self.stats[block->device].allocated_bytes[0].decrease(block->size);
  self.stats[block->device].allocation[0].decrease(1);
  delete block;
}

// Page-locked host memory: that of `pin_memory`, and of copies to the host with non_blocking.
struct PinnedAllocator final : c10::Allocator {
  static std::map<void*, size_t>& blocks() {
    static auto* made = new std::map<void*, size_t>();
    return *made;
  }
  static std::mutex& mutex() {
    static auto* made = new std::mutex();
    return *made;
  }
  static void release(void* memory) {
    std::lock_guard<std::mutex> lock(mutex());
    blocks().erase(memory);
    std::free(memory);
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0)
      return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::lock_guard<std::mutex> lock(mutex());
    blocks()[memory] = bytes;
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }
  static bool has(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex());
    auto after = blocks().upper_bound(const_cast<void*>(pointer));
    if (after == blocks().begin())
      return false;
    --after;
    return static_cast<const char*>(pointer) < static_cast<const char*>(after->first) + after->second;
  }
};
PinnedAllocator pinned;

// --- what PyTorch asks of a device ---------------------------------------------------------------------------------

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device_of(int index) {
    return c10::Device(SIM, static_cast<c10::DeviceIndex>(index));
  }
  static int index_of(c10::Device device) {
    return device.index() < 0 ? current_device : device.index();
  }
  c10::DeviceType type() const override {
    return SIM;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = current_device;
    setDevice(device);
    return device_of(before);
  }
  c10::Device getDevice() const override {
    return device_of(current_device);
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(index_of(device) < DEVICES, "there is no device sim:", index_of(device));
    current_device = index_of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index() < 0 ? current_device : device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    const int index = index_of(device);
    return c10::Stream(c10::Stream::UNSAFE, device_of(index), current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device_of(index_of(device)), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    counters.streams++;
    return c10::Stream(c10::Stream::UNSAFE, device_of(index_of(device)), 1 + next_stream++ % POOL);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_stream[index_of(stream.device())] = stream.id();
    return before;
  }
  // an event is the stream that it was recorded on; waiting for it waits for all of that stream's copies. Its time is the
  // host's, which runs the kernels
  struct Recorded {
    int device = 0;
    c10::StreamId stream = 0;
    std::chrono::steady_clock::time_point at;
  };
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr)
      *event = new Recorded();
    *static_cast<Recorded*>(*event) = {index_of(stream.device()), stream.id(), std::chrono::steady_clock::now()};
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto between = static_cast<Recorded*>(second)->at - static_cast<Recorded*>(first)->at;
    return std::chrono::duration<double, std::milli>(between).count();
  }
  void block(void* event, const c10::Stream&) const override {
    synchronizeEvent(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      const auto* recorded = static_cast<Recorded*>(event);
      finish(recorded->device, recorded->stream);
    }
  }
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    finish(index_of(stream.device()), stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    finish_device(device < 0 ? current_device : device);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard)

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current_device = device;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(current_device, device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return PinnedAllocator::has(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned;
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return SimGuard::device_of(current_device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const int before = std::exchange(current_device, SimGuard::index_of(storage.device()));
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
    current_device = before;
  }
};

// --- operations ------------------------------------------------------------------------------------------------------

struct OnDevice { // makes a device current, as a guard does
  int before;
  explicit OnDevice(c10::Device device) : before(std::exchange(current_device, SimGuard::index_of(device))) {}
  ~OnDevice() {
    current_device = before;
  }
};

// The same memory as a tensor of the host. Only for operations of this file and for the process group.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone())
    return tensor;
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::DeviceType::CPU);
  auto kept = tensor.storage();
  return at::from_blob(
      tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [kept](void*) {}, options);
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const OnDevice guard(device.value_or(at::Device(SIM)));
  return at::detail::empty_generic(
      size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const OnDevice guard(device.value_or(at::Device(SIM)));
  return at::detail::empty_strided_generic(
      size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  const bool to_host = !target.is_privateuseone(), from_host = !self.is_privateuseone();
  const auto device = SimGuard::index_of(to_host ? self.device() : target.device());
  const auto stream = current_stream[device];
  auto source = on_host(self), sink = on_host(target);
  if (in_fallback) {
    sink.copy_(source);
    return target;
  }
  counters.reads += to_host;
  counters.read_bytes += to_host ? static_cast<int64_t>(self.nbytes()) : 0;
  counters.writes += from_host;
  const bool crosses = to_host || from_host;
  const bool is_pinned = PinnedAllocator::has((to_host ? target : self).const_data_ptr());
  std::lock_guard<std::recursive_mutex> lock(pending_mutex);
  if (crosses && non_blocking && is_pinned && self.numel() > 0) {
    counters.late_copies++;
    if (sink.is_contiguous())
      std::memset(sink.mutable_data_ptr(), 0xFF, sink.nbytes());
    pending[{device, stream}].emplace_back([source, sink]() mutable { sink.copy_(source); });
    return target;
  }
  if (!pending[{device, stream}].empty() && !(crosses && !non_blocking)) { // in the stream's order
    pending[{device, stream}].emplace_back([source, sink]() mutable { sink.copy_(source); });
    return target;
  }
  finish(device, stream); // a copy that blocks waits for what is before it in the stream
  sink.copy_(source);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes())
    target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  if (!in_fallback) {
    counters.reads++;
    counters.read_bytes += static_cast<int64_t>(self.nbytes());
    finish(SimGuard::index_of(self.device()), current_stream[SimGuard::index_of(self.device())]);
  }
  return on_host(self).item();
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const OnDevice guard(self.device());
  return at::native::resize_(self, size, format);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_empty(at::Tensor& self) {
  const OnDevice guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator().allocate(0), &allocator(), true);
  return at::native::set_storage_cpu_(self, storage, 0, {0}, {});
}

// `tensor.data = other` may move a tensor between host and device, as for CUDA.
bool can_replace_data(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

// The host's kernel runs every other operation, on copies in host memory.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.operator_name().name;
  const bool takes_host_indices = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0;
  std::optional<c10::Device> device;
  bool has_host_tensor = false, has_mask = false;
  int64_t last_numel = 0; // of `values` of index_put
  const auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined())
      return;
    if (tensor.is_privateuseone()) {
      TORCH_CHECK(
          !device || *device == tensor.device(), name, ": expected all tensors to be on the same device, but found at ",
          "least two devices, ", *device, " and ", tensor.device(), "!");
      device = tensor.device();
    } else {
      has_host_tensor |= tensor.dim() > 0 && tensor.device().is_cpu();
    }
  };
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  for (const auto& argument : arguments) {
    if (argument.isTensor()) {
      see(argument.toTensor());
      last_numel = argument.toTensor().defined() ? argument.toTensor().numel() : 0;
    } else if (argument.isTensorList()) {
      for (const auto& tensor : argument.toTensorVector())
        see(tensor);
    } else if (argument.isOptionalTensorList()) {
      for (const auto& tensor : argument.toOptionalTensorVector())
        if (tensor.has_value()) {
          see(*tensor);
          has_mask |= tensor->defined() && tensor->scalar_type() == at::kBool;
        }
    }
  }
  TORCH_CHECK(
      !device || !has_host_tensor || takes_host_indices, name, ": expected all tensors to be on the same device, but found ",
      "at least two devices, ", device.value_or(c10::Device(SIM)), " and cpu!");
  if (device)
    finish(SimGuard::index_of(*device), current_stream[SimGuard::index_of(*device)]); // in the stream's order
  // operations whose result's size is in the data make CUDA wait for it
  static const std::set<std::string> waits = {
      "aten::nonzero", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::masked_select",
      "aten::equal", "aten::is_nonzero", "aten::repeat_interleave"};
  const bool fills = name.find("index_put") != std::string::npos && last_numel == 1; // CUDA fills, without waiting
  if ((waits.count(name) || (has_mask && !fills)) && !in_fallback)
    counters.reads++;
  const bool before = std::exchange(in_fallback, true);
  const OnDevice guard(device.value_or(c10::Device(SIM)));
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    in_fallback = before;
    throw;
  }
  in_fallback = before;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_", set_empty);
  m.impl("_has_compatible_shallow_copy_type", can_replace_data);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", can_replace_data);
}

TORCH_LIBRARY(sim, m) {
  m.def("on_host(Tensor x) -> Tensor", on_host);
}

} // namespace

extern "C" {

void sim_register() {
  static SimHooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(SIM, &allocator(), 10);
}

// reads back to the host, their bytes, copies from the host, streams made, copies that happened late
void sim_counters(int64_t* out) {
  out[0] = counters.reads;
  out[1] = counters.read_bytes;
  out[2] = counters.writes;
  out[3] = counters.streams;
  out[4] = counters.late_copies;
}

void sim_set_limit(int device, int64_t bytes) {
  allocator().limit[device] = static_cast<size_t>(bytes);
}

// Memory that another process has taken of the device.
void sim_set_outside(int device, int64_t bytes) {
  allocator().outside[device] = static_cast<size_t>(bytes);
}

void sim_finish(int device) {
  finish_device(device);
}
}
