// What torch asks of a device: its guard, events, generators and the hooks of CUDA.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstring>
#include "device.h"
#include "memory.h"
#include "streams.h"

namespace simulated {
using c10::Device;
using c10::DeviceIndex;
using c10::kCUDA;
using c10::Stream;

namespace {
Stream to_torch(int stream) { return Stream(Stream::UNSAFE, Device(kCUDA, device_of(stream)), id_of_stream(stream)); }
int from_torch(const Stream& stream) { return stream_of_id(stream.device_index(), stream.id()); }
Event* event_of(void* pointer) { return static_cast<Event*>(pointer); }

int index_of(Device device) {
  TORCH_CHECK(device.index() < devices(), "CUDA error: invalid device ordinal ", device);
  return device.index() < 0 ? current_device() : device.index();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kCUDA, current_device()); }
  void setDevice(Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { set_current_device(device.index()); }
  DeviceIndex deviceCount() const noexcept override { return devices(); }

  Stream getStream(Device device) const override { return to_torch(current_stream(index_of(device))); }
  Stream getDefaultStream(Device device) const override { return to_torch(index_of(device)); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return to_torch(pool_stream(index_of(device))); }
  Stream getNewStream(Device device, int) const override { return to_torch(pool_stream(index_of(device))); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = to_torch(current_stream(stream.device_index()));
    set_current_stream(from_torch(stream));
    return before;
  }
  bool queryStream(const Stream& stream) const override { return reached(now_on(from_torch(stream))); }
  void synchronizeStream(const Stream& stream) const override { host_blocks(now_on(from_torch(stream))); }
  void synchronizeDevice(const DeviceIndex device) const override { host_blocks_for(device); }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag flag) const override {
    if (!*event) *event = new Event;
    event_of(*event)->timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    simulated::record(*event_of(*event), from_torch(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event) stream_waits(from_torch(stream), event_of(event)->moment);
  }
  bool queryEvent(void* event) const override { return !event || reached(event_of(event)->moment); }
  void synchronizeEvent(void* event) const override {
    if (event) host_blocks(event_of(event)->moment);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete event_of(event); }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    return (seconds_of(end) - seconds_of(start)) * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    record_stream(data.get(), from_torch(stream));
  }

 private:
  // A program that asks again and again sees it reached the second time.
  static bool reached(const Moment& moment) {
    if (is_open(moment)) {
      finish(moment.stream, moment.position);
      return false;
    }
    host_waits(moment);
    return true;
  }
};

// As CUDA's: numbers follow from a seed and an offset, which every kernel that draws moves on. The state is those two.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device) : c10::GeneratorImpl(Device(kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override {
    words[0] = seed;
    words[1] = 0;
  }
  uint64_t current_seed() const override { return words[0]; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return words[0];
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % OFFSET == 0, "offset must be a multiple of ", OFFSET);
    words[1] = offset;
  }
  uint64_t get_offset() const override { return words[1]; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == sizeof(words), "RNG state is wrong size");
    memcpy(words, state.data(), sizeof(words));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({sizeof(words)}, at::kByte, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
    memcpy(state.mutable_data_ptr(), words, sizeof(words));
    return state.getIntrusivePtr();
  }

 private:
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device().index());
    memcpy(copy->words, words, sizeof(words));
    return copy;
  }
  uint64_t words[2] = {c10::default_rng_seed_val, 0};
};

bool hands_out_default_generators = false;
}  // namespace

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int each = 0; each < devices(); each++) made->push_back(at::make_generator<Generator>(each));
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

void hand_out_default_generators(bool does) { hands_out_default_generators = does; }

at::Generator make_generator(int device) {
  int index = device < 0 ? current_device() : device;
  return hands_out_default_generators ? default_generator(index) : at::make_generator<Generator>(index);
}

// See Note [Builds of torch with CUDA] for what these replace.
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
static const bool registered = [] {
  constexpr uint8_t HIGHEST_PRIORITY = 255;
  c10::SetAllocator(kCUDA, &device_memory(), HIGHEST_PRIORITY);
  at::setHostAllocator(kCUDA, &pinned_memory(), HIGHEST_PRIORITY);
  return true;
}();
}  // namespace simulated

// torch finds it by this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return simulated::devices(); }
  int getNumGPUs() const override { return simulated::devices(); }
  c10::DeviceIndex current_device() const override { return simulated::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return simulated::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { simulated::set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    c10::DeviceIndex before = simulated::current_device();
    simulated::set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return simulated::is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &simulated::pinned_memory(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &simulated::device_memory(); }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    return c10::Device(c10::kCUDA, std::max(0, simulated::device_at(pointer)));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return simulated::default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return simulated::make_generator(device); }
  void deviceSynchronize(c10::DeviceIndex device) const override {
    simulated::host_blocks_for(device);
  }
};
namespace at {
using ::CUDAHooks;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}  // namespace at
