// What torch's profiler asks of a device: events around every operator. Kernels are done when they are called, so an event's time is the
// host's.
#include <torch/csrc/profiler/stubs/base.h>
#include <memory>
#include "streams.h"

namespace simulated {
namespace {

using torch::profiler::impl::ProfilerVoidEventStub;

struct Profiler final : torch::profiler::impl::ProfilerStubs {
  void record(c10::DeviceIndex* device, ProfilerVoidEventStub* event, int64_t* nanoseconds) const override {
    double now = seconds();
    if (device) *device = (c10::DeviceIndex)current_device();
    if (nanoseconds) *nanoseconds = (int64_t)(now * 1e9);
    *event = std::make_shared<double>(now);
  }
  float elapsed(const ProfilerVoidEventStub* start, const ProfilerVoidEventStub* end) const override {  // microseconds
    return (float)((*static_cast<double*>(end->get()) - *static_cast<double*>(start->get())) * 1e6);
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> visit) const override {
    for (int device = 0; device < devices(); device++) visit(device);
  }
  void synchronize() const override {
    for (int device = 0; device < devices(); device++)
      for (int stream : streams_of(device)) host_waits(now_on(stream));
  }
};

const bool registered = [] {
  static auto* profiler = new Profiler;  // never destroyed
  torch::profiler::impl::registerCUDAMethods(profiler);
  return true;
}();

}  // namespace
}  // namespace simulated
