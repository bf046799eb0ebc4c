// Decides which gradients can wait, and multiplies those that code reads before the step; see deferral.h.
#include "grad/deferral.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/plain_keys.h"
#include "formats/storage_torch.h"
#include "grad/multiply.h"
#include "grad/torch_norm.h"

namespace drivetrain::grad {
namespace {

using torch::autograd::AutogradMeta;

// Guards all deferrals. Its holders run native code alone, so that none waits for the GIL. It is recursive because an
// operation on a gradient may free a watched parameter.
std::recursive_mutex& mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

// Under other versions of torch no gradient waits, because AutogradMeta may have other fields.
#define DRIVETRAIN_KNOWS_AUTOGRAD_META (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 13)
constexpr bool kKnowsTorch = DRIVETRAIN_KNOWS_AUTOGRAD_META;

using Lock = std::lock_guard<std::recursive_mutex>;

bool is_plain(const c10::TensorImpl& tensor) {
  return has_plain_keys(tensor) && tensor.device().is_cpu() && tensor.layout() == c10::kStrided && tensor.has_storage();
}

// Returns whether only `tensor` can reach the TensorImpl: neither Python nor a weak reference can.
bool is_sole_reference(const at::Tensor& tensor) {
  c10::impl::PyObjectSlot* const slot = tensor.unsafeGetTensorImpl()->pyobj_slot();
  PyObject* const object = slot->load_pyobj();
  if (tensor.weak_use_count() != 1) return false;
  if (object == nullptr) return tensor.use_count() == 1;
  // The Python object and the tensor keep each other.
  return tensor.use_count() == 2 && slot->has_unique_reference() && *PyObject_GET_WEAKREFS_LISTPTR(object) == nullptr;
}

// Returns whether only this tensor can reach its memory, which torch has allocated.
bool owns_memory(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  const c10::DataPtr& data = storage.data_ptr();
  const bool is_weakly_held = storage.getWeakStorageImpl().weak_use_count() > 2;  // the strong ones' and this one
  return storage.use_count() == 1 && !is_weakly_held && data.get_deleter() == c10::GetCPUAllocator()->raw_deleter();
}

bool can_wait(const at::Tensor& grad) {
  const c10::TensorImpl& impl = *grad.unsafeGetTensorImpl();
  return is_plain(impl) && formats::format_of(grad.scalar_type()) && !grad.is_complex() && !grad.is_inference() &&
         !grad.requires_grad() && impl.is_non_overlapping_and_dense() && is_sole_reference(grad) && owns_memory(grad);
}

// Returns whether the metadata is a leaf's, and of no subclass of torch's, which views have.
bool is_leaf_meta(const c10::AutogradMetaInterface& meta) {
  return typeid(meta) == typeid(AutogradMeta) && !static_cast<const AutogradMeta&>(meta).grad_fn_;
}

bool is_power_of_two(double value) {
  int exponent = 0;
  return std::frexp(value, &exponent) == 0.5;
}

Gradient gradient_of(const at::Tensor& grad) { return {formats::array_of(grad), grad.numel()}; }

}  // namespace

LazyGrad::LazyGrad([[maybe_unused]] AutogradMeta& former) {
#if DRIVETRAIN_KNOWS_AUTOGRAD_META
  static_assert(sizeof(AutogradMeta) == 184, "torch's AutogradMeta has changed; move its new fields");
  const std::lock_guard<std::mutex> lock(former.mutex_);
  name_ = std::move(former.name_);
  grad_ = std::move(former.grad_);
  grad_accumulator_ = std::move(former.grad_accumulator_);
  fw_grad_ = std::move(former.fw_grad_);
  hooks_ = std::move(former.hooks_);
  cpp_hooks_list_ = std::move(former.cpp_hooks_list_);
  post_acc_grad_hooks_ = std::move(former.post_acc_grad_hooks_);
  requires_grad_ = former.requires_grad_;
  retains_grad_ = former.retains_grad_;
  is_view_ = former.is_view_;
  output_nr_ = former.output_nr_;
  grad_dtype_ = former.grad_dtype_;
  allow_grad_dtype_mismatch_ = former.allow_grad_dtype_mismatch_;
#endif
}

LazyGrad::~LazyGrad() {
  const Lock lock(mutex());
  if (const std::shared_ptr<Deferral> deferral = deferral_) {
    deferral->take_out(*this);
    deferral->forget_others();
  }
}

void LazyGrad::settle() const {
  const Lock lock(mutex());
  if (const std::shared_ptr<Deferral> deferral = deferral_) deferral->settle();
}

at::Tensor& LazyGrad::mutable_grad() {
  if (is_deferred()) settle();
  return grad_;
}

const at::Tensor& LazyGrad::grad() const {
  if (is_deferred()) settle();
  return grad_;
}

LazyGrad* lazy_grad_of(const c10::TensorImpl& param) {
  c10::AutogradMetaInterface* const meta = param.autograd_meta();
  return meta != nullptr && typeid(*meta) == typeid(LazyGrad) ? static_cast<LazyGrad*>(meta) : nullptr;
}

const at::Tensor& stored_grad(const c10::TensorImpl& param, bool& is_deferred) {
  LazyGrad* const lazy = lazy_grad_of(param);
  is_deferred = lazy != nullptr && lazy->is_deferred();
  return is_deferred ? lazy->stored() : param.grad();
}

void watch_gradients(const std::vector<at::Tensor>& params) {
  for (const at::Tensor& param : params) {
    c10::TensorImpl* const impl = param.unsafeGetTensorImpl();
    c10::AutogradMetaInterface* const meta = impl->autograd_meta();
    if (!kKnowsTorch || !is_plain(*impl) || param.is_inference()) continue;
    if (meta == nullptr) {
      impl->set_autograd_meta(std::make_unique<LazyGrad>());
    } else if (is_leaf_meta(*meta)) {
      impl->set_autograd_meta(std::make_unique<LazyGrad>(static_cast<AutogradMeta&>(*meta)));
    }
  }
}

std::shared_ptr<Deferral> Deferral::make(const std::vector<at::Tensor>& params, std::optional<double> inv_scale) {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return nullptr;  // A mode may look at every operation.
  const Lock lock(mutex());
  auto deferral = std::make_shared<Deferral>();
  std::unordered_set<const LazyGrad*> seen;
  for (const at::Tensor& param : params) {
    LazyGrad* const lazy = lazy_grad_of(*param.unsafeGetTensorImpl());
    if (lazy == nullptr || !seen.insert(lazy).second) return nullptr;
    const at::Tensor& grad = lazy->grad();
    if (!grad.defined()) continue;
    if (!can_wait(grad) || (inv_scale && grad.scalar_type() == at::kHalf)) return nullptr;
    if (grad.numel() > 0) deferral->members_.push_back(lazy);
  }
  if (deferral->members_.empty()) return nullptr;
  deferral->measures_ = inv_scale.has_value();
  if (inv_scale) deferral->factors_ = {{*inv_scale}, 1};  // torch's unscaling increments no version either
  for (LazyGrad* member : deferral->members_) {
    member->deferral_ = deferral;
    member->is_deferred_.store(true, std::memory_order_release);
  }
  return deferral;
}

Deferral::Pointers Deferral::of(const std::vector<at::Tensor>& params) {
  const Lock lock(mutex());
  std::unordered_set<const LazyGrad*> seen;
  std::unordered_map<const Deferral*, size_t> num_members;
  Pointers deferrals;
  for (const at::Tensor& param : params) {
    LazyGrad* const lazy = lazy_grad_of(*param.unsafeGetTensorImpl());
    if (lazy == nullptr || !seen.insert(lazy).second) return {};
    const at::Tensor& grad = lazy->stored();
    if (!grad.defined() || grad.numel() == 0) continue;
    if (lazy->deferral_ == nullptr) return {};
    if (++num_members[lazy->deferral_.get()] == 1) deferrals.push_back(lazy->deferral_);
  }
  for (const std::shared_ptr<Deferral>& deferral : deferrals) {
    if (num_members[deferral.get()] != deferral->members_.size()) return {};
  }
  return deferrals;
}

std::optional<at::Tensor> Deferral::norm(const std::vector<at::Tensor>& params, const Pointers& deferrals) {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set() || deferrals.empty()) return std::nullopt;
  const Lock lock(mutex());
  const Factors& factors = deferrals.front()->factors_;
  if (factors.count > 1 || (factors.count == 1 && !is_power_of_two(factors.values[0]))) return std::nullopt;
  for (const std::shared_ptr<Deferral>& deferral : deferrals) {
    if (deferral->members_.empty() || deferral->factors_ != factors) return std::nullopt;
  }
  std::vector<at::Tensor> grads;
  for (const at::Tensor& param : params) {
    LazyGrad* const lazy = lazy_grad_of(*param.unsafeGetTensorImpl());
    if (lazy == nullptr) return std::nullopt;
    if (!lazy->stored().defined()) continue;
    grads.push_back(lazy->stored());
    if (grads.back().scalar_type() != grads.front().scalar_type()) return std::nullopt;
  }
  const at::NoGradGuard no_grad;
  at::Tensor norms = torch_norms(grads);
  // The bits of the norms of the products, because a power of two changes exponents alone.
  if (factors.count == 1) norms.mul_(factors.values[0]);
  return at::linalg_vector_norm(norms, 2);
}

bool Deferral::multiply(const Pointers& deferrals, double factor) {
  const Lock lock(mutex());
  for (const std::shared_ptr<Deferral>& deferral : deferrals) {
    if (deferral->members_.empty() || deferral->factors_.count == Factors::kMost) return false;
  }
  for (const std::shared_ptr<Deferral>& deferral : deferrals) {
    deferral->factors_.values[deferral->factors_.count++] = factor;
    for (LazyGrad* member : deferral->members_) member->stored().unsafeGetTensorImpl()->bump_version();
  }
  return true;
}

bool Deferral::drop(const std::vector<at::Tensor>& params, bool zeroes) {
  std::vector<at::Tensor> dropped;  // freed without the lock, because a tensor may have a Python object
  bool all = true;
  {
    const Lock lock(mutex());
    std::vector<LazyGrad*> waiting;
    for (const at::Tensor& param : params) {
      LazyGrad* const lazy = lazy_grad_of(*param.unsafeGetTensorImpl());
      if (lazy != nullptr && lazy->deferral_ != nullptr) {
        waiting.push_back(lazy);
      } else {
        all = all && lazy != nullptr && (!lazy->stored().defined() || lazy->stored().numel() == 0);
      }
    }
    Pointers left;
    std::vector<Gradient> zeroed;
    for (LazyGrad* lazy : waiting) {
      if (lazy->deferral_ == nullptr) continue;  // the same parameter again
      if (left.empty() || left.back() != lazy->deferral_) left.push_back(lazy->deferral_);
      left.back()->take_out(*lazy);
      if (!zeroes) {
        dropped.push_back(std::move(lazy->stored()));
      } else if (all) {
        zeroed.push_back(gradient_of(lazy->stored()));
        lazy->stored().unsafeGetTensorImpl()->bump_version();
      }
    }
    for (const std::shared_ptr<Deferral>& deferral : left) deferral->forget_others();
    zero(zeroed);
  }
  return all;
}

bool Deferral::were_finite() {
  const Lock lock(mutex());
  return measure();
}

void Deferral::set_finite() {
  const Lock lock(mutex());
  were_finite_ = true;
}

void Deferral::settle() {
  const std::shared_ptr<Deferral> self = shared_from_this();
  const bool were_finite = grad::multiply(gradients(), factors_);
  if (!were_finite_) were_finite_ = were_finite;
  for (LazyGrad* member : members_) {
    member->deferral_.reset();
    member->is_deferred_.store(false, std::memory_order_release);
  }
  members_.clear();
}

bool Deferral::measure() {
  if (!were_finite_) were_finite_ = all_finite(gradients());
  return *were_finite_;
}

void Deferral::take_out(LazyGrad& member) {
  if (measures_) measure();
  member.deferral_.reset();
  member.is_deferred_.store(false, std::memory_order_release);
}

void Deferral::forget_others() {
  std::erase_if(members_, [&](const LazyGrad* member) { return member->deferral_.get() != this; });
}

std::vector<Gradient> Deferral::gradients() const {
  std::vector<Gradient> gradients;
  for (LazyGrad* member : members_) gradients.push_back(gradient_of(member->stored()));
  return gradients;
}

FactorLock::FactorLock(const std::vector<const c10::TensorImpl*>& params, bool can_apply) : lock_(mutex()) {
  Deferral::Pointers deferrals;
  size_t num_waiting = 0, num_gradients = 0;
  for (const c10::TensorImpl* param : params) {
    LazyGrad* const lazy = lazy_grad_of(*param);
    if (param->numel() == 0) continue;
    ++num_gradients;
    if (lazy == nullptr || lazy->deferral_ == nullptr) continue;
    ++num_waiting;
    if (deferrals.empty() || deferrals.back() != lazy->deferral_) deferrals.push_back(lazy->deferral_);
  }
  can_apply = can_apply && num_waiting == num_gradients;
  for (const auto& deferral : deferrals) can_apply = can_apply && deferral->factors_ == deferrals.front()->factors_;
  if (can_apply && !deferrals.empty()) {
    factors_ = deferrals.front()->factors_;
    return;
  }
  for (const auto& deferral : deferrals) deferral->settle();
  lock_.unlock();
}

}  // namespace drivetrain::grad
