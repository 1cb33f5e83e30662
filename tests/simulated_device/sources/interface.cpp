// What the Python side calls.
#include <c10/core/StorageImpl.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include "device.h"
#include "kernels.h"
#include "memory.h"
#include "races.h"
#include "streams.h"

using namespace simulated;

extern "C" {
int simulated_devices() { return devices(); }
int simulated_current_device() { return current_device(); }
void simulated_set_device(int device) {
  if (device < devices()) set_current_device(device);
}
int64_t simulated_current_stream(int device) { return id_of_stream(current_stream(device)); }
void simulated_set_stream(int device, int64_t id) { set_current_stream(stream_of_id(device, id)); }
void simulated_synchronize(int device) { host_blocks_for(device); }
int simulated_behind(int device) {
  Locked held(lock());
  int count = 0;
  for (int stream : streams_of(device)) count += !host_ordered_before(stream, position_of(stream));
  return count;
}
void simulated_default_generators(int does) { hand_out_default_generators(does); }

int64_t simulated_memory(int device, int which) {
  auto& counted = held(device);
  int64_t values[] = {counted.now, counted.peak, counted.reserved, counted.reserved_peak, capacity(), pinned_bytes()};
  return values[which];
}
void simulated_reset_peak(int device) {
  held(device).peak = held(device).now;
  held(device).reserved_peak = held(device).reserved;
}
void simulated_empty_cache(int device) { empty_cache(device); }
uint64_t simulated_copies(int which) {
  uint64_t values[] = {copies().deferred, copies().pageable, copies().waited};
  return values[which];
}

uint64_t simulated_blocked(int which) { return which ? blocked().drained : blocked().all; }

void simulated_set_clock(double seconds) { set_clock(seconds); }

// Milliseconds, NaN where an event was made without times or is not reached.
double simulated_elapsed(void* start, void* end) {
  double from = seconds_of(start), to = seconds_of(end);
  return from < 0 || to < 0 ? std::nan("") : (to - from) * 1e3;
}

int simulated_races() { return (int)races().size(); }
const char* simulated_race(int index) { return races()[index].c_str(); }
void simulated_clear_races() {
  Locked held(lock());
  races().clear();
}

// UntypedStorage.resize_, which torch refuses for CUDA in a build without it.
void simulated_resize_storage(void* pointer, int64_t bytes) {
  auto* storage = static_cast<c10::StorageImpl*>(pointer);
  begin_kernel(current_stream(current_device()));
  auto fresh = device_memory().allocate(bytes);
  size_t kept = std::min<size_t>(bytes, storage->nbytes());
  if (kept) memcpy(fresh.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}
}
