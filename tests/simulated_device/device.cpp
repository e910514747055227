// A device for tests: a backend of torch's PrivateUse1 kind that computes on the processor as late as a device may.
//
// Memory. A device is two ranges of addresses: the one that tensors name, which nobody can touch (the host that does so
// crashes), and the bytes, which operators find at a constant distance. Freed memory is reused by the stream that it was
// allocated for, at once, as by CUDA's caching allocator: other streams' uses have to be recorded. New memory is full of
// NaN.
//
// Streams. An operator does nothing but infer the shapes of its results (by torch's meta functions) and queue itself; a
// queue runs when somebody waits for it, in the thread that waits, and no further than needed. So the host is always
// ahead of the device, by as much as possible, and the same in every run: a missing wait shows as a NaN or an old value.
// What needs a value (a size that depends on data, `item`, an operator without a meta function) waits for its stream.
//
// Numbers are those of the processor, to the bit; generators, one per device, are MT19937 like the processor's.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <torch/version.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>

extern "C" {
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
int PyGILState_Ensure();
void PyGILState_Release(int);
void PyErr_Clear();
}

namespace {
using c10::Device, c10::DeviceIndex, c10::Stream, c10::StreamId, torch::jit::Stack;
constexpr auto kType = c10::DeviceType::PrivateUse1;
const int kCount = std::getenv("SIMULATED_DEVICES") ? std::atoi(std::getenv("SIMULATED_DEVICES")) : 8;
thread_local DeviceIndex device_ = 0;
thread_local std::map<DeviceIndex, StreamId> current_;

// One lock for everything. Who waits for it lets others have Python meanwhile: what runs in a queue may drop the last
// reference to a tensor that Python knows.
std::recursive_mutex lock_;
struct Guard {
  Guard() {
    if (lock_.try_lock()) return;
    void* thread = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    lock_.lock();
    if (thread) PyEval_RestoreThread(thread);
  }
  ~Guard() { lock_.unlock(); }
};

// ---------------------------------------------------------------------- streams

struct Queue {
  std::deque<std::function<void()>> waiting;
  size_t done = 0;
  size_t end() const { return done + waiting.size(); }
};
std::map<std::pair<DeviceIndex, StreamId>, Queue> queues_;
Queue& queue(const Stream& s) { return queues_[{s.device_index(), s.id()}]; }
Stream current(DeviceIndex d) { return Stream(Stream::UNSAFE, Device(kType, d), current_[d]); }
const c10::DispatchKeySet kHidden = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
    c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PreDispatch,
        c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode});

void run(Queue& q, size_t until) {
  c10::impl::ExcludeDispatchKeyGuard plain(kHidden);  // modes are those of the thread that waits, not of the operator
  while (q.done < until && !q.waiting.empty()) {
    auto next = std::move(q.waiting.front());
    q.waiting.pop_front();
    ++q.done;
    next();
  }
}
void run(const Stream& s) { Guard g; run(queue(s), queue(s).end()); }
void push(DeviceIndex d, std::function<void()> what) {
  static const bool at_once = std::getenv("SIMULATED_AT_ONCE");  // to find out whether a wait is what is missing
  Guard g;
  queue(current(d)).waiting.push_back(std::move(what));
  if (at_once) run(queue(current(d)), SIZE_MAX);
}

struct Mark {  // an event
  Stream stream;
  size_t position;
  std::shared_ptr<std::chrono::steady_clock::time_point> time = {};
  int asked = 0;
  bool done() const { return queue(stream).done >= position; }
  void wait() const { run(queue(stream), position); }
};

// ---------------------------------------------------------------------- memory

constexpr size_t kSpan = size_t(1) << 36;  // of addresses per device
struct Range { char* named = nullptr; char* bytes = nullptr; size_t used = 0; };
std::map<DeviceIndex, Range> ranges_;
struct Block { size_t bytes; DeviceIndex device; StreamId stream; std::vector<Mark> uses; };
std::unordered_map<void*, Block> blocks_;
std::map<std::tuple<DeviceIndex, StreamId, size_t>, std::vector<void*>> free_;
std::vector<std::pair<void*, Block>> used_elsewhere_;  // freed, but perhaps not yet by the streams that were recorded
std::map<DeviceIndex, std::pair<size_t, size_t>> held_;  // bytes now, and at most
std::map<char*, size_t> pinned_blocks_;

size_t total(DeviceIndex d) {  // SIMULATED_MEMORY: bytes of each device, with commas
  static const std::vector<size_t> sizes = [] {
    std::vector<size_t> read;
    std::stringstream text(std::getenv("SIMULATED_MEMORY") ? std::getenv("SIMULATED_MEMORY") : "");
    for (std::string each; std::getline(text, each, ',');) read.push_back(std::stoull(each));
    return read;
  }();
  return sizes.empty() ? size_t(4) << 30 : sizes[static_cast<size_t>(d) % sizes.size()];
}
void* map(size_t bytes, int rights) {
  void* p = mmap(nullptr, bytes, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, p != MAP_FAILED, "no addresses left for a simulated device");
  return p;
}
template <class T> T* bytes_of(T* p) {  // where the memory of a device tensor really is
  for (auto& [_, r] : ranges_)
    if (r.named <= (const char*)p && (const char*)p < r.named + kSpan) return (T*)((char*)p - r.named + r.bytes);
  return p;
}
void release(void* p) {
  Guard g;
  auto it = blocks_.find(p);
  auto block = it->second;
  held_[block.device].first -= block.bytes;
  blocks_.erase(it);
  for (auto& use : block.uses) use.position = queue(use.stream).end();
  if (!block.uses.empty()) return used_elsewhere_.emplace_back(p, block), void();
  free_[{block.device, block.stream, block.bytes}].push_back(p);
}
void* reserve(size_t wanted, DeviceIndex d) {
  Guard g;
  size_t bytes = 512;
  while (bytes < wanted) bytes += bytes < 4096 ? bytes : bytes / 4096 * 1024;  // steps of a quarter
  std::erase_if(used_elsewhere_, [](auto& each) {
    auto& [p, block] = each;
    for (auto& use : block.uses) if (!use.done()) return false;
    free_[{block.device, block.stream, block.bytes}].push_back(p);
    return true;
  });
  auto& [now, most] = held_[d];
  TORCH_CHECK_WITH(OutOfMemoryError, now + bytes <= total(d), "simulated:", int(d), " out of memory: tried to allocate ",
      bytes, " bytes; ", total(d), " in total, ", now, " in use");
  now += bytes, most = std::max(most, now);
  auto stream = current_[d];
  auto& range = ranges_[d];
  if (!range.named) range = {(char*)map(kSpan, PROT_NONE), (char*)map(kSpan, PROT_READ | PROT_WRITE)};
  auto& reusable = free_[{d, stream, bytes}];
  void* p = nullptr;
  if (!reusable.empty()) p = reusable.back(), reusable.pop_back();
  else p = range.named + range.used, range.used += bytes;
  TORCH_CHECK_WITH(OutOfMemoryError, range.used <= kSpan, "no addresses left for a simulated device");
  blocks_[p] = {bytes, d, stream, {}};
  auto at = bytes_of((char*)p);
  push(d, [at, wanted] { std::memset(at, 0xff, wanted); });
  return p;
}
struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? reserve(n, device_) : nullptr;
    return {p, p, p ? &release : nullptr, Device(kType, device_)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override {
    auto a = bytes_of((char*)to);
    auto b = bytes_of((const char*)from);
    push(device_, [=] { std::memcpy(a, b, n); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& p, Stream s) override {
    Guard g;
    auto it = blocks_.find(p.get_context());
    if (it == blocks_.end() || it->second.stream == s.id()) return;
    it->second.uses.push_back({s, 0});  // until the end of the queue when it is freed
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    Guard g;
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& all = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    all.current = held_[d].first, all.peak = held_[d].second;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override { Guard g; held_[d].second = held_[d].first; }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override { Guard g; return {total(d) - held_[d].first, total(d)}; }
#endif
} memory_;
void unpin(void* p) {
  Guard g;
  auto it = pinned_blocks_.find(static_cast<char*>(p));
  munmap(p, it->second);
  pinned_blocks_.erase(it);
}
bool is_pinned(const void* p) {
  Guard g;
  auto it = pinned_blocks_.upper_bound((char*)p);
  return it != pinned_blocks_.begin() && (--it, (const char*)p < it->first + it->second);
}
struct Pinned final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, nullptr, Device(c10::kCPU)};
    Guard g;
    void* p = map(n, PROT_READ | PROT_WRITE);
    std::memset(p, 0xff, n);
    pinned_blocks_[static_cast<char*>(p)] = n;
    return {p, p, &unpin, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void*, void*, Stream) override { return true; }  // queued copies keep their tensors
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_;

// ---------------------------------------------------------------------- what torch asks of any device

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device exchangeDevice(Device d) const override { auto old = getDevice(); setDevice(d); return old; }
  Device getDevice() const override { return Device(kType, device_); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < kCount, "simulated:", int(d.index()), " does not exist: there are ", kCount);
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.has_index()) device_ = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(kCount); }
  Stream getStream(Device d) const override { return current(d.has_index() ? d.index() : device_); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, d); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d); }
  Stream getNewStream(Device d, int = 0) const override {
    Guard g;
    static StreamId last = 0;
    return Stream(Stream::UNSAFE, d.has_index() ? d : getDevice(), ++last);
  }
  Stream exchangeStream(Stream s) const override {
    auto old = current(s.device_index());
    current_[s.device_index()] = s.id();
    return old;
  }
  void record(void** e, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    Guard g;
    delete static_cast<Mark*>(*e);
    auto time = std::make_shared<std::chrono::steady_clock::time_point>();
    queue(s).waiting.push_back([time] { *time = std::chrono::steady_clock::now(); });
    *e = new Mark{s, queue(s).end(), time};
  }
  void block(void* e, const Stream& s) const override {
    Guard g;
    if (e) queue(s).waiting.push_back([mark = *static_cast<Mark*>(e)] { mark.wait(); });
  }
  bool queryEvent(void* e) const override {  // not at once, but in the end
    Guard g;
    auto mark = static_cast<Mark*>(e);
    if (mark && !mark->done() && ++mark->asked > 2) mark->wait();
    return !mark || mark->done();
  }
  void synchronizeEvent(void* e) const override { Guard g; if (e) static_cast<Mark*>(e)->wait(); }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    Guard g;
    auto from = static_cast<Mark*>(a), to = static_cast<Mark*>(b);
    TORCH_CHECK(from && to && from->done() && to->done(), "both events must be completed before calculating elapsed time");
    return std::chrono::duration<double, std::milli>(*to->time - *from->time).count();
  }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete static_cast<Mark*>(e); }
  bool queryStream(const Stream& s) const override { Guard g; return queue(s).waiting.empty(); }
  void synchronizeStream(const Stream& s) const override { run(s); }
  void synchronizeDevice(const DeviceIndex d) const override {
    Guard g;
    for (auto& [key, q] : queues_) if (key.first == d) run(q, q.end());
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override { memory_.recordStream(p, s); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator on_host;
  DeviceGenerator(DeviceIndex d, at::Generator numbers)
      : GeneratorImpl(Device(kType, d), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), on_host(std::move(numbers)) {}
  void set_current_seed(uint64_t seed) override { on_host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "generators of simulated devices have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "generators of simulated devices have no offset"); }
  uint64_t current_seed() const override { return on_host.current_seed(); }
  uint64_t seed() override { return on_host.seed(); }
  void set_state(const c10::TensorImpl& state) override { on_host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return on_host.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new DeviceGenerator(device_.index(), on_host.clone()); }
};
at::Generator new_generator(DeviceIndex d) {
  return at::make_generator<DeviceGenerator>(d, at::make_generator<at::CPUGeneratorImpl>(uint64_t(1000 + d)));
}
const at::Generator& default_generator(DeviceIndex d) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kCount; ++i) made.push_back(new_generator(static_cast<DeviceIndex>(i)));
    return made;
  }();
  return all.at(static_cast<size_t>(d < 0 ? device_ : d));
}
at::Generator on_host(const std::optional<at::Generator>& given, DeviceIndex d) {
  const auto& generator = given && given->defined() ? *given : default_generator(d);
  TORCH_CHECK(generator.device().type() == kType, "Expected a 'simulated' device type for generator but found '",
      generator.device().type(), "'");
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->on_host;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(kCount); }
  void setCurrentDevice(DeviceIndex d) const override { GuardImpl().setDevice(Device(kType, d)); }
  DeviceIndex getCurrentDevice() const override { return device_; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(device_, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return d < 0 ? device_ : std::exchange(device_, d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto made = memory_.allocate(bytes);
    if (const auto kept = std::min(bytes, storage.nbytes())) memory_.copy_data(made.get_context(), storage.data(), kept);
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(made));
    impl->set_nbytes(bytes);
  }
  Device getDeviceFromPtr(void* p) const override { Guard g; return Device(kType, blocks_.at(p).device); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return new_generator(d < 0 ? device_ : d); }
};

// ---------------------------------------------------------------------- operators

bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }
at::Tensor bytes_as_tensor(const at::Tensor& t) {  // the same memory, for the host; keeps nothing alive
  if (!on_device(t)) return t;
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided, "simulated devices have no sparse tensors");
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  auto plain = at::from_blob(bytes_of(const_cast<void*>(t.const_data_ptr())), t.sizes(), t.strides(), options);
  if (t.is_conj()) plain._set_conj(true);
  if (t.is_neg()) plain._set_neg(true);
  return plain;
}
at::Tensor shape_of(const at::Tensor& t) {
  if (!on_device(t)) return t;
  return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(at::kMeta));
}
template <class F> c10::IValue each_tensor(const c10::IValue& value, const F& f) {
  if (value.isTensor()) return value.toTensor().defined() ? f(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& t : value.toTensorList()) made.push_back(f(t));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
      made.push_back(t && t->defined() ? std::optional(f(*t)) : std::nullopt);
    return made;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return Device(at::kCPU);
  return value;
}
template <class F> Stack each_tensor(const Stack& stack, const F& f) {
  Stack made;
  for (auto& value : stack) made.push_back(each_tensor(value, f));
  return made;
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &memory_, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}
at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &memory_, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}
at::Tensor new_like(const at::Tensor& shape, DeviceIndex d) {
  return empty_strided(shape.sizes(), shape.strides(), shape.scalar_type(), {}, Device(kType, d), {});
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto f = bytes_as_tensor(from), t = bytes_as_tensor(to);
  auto copy = [f, t] { t.copy_(f); };
  if (on_device(from) && on_device(to)) {
    if (from.device() == to.device()) return push(to.device().index(), copy), to;
    run(current(from.device().index()));
  } else if (non_blocking && from.numel()) {
    const bool pinned = is_pinned((on_device(from) ? to : from).const_data_ptr());
    if (pinned) return push((on_device(from) ? from : to).device().index(), copy), to;
    if (on_device(to)) return f = from.clone(), push(to.device().index(), [f, t] { t.copy_(f); }), to;
  }
  if (on_device(from)) run(current(from.device().index()));
  if (on_device(to)) run(current(to.device().index()));
  c10::impl::ExcludeDispatchKeyGuard plain(kHidden);
  copy();
  return to;
}

// Queues the call of `run_op` on the processor with the arguments of `op`, which may be the same. Returns false, with
// the stack unchanged, where the shapes of the results are not known before it has run.
bool queue_call(const c10::OperatorHandle& op, const c10::OperatorHandle& run_op, Stack* stack) {
  static const std::set<std::string> unlike_meta{"aten::_embedding_bag", "aten::_embedding_bag_forward_only"};
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  if (unlike_meta.count(schema.name())) return false;
  Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  std::set<DeviceIndex> devices;
  bool with_host = false;
  for (auto& argument : arguments)
    each_tensor(argument, [&](const at::Tensor& t) {
      if (on_device(t)) devices.insert(t.device().index());
      else if (t.dim() > 0) with_host = true;
      return t;
    });
  const bool indexes = schema.name().find("index") != std::string::npos;  // by indices that may be on the host
  TORCH_CHECK(devices.size() < 2 && (devices.empty() || !with_host || indexes), "Expected all tensors to be on the same ",
      "device, but found at least two devices, simulated:", int(devices.empty() ? 0 : *devices.begin()), " and ",
      devices.size() < 2 ? "cpu" : "simulated:" + std::to_string(*devices.rbegin()), "! (", schema.name(), ")");
  if (devices.empty() || with_host) return false;
  // what is returned: an argument, or a new tensor
  std::vector<std::optional<c10::IValue>> returned;
  bool has_new = false;
  for (auto& result : schema.returns()) {
    returned.emplace_back();
    if (const auto* alias = result.alias_info()) {
      if (!alias->isWrite()) return false;  // a view
      for (size_t i = 0; i < count && !returned.back(); ++i) {
        const auto* of_argument = schema.arguments()[i].alias_info();
        if (of_argument && of_argument->beforeSets() == alias->beforeSets()) returned.back() = arguments[i];
      }
      if (!returned.back()) return false;
    } else {
      const auto kind = result.type()->kind();
      const bool many = kind == c10::ListType::Kind && result.type()->containedType(0)->kind() == c10::TensorType::Kind;
      if (kind != c10::TensorType::Kind && !many) return false;
      has_new = true;
    }
  }
  const auto is_out = [&](size_t i) { return schema.arguments()[i].is_out() && arguments[i].isTensor(); };
  bool has_out = false;
  for (size_t i = 0; i < count; ++i) has_out = has_out || is_out(i);
  const auto d = *devices.begin();
  std::vector<std::pair<size_t, at::Tensor>> made;  // with the number of the result; those of a list in order
  if (has_new || has_out) {
    auto shapes = each_tensor(arguments, shape_of);
    for (size_t i = 0; i < count; ++i)
      if (is_out(i)) shapes[i] = at::empty({0}, shapes[i].toTensor().options());
    const Stack before = shapes;
    for (auto& value : shapes)
      if (value.isDevice()) value = Device(at::kMeta);
    try {
      run_op.callBoxed(&shapes);
    } catch (const std::exception&) {  // perhaps Python's, which remembers it
      const int state = PyGILState_Ensure();
      PyErr_Clear();
      PyGILState_Release(state);
      return false;
    }
    for (size_t i = 0; i < count; ++i)  // those given for the results may be of another size, which changes then
      if (is_out(i) && before[i].toTensor().sizes() != arguments[i].toTensor().sizes()) return false;
    for (size_t i = 0; i < shapes.size(); ++i)
      if (!returned[i]) {
        for (auto one : shapes[i].isTensorList() ? shapes[i].toTensorVector() : std::vector{shapes[i].toTensor()})
          if (one.defined() && !one.is_meta()) return false;
        returned[i] = each_tensor(shapes[i], [&](const at::Tensor& shape) {
          made.emplace_back(i, new_like(shape, d));
          return made.back().second;
        });
      }
  }
  auto call = each_tensor(arguments, [](const at::Tensor& t) { return on_device(t) ? bytes_as_tensor(t) : t.clone(); });
  std::vector<std::pair<size_t, at::Tensor>> results;
  for (auto& [i, t] : made) results.emplace_back(i, bytes_as_tensor(t));
  std::vector<std::pair<size_t, at::Tensor>> given;  // for results: some kernels resize them on the way
  for (size_t i = 0; i < count; ++i)
    if (is_out(i)) {
      given.emplace_back(i, call[i].toTensor());
      call[i] = at::empty({0}, call[i].toTensor().options());
    }
  push(d, [run_op, call = std::move(call), results = std::move(results), given = std::move(given)]() mutable {
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;
    for (auto& [i, t] : given) copies.emplace_back(t, call[i].toTensor());
    try {
      run_op.callBoxed(&call);
    } catch (c10::Error& error) {  // it is raised where somebody waits
      error.add_context(run_op.schema().name() + " on a simulated device");
      throw;
    }
    for (auto& [to, from] : copies) to.copy_(from);
    std::map<size_t, size_t> taken;
    for (auto& [i, t] : results) {
      const auto result = call[i].isTensorList() ? call[i].toTensorVector()[taken[i]++] : call[i].toTensor();
      if (!result.numel() && t.numel()) continue;  // batch norm outside of training: statistics that nobody asks for
      TORCH_CHECK(result.sizes() == t.sizes() && result.scalar_type() == t.scalar_type(), run_op.operator_name(),
          ": the meta function gives ", t.sizes(), ", the processor ", result.sizes());
      t.copy_(result);
    }
  });
  torch::jit::drop(*stack, count);
  for (auto& value : returned) stack->push_back(*value);
  return true;
}

// Draws from a device's generator are made when an operator is queued: its state is known to the host, as a seed and an
// offset are.
bool queue_draw(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  auto* arguments = &*(stack->end() - static_cast<std::ptrdiff_t>(count));
  for (size_t i = 0; i < count; ++i) {
    const auto& type = *schema.arguments()[i].type();
    if (type.kind() != c10::OptionalType::Kind || type.containedType(0)->kind() != c10::GeneratorType::Kind) continue;
    const auto self = arguments[0].isTensor() ? arguments[0].toTensor() : at::Tensor();
    arguments[i] = on_host(arguments[i].toOptional<at::Generator>(), on_device(self) ? self.device().index() : device_);
    const auto* alias = schema.arguments()[0].alias_info();
    if (!alias || !alias->isWrite() || (count > 1 && arguments[1].isTensor())) {
      at::native::cpu_fallback(op, stack);  // draws by values that it must know
      return true;
    }
    Stack draw(arguments, arguments + count);
    const auto numbers = at::empty_like(bytes_as_tensor(self), at::TensorOptions(), c10::MemoryFormat::Contiguous);
    draw[0] = numbers;
    op.callBoxed(&draw);
    push(self.device().index(), [numbers, to = bytes_as_tensor(self)] { to.copy_(numbers); });
    torch::jit::drop(*stack, count);
    stack->push_back(self);
    return true;
  }
  return false;
}
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  if (!queue_draw(op, stack) && !queue_call(op, op, stack)) at::native::cpu_fallback(op, stack);
}
const c10::OperatorHandle& named(const char* name) {
  static std::map<std::string, c10::OperatorHandle> found;
  Guard g;
  auto it = found.find(name);
  if (it == found.end()) it = found.emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first;
  return it->second;
}

void convolution(const c10::OperatorHandle& op, Stack* stack) {
  TORCH_CHECK(queue_call(op, named("aten::convolution"), stack), "convolution: operands on several devices");
}
void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  // (grad, input, weight, stride, padding, dilation, transposed, output_padding, groups, mask), without sizes of the bias
  const auto size = stack->size();
  const auto weight = stack->at(size - 8).toTensor();
  const auto channels = (*stack)[size - 4].toBool() ? weight.size(1) * stack->at(size - 2).toInt() : weight.size(0);
  stack->insert(stack->end() - 7, c10::IValue(std::vector<int64_t>{channels}));
  const auto& like = named("aten::convolution_backward");
  TORCH_CHECK(queue_call(like, like, stack), "convolution_backward: operands on several devices");
}
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p, std::optional<bool> train) {
  auto mask = at::empty(x.sizes(), x.options().dtype(at::kBool));
  if (!train.value_or(true)) return {x.clone(), mask.fill_(true)};
  auto kept = at::empty_like(x).bernoulli_(1 - p);  // of its dtype, as on the processor: the same numbers are drawn
  mask.copy_(kept);
  return {x * kept.div_(1 - p), mask};
}
at::Tensor native_dropout_backward(const at::Tensor& grad, const at::Tensor& mask, double scale) {
  return grad * mask * scale;
}
int64_t attention_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    double, bool, std::optional<double>, bool) {
  return 0;  // by matrix products
}
at::Scalar item(const at::Tensor& t) { return t.cpu().item(); }
at::Tensor& set_source(at::Tensor& t, at::Storage s) {
  return at::native::set_storage_cpu_(t, s, 0, {static_cast<int64_t>(s.nbytes() / t.itemsize())}, {1});
}
at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& s) {
  return at::native::set_storage_cpu_(t, s.storage(), s.storage_offset(), s.sizes(), s.strides());
}
const at::Tensor& resize_(const at::Tensor& t, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(t.device());
  return at::native::resize_(t, size, format);
}
at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}
void record_stream(at::Tensor& t, Stream s) { memory_.recordStream(t.storage().data_ptr(), s); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("native_dropout_backward", native_dropout_backward);
  m.impl("_fused_sdp_choice", attention_choice);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}
// torch's fallbacks would resolve these by a copy, which asks for _copy_from again, without end
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(SINGLE)
  AT_FORALL_PROMOTE(PROMOTE)
}
TORCH_LIBRARY(simulated, m) {
  m.def("get_state(int index) -> Tensor", [](int64_t d) { return default_generator(DeviceIndex(d)).get_state(); });
  m.def("set_state(int index, Tensor state) -> ()", [](int64_t d, const at::Tensor& state) {
    auto generator = default_generator(DeviceIndex(d));
    generator.set_state(state);
  });
  m.def("seed(int index, int seed) -> ()", [](int64_t d, int64_t seed) {
    auto generator = default_generator(DeviceIndex(d));
    generator.set_current_seed(uint64_t(seed));
  });
}
const bool registered_ = [] {
  c10::SetAllocator(kType, &memory_);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
}  // namespace
