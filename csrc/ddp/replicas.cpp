// Computes the checksum of parameters and compares it over ranks.
#include "ddp/replicas.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <map>
#include <string>

#include "base/check.h"
#include "base/hash.h"
#include "base/transfer.h"
#include "ddp/errors.h"

namespace drivetrain::ddp {
namespace {

const auto kParameters = std::make_shared<const std::string>("the parameters' checksums");

at::Tensor values_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().contiguous();
  return values.is_complex() ? at::view_as_real(values) : values;
}

// Returns the sum of the values' bit patterns: int64 [].
at::Tensor sum_of_bits(const at::Tensor& values) {
  const at::ScalarType bits = values.element_size() == 8   ? at::kLong
                              : values.element_size() == 4 ? at::kInt
                              : values.element_size() == 2 ? at::kShort
                                                           : at::kByte;
  return values.view(bits).sum(at::kLong);
}

// Multiplies each tensor's sum by an odd factor of its own, so that no change of one sum goes unseen.
at::Tensor hash_on_device(const std::vector<at::Tensor>& tensors) {
  constexpr int64_t kOdd = 0x1E3779B97F4A7C15;
  const c10::Device device = tensors[0].device();
  std::vector<at::Tensor> sums;
  for (const at::Tensor& tensor : tensors) {
    sums.push_back(sum_of_bits(values_of(tensor)).to(device, /*non_blocking=*/true));
  }
  const at::Tensor factors = at::arange(static_cast<int64_t>(sums.size()), at::kLong).mul(2).add(1).mul(kOdd);
  return at::stack(sums).mul(copied_to(factors, device)).sum();
}

}  // namespace

at::Tensor hash_of(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad_tracking;
  if (!tensors[0].is_cpu()) return hash_on_device(tensors);
  uint64_t hash = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor values = values_of(tensor);
    hash = mix(hash, hash_bytes(values.const_data_ptr(), static_cast<int64_t>(values.nbytes())));
  }
  return at::scalar_tensor(static_cast<int64_t>(hash), at::kLong);
}

void ReplicaCheck::begin_step(BackwardKind /*kind*/, bool is_joining) {
  hashes_ = at::Tensor();
  if (every_ <= 0 || is_joining || (collectives_.steps() + 1) % every_ != 0) return;
  std::vector<at::Tensor> tensors;
  for (const Parameter& param : params_) tensors.push_back(param.tensor);
  const at::Tensor mine = hash_of(tensors);
  hashes_ = at::zeros({collectives_.comm().size()}, mine.options());
  hashes_.select(0, collectives_.comm().rank()).copy_(mine);
}

void ReplicaCheck::compare(int64_t position) {
  const Comm& comm = collectives_.comm();
  const int64_t ranks = comm.size(), count = static_cast<int64_t>(params_.size());
  const at::Tensor hashes = hashes_.cpu();
  const auto differs = [&](const int64_t* values, int64_t stride) {
    for (int64_t r = 1; r < ranks; ++r) {
      if (values[r * stride] != values[0]) return true;
    }
    return false;
  };
  if (!differs(hashes.data_ptr<int64_t>(), 1)) return;
  at::Tensor each = at::zeros({ranks, count}, hashes_.options());
  const at::Tensor mine = each.select(0, comm.rank());
  for (int64_t i = 0; i < count; ++i) mine.select(0, i).copy_(hash_of({params_[i].tensor}), /*non_blocking=*/true);
  collectives_.wait(*collectives_.start_sum(each, Purpose::kReplicas, *kParameters), kParameters, position);
  each = each.cpu();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* values = each.data_ptr<int64_t>() + i;
    if (!differs(values, count)) continue;
    std::map<int64_t, std::vector<std::string>> groups;
    for (int64_t r = 0; r < ranks; ++r) groups[values[r * count]].push_back(std::to_string(comm.ranks().global(r)));
    std::string equal;
    for (const auto& [hash, members] : groups) equal += (equal.empty() ? "ranks {" : ", {") + joined(members) + "}";
    throw EnvironmentError(
        text("replicas have diverged: parameter '", params_[i].name, "' is not the same on all ranks (equal within ",
             equal, "), seen in synchronized step ", collectives_.steps(),
             ". Something changed it on some ranks only. This may be a step that not all ranks made, another optimizer "
             "state, a loaded checkpoint, or code that writes rank-dependent values."));
  }
}

}  // namespace drivetrain::ddp
