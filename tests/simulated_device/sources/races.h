// Who reads and writes which bytes, and whether the streams are ordered where two of them touch the same.
#pragma once
#include <ATen/core/Tensor.h>
#include <string>
#include "streams.h"

namespace simulated {

void touch(int stream, const at::Tensor& tensor, bool writes, const std::string& what);
void host_touches(const at::Tensor& tensor, bool writes, const std::string& what);

// A block ends. `used`: streams that record_stream named. Work of others must be ordered before memory of its stream is written again.
void forget_block(const Range& block, int stream, const std::vector<int>& used);
void forget(const Range& range);
void report_race(const std::string& what);
std::vector<std::string>& races();
bool watching();
}  // namespace simulated
