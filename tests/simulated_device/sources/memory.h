// The device's memory, which is the host's: blocks with an owner stream, a limit, and pinned host memory.
#pragma once
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include "streams.h"

namespace simulated {

struct Held {
  int64_t now = 0, peak = 0;            // bytes that tensors hold
  int64_t reserved = 0, reserved_peak = 0;  // bytes that a caching allocator would keep
};

c10::DeviceAllocator& device_memory();
at::HostAllocator& pinned_memory();
Held& held(int device);
int64_t capacity();      // bytes of a device
int64_t pinned_bytes();  // held now
void empty_cache(int device);
bool is_pinned(const void* pointer);
bool poisons();
void poison(void* pointer, size_t bytes);  // NaN in every floating-point dtype
int device_at(const void* pointer);        // -1 where it is not the device's
int owner_of(const char* pointer);         // the stream whose memory it is, -1 where it is none
uint64_t taken_at(const char* pointer);    // the position of that stream when the memory was taken
void record_stream(const void* pointer, int stream);

}  // namespace simulated
