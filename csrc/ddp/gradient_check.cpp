// Checks buckets of gradients before their reduction, and shares the ranks' findings.
#include "ddp/gradient_check.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/transfer.h"
#include "ddp/tensors.h"
#include "formats/storage_torch.h"
#include "grad/norm.h"

namespace drivetrain::ddp {
namespace {

constexpr size_t kNormsKept = 32;  // steps
constexpr size_t kNormsNeeded = 8;

// Returns the sum of squares, in double. It is not finite if an element is not.
double sum_of_squares(const at::Tensor& values) {
  const at::Tensor real = as_real(values);
  if (formats::format_of(real.scalar_type()) && formats::is_walkable(real)) {
    return grad::sum_of_squares({{formats::array_of(real), real.numel()}});
  }
  const double norm = at::linalg_vector_norm(real, 2, {}, false, at::kDouble).item<double>();
  return norm * norm;
}

}  // namespace

void GradientCheck::begin_step(BackwardKind /*kind*/, bool is_joining) {
  findings_ = at::Tensor();
  if (!is_on() || is_joining) return;
  findings_ =
      at::zeros({collectives_.comm().size()}, at::TensorOptions(at::kDouble).device(params_[0].tensor.device()));
  std::vector<int64_t> bytes;
  for (const Bucket& bucket : buffer_.buckets()) bytes.push_back(bucket.end - bucket.offset);
  if (bytes != known_bytes_) {
    known_.assign(bytes.size(), {});
    known_bytes_ = std::move(bytes);
  }
  norms_.assign(known_.size(), 0);
}

at::Tensor GradientCheck::values_of(const Bucket& bucket, size_t param) const {
  if (bucket.sparse) return bucket.flat._values();
  return as_real(buffer_.region(param).view);
}

void GradientCheck::check(size_t index) {
  if (!is_due()) return;
  const Bucket& bucket = buffer_.buckets()[index];
  if (bucket.flat.is_cpu()) {
    check_on_host(index);
  } else {
    check_on_device(bucket);
  }
}

void GradientCheck::check_on_host(size_t index) {
  const Bucket& bucket = buffer_.buckets()[index];
  double squares = sum_of_squares(bucket.sparse ? bucket.flat._values() : bucket.flat);
  if (!std::isfinite(squares)) {
    if (const auto param = first_not_finite(bucket)) {
      note(1.0 + static_cast<double>(*param));
      return;
    }
    squares = 0;  // the padding is not finite, or squares of float64 overflow
    for (size_t param : bucket.params) squares += sum_of_squares(values_of(bucket, param));
  }
  norms_[index] = std::sqrt(squares);
  if (is_spike(index, norms_[index])) note(-1.0 - static_cast<double>(largest(bucket)));
}

// Keeps the step's first finding.
void GradientCheck::note(double code) {
  double& mine = findings_.data_ptr<double>()[collectives_.comm().rank()];
  if (mine == 0) mine = code;
}

std::optional<size_t> GradientCheck::first_not_finite(const Bucket& bucket) const {
  for (size_t param : bucket.params) {
    if (!at::isfinite(values_of(bucket, param)).all().item<bool>()) return param;
  }
  return std::nullopt;
}

bool GradientCheck::is_spike(size_t bucket, double norm) const {
  if (!(options_.spike_factor > 0) || known_[bucket].size() < kNormsNeeded) return false;
  std::vector<double> norms = known_[bucket];
  std::nth_element(norms.begin(), norms.begin() + static_cast<int64_t>(norms.size() / 2), norms.end());
  return norm > options_.spike_factor * norms[norms.size() / 2];
}

size_t GradientCheck::largest(const Bucket& bucket) const {
  size_t found = bucket.params[0];
  double most = -1;
  for (size_t param : bucket.params) {
    const double squares = sum_of_squares(values_of(bucket, param));
    if (squares > most) found = param;
    most = std::max(most, squares);
  }
  return found;
}

// Enqueues the check, without a wait of the host.
void GradientCheck::check_on_device(const Bucket& bucket) {
  std::vector<at::Tensor> values;
  std::vector<double> codes;
  for (size_t param : bucket.params) {
    const at::Tensor of_param = values_of(bucket, param);
    if (of_param.numel() == 0) continue;
    values.push_back(of_param);
    codes.push_back(1.0 + static_cast<double>(param));
  }
  if (values.empty()) return;
  const at::Tensor norms = at::stack(at::_foreach_norm(values, 2, at::kDouble));
  const at::Tensor is_bad = at::isfinite(norms).logical_not().to(at::kInt);
  const at::Tensor first = is_bad.argmax().view({1});
  const at::Tensor code = copied_to(at::tensor(codes, at::kDouble), findings_.device()).index_select(0, first);
  const at::Tensor found = code.mul(is_bad.index_select(0, first));  // 0 where none is bad
  const at::Tensor mine = findings_.narrow(0, collectives_.comm().rank(), 1);
  mine.copy_(at::where(mine.eq(0), found, mine), /*non_blocking=*/true);
}

std::vector<GradientCheck::Finding> GradientCheck::finish() {
  std::vector<Finding> found;
  if (!is_due()) return found;
  const at::Tensor codes = findings_.cpu();
  for (int64_t rank = 0; rank < codes.numel(); ++rank) {
    const double code = codes.data_ptr<double>()[rank];
    if (code != 0) found.push_back({rank, static_cast<size_t>(std::abs(code)) - 1, code < 0});
  }
  for (size_t i = 0; found.empty() && options_.spike_factor > 0 && i < known_.size(); ++i) {
    if (known_[i].size() == kNormsKept) known_[i].erase(known_[i].begin());
    known_[i].push_back(norms_[i]);
  }
  return found;
}

void GradientCheck::reset() {
  SideSum::reset();
  findings_ = at::Tensor();
}

std::string GradientCheck::describe(const std::vector<Finding>& findings) const {
  std::string out;
  for (const Finding& finding : findings) {
    const std::string& name = params_[finding.param].name;
    out += text(out.empty() ? "" : "; ", collectives_.comm().ranks().name(static_cast<int>(finding.rank)));
    if (finding.is_spike) {
      out += text(" has a bucket whose norm exceeds the median of its last ones more than ", options_.spike_factor,
                  " times, most of it in '", name, "'");
    } else {
      out += text(" has a gradient that is not finite (nan or inf) for '", name, "'");
    }
  }
  return out;
}

}  // namespace drivetrain::ddp
