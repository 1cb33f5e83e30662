// What communicators were given, in order: deadlocks.py plays it back with NCCL's rules.
#pragma once
#include <string>
#include <vector>
#include "streams.h"

namespace simulated {

struct Call {
  std::string kind;
  int peer;  // rank in the world, -1 for a collective
  int64_t bytes;
};

struct Communicator {
  std::string name;  // the same on all its ranks
  int stream;
};

Communicator new_communicator(const std::string& name, int device);
void write_down(const Communicator& communicator, int rank, const std::vector<Call>& calls, const Moment& moment);
std::vector<std::string>& journal();  // lines of JSON

}  // namespace simulated
