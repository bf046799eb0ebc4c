// Runs the shared-memory protocols of shm_exchange.cpp and tag_board.cpp, as they are, on Relacy's model of C++ memory:
// loads may return old values wherever the orders of the atomics allow it. Plain values are checked for data races.
// Each runs again with weaker orders of one kind, which the model must find. Needs Debian's package relacy-dev.
// Usage: memory_order [ITERATIONS]
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "ddp/transport/shm/shm_exchange.h"
#include "ddp/transport/shm/shm_segment.h"
#include "ddp/transport/tag_board.h"
// clang-format off: Relacy's macros come after all that the sources include
#include <relacy/relacy.hpp>
// clang-format on
#undef memory_order_relaxed
#undef memory_order_acquire
#undef memory_order_release
#undef memory_order_acq_rel
#undef memory_order_seq_cst
#undef new
#undef delete
#undef malloc
#undef free

namespace model {

enum class Weaker { kNothing, kStores, kLoads, kExchanges, kSequence };
Weaker weaker = Weaker::kNothing;

rl::memory_order order_of(std::memory_order order, Weaker kind) {
  const bool is_sequence = order == std::memory_order_seq_cst;
  if (is_sequence && weaker == Weaker::kSequence) {
    order = kind == Weaker::kLoads    ? std::memory_order_acquire
            : kind == Weaker::kStores ? std::memory_order_release
                                      : std::memory_order_acq_rel;
  } else if (!is_sequence && weaker == kind) {
    return rl::mo_relaxed;
  }
  return static_cast<rl::memory_order>(order);
}
static_assert(static_cast<int>(std::memory_order_seq_cst) == static_cast<int>(rl::mo_seq_cst));

// Has the interface of std::atomic. Zero at first, as mapped memory is.
template <class T>
class Atomic {
 public:
  static constexpr bool is_always_lock_free = true;
  Atomic() : value_(0) {}
  T load(std::memory_order order = std::memory_order_seq_cst) const {
    return static_cast<T>(value_.load(order_of(order, Weaker::kLoads), $));
  }
  void store(T value, std::memory_order order = std::memory_order_seq_cst) {
    value_.store(static_cast<uint64_t>(value), order_of(order, Weaker::kStores), $);
  }
  T fetch_add(T value, std::memory_order order = std::memory_order_seq_cst) {
    return static_cast<T>(value_.fetch_add(value, order_of(order, Weaker::kExchanges), $));
  }
  T fetch_sub(T value) { return fetch_add(-value); }
  bool compare_exchange_weak(T& expected, T value, std::memory_order order) {
    return value_.compare_exchange_weak(expected, value, order_of(order, Weaker::kExchanges), $, rl::mo_relaxed, $);
  }

  rl::atomic<uint64_t> value_;
};

// The kernel compares and sleeps at once, after a full barrier. A wake-up without a change of the value is not modeled.
constexpr int kRanks = 3;
bool sleeps[kRanks];
template <class... Rest>
long system_call(long, Atomic<uint32_t>* word, int operation, uint32_t value, const Rest&...) {
  if (operation == FUTEX_WAKE) {
    std::fill_n(sleeps, kRanks, false);
    return 0;
  }
  if (static_cast<uint32_t>(word->value_.load(rl::mo_seq_cst, $)) != value) return 0;
  bool& asleep = sleeps[rl::thread_index()];
  asleep = true;
  while (asleep) rl::yield(1, $);
  return 0;
}

// Stands still, so that no limit ends a wait.
struct Clock : std::chrono::steady_clock {
  static time_point now() { return {}; }
};

}  // namespace model

namespace std {
template <class T>
using model_atomic = model::Atomic<T>;
namespace chrono {
using model_clock = model::Clock;
}
}  // namespace std
using model::system_call;
#define VAR_READ(variable) (variable)($).load()
#define VAR_WRITE(variable, value) (variable)($).store(value)

#define atomic model_atomic
#define steady_clock model_clock
#define syscall system_call
#include "../../csrc/ddp/transport/shm/shm_exchange.cpp"
#include "../../csrc/ddp/transport/tag_board.cpp"
#undef atomic
#undef steady_clock
#undef syscall

namespace drivetrain::ddp {

constexpr int kSteps = 2;
constexpr int64_t kNumel = 3 * (kSmallestChunk / 4);

// A rank's values: one per chunk. Operations pass its address around.
struct Values {
  rl::var<int> chunks[3];
};

// Sums chunks as the kernels do, with every access checked.
void sum_range(const SumJob& job) {
  const int64_t chunk = job.begin / (kSmallestChunk / 4);
  const auto value = [chunk](const char* values) -> rl::var<int>& {
    return reinterpret_cast<Values*>(const_cast<char*>(values))->chunks[chunk];
  };
  int sum = 0;
  for (int i = 0; i < job.num_inputs; ++i) sum += VAR_READ(value(job.inputs[i]));
  for (int i = 0; i < job.num_outputs; ++i) VAR_WRITE(value(job.outputs[i]), sum);
}

}  // namespace drivetrain::ddp

namespace {

using namespace drivetrain::ddp;
using model::kRanks, model::Weaker;

// Ranks sum their values, read the sum and write new values into the same memory.
struct Exchanges : rl::test_suite<Exchanges, kRanks> {
  std::unique_ptr<char[]> memory;
  void* block = nullptr;
  std::array<Values, kRanks> values;

  void before() {
    std::fill_n(model::sleeps, kRanks, false);
    size_t space = ShmExchange::shared_state_bytes(kRanks) + 64;
    memory.reset(new char[space]);
    block = memory.get();
    std::align(64, space - 64, block, space);
    auto* const state = new (block) SharedState;
    for (int rank = 0; rank < kRanks; ++rank) new (&line_of(*state, rank)) RankLine;
  }
  void thread(unsigned rank) {
    ShmExchange::Options options;
    options.rank = static_cast<int>(rank);
    options.size = kRanks;
    options.timeout = std::chrono::hours(1);
    options.spin = false;
    options.rank_names.resize(kRanks, "a rank");
    ShmExchange exchange(block, std::move(options));
    ShmExchange::Operation operation;
    for (Values& of_rank : values) operation.values.push_back(reinterpret_cast<char*>(&of_rank));
    operation.type = ElementType::kFloat32;
    operation.numel = kNumel;
    for (int step = 0; step < kSteps; ++step) {
      for (auto& chunk : values[rank].chunks) VAR_WRITE(chunk, 1 << (4 * step + static_cast<int>(rank)));
      exchange.wait(exchange.start(operation));
      for (auto& chunk : values[rank].chunks) RL_ASSERT(VAR_READ(chunk) == ((1 << kRanks) - 1) << 4 * step);
    }
  }
  void after() {
    auto* const state = static_cast<SharedState*>(block);
    for (int rank = 0; rank < kRanks; ++rank) line_of(*state, rank).~RankLine();
    state->~SharedState();
  }
};

// Two ranks start different collectives at once: at least one must see the other's, before it starts its own.
struct Tags : rl::test_suite<Tags, 2> {
  std::array<std::unique_ptr<char[]>, 2> memory;
  std::vector<char*> lines;
  int refused = 0;

  void before() {
    for (auto& of_rank : memory) {
      size_t space = TagBoard::line_bytes() + 64;
      of_rank.reset(new char[space]);
      void* line = of_rank.get();
      std::align(64, space - 64, line, space);
      lines.push_back(reinterpret_cast<char*>(new (line) TagBoard::Line));
    }
  }
  void thread(unsigned rank) {
    TagBoard::Options options;
    options.rank = static_cast<int>(rank);
    options.lines = lines;
    options.ranks = {0, 1};
    options.rank_names = {"rank 0", "rank 1"};
    TagBoard board(std::move(options));
    try {
      board.show({Purpose::kBucket, 1, 0, 0});
      board.show({Purpose::kBucket, 1, 1 + rank, 0});
    } catch (const drivetrain::EnvironmentError&) {
      ++refused;  // the model runs one thread at a time
    }
  }
  void after() {
    for (char* const line : lines) reinterpret_cast<TagBoard::Line*>(line)->~Line();
    RL_ASSERT(refused > 0);
  }
};

// Returns whether every iteration passed. Prints what failed if that is not expected.
template <class Suite>
bool passes(Weaker weaker, unsigned long iterations) {
  rl::ostringstream text;  // allocates outside of the model
  rl::test_params params;
  params.iteration_count = iterations;
  params.execution_depth_limit = 100000;
  params.output_stream = params.progress_stream = &text;
  model::weaker = weaker;
  const bool passed = rl::simulate<Suite>(params);
  if (passed != (weaker == Weaker::kNothing)) std::puts(text.str().substr(0, 20000).c_str());
  return passed;
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned long iterations = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 20000;
  const bool holds = passes<Exchanges>(Weaker::kNothing, iterations) && passes<Tags>(Weaker::kNothing, iterations / 10);
  bool all_found = !passes<Tags>(Weaker::kSequence, iterations);
  for (const Weaker weaker : {Weaker::kStores, Weaker::kLoads, Weaker::kExchanges, Weaker::kSequence}) {
    all_found &= !passes<Exchanges>(weaker, iterations);
  }
  std::puts(!holds ? "the orders are too weak" : all_found ? "memory order passed" : "weaker orders passed as well");
  return holds && all_found ? 0 : 1;
}
