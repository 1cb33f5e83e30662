#include "races.h"
#include <c10/util/StringUtil.h>
#include <algorithm>
#include <map>
#include "memory.h"

namespace simulated {
namespace {

constexpr size_t MOST_RUNS = 512;  // of bytes in one tensor; more are taken as one that holds them all
constexpr size_t MOST_REPORTS = 1000;

struct Access {
  uint64_t position;
  std::string what;
};

// Bytes with one history: the last write, and the reads since.
struct Piece {
  size_t length;
  int writer = -1;
  Access write;
  std::map<int, Access> reads;
};

struct Freed {
  int stream;
  Access access;
  size_t bytes;
};

using Pieces = std::map<const char*, Piece>;
Pieces& pieces() {
  static auto* all = new Pieces;
  return *all;
}
// By stream whose memory it was: work of other streams that may still use it.
std::map<int, std::vector<Freed>>& freed() {
  static auto* all = new std::map<int, std::vector<Freed>>;
  return *all;
}

std::string on(int stream) { return " on stream " + std::to_string(stream); }

// Let a piece begin at `at`, where one holds it.
void split(const char* at) {
  auto after = pieces().upper_bound(at);
  if (after == pieces().begin()) return;
  auto piece = std::prev(after);
  size_t before = at - piece->first;
  if (before == 0 || before >= piece->second.length) return;
  Piece rest = piece->second;
  rest.length -= before;
  piece->second.length = before;
  pieces().emplace(at, std::move(rest));
}

// The bytes of a tensor, as runs without a gap.
std::vector<Range> runs(const at::Tensor& tensor) {
  const char* first = (const char*)tensor.const_data_ptr();
  size_t item = tensor.element_size(), length = item, count = 1;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t dim = 0; dim < tensor.dim(); dim++)
    if (tensor.size(dim) > 1 && tensor.stride(dim) != 0) dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  std::sort(dims.begin(), dims.end());
  size_t at = 0;
  while (at < dims.size() && dims[at].first * item == length) length *= dims[at++].second;
  std::vector<size_t> offsets{0};
  size_t extent = length;
  for (size_t dim = at; dim < dims.size(); dim++) {
    count *= dims[dim].second;
    extent += dims[dim].first * item * (dims[dim].second - 1);
  }
  if (count > MOST_RUNS) return {{first, extent}};
  for (; at < dims.size(); at++) {
    std::vector<size_t> more;
    for (int64_t index = 0; index < dims[at].second; index++)
      for (size_t offset : offsets) more.push_back(offset + index * dims[at].first * item);
    offsets = std::move(more);
  }
  std::vector<Range> found;
  for (size_t offset : offsets) found.emplace_back(first + offset, length);
  return found;
}

std::string conflict(const Piece& piece, int stream, bool writes, const std::string& what) {
  const char* verb = writes ? " writes" : " reads";
  if (piece.writer >= 0 && !ordered_before(stream, piece.writer, piece.write.position))
    return what + verb + on(stream) + " what " + piece.write.what + " writes" + on(piece.writer) + ", without waiting for it";
  if (writes)
    for (auto& [reader, read] : piece.reads)
      if (!ordered_before(stream, reader, read.position))
        return what + verb + on(stream) + " what " + read.what + " reads" + on(reader) + ", without waiting for it";
  return "";
}

// Told where memory of that stream is first written after something of it was freed too early: it may be the same memory. Also where
// another stream writes it first, without waiting for its own one: that one may not have done what was asked of it with the same memory.
std::string reused(const Range& range, int stream, const std::string& what) {
  int owner = owner_of(range.first);
  std::string found;
  for (auto& each : freed()[owner])
    if (!ordered_before(stream, each.stream, each.access.position))
      found = "memory" + on(owner) + " was freed while " + each.access.what + on(each.stream) +
              " may still use it (no record_stream), and may be given to " + what + on(stream);
  freed()[owner].clear();
  uint64_t taken = taken_at(range.first);
  if (found.empty() && owner >= 0 && owner != stream && !ordered_before(stream, owner, taken) && !host_ordered_before(owner, taken))
    found = what + " writes" + on(stream) + " memory" + on(owner) + ", without waiting for what that stream did with it before";
  return found;
}

std::string touch_run(const Range& range, int stream, bool writes, const std::string& what) {
  std::string found;
  const char *begin = range.first, *end = begin + range.second;
  split(begin);
  split(end);
  auto piece = pieces().lower_bound(begin);
  if (writes) {
    bool fresh = true;  // not written before
    for (auto at = piece; at != pieces().end() && at->first < end; ++at) fresh = fresh && at->second.writer < 0;
    if (fresh) found = reused(range, stream, what);
    while (piece != pieces().end() && piece->first < end) {
      if (found.empty()) found = conflict(piece->second, stream, true, what);
      piece = pieces().erase(piece);
    }
    pieces()[begin] = Piece{range.second, stream, {position_of(stream), what}, {}};
    return found;
  }
  for (const char* at = begin; at < end;) {
    if (piece == pieces().end() || piece->first > at) {  // never written
      size_t gap = (piece == pieces().end() ? end : std::min(end, piece->first)) - at;
      piece = pieces().emplace(at, Piece{gap, -1, {0, ""}, {}}).first;
    }
    if (found.empty()) found = conflict(piece->second, stream, false, what);
    piece->second.reads[stream] = {position_of(stream), what};
    at = piece->first + piece->second.length;
    ++piece;
  }
  return found;
}

template <class Visit>
void each_piece(const Range& range, Visit visit) {
  for (auto piece = pieces().lower_bound(range.first); piece != pieces().end() && piece->first < range.first + range.second; ++piece)
    visit(piece->second);
}

}  // namespace

bool watching() {
  static const bool watches = setting("SIMULATED_DEVICE_RACES", 1) != 0;
  return watches;
}

std::vector<std::string>& races() {
  static auto* all = new std::vector<std::string>;
  return *all;
}

void report_race(const std::string& what) {
  Locked held(lock());
  if (races().size() < MOST_REPORTS) races().push_back(what);
  if (setting("SIMULATED_DEVICE_LOUD", 0)) fprintf(stderr, "[simulated device] %s\n", what.c_str());
}

void touch(int stream, const at::Tensor& tensor, bool writes, const std::string& what) {
  if (!watching() || in_deferred() || tensor.numel() == 0) return;
  Locked held(lock());
  std::string found;
  for (auto& run : runs(tensor)) {
    auto told = touch_run(run, stream, writes, what);
    if (found.empty()) found = told;
  }
  if (!found.empty()) report_race(found + ", shape " + c10::str(tensor.sizes()));
}

void host_touches(const at::Tensor& tensor, bool writes, const std::string& what) {
  if (!watching() || in_deferred() || tensor.numel() == 0) return;
  // gloo's threads come here too, while a thread that waits for them holds the lock.
  std::unique_lock<std::recursive_mutex> held(lock(), std::try_to_lock);
  if (!held) return;
  std::string found;
  auto check = [&](int stream, const Access& access, const char* verb) {
    if (found.empty() && !host_ordered_before(stream, access.position))
      found = what + (writes ? " writes" : " reads") + " on the host what " + access.what + verb + on(stream) + ", without waiting for it";
  };
  for (auto& run : runs(tensor)) {
    split(run.first);
    split(run.first + run.second);
    each_piece(run, [&](Piece& piece) {
      if (piece.writer >= 0) check(piece.writer, piece.write, " writes");
      if (writes)
        for (auto& [reader, read] : piece.reads) check(reader, read, " reads");
    });
    if (writes) forget(run);  // later work of streams is given after it
  }
  if (!found.empty()) report_race(found + ", shape " + c10::str(tensor.sizes()));
}

void forget(const Range& range) {
  split(range.first);
  split(range.first + range.second);
  pieces().erase(pieces().lower_bound(range.first), pieces().lower_bound(range.first + range.second));
}

void forget_block(const Range& block, int stream, const std::vector<int>& used) {
  if (watching())
    each_piece(block, [&](Piece& piece) {
      auto check = [&](int user, const Access& access) {
        bool named = std::find(used.begin(), used.end(), user) != used.end();
        if (!named && !ordered_before(stream, user, access.position) && !host_ordered_before(user, access.position))
          freed()[stream].push_back({user, access, block.second});
      };
      if (piece.writer >= 0) check(piece.writer, piece.write);
      for (auto& [reader, read] : piece.reads) check(reader, read);
    });
  forget(block);
}

}  // namespace simulated
