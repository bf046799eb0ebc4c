// Derives operator traits from schemas, and keeps them per operator.
#include "budget/recorder/op_traits.h"

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/hash.h"

namespace drivetrain::budget {
namespace {

template <size_t N>
bool is_one_of(std::string_view name, const std::array<std::string_view, N>& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Models also gather into or add to tensors of zeros and ones, so these count as uninitialized as well.
constexpr std::array<std::string_view, 17> kUninitialized{
    "aten::empty",     "aten::empty_like", "aten::empty_strided",     "aten::empty_permuted", "aten::new_empty",
    "aten::resize",    "aten::zeros",      "aten::new_empty_strided", "aten::zeros_like",     "aten::new_zeros",
    "aten::full",      "aten::full_like",  "aten::empty_quantized",   "aten::new_full",       "aten::ones",
    "aten::ones_like", "aten::new_ones"};
constexpr std::array<std::string_view, 10> kOnlyWrite{
    "aten::fill_",   "aten::zero_",        "aten::copy_",       "aten::bernoulli_", "aten::uniform_",
    "aten::normal_", "aten::exponential_", "aten::log_normal_", "aten::cauchy_",    "aten::geometric_"};
constexpr std::array<std::string_view, 3> kSeparateVersions{"aten::unsafe_chunk", "aten::unsafe_split",
                                                            "aten::unsafe_split_with_sizes"};
// These operators update running statistics without declaring so in their schemas. In training, no result of the first
// group depends on the statistics, which are the fourth and fifth argument.
constexpr std::array<std::string_view, 3> kBatchNorm{"aten::native_batch_norm", "aten::cudnn_batch_norm",
                                                     "aten::miopen_batch_norm"};
// The operators of this group are never replayed.
constexpr std::array<std::string_view, 3> kStatistics{
    "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts", "aten::batch_norm_update_stats"};

uint64_t hash_of(const c10::OperatorName& name) {
  const std::string whole = c10::toString(name);
  return hash_bytes(whole.data(), static_cast<int64_t>(whole.size()));
}

// Keeps the traits of every operator called so far. When an operator is removed (a torch.library.Library is destroyed,
// or a notebook cell runs again), the dispatcher reuses its handle for the next one.
class TraitsCache : public c10::OpRegistrationListener {
 public:
  const OpTraits& of(const c10::OperatorHandle& op) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(op);
    if (found != known_.end()) return *found->second;
    return *known_.emplace(op, new OpTraits(op)).first->second;
  }

  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(op);
    if (found == known_.end()) return;
    found->second->is_removed = true;
    known_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<c10::OperatorHandle, OpTraits*> known_;
};

TraitsCache& registered_cache() {
  auto cache = std::make_unique<TraitsCache>();
  TraitsCache& made = *cache;
  // The registration is leaked on purpose: the dispatcher owns the listener until the process ends.
  new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::move(cache)));
  return made;
}

}  // namespace

const OpTraits& traits_of(const c10::OperatorHandle& op) {
  static TraitsCache& cache = registered_cache();
  return cache.of(op);
}

bool has_kernel(const c10::OperatorHandle& op, c10::BackendComponent backend) {
  return op.hasKernelForDispatchKey(c10::toRuntimePerBackendFunctionalityKey(c10::DispatchKey::Dense, backend));
}

OpTraits::OpTraits(const c10::OperatorHandle& op)
    : name(op.operator_name().name),
      is_composite(op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)),
      is_uninitialized(is_one_of(name, kUninitialized)),
      returns_garbage(is_uninitialized && name.find("empty") != std::string::npos),
      only_writes(is_one_of(name, kOnlyWrite)),
      has_workspace(name == "aten::mkldnn_rnn_layer" || is_one_of(name, kBatchNorm)),
      is_random(op.hasTag(at::Tag::nondeterministic_seeded)),
      identity(hash_of(op.operator_name())),
      separates_versions(is_one_of(name, kSeparateVersions)),
      is_batch_norm(is_one_of(name, kBatchNorm)),
      statistics(is_batch_norm || is_one_of(name, kStatistics) ? (name == "aten::batch_norm_update_stats" ? 1 : 3)
                                                               : -1),
      is_collective(name.starts_with("c10d::") || name.starts_with("_c10d_functional::")),
      is_never_replayed(is_collective || (statistics >= 0 && !is_batch_norm)) {
  for (const c10::Argument& argument : op.schema().arguments()) {
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    writes.push_back(is_written);
    writes_any = writes_any || is_written;
    if (is_written && argument.kwarg_only()) only_writes = true;  // out=
  }
  const auto& returns = op.schema().returns();
  is_view = !writes_any && !separates_versions && !returns.empty() &&
            std::all_of(returns.begin(), returns.end(), [](const c10::Argument& returned) {
              return returned.alias_info() != nullptr && !returned.alias_info()->isWrite();
            });
}

}  // namespace drivetrain::budget
