// Allocates the flat gradient buffer, divides it into buckets and moves gradients in and out.
#include "ddp/grad_buffer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "ddp/errors.h"
#include "ddp/tensors.h"
#include "ddp/transport/rank_ranges.h"

namespace drivetrain::ddp {
namespace {

// A smaller bucket costs the latency of a collective whatever its size. The threshold is not tuned.
constexpr int64_t kSmallBucket = 256 << 10;

static_assert(kAlignment == kGapAlignment);  // transports tell padding by it

// Returns strides by torch's gradient layout contract: the parameter's own where it is dense, else row-major.
std::vector<int64_t> grad_strides(const at::Tensor& param) {
  if (param.is_non_overlapping_and_dense()) return param.strides().vec();
  std::vector<int64_t> strides(param.dim(), 1);
  for (int64_t d = param.dim() - 2; d >= 0; --d) strides[d] = strides[d + 1] * std::max<int64_t>(param.size(d + 1), 1);
  return strides;
}

bool has_grad_strides(const at::Tensor& param, at::IntArrayRef strides) {
  return strides.equals(param.is_non_overlapping_and_dense() ? param.strides() : at::IntArrayRef(grad_strides(param)));
}

// Returns another tensor over the same storage. Unlike detach() it allows `.grad.set_()`.
at::Tensor twin_of(const at::Tensor& tensor) {
  auto twin = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
  twin->set_autograd_meta(nullptr);
  return at::Tensor(std::move(twin));
}

}  // namespace

at::Tensor piece_of(const at::Tensor& memory, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides,
                    at::ScalarType dtype) {
  const auto keep_memory = [memory](void*) {};
  return at::from_blob(static_cast<char*>(memory.data_ptr()) + offset, sizes, strides, keep_memory,
                       memory.options().dtype(dtype), memory.device());
}

GradBuffer::GradBuffer(const Parameters& params, StepStreams& streams, bool stays_views)
    : params_(params), streams_(streams), regions_(params.size()) {
  settings.stays_views = stays_views;
}

// ---- Memory.

void GradBuffer::build(const std::vector<BucketPlan>& plans, Comm& comm) {
  plans_ = std::vector<BucketPlan>(plans);  // `plans` may be plans_
  if (settings.is_hooked) free();           // tensors that the script keeps over gradients keep the memory before
  std::map<std::string, int64_t> bytes, largest;
  for (const BucketPlan& plan : plans_) {
    const Parameter& first = params_[plan.entries[0].param];
    if (first.sparse) continue;
    const std::string device = first.tensor.device().str();
    bytes[device] += aligned(plan.bytes);
    largest[device] = std::max(largest[device], aligned(plan.bytes));
  }
  buckets_.clear();
  bytes_ = 0;
  for (auto& [device, size] : bytes) {
    // One bucket is filled while another is reduced. Small ones that start together have room next to each other.
    if (settings.reuses_memory) size = std::min(size, 2 * (largest[device] + kSmallBucket));
    bytes_ += size;
  }
  std::map<std::string, int64_t> used;
  for (const BucketPlan& plan : plans_) {
    const std::string device = params_[plan.entries[0].param].tensor.device().str();
    lay_out(plan, bytes[device], used[device], comm);
  }
  errors_.clear();
  for (const auto& [device, memory] : memory_) {
    // Where buckets share memory, errors of one would be added to another.
    if (!settings.reuses_memory) errors_.push_back(comm.carry_errors(memory));
  }
  for (size_t i = 0; i < buckets_.size(); ++i) buckets_[i].label = std::make_shared<const std::string>(describe(i));
  group_small_buckets();
}

void GradBuffer::lay_out(const BucketPlan& plan, int64_t device_bytes, int64_t& used, Comm& comm) {
  const size_t first = plan.entries[0].param;
  const c10::Device device = params_[first].tensor.device();
  Bucket& bucket = buckets_.emplace_back();
  bucket.sparse = params_[first].sparse;
  if (!bucket.sparse) {
    at::Tensor& memory = memory_[device.str()];
    if (!memory.defined() || memory.numel() != device_bytes) {
      if (memory.defined()) streams_.keep_alive(memory);
      memory = settings.is_hooked ? at::zeros({device_bytes}, at::TensorOptions(at::kByte).device(device))
                                  : comm.allocate(device_bytes, device);
    }
    const at::ScalarType dtype = grad_dtype(first);
    const int64_t numel = plan.bytes / static_cast<int64_t>(c10::elementSize(dtype));
    if (used + aligned(plan.bytes) > device_bytes) used = 0;  // reuses the memory of the first buckets
    bucket.offset = used;
    bucket.end = bucket.offset + aligned(plan.bytes);
    bucket.flat = piece_of(memory, bucket.offset, {numel}, {1}, dtype);
    used = bucket.end;
  }
  for (const BucketEntry& entry : plan.entries) {
    Region& region = regions_[entry.param];
    region.bucket = buckets_.size() - 1;
    region.offset = entry.offset;
    if (bucket.sparse) {
      region.view = at::Tensor();
    } else if (!shows_region(entry.param)) {
      make_view(entry.param);
    }
    bucket.params.push_back(entry.param);
  }
  if (!settings.kept.empty() && !bucket.sparse) bucket.ranges = kept_ranges(bucket);
}

std::shared_ptr<const RankRanges> GradBuffer::kept_ranges(const Bucket& bucket) const {
  auto ranges = std::make_shared<RankRanges>();
  for (const size_t param : bucket.params) {
    const int64_t element = static_cast<int64_t>(c10::elementSize(grad_dtype(param)));
    const int64_t offset = regions_[param].offset;
    for (const RankRange& kept : settings.kept[param]) {
      ranges->push_back({offset + kept.begin * element, offset + kept.end * element, kept.rank, kept.also});
    }
  }
  std::sort(ranges->begin(), ranges->end(), [](const RankRange& a, const RankRange& b) { return a.begin < b.begin; });
  return ranges;
}

// Depends on sizes alone, so that all ranks form the same groups whenever their gradients come.
void GradBuffer::group_small_buckets() {
  int64_t grouped = 0;
  for (Bucket& bucket : buckets_) {
    grouped += bucket.sparse ? kSmallBucket : static_cast<int64_t>(bucket.flat.nbytes());
    bucket.ends_group = grouped >= kSmallBucket || &bucket == &buckets_.back();
    if (bucket.ends_group) grouped = 0;
  }
}

void GradBuffer::free() {
  for (const auto& [device, memory] : memory_) streams_.keep_alive(memory);
  errors_.clear();
  memory_.clear();
}

std::string GradBuffer::describe(size_t bucket) const {
  std::vector<std::string> names;
  for (size_t index : buckets_[bucket].params) names.push_back(params_[index].name);
  return text("bucket ", bucket, " of ", buckets_.size(), " [", joined(names), "]");
}

at::ScalarType GradBuffer::grad_dtype(size_t param) const {
  const Parameter& of = params_[param];
  return settings.low_precision && of.tensor.is_floating_point() ? *settings.low_precision : of.grad_dtype;
}

std::vector<BucketInfo> GradBuffer::infos() const {
  std::vector<BucketInfo> infos;
  for (const Bucket& bucket : buckets_) {
    BucketInfo info;
    for (size_t index : bucket.params) {
      info.names.push_back(params_[index].name);
      info.bytes += params_[index].tensor.numel() * static_cast<int64_t>(c10::elementSize(grad_dtype(index)));
    }
    info.dtype = c10::toString(grad_dtype(bucket.params[0]));
    infos.push_back(std::move(info));
  }
  return infos;
}

// ---- Views.

std::vector<at::Tensor> GradBuffer::views() const {
  std::vector<at::Tensor> views;
  for (const Region& region : regions_) views.push_back(region.view);
  return views;
}

void GradBuffer::make_view(size_t param) {
  const at::Tensor& tensor = params_[param].tensor;
  Region& region = regions_[param];
  region.view =
      piece_of(buckets_[region.bucket].flat, region.offset, tensor.sizes(), grad_strides(tensor), grad_dtype(param));
  region.memory = region.view.storage();
}

// Returns true if the view shows the place where the region is now. References to it then stay known.
bool GradBuffer::shows_region(size_t param) const {
  const at::Tensor& view = regions_[param].view;
  return view.defined() && view.numel() > 0 && has_intact_view(param);
}

const void* GradBuffer::address_of(size_t param) const {
  const Region& region = regions_[param];
  return static_cast<const char*>(buckets_[region.bucket].flat.const_data_ptr()) + region.offset;
}

bool GradBuffer::is_in_place(size_t param, const at::Tensor& grad) const {
  return grad.const_data_ptr() == address_of(param) && has_grad_strides(params_[param].tensor, grad.strides());
}

bool GradBuffer::has_intact_view(size_t param) const {
  const Region& region = regions_[param];
  const at::Tensor& tensor = params_[param].tensor;
  return region.view.const_data_ptr() == address_of(param) && region.view.storage().is_alias_of(region.memory) &&
         region.view.scalar_type() == grad_dtype(param) && region.view.sizes().equals(tensor.sizes()) &&
         has_grad_strides(tensor, region.view.strides());
}

bool GradBuffer::is_in_place(const std::vector<BucketPlan>& plans) const {
  const auto same_params = [](const BucketPlan& a, const BucketPlan& b) {
    return std::equal(a.entries.begin(), a.entries.end(), b.entries.begin(), b.entries.end(),
                      [](const BucketEntry& x, const BucketEntry& y) { return x.param == y.param; });
  };
  return std::equal(plans.begin(), plans.end(), plans_.begin(), plans_.end(), same_params);
}

bool GradBuffer::contains(const at::Tensor& tensor) const {
  const char* address = static_cast<const char*>(tensor.const_data_ptr());
  for (const auto& [device, memory] : memory_) {
    const char* begin = static_cast<const char*>(memory.const_data_ptr());
    if (tensor.device() == memory.device() && address >= begin && address < begin + memory.numel()) return true;
  }
  return false;
}

// ---- Gradients in and out.

void GradBuffer::leave_to_holders(size_t param) {
  Region& region = regions_[param];
  if (!region.view.defined() || params_[param].tensor.numel() == 0) return;
  restore_view(param);
  if (settings.stays_views || settings.on_moved) return;
  // torch accumulates in place into what .grad shows.
  const at::Tensor& grad = params_[param].tensor.grad();
  if (grad.defined() && grad.layout() == at::kStrided && is_in_place(param, grad)) return;
  region.view = twin_of(region.view);  // ends references to the tensor that was `.grad`, also weak ones
  if (region.memory.use_count() == 2) return;
  const at::Storage held = region.memory;
  const at::Tensor copy = region.view.clone();
  make_view(param);
  held.set_data_ptr_noswap(copy.storage().set_data_ptr(at::DataPtr(nullptr, copy.device())));
}

void GradBuffer::restore_view(size_t param) {
  if (has_intact_view(param)) return;
  Region& region = regions_[param];
  const at::Tensor& tensor = params_[param].tensor;
  region.view = at::empty({0}, buckets_[region.bucket].flat.options());
  region.view.set_(region.memory, 0, tensor.sizes(), grad_strides(tensor));
}

void GradBuffer::fill(size_t param, const at::Tensor& values, double scale) {
  leave_to_holders(param);
  at::Tensor& view = regions_[param].view;
  if (scale != 1) {
    at::mul_out(view, values, as_scalar(scale));
  } else {
    view.copy_(values);
  }
}

void GradBuffer::fill_zeros(size_t param) {
  leave_to_holders(param);
  regions_[param].view.zero_();
}

bool GradBuffer::is_scripts_own(const at::Tensor& grad) const {
  if (settings.stays_views || settings.on_moved || settings.low_precision || settings.reuses_memory) return false;
  if (grad.layout() != at::kStrided || !grad.has_storage() || contains(grad)) return false;
  return grad.storage().use_count() > 1 || (settings.are_held && settings.are_held({grad}));
}

bool GradBuffer::are_views_held() const {
  std::vector<at::Tensor> views;
  for (const Region& region : regions_) {
    if (!region.view.defined()) continue;
    const size_t own = region.view.storage().is_alias_of(region.memory) ? 2 : 1;
    if (region.memory.use_count() > own) return true;
    views.push_back(region.view);
  }
  return settings.are_held && settings.are_held(views);
}

// The accumulators' streams may have written some of these gradients in this backward, outside of hooks.
std::vector<at::Tensor> GradBuffer::copy_kept_gradients() const {
  streams_.wait_for_accumulators();
  std::vector<at::Tensor> kept(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor& grad = params_[i].tensor.grad();
    if (grad.defined() && !params_[i].sparse && contains(grad)) kept[i] = grad.clone();
  }
  return kept;
}

void GradBuffer::put_back(const std::vector<at::Tensor>& kept) {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!kept[i].defined() || (settings.is_hooked && is_scripts_own(params_[i].tensor.grad()))) continue;
    regions_[i].view.variable_data().copy_(kept[i]);  // keeps the version: the values are the same
    params_[i].tensor.mutable_grad() = regions_[i].view;
  }
  streams_.let_accumulators_wait();
  tell_moved();
}

void GradBuffer::tell_moved() const {
  if (settings.on_moved) settings.on_moved(views());
}

void GradBuffer::forget_sparse_gradients() {
  for (Bucket& bucket : buckets_) {
    if (bucket.sparse) bucket.flat = at::Tensor();
  }
}

}  // namespace drivetrain::ddp
