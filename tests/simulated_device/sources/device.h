#pragma once
#include <ATen/core/Generator.h>

namespace simulated {
constexpr uint64_t OFFSET = 4;  // of a generator: what a kernel that draws moves it on by, at least
const at::Generator& default_generator(int device);
void hand_out_default_generators(bool does);  // while torch.cuda's tuple of them is made
}  // namespace simulated
