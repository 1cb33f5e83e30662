#include "journal.h"
#include <set>
#include <sstream>

namespace simulated {
namespace {
// Those of communicators: only they can wait for another process.
std::set<int>& communication_streams() {
  static auto* streams = new std::set<int>;
  return *streams;
}
}  // namespace

std::vector<std::string>& journal() {
  static auto* lines = new std::vector<std::string>;
  return *lines;
}

Communicator new_communicator(const std::string& name, int device) {
  Locked held(lock());
  int stream = new_stream(device);
  communication_streams().insert(stream);
  return {name, stream};
}

void write_down(const Communicator& communicator, int rank, const std::vector<Call>& calls, const Moment& moment) {
  Locked held(lock());
  std::ostringstream line;
  line << "{\"communicator\":\"" << communicator.name << "\",\"rank\":" << rank << ",\"stream\":" << communicator.stream
       << ",\"position\":" << moment.position << ",\"calls\":[";
  for (size_t at = 0; at < calls.size(); at++)
    line << (at ? "," : "") << "[\"" << calls[at].kind << "\"," << calls[at].peer << "," << calls[at].bytes << "]";
  line << "],\"after\":{";
  bool first = true;
  for (int stream : communication_streams())
    if (stream != communicator.stream && stream < (int)moment.clock.size() && moment.clock[stream]) {
      line << (first ? "" : ",") << "\"" << stream << "\":" << moment.clock[stream];
      first = false;
    }
  line << "}}";
  journal().push_back(line.str());
}

}  // namespace simulated
