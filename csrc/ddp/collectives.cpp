// Starts and awaits the collectives of a reducer's steps.
#include "ddp/collectives.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/check.h"
#include "base/transfer.h"
#include "ddp/parameter_claims.h"

namespace drivetrain::ddp {

Collectives::Collectives(std::shared_ptr<Comm> comm, std::string wrapper)
    : comm_(std::move(comm)), wrapper_(std::move(wrapper)) {}

std::unique_ptr<PendingReduce> Collectives::start_bucket(const at::Tensor& flat, size_t index, bool as_sum) {
  comm_->set_tag(tag_of(steps_ + 1, Purpose::kBucket, index));
  return as_sum ? comm_->start_sum(flat) : comm_->start(flat);
}

std::unique_ptr<PendingReduce> Collectives::start_sum(const at::Tensor& flat, Purpose purpose) {
  comm_->set_tag(tag_of(steps_ + 1, purpose));
  return comm_->start_sum(flat);
}

void Collectives::wait(PendingReduce& reduce, const std::shared_ptr<const std::string>& what, int64_t position) {
  try {
    const Progress::Wait wait(*progress_, what, position);
    reduce.wait();
  } catch (const std::exception& error) {
    if (recovery_.end_hooked_step()) throw;  // the hook's own error keeps its type
    fail_step("the all-reduce of " + *what, error.what());
  }
}

void Collectives::sum_now(const at::Tensor& flat, const std::string& what) {
  try {
    const Progress::Wait wait(*progress_, std::make_shared<const std::string>(what), Progress::kGradients);
    start_sum(flat, Purpose::kPlan)->wait();
  } catch (const std::exception& error) {
    fail("the all-reduce of " + what, error.what());
  }
}

std::vector<int64_t> Collectives::from_rank_0(const std::vector<int64_t>& values,
                                              const std::shared_ptr<const std::string>& what, c10::Device device) {
  const at::Tensor shared = copied_to(at::tensor(values, at::kLong), device);
  try {
    const Progress::Wait wait(*progress_, what, Progress::kGradients);
    comm_->broadcast(shared);
  } catch (const std::exception& error) {
    fail(*what, error.what());
  }
  const at::Tensor on_host = shared.cpu();
  return {on_host.data_ptr<int64_t>(), on_host.data_ptr<int64_t>() + on_host.numel()};
}

std::vector<at::Tensor> Collectives::gather(const std::vector<double>& values, const std::string& what,
                                            c10::Device device) {
  const int64_t count = static_cast<int64_t>(values.size());
  const at::Tensor mine = at::zeros({comm_->size() * count}, at::kDouble);
  std::copy(values.begin(), values.end(), mine.data_ptr<double>() + comm_->rank() * count);
  const at::Tensor all = copied_to(mine, device);
  sum_now(all, what);
  return all.cpu().view({comm_->size(), count}).unbind();
}

void Collectives::fail_step(std::string what, std::string report) const {
  recovery_.forget_step();
  fail(what, report);
}

void Collectives::fail(const std::string& what, const std::string& report) const {
  const std::string hang = progress_->report(steps_ + 1), ended = ended_ranks_ ? ended_ranks_() : "";
  throw EnvironmentError(text("drivetrain: ", what, " failed in synchronized step ", steps_ + 1,
                              ParameterClaims::has_several_reducers() ? " of " + wrapper_ : "",
                              "; a rank has probably died, hangs or has left out a step: look for the first error in "
                              "the others' logs, and whether they name the same step. The transport reports: ",
                              report, ended.empty() ? "" : "\n", ended,
                              hang.empty() ? "" : "\nThe last report before that: ", hang));
}

}  // namespace drivetrain::ddp
