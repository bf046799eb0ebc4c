// Starts and awaits the collectives of a reducer's steps.
#include "ddp/collectives.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <exception>

#include "base/check.h"
#include "base/write_cuda.h"
#include "ddp/parameter.h"

namespace drivetrain::ddp {

namespace {

// The time after which a waiting rank learns that others have parted from each other.
constexpr std::chrono::milliseconds kBetweenLooks(50);

}  // namespace

Collectives::Collectives(std::shared_ptr<Comm> comm, std::string wrapper) : wrapper_(std::move(wrapper)) {
  set_comm(std::move(comm));
}

void Collectives::set_comm(std::shared_ptr<Comm> comm) {
  comm_ = std::move(comm);
  steps_ = 0;
  if (comm_->board() != nullptr) wrapper_number_ = comm_->board()->add_wrapper(wrapper_);
}

void Collectives::show(const Tag& shown) {
  comm_->set_tag(shown);
  if (comm_->board() != nullptr) comm_->board()->show(shown);
}

void Collectives::promise(const std::vector<std::pair<Purpose, size_t>>& purposes) {
  change_.clear();
  if (comm_->board() == nullptr || comm_->board()->has_all_ranks()) return;
  std::vector<Tag> tags;
  for (const auto& [purpose, bucket] : purposes) tags.push_back(tag(purpose, bucket));
  try {
    comm_->board()->promise(tags);
  } catch (const std::exception& error) {
    fail_step("the agreement of the hosts on the step", error.what());
  }
}

void Collectives::announce(Purpose purpose, const std::string& what, size_t bucket) {
  try {
    show(purpose, bucket);
  } catch (const std::exception& error) {
    fail_step(what, error.what());
  }
}

void Collectives::compare_change(size_t param, int64_t checksum, std::string warning) {
  change_ = std::move(warning);
  Tag shown = tag(Purpose::kChange, param);
  shown.step = checksum & INT32_MAX;  // as much as a tag holds
  try {
    show(shown);
  } catch (const std::exception& error) {
    fail_step("the comparison of parameters that hooks changed", error.what());
  }
}

std::unique_ptr<PendingReduce> Collectives::start_bucket(const at::Tensor& flat, size_t index, bool as_sum,
                                                         Purpose purpose,
                                                         const std::shared_ptr<const RankRanges>& ranges,
                                                         std::optional<double>& weight) {
  show(purpose, index);
  if (!as_sum || weight) {
    if (auto reduce = comm_->start_mean(flat, weight, ranges)) return reduce;
    weight.reset();
  }
  return ranges ? comm_->start_scatter(flat, ranges) : comm_->start_sum(flat);
}

std::unique_ptr<PendingReduce> Collectives::start_sum(const at::Tensor& flat, Purpose purpose,
                                                      const std::string& what) {
  try {
    show(purpose);
    return comm_->start_sum(flat);
  } catch (const std::exception& error) {
    fail_step("the all-reduce of " + what, error.what());
  }
}

void Collectives::await(PendingReduce& reduce) const {
  if (comm_->board() == nullptr) {
    reduce.wait();
    return;
  }
  for (std::chrono::milliseconds waited = kBetweenLooks; !reduce.wait_for(kBetweenLooks); waited += kBetweenLooks) {
    comm_->board()->check(waited);
  }
}

void Collectives::wait(PendingReduce& reduce, const std::shared_ptr<const std::string>& what, int64_t position) {
  try {
    const Progress::Wait wait(*progress_, what, position);
    await(reduce);
  } catch (const std::exception& error) {
    // A hook's own error keeps its type. After a difference the ranks will not end the other hooks' reductions.
    if (difference().empty() && recovery_.end_hooked_step()) throw;
    fail_step("the all-reduce of " + *what, error.what());
  }
}

void Collectives::sum_now(const at::Tensor& flat, const std::string& what, Purpose purpose,
                          const std::function<void()>& before_start) {
  try {
    const Progress::Wait wait(*progress_, std::make_shared<const std::string>(what), Progress::kGradients);
    show(purpose);
    if (before_start) before_start();
    await(*comm_->start_sum(flat));
  } catch (const std::exception& error) {
    fail("the all-reduce of " + what, error.what());
  }
}

std::vector<int64_t> Collectives::from_rank_0(const std::vector<int64_t>& values, const std::string& what,
                                              c10::Device device) {
  const at::Tensor mine = at::tensor(values, at::kLong);
  if (comm_->rank() != 0) mine.zero_();
  const at::Tensor shared = copied_to(mine, device);
  sum_now(shared, what, Purpose::kFromRank0);
  const at::Tensor on_host = shared.cpu();
  return {on_host.data_ptr<int64_t>(), on_host.data_ptr<int64_t>() + on_host.numel()};
}

// Returns a row of values per rank, one after the other: float64 [ranks * values], on the device.
at::Tensor Collectives::sum_of_rows(const std::vector<double>& values, const std::string& what, c10::Device device) {
  const int64_t count = static_cast<int64_t>(values.size());
  const at::Tensor mine = at::zeros({comm_->size() * count}, at::kDouble);
  std::copy(values.begin(), values.end(), mine.data_ptr<double>() + comm_->rank() * count);
  const at::Tensor all = copied_to(mine, device);
  sum_now(all, what);
  return all;
}

std::vector<at::Tensor> Collectives::rows(const at::Tensor& gathered) const {
  return gathered.view({comm_->size(), -1}).unbind();
}

std::vector<at::Tensor> Collectives::gather(const std::vector<double>& values, const std::string& what,
                                            c10::Device device) {
  return rows(sum_of_rows(values, what, device).cpu());
}

std::unique_ptr<LateValue> Collectives::gather_late(const std::vector<double>& values, const std::string& what,
                                                    c10::Device device) {
  return std::make_unique<LateValue>(sum_of_rows(values, what, device));
}

std::vector<at::Tensor> Collectives::read(const LateValue& gathered, const std::string& what) const {
  const OutsideCaptures outside_captures;  // another thread may capture
  if (!gathered.has_come()) {
    const Progress::Wait wait(*progress_, std::make_shared<const std::string>(what), Progress::kGradients);
    gathered.wait();
  }
  return rows(gathered.value());
}

void Collectives::fail_step(std::string what, std::string report) const {
  recovery_.forget_step();
  if (comm_->is_foreign() && std::current_exception()) throw;  // a script's own group raises what it means
  fail(what, report);
}

void Collectives::fail(const std::string& what, const std::string& report) const {
  const std::string hang = progress_->report(steps_ + 1), ended = ended_ranks_ ? ended_ranks_() : "";
  const std::string parted = difference();
  const bool is_told = report.find(parted) != std::string::npos;
  throw EnvironmentError(
      text("drivetrain: ", what, " failed in synchronized step ", steps_ + 1,
           ParameterClaims::has_several_reducers() ? " of " + wrapper_ : "",
           ". A rank has probably died, hangs or has left out a step. Look for the first error in the "
           "others' logs, and whether they name the same step. The transport reports: ",
           report, is_told ? "" : "\n", is_told ? "" : parted, change_.empty() ? "" : "\n", change_,
           ended.empty() ? "" : "\n", ended, hang.empty() ? "" : "\nThe last report before that: ", hang));
}

}  // namespace drivetrain::ddp
