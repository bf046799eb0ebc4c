// What the reducer checks of its surroundings, and what it says when something is wrong.
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/check.h"
#include "ddp/reducer.h"
#include "ddp/replicas.h"

namespace drivetrain::ddp {
namespace {

constexpr size_t kNamesShown = 10;
constexpr int kDigitBits = 7;  // of a tag: 16-bit types have no more bits that are sure to arrive
constexpr uint64_t kDigit = (uint64_t{1} << kDigitBits) - 1;

const auto kParameters = std::make_shared<const std::string>("the parameters' checksums");

template <class Names>
std::string joined(const Names& names) {
  std::string out;
  for (size_t i = 0; i < names.size() && i < kNamesShown; ++i) out += (i ? ", " : "") + names[i];
  if (names.size() > kNamesShown) out += text(", and ", names.size() - kNamesShown, " more");
  return out;
}

}  // namespace

// Runs a public operation and keeps the text of what it throws.
void Reducer::noting_errors(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    error_ = error.what_without_backtrace();
    throw;
  } catch (const std::exception& error) {
    error_ = error.what();
    throw;
  }
}

std::string Reducer::last_error() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return error_;
}

std::string Reducer::describe(const Bucket& bucket) const {
  std::vector<std::string> names;
  for (size_t index : bucket.params) names.push_back(params_[index].name);
  return text("bucket ", &bucket - buckets_.data(), " of ", buckets_.size(), " [", joined(names), "]");
}

// ---- Before a forward's backward.

// module.to(dtype) and the like give a parameter a new gradient accumulator: our hook would sit on the old one, and
// nothing would be reduced any more.
void Reducer::check_hooked(const Parameter& param) const {
  if (!param.accumulator) return;  // hooks were removed on purpose
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(param.tensor);
  if (accumulator.get() == param.accumulator.get()) return;
  throw EnvironmentError(text("parameter '", param.name,
                              "' was changed after DistributedDataParallel wrapped it (by .half(), .double(), .to() or "
                              "an assignment to .data of another type), so that its gradient would no longer be "
                              "reduced: convert the module first and wrap it then."));
}

void Reducer::check_frozen() const {
  for (const auto& [name, tensor] : options_.frozen) {
    if (!tensor.requires_grad()) continue;
    throw EnvironmentError(text("parameter '", name,
                                "' was frozen when DistributedDataParallel wrapped the module and requires a gradient "
                                "now, which would not be reduced: set requires_grad before wrapping, or wrap the "
                                "module anew after unfreezing."));
  }
}

// ---- Missing or surplus gradients.

void Reducer::check_finalized() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  noting_errors([&] {
    if (step_ == Step::kRunning) fail_incomplete();
  });
}

// Says what torch's reducer says where others look for it, and always gives the names.
void Reducer::fail_incomplete() const {
  std::string names, indices;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].ready) continue;
    names += (names.empty() ? "" : ", ") + params_[i].name;
    indices += text(indices.empty() ? "" : " ", i);
  }
  std::string cause;
  if (graph_ == Graph::kStaticKnown) {
    cause =
        "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used in "
        "first iteration, but then got unused in the second iteration. this is not compatible with static_graph set to "
        "True.";
  } else {
    cause =
        "Some parameters got no gradient although backward was to be reduced over ranks. If a forward may leave "
        "parameters unused, say so by passing the keyword argument `find_unused_parameters=True` to "
        "DistributedDataParallel; make sure that all `forward` function outputs participate in calculating loss, and "
        "that forward goes through the wrapper, not its .module. An exception in the middle of that backward has the "
        "same "
        "effect, on every rank that it interrupts.";
    if (options_.find_unused_parameters) {
      cause +=
          " Since `find_unused_parameters=True` is enabled, some output that reaches them is probably not in the "
          "outputs that `forward` returned (which may hold tensors in lists, tuples, dicts and dataclasses).";
    }
  }
  const std::string rank = comm_->ranks().name(comm_->rank());
  throw EnvironmentError(
      text("Expected to have finished reduction in the prior iteration before starting a new one. ", cause,
           "\nParameter indices which did not receive grad for ", rank, ": ", indices,
           "\nParameters which did not receive grad for ", rank, ": ", names,
           "\n(For torch's own log of the step, set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or "
           "DETAIL.)"));
}

void Reducer::fail_changed_graph(const Parameter& param) const {
  throw EnvironmentError(text(
      "Your training graph has changed in this iteration, which static_graph=True does not allow: parameter '",
      param.name, "' got ", param.fired, param.fired == 1 ? " gradient" : " gradients", ", expected ", param.expected,
      " as in the first iteration. Leave static_graph out, or pass find_unused_parameters=True instead."));
}

// ---- The transport.

void Reducer::fail_start(const std::string& what, const std::exception& error) {
  const std::string report = error.what();  // it may go with the step
  forget_step();
  fail_collective("the all-reduce of " + what, report);
}

void Reducer::fail_collective(const std::string& what, const std::string& report) const {
  const std::string hang = progress_->report(steps_ + 1), ended = ended_ranks_ ? ended_ranks_() : "";
  throw EnvironmentError(text("drivetrain: ", what, " failed in synchronised step ", steps_ + 1,
                              num_reducers_ > 1 ? " of " + options_.wrapper : "",
                              "; a rank has probably died, hangs or has left out a step: look for the first error in "
                              "the others' logs, and whether they name the same step. The transport reports: ",
                              report, ended.empty() ? "" : "\n", ended,
                              hang.empty() ? "" : "\nThe last report before that: ", hang));
}

// ---- Tags, where the transport compares none: they come back with the values, before any is used.

void Reducer::write_tags(Bucket& bucket) {
  uint64_t step = static_cast<uint64_t>(steps_) + 1;
  float* const digits = tag_digits_.data_ptr<float>() + comm_->rank() * kTagDigits;
  for (int64_t i = 0; i < kTagDigits - 1; ++i, step >>= kDigitBits) digits[i] = static_cast<float>(step & kDigit);
  digits[kTagDigits - 1] = static_cast<float>((&bucket - buckets_.data()) & kDigit);
  bucket.tags.copy_(tag_digits_);
}

void Reducer::check_tags(const Bucket& bucket) {
  if (!bucket.tags.defined() || bucket.hooked != nullptr) return;
  // Several hosts may leave means instead of sums.
  const float factor = scaling_.as_sum ? 1 : static_cast<float>(comm_->size());
  const at::Tensor came = bucket.tags.to(at::kFloat);
  const float* const digits = came.data_ptr<float>();
  const float* const mine = tag_digits_.data_ptr<float>() + comm_->rank() * kTagDigits;
  const float index = static_cast<float>((&bucket - buckets_.data()) & kDigit);
  for (int rank = 0; rank < comm_->size(); ++rank) {
    const float* const theirs = digits + rank * kTagDigits;
    bool is_same = std::round(theirs[kTagDigits - 1] * factor) == index;
    uint64_t step = 0;
    for (int64_t i = kTagDigits - 2; i >= 0; --i) {
      const float digit = std::round(theirs[i] * factor);
      is_same &= digit == mine[i];
      step = step << kDigitBits | (digit >= 0 && digit <= kDigit ? static_cast<uint64_t>(digit) : 0);
    }
    if (is_same) continue;
    const std::string
        what = "the all-reduce of " + *bucket.label,
        reason = text(
            "the ranks reduce different things: ", comm_->ranks().name(comm_->rank()), " bucket ",
            &bucket - buckets_.data(), " in synchronised step ", steps_ + 1, ", ", comm_->ranks().name(rank),
            " something else, which looks like bucket ", std::round(theirs[kTagDigits - 1] * factor), " in step ", step,
            ". They have taken different ways through the script: another number of backwards, another model");
    forget_step();
    fail_collective(what, reason);
  }
}

// The watching thread has found that the step under way cannot end.
void Reducer::check_given_up() {
  const std::string why = progress_->why_given_up();
  if (why.empty()) return;
  forget_step();
  throw EnvironmentError(why);
}

// ---- Replicas.

// Names the first parameter that is not the same everywhere.
void Reducer::compare_replicas() {
  const int64_t ranks = comm_->size(), count = static_cast<int64_t>(params_.size());
  const at::Tensor hashes = replica_hashes_.cpu();
  const auto differs = [&](const int64_t* values, int64_t stride) {
    for (int64_t r = 1; r < ranks; ++r) {
      if (values[r * stride] != values[0]) return true;
    }
    return false;
  };
  if (!differs(hashes.data_ptr<int64_t>(), 1)) return;
  at::Tensor each = at::zeros({ranks, count}, replica_hashes_.options());
  const at::Tensor mine = each.select(0, comm_->rank());
  for (int64_t i = 0; i < count; ++i) mine.select(0, i).copy_(hash_of({params_[i].tensor}), /*non_blocking=*/true);
  wait_for(*start_sum(each, Purpose::kReplicas), kParameters, place_of_all());
  each = each.cpu();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* values = each.data_ptr<int64_t>() + i;
    if (!differs(values, count)) continue;
    std::map<int64_t, std::vector<std::string>> groups;
    for (int64_t r = 0; r < ranks; ++r) groups[values[r * count]].push_back(std::to_string(comm_->ranks().global(r)));
    std::string who;
    for (const auto& [hash, members] : groups) who += (who.empty() ? "ranks {" : ", {") + joined(members) + "}";
    throw EnvironmentError(text(
        "replicas have parted: parameter '", params_[i].name, "' is not the same on all ranks (equal within ", who,
        "), seen in synchronised step ", steps_,
        ". Something changed it on some ranks only: a step that not all ranks made, another optimizer state, a loaded "
        "checkpoint, or code that writes to parameters with rank-dependent values."));
  }
}

}  // namespace drivetrain::ddp
