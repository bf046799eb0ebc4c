// Implements the protocol of shm_exchange.h: claims of chunks, sums and waits.
#include "ddp/transport/shm/shm_exchange.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <climits>
#include <cstring>
#include <new>
#include <utility>

#include "base/check.h"
#include "ddp/transport/shm/shm_segment.h"

namespace drivetrain::ddp {
// Chunks of an operation that are done. Named outside the anonymous namespace, as SharedState has fields of it.
struct alignas(64) DoneCounts {
  std::atomic<uint64_t> done[2];  // per stage
};

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLargestChunk = 128 << 10;  // fits into a core's own cache, for a few ranks
constexpr int64_t kSmallestChunk = 16 << 10;
constexpr uint64_t kSlots = 64;  // operations in progress; a further one waits for the oldest
// The approximate cost of a wake-up. Longer spinning gains little.
constexpr std::chrono::microseconds kSpin(100);
// The time after which a dead rank is noticed. Other ranks wake this one at once.
constexpr std::chrono::milliseconds kSleep(20);
// A link is polled, as it cannot wake this rank.
constexpr std::chrono::microseconds kLinkPoll(50);

// Packs the number of an operation and a count of chunks into one word for compare-and-swap. A rank that is late with
// an old operation then cannot touch a new one in the same slot.
constexpr int kCountBits = 24;
constexpr uint64_t word_of(uint64_t number, uint64_t count) { return number << kCountBits | count; }
constexpr uint64_t number_of(uint64_t word) { return word >> kCountBits; }
constexpr uint64_t count_of(uint64_t word) { return word & ((uint64_t{1} << kCountBits) - 1); }

// Stages: the sum within the host and, with several hosts, the copy from its first rank.
constexpr int kSum = 0;
constexpr int kCopy = 1;

// The number of chunks of a rank's region that are taken, per stage.
struct alignas(64) Claims {
  std::atomic<uint64_t> word[2];
};

enum class RankState : uint32_t { kOpen, kClosed, kFailed };

struct alignas(64) RankLine {
  std::atomic<uint64_t> published;  // the number of the rank's last operation
  std::atomic<RankState> state;
  alignas(64) std::atomic<uint64_t> kind[kSlots];  // by slot of the operation, written before it is published
  Claims claims[kSlots];                           // likewise
  std::atomic<uint64_t> weight[kSlots];            // likewise, the bits of a double
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<RankState>::is_always_lock_free);

// Packs the properties that must be equal on all ranks into one word. The scale needs two bits: it is 1, 1 / size, or
// comes from weights.
uint64_t kind_of(const ShmExchange::Operation& operation) {
  return static_cast<uint64_t>(operation.numel) << 8 | uint64_t{operation.weight.has_value()} << 6 |
         static_cast<uint64_t>(operation.exchange) << 4 | static_cast<uint64_t>(operation.type) << 1 |
         (!operation.weight && operation.scale != 1 ? 1 : 0);
}

std::string describe_kind(uint64_t kind) {
  constexpr const char* kTypes[] = {"float32", "float64", "bfloat16", "float16", "int32", "int64"};
  const auto exchange = static_cast<Exchange>(kind >> 4 & 3);
  const char* const result = exchange == Exchange::kGather ? "gathered values"
                             : (kind >> 6 & 1) != 0        ? "weighted mean"
                             : (kind & 1) != 0             ? "mean"
                                                           : "sum";
  return text("the ", exchange == Exchange::kReduceScatter ? "scattered " : "", result, " of ", kind >> 8, " ",
              kTypes[kind >> 1 & 7]);
}

// Returns a function that tells if bytes have some of [begin, end).
auto overlaps(const char* begin, const char* end) {
  return [=](const auto& bytes) { return bytes.first < end && begin < bytes.second; };
}

void pause() {
#if defined(__aarch64__)
  asm volatile("yield");
#else
  __builtin_ia32_pause();
#endif
}

DoneCounts& slot_of(SharedState& block, uint64_t number);
RankLine& line_of(SharedState& block, int rank);

}  // namespace

// Zeroed bytes are a valid shared state, as operations are numbered from 1.
//
// Orders, for any C++ memory; tests/native/memory_order.cpp runs this file on a model of it. A rank's release of
// `published` makes its values, kind, weight and claims visible to those who acquire it before they take a chunk.
// Additions to `done` acquire and release, so that the load which sees the last one sees the sums of all chunks.
// `shared` does the same for sums over hosts. Changes of `event` and `sleepers` are sequentially consistent: of a rank
// that announces and one that goes to sleep, at least one sees the other.
struct SharedState {
  alignas(64) std::atomic<uint32_t> event;     // changes with everything that a rank may wait for
  alignas(64) std::atomic<uint32_t> sleepers;  // ranks that sleep on `event`; too many after one died asleep, which
                                               // costs a call
  alignas(64) std::atomic<uint64_t> shared;    // the last operation whose sum over hosts has arrived
  DoneCounts slots[kSlots];
  // RankLine [size] follow.
};

namespace {

DoneCounts& slot_of(SharedState& block, uint64_t number) { return block.slots[number % kSlots]; }
RankLine& line_of(SharedState& block, int rank) { return reinterpret_cast<RankLine*>(&block + 1)[rank]; }

// Moves a slot to its new operation, unless another rank has done so.
void move_to(std::atomic<uint64_t>& word, uint64_t number) {
  uint64_t now = word.load(std::memory_order_relaxed);
  while (number_of(now) < number && !word.compare_exchange_weak(now, word_of(number, 0), std::memory_order_acq_rel)) {
  }
}

}  // namespace

int64_t ShmExchange::shared_state_bytes(int size) { return sizeof(SharedState) + size * sizeof(RankLine); }

ShmExchange::ShmExchange(void* block, Options options)
    : block_(*static_cast<SharedState*>(block)),
      options_(std::move(options)),
      last_stage_(options_.several_hosts ? kCopy : kSum),
      creator_(fork_depth()) {}

ShmExchange::~ShmExchange() {
  if (is_forked()) return;
  line_of(block_, options_.rank).state.store(failure_.empty() ? RankState::kClosed : RankState::kFailed);
  announce();
}

bool ShmExchange::is_forked() const { return fork_depth() != creator_; }

void ShmExchange::check_usable() const {
  if (!failure_.empty()) throw EnvironmentError(failure_);
  check_not_forked(creator_, options_.rank_names[options_.rank]);
}

uint64_t ShmExchange::start(Operation operation) {
  check_usable();
  DT_INVARIANT(static_cast<int>(operation.values.size()) == options_.size);
  DT_INVARIANT(!operation.weight || !options_.several_hosts);  // It would divide by the weights of one host.
  const uint64_t number = started_ + 1;
  // Frees its slot.
  if (number > kSlots) wait(number - kSlots);
  started_ = number;
  const char* const mine = operation.values[options_.rank];
  std::erase_if(summed_, overlaps(mine, mine + operation.numel * bytes_of(operation.type)));

  const int64_t element = bytes_of(operation.type);
  const int64_t share = operation.numel * element / (2 * options_.size);
  const int64_t chunk_bytes = std::clamp((share + 63) / 64 * 64, kSmallestChunk, kLargestChunk);
  const int64_t chunk_numel = chunk_bytes / element;
  const int64_t num_chunks = (operation.numel + chunk_numel - 1) / chunk_numel;
  DT_INVARIANT(num_chunks < int64_t{1} << kCountBits);
  RankLine& line = line_of(block_, options_.rank);
  line.kind[number % kSlots].store(kind_of(operation), std::memory_order_release);
  line.weight[number % kSlots].store(std::bit_cast<uint64_t>(operation.weight.value_or(0)), std::memory_order_relaxed);
  running_.push_back({std::move(operation), number, static_cast<uint32_t>(num_chunks), chunk_numel});

  DoneCounts& slot = slot_of(block_, number);
  for (int stage = 0; stage <= last_stage_; ++stage) {
    move_to(slot.done[stage], number);
    // No rank takes chunks of the slot's last operation, which is complete, or of this one before it is published.
    line.claims[number % kSlots].word[stage].store(word_of(number, 0), std::memory_order_relaxed);
  }
  line.published.store(number, std::memory_order_release);
  announce();
  // Does a share only: the rank that arrives last could sum everything, and has the least time for it.
  work(static_cast<uint32_t>((num_chunks + options_.size - 1) / options_.size));
  return number;
}

bool ShmExchange::has_summed(const char* begin, const char* end) const {
  return std::any_of(summed_.begin(), summed_.end(), overlaps(begin, end));
}

bool ShmExchange::is_complete(const Running& running) const {
  const uint64_t done = slot_of(block_, running.number).done[last_stage_].load(std::memory_order_acquire);
  return number_of(done) > running.number ||
         (number_of(done) == running.number && count_of(done) == running.num_chunks);
}

bool ShmExchange::is_complete(uint64_t number) {
  while (!running_.empty() && is_complete(running_.front())) running_.pop_front();
  const auto found =
      std::find_if(running_.begin(), running_.end(), [&](const Running& r) { return r.number == number; });
  return found == running_.end() || is_complete(*found);
}

uint64_t ShmExchange::published_by_all() const {
  uint64_t least = started_;
  for (int rank = 0; rank < options_.size; ++rank) {
    least = std::min(least, line_of(block_, rank).published.load(std::memory_order_acquire));
  }
  return least;
}

// Takes up to `max_chunks` chunks. Returns true if it did anything.
bool ShmExchange::work(uint32_t max_chunks) {
  bool worked = false;
  try {
    worked = options_.link != nullptr && relay();
  } catch (const std::exception& error) {
    fail(text("the exchange between hosts failed: ", error.what()));
  }
  const uint64_t published = published_by_all();
  const uint64_t shared = block_.shared.load(std::memory_order_acquire);
  for (Running& running : running_) {
    if (max_chunks == 0 || running.number > published) break;
    if (running.number > compared_) {
      compare_kinds(running);
      if (running.operation.weight) running.operation.scale = inverse_of_weights(running.number);
    }
    worked |= work_on(running, kSum, max_chunks);
    if (options_.several_hosts && running.number <= shared) worked |= work_on(running, kCopy, max_chunks);
  }
  return worked;
}

// Returns the first chunk of that rank's region, which is the end of the region before.
uint32_t ShmExchange::region_begin(const Running& running, int rank) const {
  return static_cast<uint32_t>(uint64_t{running.num_chunks} * rank / options_.size);
}

bool ShmExchange::work_on(Running& running, int stage, uint32_t& max_chunks) {
  DoneCounts& slot = slot_of(block_, running.number);
  bool worked = false;
  for (int& turn = running.turn[stage]; turn < options_.size; ++turn) {
    const int region = (options_.rank + turn) % options_.size;
    const uint32_t begin = region_begin(running, region);
    const uint32_t count = region_begin(running, region + 1) - begin;
    std::atomic<uint64_t>& claimed = line_of(block_, region).claims[running.number % kSlots].word[stage];
    uint64_t word = claimed.load(std::memory_order_relaxed);
    while (number_of(word) == running.number && count_of(word) < count) {
      if (max_chunks == 0) return worked;
      if (!claimed.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel)) continue;
      compute(running, stage, begin + static_cast<uint32_t>(count_of(word)), turn == 0);
      worked = true;
      --max_chunks;
      const uint64_t done = slot.done[stage].fetch_add(1, std::memory_order_acq_rel) + 1;
      if (count_of(done) == running.num_chunks) announce();
      word = claimed.load(std::memory_order_relaxed);
    }
  }
  return worked;
}

// Comes before any sum: ranks that reduce different tensors would mix their values.
void ShmExchange::compare_kinds(const Running& running) {
  const uint64_t mine = kind_of(running.operation);
  for (int rank = 0; rank < options_.size; ++rank) {
    const RankLine& line = line_of(block_, rank);
    const uint64_t theirs = line.kind[running.number % kSlots].load(std::memory_order_acquire);
    if (theirs == mine) continue;
    if (is_complete(running)) break;  // others have compared and summed; the words belong to a later operation
    fail(text("the ranks reduce different tensors: ", options_.rank_names[options_.rank], " reduces ",
              describe_kind(mine), ", but ", options_.rank_names[rank], " reduces ", describe_kind(theirs),
              ". Every rank must construct the same model"));
  }
  compared_ = running.number;
}

// Returns one over the sum of the ranks' weights, or 1 if that is 0. The sum has the order of all other sums.
double ShmExchange::inverse_of_weights(uint64_t number) const {
  std::vector<double> weights(options_.size);
  std::vector<char*> places;
  for (int rank = 0; rank < options_.size; ++rank) {
    weights[rank] =
        std::bit_cast<double>(line_of(block_, rank).weight[number % kSlots].load(std::memory_order_relaxed));
    places.push_back(reinterpret_cast<char*>(&weights[rank]));
  }
  constexpr ElementType kType = ElementType::kFloat64;
  sum_range({kType, kType, places.data(), options_.size, places.data(), 1, 0, 1, 1, options_.in_tree});
  return weights[0] > 0 ? 1 / weights[0] : 1;
}

// is_usual: this rank computes that chunk in every step.
void ShmExchange::compute(const Running& running, int stage, uint32_t chunk, bool is_usual) {
  const Operation& operation = running.operation;
  const int64_t begin = chunk * running.chunk_numel;
  const int64_t end = std::min(begin + running.chunk_numel, operation.numel);
  const int64_t element = bytes_of(operation.type);
  if (operation.residency != nullptr) {
    operation.residency->touch(operation.offset + begin * element, operation.offset + end * element, is_usual);
  }
  char* const* values = operation.values.data();
  if (!options_.several_hosts && operation.exchange != Exchange::kGather) {
    summed_.emplace_back(values[options_.rank] + begin * element, values[options_.rank] + end * element);
  }
  const bool sums_for_link = stage == kSum && options_.several_hosts;
  if (operation.exchange != Exchange::kAllReduce && !sums_for_link) {
    compute_ranges(operation, stage, begin * element, end * element);
    return;
  }
  if (stage == kSum) {
    const int num_outputs = sums_for_link ? 1 : options_.size;
    sum_range({operation.type, operation.type, values, options_.size, values, num_outputs, begin, end, operation.scale,
               options_.in_tree});
    return;
  }
  for (int rank = 1; rank < options_.size; ++rank) {
    std::memcpy(values[rank] + begin * element, values[0] + begin * element, (end - begin) * element);
  }
}

// Computes the bytes [begin, end) of an operation with ranges.
void ShmExchange::compute_ranges(const Operation& operation, int stage, int64_t begin, int64_t end) const {
  const RankRanges& ranges = *operation.ranges;
  const int64_t element = bytes_of(operation.type);
  char* const* values = operation.values.data();
  std::vector<char*> outputs;
  // targets: the ranks that get the values; null: all.
  const auto compute = [&](int64_t from, int64_t to, const RankRange* targets) {
    if (from == to) return;
    outputs.clear();
    const auto add = [&](int rank) {
      if (rank >= 0) outputs.push_back(values[rank]);
    };
    if (targets == nullptr || operation.exchange == Exchange::kGather) {
      outputs = operation.values;
    } else {
      add(targets->rank);
      std::for_each(targets->also.begin(), targets->also.end(), add);
    }
    if (operation.exchange == Exchange::kReduceScatter && stage == kSum) {
      sum_range({operation.type, operation.type, values, options_.size, outputs.data(),
                 static_cast<int>(outputs.size()), from / element, to / element, operation.scale, options_.in_tree});
      return;
    }
    const char* const source = operation.exchange == Exchange::kGather ? values[targets->rank] : values[0];
    for (char* const output : outputs) {
      if (output != source) std::memcpy(output + from, source + from, to - from);
    }
  };
  auto range = std::partition_point(ranges.begin(), ranges.end(), [&](const RankRange& r) { return r.end <= begin; });
  int64_t done = begin;
  const auto skip_to = [&](int64_t to) {
    if (operation.exchange == Exchange::kReduceScatter) compute(done, to, nullptr);
  };
  for (; range != ranges.end() && range->begin < end; ++range) {
    const int64_t from = std::max(begin, range->begin), to = std::min(end, range->end);
    skip_to(from);
    compute(from, to, &*range);
    done = to;
  }
  skip_to(end);
}

// Runs the sums over hosts between the stages, on the first rank. Returns true if anything progressed.
bool ShmExchange::relay() {
  bool moved = false;
  for (const Running& running : running_) {
    if (running.number <= relayed_ || running.num_chunks == 0) continue;
    const uint64_t done = slot_of(block_, running.number).done[kSum].load(std::memory_order_acquire);
    if (done != word_of(running.number, running.num_chunks)) break;
    const Operation& operation = running.operation;
    options_.link->start(operation.values[0], operation.type, operation.numel, operation.host_ranges);
    relayed_ = running.number;
    relaying_.push_back(running.number);
    moved = true;
  }
  while (!relaying_.empty() && options_.link->finish_oldest()) {
    block_.shared.store(relaying_.front(), std::memory_order_release);
    relaying_.pop_front();
    announce();
    moved = true;
  }
  return moved;
}

bool ShmExchange::wait_until(uint64_t number, Clock::time_point deadline) {
  check_usable();
  const auto begin = Clock::now();
  auto next_check = begin + kSleep;
  if (awaited_ != number) {
    awaited_ = number;
    awaited_since_ = begin;
  }
  for (;;) {
    // Reads the event first, so that any later change ends the sleep.
    const uint32_t event = block_.event.load();
    const bool worked = work(UINT_MAX);
    if (is_complete(number)) return true;
    if (worked) continue;
    spin_or_sleep(event);
    const auto now = Clock::now();
    if (now >= deadline) return false;
    if (now < next_check) continue;
    next_check = now + kSleep;
    check_ranks(number);
    if (now - awaited_since_ >= options_.timeout) {
      fail(text("not complete within the process group's timeout of ",
                std::chrono::duration<double>(options_.timeout).count(), " s", missing_ranks(number)));
    }
  }
}

void ShmExchange::announce() {
  block_.event.fetch_add(1);
  if (block_.sleepers.load() > 0) ::syscall(SYS_futex, &block_.event, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Waits until the event has changed or a limit has passed.
void ShmExchange::spin_or_sleep(uint32_t event) {
  const auto moved = [&] { return block_.event.load(std::memory_order_acquire) != event; };
  const bool polls = !relaying_.empty();
  if (options_.spin && !polls) {
    const auto end = Clock::now() + kSpin;
    do {
      for (int i = 0; i < 32; ++i) {
        if (moved()) return;
        pause();
      }
      // The awaited rank may wait for this core.
      ::sched_yield();
    } while (Clock::now() < end);
  }
  const std::chrono::nanoseconds sleep = polls ? std::chrono::nanoseconds(kLinkPoll) : kSleep;
  const timespec limit = {0, sleep.count()};
  block_.sleepers.fetch_add(1);
  // The kernel compares, and returns at once if the event has changed.
  ::syscall(SYS_futex, &block_.event, FUTEX_WAIT, event, &limit, nullptr, 0);
  block_.sleepers.fetch_sub(1);
}

void ShmExchange::check_ranks(uint64_t number) {
  for (int rank = 0; rank < options_.size; ++rank) {
    if (rank == options_.rank) continue;
    const RankLine& line = line_of(block_, rank);
    const RankState state = line.state.load(std::memory_order_acquire);
    const bool is_dead = state == RankState::kOpen && options_.is_dead && options_.is_dead(rank);
    if (state == RankState::kOpen && !is_dead) continue;
    // The rank may have completed the operation last. Others can also sum what it published before it closed.
    if (is_complete(number)) return;
    const bool is_needed = options_.several_hosts && rank == 0;
    const bool is_published = line.published.load(std::memory_order_acquire) >= number;
    if (state == RankState::kClosed && is_published && !is_needed) continue;
    const std::string& name = options_.rank_names[rank];
    if (is_dead) fail(text(name, " has died"));
    if (state == RankState::kFailed) fail(text(name, " has failed before; see its own error"));
    fail(text(name, " has already deleted its DistributedDataParallel"));
  }
}

void ShmExchange::fail(const std::string& message) {
  failure_ = message;
  line_of(block_, options_.rank).state.store(RankState::kFailed, std::memory_order_release);
  announce();
  throw EnvironmentError(message);
}

std::string ShmExchange::missing_ranks(uint64_t number) const {
  std::string names;
  for (int rank = 0; rank < options_.size; ++rank) {
    if (line_of(block_, rank).published.load(std::memory_order_acquire) >= number) continue;
    names += (names.empty() ? "" : ", ") + options_.rank_names[rank];
  }
  if (names.empty())
    return options_.several_hosts ? "; all ranks of this host have started it, ranks of another host have not"
                                  : "; all ranks have started it, and one has stopped in the middle";
  return "; not started by " + names;
}

}  // namespace drivetrain::ddp
