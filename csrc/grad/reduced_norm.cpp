// Registers the sums that reductions publish, and finds them; see reduced_norm.h.
#include "grad/reduced_norm.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>

#include "base/hash.h"

namespace drivetrain::grad {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<ReducedNorm>> norms;
};

Registry& registry() {
  static Registry registry;
  return registry;
}

Gradients sorted(Gradients gradients) {
  std::sort(gradients.begin(), gradients.end(), std::less<>());
  return gradients;
}

// Every write that autograd tracks increments the version.
std::vector<uint32_t> versions_of(const Gradients& gradients) {
  std::vector<uint32_t> versions;
  versions.reserve(gradients.size());
  for (c10::TensorImpl* gradient : gradients) {
    versions.push_back(gradient->is_inference() ? 0 : gradient->version_counter().current_version());
  }
  return versions;
}

// Number of sampled elements per gradient, evenly spread and including the first and the last. A larger sample costs a
// cache miss per element, and no sample sees every write.
constexpr int64_t kSampled = 16;

uint64_t hash_of_sample(const c10::TensorImpl& gradient) {
  const int64_t count = gradient.numel(), element = static_cast<int64_t>(gradient.itemsize());
  const char* const values = static_cast<const char*>(gradient.data());
  const int64_t sampled = std::min(count, kSampled);
  uint64_t hash = 0;
  for (int64_t i = 0; i < sampled; ++i) {
    const int64_t at = sampled > 1 ? i * (count - 1) / (sampled - 1) : 0;
    hash = mix(hash, hash_bytes(values + at * element, element));
  }
  return hash;
}

// The gradients are a reducer's: dense and on the CPU.
std::vector<uint64_t> samples_of(const Gradients& gradients) {
  std::vector<uint64_t> hashes;
  hashes.reserve(gradients.size());
  for (const c10::TensorImpl* gradient : gradients) hashes.push_back(hash_of_sample(*gradient));
  return hashes;
}

}  // namespace

std::shared_ptr<ReducedNorm> ReducedNorm::make() {
  auto norm = std::make_shared<ReducedNorm>();
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::erase_if(all.norms, [](const auto& other) { return other.expired(); });
  all.norms.push_back(norm);
  return norm;
}

bool ReducedNorm::is_wanted() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_wanted_;
}

void ReducedNorm::publish(Gradients gradients, std::optional<double> sum_of_squares) {
  const std::lock_guard<std::mutex> lock(mutex_);
  gradients_ = std::move(gradients);
  if (sum_of_squares) {
    versions_ = versions_of(gradients_);
    samples_ = samples_of(gradients_);
  }
  sum_of_squares_ = sum_of_squares;
}

void ReducedNorm::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  gradients_.clear();
  sum_of_squares_.reset();
}

std::optional<double> ReducedNorm::ask(const Gradients& gradients) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Usually both lists are in the model's order.
  if (gradients.size() != gradients_.size() || (gradients != gradients_ && sorted(gradients) != sorted(gradients_))) {
    return std::nullopt;
  }
  is_wanted_ = true;
  if (!sum_of_squares_ || versions_ != versions_of(gradients_) || samples_ != samples_of(gradients_)) {
    return std::nullopt;
  }
  return sum_of_squares_;
}

std::optional<double> known_sum_of_squares(const Gradients& gradients) {
  if (gradients.empty()) return std::nullopt;
  std::vector<std::shared_ptr<ReducedNorm>> norms;
  {
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto& norm : all.norms) {
      if (auto alive = norm.lock()) norms.push_back(std::move(alive));
    }
  }
  for (const auto& norm : norms) {
    if (const auto known = norm->ask(gradients)) return known;
  }
  return std::nullopt;
}

}  // namespace drivetrain::grad
