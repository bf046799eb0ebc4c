// Several reducers that hold the same parameter: which of them reduces its gradient in a backward.
#include <torch/csrc/autograd/engine.h>

#include <mutex>
#include <unordered_map>

#include "base/check.h"
#include "ddp/reducer.h"
#include "ddp/tensors.h"

namespace drivetrain::ddp {
namespace {

// Several wrappers may hold one parameter. Which of them has its gradient in a synchronised backward (they take turns
// well; in one backward the first to come reduces it for both). Kept only while there are several reducers.
std::mutex shared_mutex;
struct Taker {
  const void* reducer;
  int backward;  // autograd's number of it
};
std::unordered_map<const c10::TensorImpl*, Taker> takers;

}  // namespace

std::atomic<int> Reducer::num_reducers_{0};

// False: another wrapper reduces it in this backward.
bool Reducer::claim(const Parameter& param) const {
  if (num_reducers_ == 1) return true;
  const std::lock_guard<std::mutex> lock(shared_mutex);
  const int backward = torch::autograd::get_current_graph_task_id();
  const Taker taker = takers.emplace(param.tensor.unsafeGetTensorImpl(), Taker{this, backward}).first->second;
  if (taker.reducer == this) return true;
  if (taker.backward == backward) return false;
  throw_unsupported(text("parameter '", param.name,
                         "' belongs to two DistributedDataParallel wrappers, and the other one has a backward under "
                         "way that has not ended (it was interrupted by an error, or it is a reentrant one): wrap it "
                         "once, or use one of the wrappers under no_sync()."));
}

void Reducer::release_params() {
  const std::lock_guard<std::mutex> lock(shared_mutex);
  if (takers.empty()) return;
  for (const Parameter& param : params_) {
    const auto found = takers.find(param.tensor.unsafeGetTensorImpl());
    if (found != takers.end() && found->second.reducer == this) takers.erase(found);
  }
}

}  // namespace drivetrain::ddp
