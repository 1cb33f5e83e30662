#include "streams.h"
#include <c10/util/Exception.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>

namespace simulated {
namespace {

constexpr int POOL = 32;

struct Stream {
  int device;
  uint64_t position = 0;  // pieces of work so far
  std::deque<Deferred> deferred;
  Clock clock;
};

// Never destroyed: torch frees tensors after static destructors ran.
std::deque<Stream>& streams() {
  static auto* all = [] {
    auto* made = new std::deque<Stream>;
    for (int device = 0; device < devices(); device++) made->push_back(Stream{device});
    return made;
  }();
  return *all;
}

Clock& host() {
  static auto* clock = new Clock;
  return *clock;
}

std::vector<std::vector<int>>& pools() {
  static auto* all = new std::vector<std::vector<int>>(devices());
  return *all;
}

thread_local int device_now = 0;
thread_local std::vector<int> stream_now;  // by device
thread_local int doing_deferred = 0;

void merge(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t at = 0; at < other.size(); at++) into[at] = std::max(into[at], other[at]);
}

uint64_t at(const Clock& clock, int stream) { return stream < (int)clock.size() ? clock[stream] : 0; }

// The next piece of work: after what the host waited for.
void advance(int stream) {
  auto& own = streams()[stream];
  own.position++;
  merge(own.clock, host());
  if ((int)own.clock.size() <= stream) own.clock.resize(stream + 1);
  own.clock[stream] = own.position;
}

std::atomic<double> set_seconds = -1;

bool overlap(const Range& one, const Range& other) {
  return one.first < other.first + other.second && other.first < one.first + one.second;
}

template <class Visit>
void each_touching(const Range& range, Visit visit) {
  for (int stream = 0; stream < (int)streams().size(); stream++)
    for (auto& work : streams()[stream].deferred)
      if (std::any_of(work.touches.begin(), work.touches.end(), [&](auto& touched) { return overlap(touched, range); }))
        visit(stream, work.position);
}

}  // namespace

std::recursive_mutex& lock() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

namespace {
thread_local int depth = 0;
thread_local std::vector<std::shared_ptr<void>> to_destroy;
}  // namespace

Locked::Locked(std::recursive_mutex& mutex) {
  mutex.lock();
  depth++;
}

Locked::~Locked() {
  std::vector<std::shared_ptr<void>> mine;
  if (--depth == 0) mine.swap(to_destroy);
  lock().unlock();
}

void let_go(std::shared_ptr<void> held) { to_destroy.push_back(std::move(held)); }

int setting(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoi(value) : otherwise;
}

int devices() {
  static const int count = setting("SIMULATED_DEVICES", 8);
  return count;
}

int current_device() { return device_now; }

void set_current_device(int device) {
  TORCH_CHECK(device < devices(), "CUDA error: invalid device ordinal ", device, "; there are ", devices());
  if (device >= 0) device_now = device;
}

int current_stream(int device) {
  if (stream_now.empty())
    for (int each = 0; each < devices(); each++) stream_now.push_back(each);
  return stream_now.at(device);
}

void set_current_stream(int stream) {
  Locked held(lock());
  int device = device_of(stream);
  current_stream(device);
  stream_now[device] = stream;
}

int new_stream(int device) {
  Locked held(lock());
  streams().push_back(Stream{device});
  return (int)streams().size() - 1;
}

int pool_stream(int device) {
  Locked held(lock());
  static auto* next = new std::vector<int>(devices());
  auto& pool = pools()[device];
  if ((int)pool.size() < POOL) {
    pool.push_back(new_stream(device));
    return pool.back();
  }
  return pool[(*next)[device]++ % POOL];
}

int device_of(int stream) { return streams()[stream].device; }
int stream_of_id(int device, int64_t id) { return id == 0 ? device : (int)id; }
int64_t id_of_stream(int stream) { return stream < devices() ? 0 : stream; }

std::vector<int> streams_of(int device) {
  Locked held(lock());
  std::vector<int> found;
  for (int stream = 0; stream < (int)streams().size(); stream++)
    if (streams()[stream].device == device) found.push_back(stream);
  return found;
}

Moment now_on(int stream) {
  Locked held(lock());
  auto& own = streams()[stream];
  return {stream, own.position, own.clock};
}

void happens_after(int stream, const Clock& clock) {
  Locked held(lock());
  merge(streams()[stream].clock, clock);
}

void begin_kernel(int stream) {
  Locked held(lock());
  finish(stream);
  advance(stream);
}

uint64_t defer(int stream, std::function<void()> run, std::vector<Range> touches) {
  Locked held(lock());
  advance(stream);
  auto& own = streams()[stream];
  own.deferred.push_back({own.position, std::move(run), std::move(touches)});
  return own.position;
}

void finish(int stream, uint64_t position) {
  Locked held(lock());
  auto& own = streams()[stream];
  while (!own.deferred.empty() && own.deferred.front().position <= position) {
    Deferred work = std::move(own.deferred.front());
    own.deferred.pop_front();
    doing_deferred++;
    try {
      work.run();
    } catch (...) {
      doing_deferred--;
      throw;
    }
    doing_deferred--;
  }
}

void finish(int stream) { finish(stream, ~0ull); }

bool is_open(const Moment& moment) {
  Locked held(lock());
  if (moment.stream < 0) return false;
  auto& deferred = streams()[moment.stream].deferred;
  return !deferred.empty() && deferred.front().position <= moment.position;
}

void stream_waits(int stream, const Moment& moment) {
  Locked held(lock());
  if (moment.stream < 0) return;
  merge(streams()[stream].clock, moment.clock);
  if (moment.stream != stream && is_open(moment)) defer(stream, [moment] { finish(moment.stream, moment.position); }, {});
}

void host_waits(const Moment& moment) {
  Locked held(lock());
  if (moment.stream < 0) return;
  finish(moment.stream, moment.position);
  merge(host(), moment.clock);
}

Blocked& blocked() {
  static auto* counted = new Blocked;
  return *counted;
}

void host_blocks(const Moment& moment) {
  Locked held(lock());
  if (moment.stream < 0) return;
  blocked().all++;
  if (moment.position >= streams()[moment.stream].position) blocked().drained++;
  host_waits(moment);
}

void host_blocks_for(int device) {
  blocked().all++;
  blocked().drained++;
  for (int stream : streams_of(device)) host_waits(now_on(stream));
}

bool ordered_before(int stream, int earlier, uint64_t position) {
  return stream == earlier || at(streams()[stream].clock, earlier) >= position;
}

bool host_ordered_before(int earlier, uint64_t position) { return at(host(), earlier) >= position; }

bool is_touched(const Range& range) { return touching(range, 0) >= 0; }

int touching(const Range& range, int first) {
  Locked held(lock());
  int found = -1;
  each_touching(range, [&](int stream, uint64_t) {
    if (stream >= first && found < 0) found = stream;
  });
  return found;
}

void finish_touching(const Range& range) {
  Locked held(lock());
  std::vector<std::pair<int, uint64_t>> due;
  each_touching(range, [&](int stream, uint64_t position) { due.emplace_back(stream, position); });
  for (auto& [stream, position] : due) finish(stream, position);
}

bool in_deferred() { return doing_deferred > 0; }
uint64_t position_of(int stream) { return streams()[stream].position; }

double seconds() {
  if (set_seconds >= 0) return set_seconds;
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void set_clock(double seconds) { set_seconds = seconds; }

double seconds_of(const void* pointer) {
  Locked held(lock());
  auto* event = static_cast<const Event*>(pointer);
  return event && event->timed && event->seconds ? *event->seconds : -1;
}

void record(Event& event, int stream) {
  Locked held(lock());
  event.moment = now_on(stream);
  event.seconds = std::make_shared<double>(-1);
  auto reached = [at = event.seconds] { *at = seconds(); };
  auto& own = streams()[stream];
  if (own.deferred.empty())
    reached();
  else  // no work of its own: as soon as what was given before is done
    own.deferred.push_back({own.position, reached, {}});
}

}  // namespace simulated
