// Keeps the claims of this process's reducers on shared parameters.
#include "ddp/parameter.h"

#include <torch/csrc/autograd/engine.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "base/check.h"
#include "ddp/errors.h"

namespace drivetrain::ddp {
namespace {

struct Claim {
  const void* owner;
  int backward;  // autograd's number of the backward
};

std::atomic<int> num_reducers{0};
std::mutex claims_mutex;
std::unordered_map<const c10::TensorImpl*, Claim> claims;  // empty while the process has one reducer

}  // namespace

ParameterClaims::ParameterClaims(const Parameters& params) : params_(params) { ++num_reducers; }

ParameterClaims::~ParameterClaims() {
  release();
  --num_reducers;
}

bool ParameterClaims::has_several_reducers() { return num_reducers > 1; }

bool ParameterClaims::claim(const Parameter& param) const {
  if (num_reducers == 1) return true;
  const std::lock_guard<std::mutex> lock(claims_mutex);
  const int backward = torch::autograd::get_current_graph_task_id();
  const Claim claim = claims.emplace(param.tensor.unsafeGetTensorImpl(), Claim{this, backward}).first->second;
  if (claim.owner == this) return true;
  if (claim.backward == backward) return false;
  throw_unsupported(text("parameter '", param.name,
                         "' belongs to two DistributedDataParallel wrappers, and a backward of the other one has not "
                         "ended. An error interrupted it, or it is a reentrant one. Wrap the parameter once, or use "
                         "one of the wrappers under no_sync()."));
}

void ParameterClaims::release() {
  const std::lock_guard<std::mutex> lock(claims_mutex);
  if (claims.empty()) return;
  for (const Parameter& param : params_) {
    const auto found = claims.find(param.tensor.unsafeGetTensorImpl());
    if (found != claims.end() && found->second.owner == this) claims.erase(found);
  }
}

}  // namespace drivetrain::ddp
