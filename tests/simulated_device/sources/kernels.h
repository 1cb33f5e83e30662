// Kernels are the CPU's, on the device's memory.
#pragma once
#include <ATen/core/Tensor.h>

namespace simulated {
at::Tensor as_cpu(const at::Tensor& tensor);  // the same memory
struct Copies {
  uint64_t deferred = 0;  // between pinned memory and the device, that the host does not wait for
  uint64_t pageable = 0;  // asked for without waiting, but the host's memory is not pinned: the host waits
  uint64_t waited = 0;
};
Copies& copies();
}  // namespace simulated
