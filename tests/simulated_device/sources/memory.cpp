#include "memory.h"
#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <cstdlib>
#include <cstring>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include "races.h"

namespace simulated {
namespace {

constexpr size_t ROUNDED = 512;            // bytes, as CUDA's allocator
constexpr int64_t SEGMENT = 2 << 20;       // it asks the driver for multiples of this
constexpr size_t MOST_POISONED = 64 << 20;  // larger blocks are not filled: it would take too long

struct Block {
  size_t size;
  int device;
  int stream;          // it was taken on
  uint64_t position;   // of that stream then
  std::set<int> used;  // named by record_stream
};

template <class T>
std::map<const char*, T>& never_destroyed() {
  static auto* all = new std::map<const char*, T>;
  return *all;
}
std::map<const char*, Block>& blocks() { return never_destroyed<Block>(); }
std::map<const char*, size_t>& pinned() { return never_destroyed<size_t>(); }
std::atomic<int64_t> pinned_now = 0;

// Of pinned memory alone: gloo's threads ask too, while a thread that waits for them holds the lock of everything.
std::mutex& pinned_lock() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

Block* block_at(const char* pointer) {
  auto after = blocks().upper_bound(pointer);
  if (after == blocks().begin()) return nullptr;
  auto& [first, block] = *std::prev(after);
  return pointer < first + block.size ? &block : nullptr;
}

void* take(size_t bytes) {
  void* pointer = nullptr;
  TORCH_CHECK(posix_memalign(&pointer, ROUNDED, bytes) == 0, "the simulated device has no host memory for ", bytes, " bytes");
  poison(pointer, bytes);
  return pointer;
}

void free_device(void* pointer) {
  if (!pointer) return;
  Locked held_lock(lock());
  const char* first = (const char*)pointer;
  Block block = blocks().at(first);
  Range range{first, block.size};
  // Work that is known of ends before anybody gets the memory.
  finish(block.stream);
  for (int stream : block.used) finish(stream);
  int pending = touching(range, 0);
  if (pending >= 0) {
    poison(pointer, block.size);
    report_race("device memory is freed while a copy on stream " + std::to_string(pending) + " is pending on it, without record_stream");
    finish_touching(range);
  }
  forget_block(range, block.stream, {block.used.begin(), block.used.end()});
  held(block.device).now -= block.size;
  poison(pointer, block.size);
  blocks().erase(first);
  std::free(pointer);
}

void free_pinned(void* pointer) {
  if (!pointer) return;
  Locked held_lock(lock());
  const char* first = (const char*)pointer;
  std::unique_lock<std::mutex> known(pinned_lock());
  Range range{first, pinned().at(first)};
  pinned().erase(first);
  known.unlock();
  pinned_now -= range.second;
  finish_touching(range);  // the caching allocator of CUDA waits for the events of the copies
  forget(range);
  std::free(pointer);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    Locked held_lock(lock());
    int device = current_device();
    void* pointer = nullptr;
    if (bytes) {
      size_t size = (bytes + ROUNDED - 1) / ROUNDED * ROUNDED;
      auto& counted = held(device);
      TORCH_CHECK_WITH(OutOfMemoryError, counted.now + (int64_t)size <= capacity(),
                       "CUDA out of memory (simulated device). Tried to allocate ", size, " bytes. GPU ", device,
                       " has a total capacity of ", capacity(), " bytes, of which ", counted.now, " are in use");
      pointer = take(size);
      blocks()[(const char*)pointer] = Block{size, device, current_stream(device), position_of(current_stream(device)), {}};
      counted.now += size;
      counted.peak = std::max(counted.peak, counted.now);
      counted.reserved = std::max(counted.reserved, (counted.now + SEGMENT - 1) / SEGMENT * SEGMENT);
      counted.reserved_peak = std::max(counted.reserved_peak, counted.reserved);
    }
    return {pointer, pointer, &free_device, c10::Device(c10::kCUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(current_device()); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data.get(), stream_of_id(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats found;
    auto put = [](c10::CachingAllocator::StatArray& into, int64_t now, int64_t peak) {
      auto& all = into[(size_t)c10::CachingAllocator::StatType::AGGREGATE];
      all.current = now;
      all.peak = peak;
    };
    auto& counted = held(device);
    put(found.allocated_bytes, counted.now, counted.peak);
    put(found.reserved_bytes, counted.reserved, counted.reserved_peak);
    return found;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { held(device).peak = held(device).now; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override { return {capacity() - held(device).now, capacity()}; }
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = nullptr;
    if (bytes) {
      pointer = take(bytes);
      std::lock_guard<std::mutex> known(pinned_lock());
      pinned()[(const char*)pointer] = bytes;
      pinned_now += bytes;
    }
    return {pointer, pointer, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

c10::DeviceAllocator& device_memory() {
  static auto* made = new DeviceMemory;
  return *made;
}

at::HostAllocator& pinned_memory() {
  static auto* made = new PinnedMemory;
  return *made;
}

Held& held(int device) {
  static auto* all = new std::vector<Held>(devices());
  return all->at(device);
}

int64_t capacity() {
  static const int64_t bytes = (int64_t)setting("SIMULATED_DEVICE_MIB", 80 << 10) << 20;
  return bytes;
}

int64_t pinned_bytes() { return pinned_now; }

void empty_cache(int device) {
  Locked held_lock(lock());
  auto& counted = held(device);
  counted.reserved = (counted.now + SEGMENT - 1) / SEGMENT * SEGMENT;
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> known(pinned_lock());
  auto after = pinned().upper_bound((const char*)pointer);
  if (!pointer || after == pinned().begin()) return false;
  auto& [first, bytes] = *std::prev(after);
  return (const char*)pointer < first + bytes;
}

bool poisons() {
  static const bool fills = setting("SIMULATED_DEVICE_POISON", 1) != 0;
  return fills;
}

void poison(void* pointer, size_t bytes) {
  if (poisons() && bytes <= MOST_POISONED) memset(pointer, 0xFF, bytes);
}

int device_at(const void* pointer) {
  Locked held_lock(lock());
  auto* block = block_at((const char*)pointer);
  return block ? block->device : -1;
}

int owner_of(const char* pointer) {
  Locked held_lock(lock());
  auto* block = block_at(pointer);
  return block ? block->stream : -1;
}

uint64_t taken_at(const char* pointer) {
  Locked held_lock(lock());
  auto* block = block_at(pointer);
  return block ? block->position : 0;
}

void record_stream(const void* pointer, int stream) {
  Locked held_lock(lock());
  auto* block = block_at((const char*)pointer);
  if (block && block->stream != stream) block->used.insert(stream);
}

}  // namespace simulated
