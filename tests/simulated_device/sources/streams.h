// Streams, events and the order between them: what work happens before what, and what was put off until somebody waits for it.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace simulated {

// By stream: of its first so many pieces of work it is known that they are done before.
using Clock = std::vector<uint64_t>;

// Bytes in memory: first address, length.
using Range = std::pair<const char*, size_t>;

// What a stream was given until now. What waits for it happens after all of that.
struct Moment {
  int stream = -1;
  uint64_t position = 0;
  Clock clock;
};

struct Deferred {
  uint64_t position;
  std::function<void()> run;
  std::vector<Range> touches;
};

// One lock for everything: threads of autograd and of the program use the device at once.
std::recursive_mutex& lock();
class Locked {
 public:
  explicit Locked(std::recursive_mutex& mutex);
  ~Locked();
  Locked(const Locked&) = delete;
};
// Destroyed when this thread holds the lock no longer: a tensor with a Python object takes the interpreter's lock, and a thread that
// has that one may wait for ours.
void let_go(std::shared_ptr<void> held);

int setting(const char* name, int otherwise);  // an environment variable
int devices();
int current_device();
void set_current_device(int device);  // refuses a device that does not exist

int current_stream(int device);
void set_current_stream(int stream);
int new_stream(int device);
int pool_stream(int device);  // as CUDA's: 32 a device, handed out in turn
int device_of(int stream);
int stream_of_id(int device, int64_t id);  // torch's id of a device's default stream is 0, of others ours
int64_t id_of_stream(int stream);
std::vector<int> streams_of(int device);

Moment now_on(int stream);
void happens_after(int stream, const Clock& clock);
void begin_kernel(int stream);  // what was put off on it is done first
uint64_t defer(int stream, std::function<void()> run, std::vector<Range> touches);
void finish(int stream, uint64_t position);  // do what was put off, up to there
void finish(int stream);
bool is_open(const Moment& moment);
void stream_waits(int stream, const Moment& moment);
void host_waits(const Moment& moment);
// How often the program blocked until a stream had reached a point. `drained`: nothing was queued behind that point, so the device idled.
struct Blocked {
  uint64_t all = 0;
  uint64_t drained = 0;
};
Blocked& blocked();
void host_blocks(const Moment& moment);  // host_waits, counted
void host_blocks_for(int device);        // for all of its streams, counted once
bool ordered_before(int stream, int earlier, uint64_t position);  // what `stream` begins now is after it
bool host_ordered_before(int earlier, uint64_t position);
bool is_touched(const Range& range);               // by something that was put off
int touching(const Range& range, int not_before);  // a stream with such work, -1 for none
void finish_touching(const Range& range);
bool in_deferred();  // this thread is doing what was put off
uint64_t position_of(int stream);

struct Event {
  Moment moment;
  std::shared_ptr<double> seconds;  // when it was reached; below 0 before
  bool timed = false;
};
void set_clock(double seconds);        // below 0: the host's clock
double seconds();                      // of that clock
double seconds_of(const void* event);  // below 0 where it is not known
void record(Event& event, int stream);

}  // namespace simulated
