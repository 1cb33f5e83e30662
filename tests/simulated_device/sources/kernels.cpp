#include "kernels.h"
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <torch/library.h>
#include <algorithm>
#include <cstring>
#include "device.h"
#include "memory.h"
#include "races.h"
#include "streams.h"

namespace simulated {
using c10::Device;
using c10::IntArrayRef;
using c10::kCUDA;

namespace {
thread_local int inside_kernel = 0;   // the CPU's kernel runs for the device's
thread_local const char* kernel = "";  // its name, told in reports

std::string named(const char* otherwise) { return inside_kernel ? kernel : otherwise; }

struct Inside {
  const char* before = kernel;
  explicit Inside(const char* name) {
    if (!inside_kernel++) kernel = name;
  }
  ~Inside() {
    inside_kernel--;
    kernel = before;
  }
};

// As torch's device guard, without its cost of a virtual call each.
struct OnDevice {
  int before = current_device();
  explicit OnDevice(std::optional<Device> device) {
    if (device) set_current_device(device->index());
  }
  ~OnDevice() { set_current_device(before); }
};

int stream_for(const at::Tensor& tensor) { return current_stream(tensor.device().index()); }

void use(const at::Tensor& tensor) {
  if (!inside_kernel) begin_kernel(stream_for(tensor));
}

// ---- memory -------------------------------------------------------------------------------------------------------------------------

const c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

at::Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  OnDevice on(device);
  return at::detail::empty_generic(size, &device_memory(), KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<Device> device, std::optional<bool>) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory(), KEYS, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& tensor, IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  OnDevice on(tensor.device());
  use(tensor);
  return at::native::resize_(tensor, size, format);
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  OnDevice on(tensor.device());
  use(tensor);
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset, size, stride);
}

at::Tensor& set_source(at::Tensor& tensor, at::Storage storage) {
  int64_t count = storage.nbytes() / tensor.dtype().itemsize();
  return set_storage(tensor, std::move(storage), 0, {count}, {1});
}

at::Tensor& set_empty(at::Tensor& tensor) {
  OnDevice on(tensor.device());
  at::Storage storage(c10::Storage::use_byte_size_t(), 0, device_memory().allocate(0), &device_memory(), true);
  return set_storage(tensor, storage, 0, {0}, {1});
}

// ---- copies -------------------------------------------------------------------------------------------------------------------------

// Between pinned memory and the device: put off until somebody waits for it.
void defer_copy(at::Tensor& to, const at::Tensor& from, int stream, bool plain) {
  copies().deferred++;
  char* target = (char*)to.mutable_data_ptr();
  size_t bytes = to.numel() * to.element_size();
  if (!plain) {  // another dtype or other strides: converted where it comes from, before it moves
    if (from.is_cuda()) begin_kernel(stream);
    at::Tensor converted = at::empty_strided(to.sizes(), to.strides(), to.options().device(c10::kCPU));
    converted.copy_(as_cpu(from));
    if (from.is_cuda()) touch(stream, from, false, "copy_");
    defer(stream, [converted, target, bytes] { memcpy(target, converted.const_data_ptr(), bytes); }, {{target, bytes}});
    touch(stream, to, true, "copy_");
    return;
  }
  const char* source = (const char*)from.const_data_ptr();
  if (!to.is_cuda() && !is_touched({target, bytes})) poison(target, bytes);
  defer(stream, [target, source, bytes] { memcpy(target, source, bytes); }, {{target, bytes}, {source, bytes}});
  const char* way = to.is_cuda() ? "copy_ from the host" : "copy_ to the host";
  touch(stream, from, false, way);
  touch(stream, to, true, way);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  if (self.numel() == 0) return self;
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor source = given.sizes() == self.sizes() ? given : given.expand(self.sizes());
  bool within = self.is_cuda() && source.is_cuda();
  int stream = stream_for(self.is_cuda() ? self : source);
  bool dense = self.is_non_overlapping_and_dense() && source.strides() == self.strides() && !self.is_conj() && !source.is_conj();
  if (non_blocking && !within && !inside_kernel) {
    if (is_pinned((self.is_cuda() ? source : self).const_data_ptr()) && (dense || self.is_contiguous())) {
      defer_copy(self, source, stream, dense && source.dtype() == self.dtype());
      return self;
    }
    copies().pageable++;
  }
  if (!inside_kernel) begin_kernel(stream);
  if (source.is_cuda() || is_pinned(source.const_data_ptr())) touch(stream, source, false, named("copy_"));
  if (self.is_cuda() || is_pinned(self.const_data_ptr())) touch(stream, self, true, named("copy_"));
  {
    Inside inside("copy_");  // the stream's, not the host's
    as_cpu(self).copy_(as_cpu(source));
  }
  if (!within && !inside_kernel) {
    copies().waited++;
    host_blocks(now_on(stream));
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  return copy_(target, source, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& to) {
  at::Tensor target = to;
  target.resize_(source.sizes());
  return copy_(target, source, false);
}

at::Scalar item(const at::Tensor& tensor) {
  int stream = stream_for(tensor);
  begin_kernel(stream);
  touch(stream, tensor, false, "item");
  host_blocks(now_on(stream));
  return at::native::_local_scalar_dense_cpu(as_cpu(tensor));
}

// ---- all other kernels --------------------------------------------------------------------------------------------------------------

// The CPU's kernels draw from the CPU's generator: seeded for each by where the device's stands.
struct LentGenerator {
  at::Generator theirs = at::globalContext().defaultGenerator(Device(c10::kCPU));
  at::Tensor state = theirs.get_state();
  explicit LentGenerator(at::Generator ours) {
    uint64_t seed = ours.current_seed() * 0x9E3779B97F4A7C15 ^ ours.get_offset() * 0xBF58476D1CE4E5B9;
    ours.set_offset(ours.get_offset() + OFFSET);
    theirs.set_current_seed(seed);
  }
  ~LentGenerator() { theirs.set_state(state); }
};

const char* kept(const std::string& name) {
  Locked held(lock());
  static auto* names = new std::set<std::string>;
  return names->insert(name).first->c_str();
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  std::optional<Device> device;
  at::Generator generator;
  auto see = [&](const at::Tensor& tensor) {
    if (!device && tensor.defined() && tensor.is_cuda()) device = tensor.device();
  };
  for (size_t at = stack->size() - schema.arguments().size(); at < stack->size(); at++) {
    auto& value = (*stack)[at];
    if (value.isTensor()) see(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) see(tensor);
    if (value.isDevice() && value.toDevice().is_cuda() && !device) device = value.toDevice();
    if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      generator = value.toGenerator();
      value = c10::IValue();
    }
  }
  OnDevice on(device);
  begin_kernel(current_stream(current_device()));
  bool random = generator.defined() || op.hasTag(at::Tag::nondeterministic_seeded);
  std::optional<LentGenerator> lent;
  if (random) lent.emplace(generator.defined() ? generator : default_generator(-1));
  Inside inside(kept(schema.name()));
  at::native::cpu_fallback(op, stack);
}

// ---- what the host reads of pinned memory -------------------------------------------------------------------------------------------

// Operators of the CPU are watched where pinned memory is among their arguments: a copy may still write it.
std::unique_ptr<at::ObserverContext> watch_host(const at::RecordFunction& call) {
  if (inside_kernel || in_deferred()) return nullptr;
  auto schema = call.operator_schema();
  if (!schema) return nullptr;
  const std::string& name = schema->name();
  if (name == "aten::to" || name == "aten::_to_copy" || name == "aten::is_pinned" || name == "aten::empty_like") return nullptr;
  auto inputs = call.inputs();
  std::vector<std::pair<at::Tensor, bool>> found;
  for (size_t at = 0; at < inputs.size() && at < schema->arguments().size(); at++) {
    auto* alias = schema->arguments()[at].alias_info();
    if (alias && !alias->isWrite()) continue;  // a view: its bytes are not looked at
    auto see = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return true;
      if (tensor.is_cuda()) return false;
      if (tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.has_storage() && is_pinned(tensor.const_data_ptr()))
        found.emplace_back(tensor, alias != nullptr);
      return true;
    };
    bool on_host = true;
    if (inputs[at].isTensor()) on_host = see(inputs[at].toTensor());
    if (inputs[at].isTensorList())
      for (const at::Tensor& tensor : inputs[at].toTensorVector()) on_host = on_host && see(tensor);
    if (!on_host) return nullptr;  // the device's: its stream is looked at
  }
  for (auto& [tensor, writes] : found) host_touches(tensor, writes, name);
  return nullptr;
}

at::CallbackHandle watch() {
  return at::addGlobalCallback(at::RecordFunctionCallback(&watch_host).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}
const auto host_watch = watching() ? watch() : 0;

}  // namespace

at::Tensor as_cpu(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

Copies& copies() {
  static auto* counted = new Copies;
  return *counted;
}

// Note [Builds of torch with CUDA]
// The build of torch for the CPU has no kernel for the dispatch key CUDA, so the dispatcher takes an
// operator's composite kernel or the fallback below. A build with CUDA brings kernels that need a
// driver. Each of them is replaced by what the dispatcher would choose if it did not exist, so that
// both builds run the same code. Only operators of aten are replaced: the CUDA kernels of c10d belong
// to libtorch_cpu and serve every device.
//
// The other parts of the device (guard, allocators, hooks, profiler) are registered after those of
// libtorch_cuda, and with a higher priority where torch has priorities. Kernels for sparse, nested and
// quantized tensors stay: the simulated device does not support these tensors in either build.
namespace {
using c10::DispatchKey;

// The order in which the dispatcher looks for a composite kernel.
constexpr DispatchKey COMPOSITES[] = {
    DispatchKey::CompositeExplicitAutogradNonFunctional, DispatchKey::CompositeExplicitAutograd,
    DispatchKey::CompositeImplicitAutograd};

template <DispatchKey composite>
void run_composite(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.callBoxedForDispatchKey(composite, *stack);
}

c10::KernelFunction composite_kernel(DispatchKey key) {
  switch (key) {
    case DispatchKey::CompositeExplicitAutogradNonFunctional:
      return c10::KernelFunction::makeFromBoxedFunction<
          &run_composite<DispatchKey::CompositeExplicitAutogradNonFunctional>>();
    case DispatchKey::CompositeExplicitAutograd:
      return c10::KernelFunction::makeFromBoxedFunction<
          &run_composite<DispatchKey::CompositeExplicitAutograd>>();
    default:
      return c10::KernelFunction::makeFromBoxedFunction<
          &run_composite<DispatchKey::CompositeImplicitAutograd>>();
  }
}

void replace_kernel(const c10::OperatorName& name, DispatchKey key, c10::KernelFunction kernel) {
  static auto* registrations = new std::vector<c10::RegistrationHandleRAII>;  // never destroyed
  registrations->push_back(c10::Dispatcher::singleton().registerImpl(
      name, key, std::move(kernel), std::nullopt, nullptr, "simulated device"));
}

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Returns how many kernels were replaced: none in a build for the CPU.
size_t replace_cuda_kernels() {
  Silent silent;  // the dispatcher warns once when a kernel is replaced
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto& dispatcher = c10::Dispatcher::singleton();
  size_t count = 0;

  for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(DispatchKey::CUDA)) {
    if (name.getNamespace() != "aten") continue;
    auto op = dispatcher.findOp(name);
    TORCH_INTERNAL_ASSERT(op);
    auto composite = std::find_if(std::begin(COMPOSITES), std::end(COMPOSITES), [&](DispatchKey key) {
      return op->hasKernelForDispatchKey(key);
    });
    count++;
    if (composite == std::end(COMPOSITES)) {
      replace_kernel(name, DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&run_on_cpu>());
      continue;
    }
    replace_kernel(name, DispatchKey::CUDA, composite_kernel(*composite));
    // Without a kernel for CUDA, autograd differentiates the operators that an implicit composite
    // calls, not the operator itself, whose backward may exist for CUDA alone.
    if (*composite == DispatchKey::CompositeImplicitAutograd)
      replace_kernel(name, DispatchKey::AutogradCUDA, composite_kernel(*composite));
  }
  // scaled_dot_product_attention asks this stub, and not the dispatcher, for a fused kernel of CUDA.
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(nullptr);
  return count;
}

const size_t replaced = replace_cuda_kernels();  // before those below, which replace some again
}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  using at::Tensor;
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_source);
  library.impl("set_", &set_empty);
  library.impl("set_.source_Tensor", [](Tensor& to, const Tensor& from) -> Tensor& { return at::native::set_tensor_(to, from); });
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("record_stream", [](Tensor& tensor, c10::Stream stream) {
    record_stream(tensor.storage().data(), stream_of_id(stream.device_index(), stream.id()));
  });
  // Views touch no memory.
  library.impl("as_strided", [](const Tensor& of, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(of, size, stride, offset);
  });
  library.impl("view", [](const Tensor& of, IntArrayRef size) { return at::native::view(of, size); });
  library.impl("_reshape_alias", [](const Tensor& of, IntArrayRef size, IntArrayRef stride) {
    return at::native::_reshape_alias(of, size, stride);
  });
  library.impl("unfold", [](const Tensor& of, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(of, dim, size, step); });
  library.impl("view_as_real", [](const Tensor& of) { return at::native::view_as_real(of); });
  library.impl("view_as_complex", [](const Tensor& of) { return at::native::view_as_complex(of); });
  library.impl("is_set_to", [](const Tensor& one, const Tensor& other) { return at::native::is_set_to(one, other); });
}
}  // namespace simulated
