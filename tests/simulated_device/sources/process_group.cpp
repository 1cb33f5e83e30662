// The backend `nccl`: gloo works on the device's memory in threads of its own, streams wait for it as they wait for NCCL, and what every
// communicator was given is written down, in order, so that a deadlock of NCCL is found where gloo has none (see deadlocks.py).
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <map>
#include <sstream>
#include "journal.h"
#include "kernels.h"
#include "races.h"
#include "streams.h"

namespace py = pybind11;
using namespace c10d;
using c10::intrusive_ptr;
using simulated::Call;
using simulated::Communicator;
using simulated::Moment;
using Tensors = std::vector<at::Tensor>;
using Works = std::vector<intrusive_ptr<Work>>;
using After = std::function<void()>;

namespace {

py::object& gloo_factory() {
  static auto* factory = new py::object;
  return *factory;
}

// ---- work ---------------------------------------------------------------------------------------------------------------------------

std::chrono::milliseconds patience() {
  static const auto seconds = std::chrono::seconds(simulated::setting("SIMULATED_DEVICE_TIMEOUT", 120));
  return seconds;
}

// What gloo does of one call, or of those of one group.
struct Transfer {
  Works works;
  Tensors kept;
  std::vector<After> afterwards;
  std::string what;
  bool ended = false;
  std::exception_ptr error;

  void end() {
    simulated::Locked held(simulated::lock());
    if (!ended) {
      ended = true;
      try {
        for (auto& work : works) work->wait(patience());
        at::AutoDispatchBelowADInplaceOrView below;
        for (auto& after : afterwards) after();
      } catch (const std::exception& failed) {
        error = std::make_exception_ptr(std::runtime_error(what + " was not answered: " + failed.what()));
      }
      simulated::let_go(std::make_shared<Tensors>(std::move(kept)));
      kept.clear();
    }
    if (error) std::rethrow_exception(error);
  }
};

struct SimulatedWork : Work {
  std::shared_ptr<Transfer> transfer;
  Moment moment;
  int device;
  Tensors outputs;
  bool host_waits;

  SimulatedWork(OpType type, std::shared_ptr<Transfer> transfer, Moment moment, int device, Tensors outputs, bool host_waits = false)
      : Work(-1, type), transfer(std::move(transfer)), moment(std::move(moment)), device(device), outputs(std::move(outputs)),
        host_waits(host_waits) {}
  bool isCompleted() override {
    for (auto& work : transfer->works)
      if (!work->isCompleted()) return false;
    simulated::finish(moment.stream, moment.position);
    return true;
  }
  bool isSuccess() const override { return !transfer->error; }
  Tensors result() override { return outputs; }
  void synchronize() override {
    simulated::stream_waits(simulated::current_stream(device), moment);
    if (host_waits) simulated::host_blocks(moment);
    outputs.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    simulated::finish(moment.stream, moment.position);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{c10::Device(c10::kCUDA, device)});
    // Who waits for the future waits on its stream for this work, as with NCCL: the future records
    // its events on the current streams.
    int before = simulated::current_stream(device);
    simulated::set_current_stream(moment.stream);
    future->markCompleted(c10::IValue(outputs));
    simulated::set_current_stream(before);
    return future;
  }
};

Tensors as_cpu(const Tensors& tensors) {
  Tensors found;
  for (auto& tensor : tensors) found.push_back(simulated::as_cpu(tensor));
  return found;
}

at::Tensor flat(const at::Tensor& tensor) { return simulated::as_cpu(tensor).view({-1}); }

struct NCCLOptions : Backend::Options {
  NCCLOptions() : Backend::Options("nccl") {}
  bool is_high_priority_stream = false;
};

// ---- the backend --------------------------------------------------------------------------------------------------------------------

struct SimulatedNCCL : Backend {
  intrusive_ptr<Backend> gloo;
  intrusive_ptr<NCCLOptions> options;
  bool eager = false;  // one communicator for all calls, from the start; else pairs of ranks get their own for messages outside of a group
  std::map<std::string, Communicator> communicators;

  struct Group {  // calls between startCoalescing and endCoalescing: one kernel
    std::shared_ptr<Transfer> transfer = std::make_shared<Transfer>();
    std::vector<Call> calls;
    std::vector<std::pair<at::Tensor, bool>> uses;
    Tensors outputs;
    int device = -1;
  };
  std::optional<Group> group;

  SimulatedNCCL(intrusive_ptr<Backend> gloo, int rank, int size, intrusive_ptr<NCCLOptions> options)
      : Backend(rank, size), gloo(std::move(gloo)), options(std::move(options)) {}
  const std::string getBackendName() const override { return "nccl"; }
  intrusive_ptr<Backend::Options> getBackendOptions() override { return options; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void eagerConnectSingleDevice(at::Device) override { eager = true; }

  intrusive_ptr<Backend> split(const intrusive_ptr<Store>& store, const std::vector<int>& ranks,
                               const intrusive_ptr<Backend::Options>& given) override {
    auto mine = std::find(ranks.begin(), ranks.end(), getRank());
    if (mine == ranks.end()) return nullptr;
    auto theirs = c10::make_intrusive<NCCLOptions>();
    theirs->timeout = given ? given->timeout : options->timeout;
    if (given) theirs->group_name = given->group_name;
    for (int each : ranks) theirs->global_ranks_in_group.push_back(global_rank(each));
    py::gil_scoped_acquire gil;
    int rank = mine - ranks.begin(), size = (int)ranks.size();
    // The groups of one split have one store, which NCCL does not need.
    std::ostringstream name;
    for (int each : ranks) name << each << " ";
    auto own = c10::make_intrusive<PrefixStore>(name.str(), store);
    auto made = gloo_factory()(own, rank, size, theirs->timeout).cast<intrusive_ptr<Backend>>();
    auto backend = c10::make_intrusive<SimulatedNCCL>(made, rank, size, theirs);
    backend->eager = true;
    return backend;
  }

  std::string name() const {
    auto& ranks = options->global_ranks_in_group;
    std::ostringstream text;
    text << (options->group_name.empty() ? getGroupUid() : options->group_name) << " [";
    for (int rank = 0; rank < getSize(); rank++) text << (rank ? " " : "") << (ranks.empty() ? rank : (int)ranks[rank]);
    text << "]";
    return text.str();
  }

  int global_rank(int rank) const { return options->global_ranks_in_group.empty() ? rank : (int)options->global_ranks_in_group[rank]; }

  Communicator& communicator(int device, const std::string& pair) {
    auto found = communicators.find(pair);
    if (found == communicators.end()) {
      found = communicators.emplace(pair, simulated::new_communicator(name() + pair, device)).first;
    }
    return found->second;
  }

  int begin(const Tensors& tensors) {
    TORCH_CHECK(!tensors.empty(), "nccl: no tensor");
    for (auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu");
      TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
      TORCH_CHECK(tensor.device() == tensors[0].device(), "nccl: tensors on several devices");
    }
    int device = tensors[0].device().index();
    simulated::begin_kernel(simulated::current_stream(device));
    return device;
  }

  intrusive_ptr<Work> end(OpType type, int device, Works works, const Tensors& inputs, const Tensors& outputs,
                          std::vector<After> afterwards = {}, int peer = -1) {
    int64_t bytes = 0;
    for (auto& tensor : inputs.empty() ? outputs : inputs) bytes += tensor.nbytes();
    Group one;
    Group& into = group ? *group : one;
    for (auto& work : works) into.transfer->works.push_back(work);
    for (auto& after : afterwards) into.transfer->afterwards.push_back(after);
    for (auto* tensors : {&inputs, &outputs})
      for (auto& tensor : *tensors) {
        into.transfer->kept.push_back(tensor);
        into.uses.emplace_back(tensor, tensors == &outputs);
      }
    into.outputs.insert(into.outputs.end(), outputs.begin(), outputs.end());
    into.calls.push_back({opTypeToString(type), peer < 0 ? -1 : global_rank(peer), bytes});
    into.device = device;
    if (group) return c10::make_intrusive<SimulatedWork>(type, into.transfer, Moment{}, device, outputs);
    std::string pair;
    if (peer >= 0 && !eager) pair = " pair " + std::to_string(std::min(getRank(), peer)) + "-" + std::to_string(std::max(getRank(), peer));
    return launch(type, into, pair);
  }

  intrusive_ptr<Work> launch(OpType type, Group& calls, const std::string& pair, bool host_waits = false) {
    simulated::Locked held(simulated::lock());
    auto& on = communicator(calls.device, pair);
    calls.transfer->what = calls.calls[0].kind + " on " + on.name + " by rank " + std::to_string(global_rank(getRank()));
    simulated::happens_after(on.stream, simulated::now_on(simulated::current_stream(calls.device)).clock);
    simulated::defer(on.stream, [transfer = calls.transfer] { transfer->end(); }, {});
    for (auto& [tensor, writes] : calls.uses) simulated::touch(on.stream, tensor, writes, opTypeToString(type));
    Moment moment = simulated::now_on(on.stream);
    simulated::write_down(on, global_rank(getRank()), calls.calls, moment);
    return c10::make_intrusive<SimulatedWork>(type, calls.transfer, moment, calls.device, calls.outputs, host_waits);
  }

  void startCoalescing() override { group.emplace(); }
  intrusive_ptr<Work> endCoalescing() override {
    Group calls = std::move(*group);
    group.reset();
    return calls.device < 0 ? nullptr : launch(OpType::COALESCED, calls, "");
  }

  // gloo has no average: a sum, divided afterwards.
  std::vector<After> averaged(ReduceOp& op, const Tensors& outputs) {
    if (op != ReduceOp::AVG) return {};
    op = ReduceOp::SUM;
    return {[tensors = as_cpu(outputs), size = getSize()]() mutable {
      for (auto& tensor : tensors) tensor.div_(size);
    }};
  }

  intrusive_ptr<Work> allreduce(Tensors& tensors, const AllreduceOptions& given) override {
    AllreduceOptions opts = given;
    int device = begin(tensors);
    auto after = averaged(opts.reduceOp, tensors);
    auto shared = as_cpu(tensors);
    return end(OpType::ALLREDUCE, device, {gloo->allreduce(shared, opts)}, {}, tensors, after);
  }
  intrusive_ptr<Work> broadcast(Tensors& tensors, const BroadcastOptions& opts) override {
    int device = begin(tensors);
    auto shared = as_cpu(tensors);
    bool sends = opts.rootRank == getRank();
    return end(OpType::BROADCAST, device, {gloo->broadcast(shared, opts)}, sends ? tensors : Tensors{}, sends ? Tensors{} : tensors);
  }
  intrusive_ptr<Work> reduce(Tensors& tensors, const ReduceOptions& given) override {
    ReduceOptions opts = given;
    int device = begin(tensors);
    auto after = averaged(opts.reduceOp, tensors);
    auto shared = as_cpu(tensors);
    return end(OpType::REDUCE, device, {gloo->reduce(shared, opts)}, {}, tensors, after);
  }
  intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const AllgatherOptions& opts) override {
    int device = begin(inputs);
    std::vector<Tensors> gathered{as_cpu(outputs.at(0))};
    auto shared = as_cpu(inputs);
    return end(OpType::ALLGATHER, device, {gloo->allgather(gathered, shared, opts)}, inputs, outputs[0]);
  }
  intrusive_ptr<Work> gather_one(at::Tensor& output, at::Tensor& input, const AllgatherOptions& opts) {
    at::Tensor gathered = flat(output), shared = flat(input).clone();  // its own part of the output may be the input
    return gloo->_allgather_base(gathered, shared, opts);
  }
  intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input, const AllgatherOptions& opts) override {
    int device = begin({output, input});
    return end(OpType::_ALLGATHER_BASE, device, {gather_one(output, input, opts)}, {input}, {output});
  }
  intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const AllgatherOptions& opts) override {
    int device = begin(inputs);
    Works works;
    for (size_t at = 0; at < inputs.size(); at++) works.push_back(gather_one(outputs[at], inputs[at], opts));
    return end(OpType::ALLGATHER_COALESCED, device, works, inputs, outputs);
  }
  intrusive_ptr<Work> reduce_one(at::Tensor& output, const at::Tensor& input, ReduceScatterOptions opts, std::vector<After>& after) {
    for (auto& each : averaged(opts.reduceOp, {output})) after.push_back(each);
    at::Tensor reduced = flat(output), shared = input;
    return gloo->_reduce_scatter_base(reduced, shared, opts);
  }
  intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const ReduceScatterOptions& opts) override {
    int device = begin({output, input});
    std::vector<After> after;
    auto work = reduce_one(output, flat(input).clone(), opts, after);
    return end(OpType::_REDUCE_SCATTER_BASE, device, {work}, {input}, {output}, after);
  }
  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& opts) override {
    int device = begin(inputs);
    std::vector<After> after;
    Works works;
    for (size_t at = 0; at < inputs.size(); at++) works.push_back(reduce_one(outputs[at], flat(inputs[at]).clone(), opts, after));
    // torch 2.11 has no type of its own for this call.
    return end(OpType::COALESCED, device, works, inputs, outputs, after);
  }
  intrusive_ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ReduceScatterOptions& opts) override {
    int device = begin(outputs);
    Tensors parts;
    for (auto& tensor : inputs.at(0)) parts.push_back(simulated::as_cpu(tensor).reshape({-1}));
    std::vector<After> after;
    auto work = reduce_one(outputs[0], at::cat(parts), opts, after);
    return end(OpType::REDUCE_SCATTER, device, {work}, inputs[0], outputs, after);
  }
  intrusive_ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs, const GatherOptions& opts) override {
    int device = begin(inputs);
    std::vector<Tensors> gathered;
    for (auto& tensors : outputs) gathered.push_back(as_cpu(tensors));
    auto shared = as_cpu(inputs);
    return end(OpType::GATHER, device, {gloo->gather(gathered, shared, opts)}, inputs, outputs.empty() ? Tensors{} : outputs[0]);
  }
  intrusive_ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ScatterOptions& opts) override {
    int device = begin(outputs);
    std::vector<Tensors> shared;
    for (auto& tensors : inputs) shared.push_back(as_cpu(tensors));
    auto scattered = as_cpu(outputs);
    return end(OpType::SCATTER, device, {gloo->scatter(scattered, shared, opts)}, inputs.empty() ? Tensors{} : inputs[0], outputs);
  }
  intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from,
                                    const AllToAllOptions& opts) override {
    int device = begin({output, input});
    at::Tensor received = simulated::as_cpu(output), sent = simulated::as_cpu(input);
    return end(OpType::ALLTOALL_BASE, device, {gloo->alltoall_base(received, sent, to, from, opts)}, {input}, {output});
  }
  intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const AllToAllOptions&) override {
    constexpr int TAG = 7;
    int device = begin(inputs);
    auto received = as_cpu(outputs), sent = as_cpu(inputs);
    Works works;
    for (int rank = 0; rank < getSize(); rank++) {
      if (rank == getRank()) {
        received[rank].copy_(sent[rank]);
        continue;
      }
      Tensors to{sent[rank]}, from{received[rank]};
      works.push_back(gloo->send(to, rank, TAG));
      works.push_back(gloo->recv(from, rank, TAG));
    }
    return end(OpType::ALLTOALL, device, works, inputs, outputs);
  }
  intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    int device = begin(tensors);
    auto shared = as_cpu(tensors);
    return end(OpType::SEND, device, {gloo->send(shared, to, tag)}, tensors, {}, {}, to);
  }
  intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    int device = begin(tensors);
    auto shared = as_cpu(tensors);
    return end(OpType::RECV, device, {gloo->recv(shared, from, tag)}, {}, tensors, {}, from);
  }
  intrusive_ptr<Work> barrier(const BarrierOptions& opts) override {
    Group one;
    one.transfer->works.push_back(gloo->barrier(opts));
    one.calls.push_back({"BARRIER", -1, 0});
    one.device = opts.device_ids.empty() ? simulated::current_device() : (int)opts.device_ids[0];
    return launch(OpType::BARRIER, one, "", true);
  }
};

// What DistributedDataParallel times itself with; the host's clock, as for CPU tensors.
struct HostTimer : Timer {
  explicit HostTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    if (!from || !to) return std::nullopt;
    return *to - *from;
  }
};
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(
    TimerRegistry, c10::kCUDA, c10::REGISTRY_PREFERRED, HostTimer);

}  // namespace

PYBIND11_MODULE(simulated_nccl, module) {
  py::module_::import("torch._C._distributed_c10d");
  module.def("set_gloo", [](py::object factory) { gloo_factory() = std::move(factory); });
  module.def("journal", [] { return simulated::journal(); });
  module.def("clear_journal", [] { simulated::journal().clear(); });
  auto group = py::class_<SimulatedNCCL, Backend, intrusive_ptr<SimulatedNCCL>>(module, "ProcessGroupNCCL", py::dynamic_attr());
  py::class_<NCCLOptions, Backend::Options, intrusive_ptr<NCCLOptions>>(group, "Options", py::dynamic_attr())
      .def(py::init([](bool high) {
             auto made = c10::make_intrusive<NCCLOptions>();
             made->is_high_priority_stream = high;
             return made;
           }),
           py::arg("is_high_priority_stream") = false)
      .def("__deepcopy__", [](const NCCLOptions& of, const py::object&) { return c10::make_intrusive<NCCLOptions>(of); })
      .def("__copy__", [](const NCCLOptions& of) { return c10::make_intrusive<NCCLOptions>(of); })
      .def_readwrite("is_high_priority_stream", &NCCLOptions::is_high_priority_stream);
  group.def("_set_default_timeout", [](SimulatedNCCL& of, std::chrono::milliseconds timeout) {
    of.options->timeout = timeout;
    of.setTimeout(timeout);
  });
  group.def("perform_nocolor_split", [](SimulatedNCCL&, const py::object&) {});  // of a rank that is in none of the new groups
  group.def("_group_start", [](SimulatedNCCL& of) { of.startCoalescing(); });
  group.def("_group_end", [](SimulatedNCCL& of) { of.endCoalescing(); });
  group.def_property_readonly("options", [](const SimulatedNCCL& of) { return of.options; });
  group.def(py::init([](const intrusive_ptr<Store>& store, int rank, int size, const intrusive_ptr<NCCLOptions>& options) {
    auto gloo = gloo_factory()(store, rank, size, options->timeout).cast<intrusive_ptr<Backend>>();
    return c10::make_intrusive<SimulatedNCCL>(gloo, rank, size, options);
  }));
}
