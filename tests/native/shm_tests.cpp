// Tests the shared-memory transport without torch: the sum kernels, the segments and the exchange. Ranks are threads,
// so that the thread sanitizer sees every access of every rank.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <deque>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "ddp/transport/processes.h"
#include "ddp/transport/rank_sum.h"
#include "ddp/transport/shm/shm_exchange.h"
#include "ddp/transport/shm/shm_residency.h"
#include "ddp/transport/shm/shm_segment.h"
#include "formats/tile_cpu.h"
#include "native_tests.h"

namespace drivetrain {
namespace {

using ddp::ElementType;
using ddp::ShmExchange;
using namespace std::chrono_literals;

// A block of exactly the size needed, so that the address sanitizer sees any access beyond it.
using Block = std::vector<char>;

double value_of(int rank, int64_t i) { return static_cast<double>((i * 37 + rank * 11) % 101 - 50) / 64; }

formats::Format format_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat64:
      return formats::Format::kFloat64;
    case ElementType::kBFloat16:
      return formats::Format::kBFloat16;
    case ElementType::kFloat16:
      return formats::Format::kFloat16;
    default:
      return formats::Format::kFloat32;
  }
}

void store(ElementType type, Block& block, int64_t i, double value) {
  if (type == ElementType::kInt32) {
    const int32_t integer = static_cast<int32_t>(64 * value);
    std::memcpy(block.data() + 4 * i, &integer, 4);
  } else if (type == ElementType::kInt64) {
    const int64_t integer = static_cast<int64_t>(64 * value);
    std::memcpy(block.data() + 8 * i, &integer, 8);
  } else {
    formats::store_one<double>({block.data(), format_of(type)}, i, value);
  }
}

Block make_block(ElementType type, int64_t numel, int rank) {
  Block block(numel * ddp::bytes_of(type));
  for (int64_t i = 0; i < numel; ++i) store(type, block, i, value_of(rank, i));
  return block;
}

// Returns the sum that all ranks must hold. These values add up without rounding errors, and one rounding follows.
Block expected_block(ElementType type, int64_t numel, int ranks, double scale) {
  Block block(numel * ddp::bytes_of(type));
  const bool in_float = type != ElementType::kFloat64;
  for (int64_t i = 0; i < numel; ++i) {
    double sum = 0;
    for (int rank = 0; rank < ranks; ++rank) sum += value_of(rank, i);
    const double scaled = in_float ? static_cast<float>(sum) * static_cast<float>(scale) : sum * scale;
    const bool is_integer = type == ElementType::kInt32 || type == ElementType::kInt64;
    store(type, block, i, is_integer ? sum : scaled);
  }
  return block;
}

const std::vector<ElementType> kTypes = {ElementType::kFloat32, ElementType::kFloat64, ElementType::kBFloat16,
                                         ElementType::kFloat16, ElementType::kInt32,   ElementType::kInt64};

void test_sums() {
  for (ElementType type : kTypes) {
    for (int ranks : {1, 2, 3, 5}) {
      for (int64_t numel : {1, 15, 16, 17, 511, 512, 513, 3000}) {
        const double scale = 1.0 / ranks;
        const Block expected = expected_block(type, numel, ranks, scale);
        for (Isa isa : available_isas()) {
          std::vector<Block> blocks;
          std::vector<char*> values;
          for (int rank = 0; rank < ranks; ++rank) blocks.push_back(make_block(type, numel, rank));
          for (Block& block : blocks) values.push_back(block.data());
          const int64_t middle = numel / 3;
          for (auto [begin, end] : {std::pair(middle, numel), std::pair(int64_t{0}, middle)}) {
            for_isa(isa, DT_BY_ISA(ddp, sum_range))(
                {type, type, values.data(), ranks, values.data(), ranks, begin, end, scale});
          }
          for (const Block& block : blocks) {
            expect(block == expected, text("sum of type ", static_cast<int>(type), ", ", ranks, " ranks of ", numel,
                                           " elements, ", name_of(isa)));
          }
        }
      }
    }
  }
}

void test_segments() {
  ddp::ShmSegment mine = ddp::ShmSegment::create(10000);
  mine.data()[9999] = 7;
  ddp::ShmSegment same = ddp::ShmSegment::open(mine.address());
  expect(same.data()[9999] == 7 && same.data()[0] == 0, "an opened segment is the same memory, zeroed at first");
  ddp::ShmSegment::Address other = mine.address(), larger = mine.address();
  ++other.nonce;
  larger.bytes = 20000;
  for (const ddp::ShmSegment::Address& address : {other, larger}) {
    bool threw = false;
    try {
      ddp::ShmSegment::open(address);
    } catch (const EnvironmentError&) {
      threw = true;
    }
    expect(threw, "a segment with another nonce or size is refused");
  }
}

void test_seals() {
  ddp::ShmSegment mine = ddp::ShmSegment::create(10000);
  const int file = static_cast<int>(mine.address().fd);
  expect(::ftruncate(file, 0) != 0 && ::ftruncate(file, 1 << 20) != 0, "a segment keeps its size");
  const ddp::Descriptor open(::memfd_create("not sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const uint64_t nonce = 7;
  expect(::pwrite(open.get(), &nonce, sizeof(nonce), 0) == sizeof(nonce) && ::ftruncate(open.get(), 1 << 20) == 0,
         "a file that must be refused is made");
  std::string error = "no error";
  try {
    ddp::ShmSegment::open({::getpid(), open.get(), nonce, 10000});
  } catch (const EnvironmentError& thrown) {
    error = thrown.what();
  }
  expect(error.find("not sealed") != std::string::npos, "memory that its process can shrink is refused: " + error);
}

// Returns the result of `child` in a forked process: 0, or the number of the check that failed.
template <class Child>
int status_of_fork(Child&& child) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(child());
  int status = -1;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

void test_forked_segments() {
  ddp::ShmSegment mine = ddp::ShmSegment::create(10000);
  auto opened = std::make_unique<ddp::ShmSegment>(ddp::ShmSegment::open(mine.address()));
  mine.data()[0] = 1;
  const int failed = status_of_fork([&] {
    if (mine.data()[0] != 1) return 1;
    mine.data()[0] = 2;
    const int failed_below = status_of_fork([&] {
      if (mine.data()[0] != 2) return 3;
      mine.data()[0] = 3;
      return 0;
    });
    if (failed_below != 0) return failed_below;
    if (mine.data()[0] != 2) return 4;
    opened.reset();
    ddp::ShmSegment own = ddp::ShmSegment::create(10000);
    return own.data()[0] == 0 ? 0 : 5;
  });
  expect(failed == 0, text("the memory of a forked child and of its own child: failed check ", failed));
  expect(mine.data()[0] == 1 && opened->data()[0] == 1, "a forked child's writes are its own");
}

void test_peer_process() {
  expect(!ddp::PeerProcess(::getpid()).has_ended(), "this process has not ended");
  const pid_t pid = ::fork();
  if (pid == 0) ::pause();
  const ddp::PeerProcess child(pid);
  const bool had_ended = child.has_ended();
  ::kill(pid, SIGKILL);
  // The child has ended but is not reaped, like a rank whose parent does not wait for it.
  siginfo_t ended;
  ::waitid(P_PID, pid, &ended, WEXITED | WNOWAIT);
  expect(!had_ended && child.has_ended(), "a killed process has ended");
  ::waitpid(pid, nullptr, 0);
  expect(child.has_ended(), "a reaped process has ended");
  bool threw = false;
  try {
    ddp::PeerProcess gone(pid);
  } catch (const EnvironmentError&) {
    threw = true;
  }
  expect(threw, "a process that does not exist is refused");
}

// Runs in its own thread, because the filter lasts until the thread ends.
void test_peer_process_in_a_sandbox() {
  std::thread([] {
    sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog filter = {std::size(program), program};
    const bool is_set =
        ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
#if defined(__aarch64__)
    if (!is_set && errno == EINVAL) return;  // qemu has no filters
#endif
    expect(is_set && ::syscall(SYS_pidfd_open, ::getpid(), 0) < 0, "pidfd_open is unavailable");
    test_peer_process();
  }).join();
}

void test_residency() {
  constexpr int64_t kBytes = (12 << 20) + 100;
  ddp::ShmSegment memory = ddp::ShmSegment::create(kBytes);
  std::vector<ddp::ShmSegment> others;
  std::vector<char*> data;
  for (int i = 0; i < 6; ++i) {
    others.push_back(ddp::ShmSegment::open(memory.address()));
    data.push_back(others.back().data());
  }
  ddp::Residency residency(data, kBytes);
  constexpr int64_t kStep = 100'000;
  for (int64_t begin = 0; begin < kBytes; begin += kStep) memory.data()[begin] = static_cast<char>(begin / kStep);
  bool is_bounded = true, is_same = true;
  for (int round = 0; round < 3; ++round) {
    for (int64_t begin = 0; begin < kBytes; begin += kStep) {
      residency.touch(begin, std::min(begin + kStep, kBytes), /*is_usual=*/begin < kBytes / 3 || round == 2);
      for (const char* other : data) is_same &= other[begin] == static_cast<char>(begin / kStep);
      is_bounded &= residency.resident_bytes() <= 3 * kBytes;
    }
  }
  expect(is_bounded && residency.resident_bytes() > 0, "no more is resident than is allowed");
  expect(is_same, "values survive when memory is no longer resident");
}

void test_cores() {
  const auto cores = [](std::vector<std::vector<int>> processes) {
    std::vector<ddp::CoreSet> sets;
    for (const auto& process : processes) {
      sets.emplace_back();
      for (int core : process) sets.back().add(core);
    }
    return sets;
  };
  expect(ddp::is_a_core_for_each(cores({{0}, {1}, {200}, {8191}})), "each process has its own core");
  expect(ddp::is_a_core_for_each(cores({{0, 1}, {0, 1}})), "two processes share two cores");
  expect(ddp::is_a_core_for_each(cores({{0, 1, 2}, {0, 1}, {0}})), "the first two make room");
  expect(!ddp::is_a_core_for_each(cores({{3}, {3}, {0, 1, 2}})), "two processes have one core, whatever others have");
  expect(!ddp::is_a_core_for_each(cores({{0, 1}, {0, 1}, {0, 1}})), "three processes share two cores");
  expect(!ddp::is_a_core_for_each(cores({{0}, {}})), "a process of which nothing is known");
  const ddp::CoreSet mine = ddp::cores_of_this_thread();
  expect(ddp::is_a_core_for_each({mine}), "this process runs on some core");
}

// Holds the memory that all ranks of one host see.
struct Host {
  explicit Host(int num_ranks)
      : size(num_ranks), block(::operator new(ShmExchange::shared_state_bytes(num_ranks), std::align_val_t(64))) {
    std::memset(block, 0, ShmExchange::shared_state_bytes(num_ranks));
  }
  ~Host() { ::operator delete(block, std::align_val_t(64)); }
  Host(const Host&) = delete;

  ShmExchange::Options options(int rank) const {
    ShmExchange::Options options;
    options.rank = rank;
    options.size = size;
    options.timeout = 60s;
    options.spin = false;
    for (int i = 0; i < size; ++i) options.rank_names.push_back(text("rank ", i));
    options.is_dead = [](int) { return false; };
    return options;
  }

  int size;
  void* block;
};

// Adds up the leaders' values once all have arrived, as a process group between hosts does.
class Hub {
 public:
  explicit Hub(int hosts) : hosts_(hosts) {}

  void add(size_t index, char* values, int64_t numel) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (sums_.size() <= index) sums_.resize(index + 1);
    std::vector<float*>& parts = sums_[index];
    parts.push_back(reinterpret_cast<float*>(values));
    if (static_cast<int>(parts.size()) < hosts_) return;
    for (int64_t i = 0; i < numel; ++i) {
      float sum = 0;
      for (float* part : parts) sum += part[i];
      for (float* part : parts) part[i] = sum;
    }
  }

  bool is_done(size_t index) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(sums_[index].size()) == hosts_;
  }

 private:
  const int hosts_;
  std::mutex mutex_;
  std::vector<std::vector<float*>> sums_;
};

class HubLink final : public ddp::HostLink {
 public:
  explicit HubLink(Hub& hub) : hub_(hub) {}
  void start(char* values, ElementType, int64_t numel, const std::shared_ptr<const ddp::RankRanges>&) override {
    hub_.add(started_++, values, numel);
  }
  bool finish_oldest() override { return hub_.is_done(finished_) && (++finished_, true); }

 private:
  Hub& hub_;
  size_t started_ = 0;
  size_t finished_ = 0;
};

// Runs many steps on threads with random delays. More buckets are in progress than the control block has slots.
void test_exchange(int num_hosts, int ranks_per_host) {
  constexpr int kSteps = 30;
  // Few buckets are large, because sanitizers cost time per element and races between ranks concern buckets.
  const std::vector<int64_t> numels = {1, 70000, 0, 17, 12345, 1, 511, 0, 16, 3000, 1, 17, 0, 513, 1, 300};
  const int num_buckets = 80;
  const int world = num_hosts * ranks_per_host;
  std::deque<Host> hosts;
  for (int host = 0; host < num_hosts; ++host) hosts.emplace_back(ranks_per_host);
  Hub hub(num_hosts);
  // [world][bucket]
  std::vector<std::vector<std::vector<float>>> values(world);
  for (auto& mine : values) {
    for (int bucket = 0; bucket < num_buckets; ++bucket) mine.emplace_back(numels[bucket % numels.size()]);
  }
  // Their sums are divided by the sum of weights.
  const auto is_weighted = [&](int bucket) { return num_hosts == 1 && bucket % 3 == 1; };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      const int host = rank / ranks_per_host;
      const int place = rank % ranks_per_host;
      HubLink link(hub);
      ShmExchange::Options options = hosts[host].options(place);
      options.several_hosts = num_hosts > 1;
      options.link = num_hosts > 1 && place == 0 ? &link : nullptr;
      options.spin = rank % 2 == 0;
      ShmExchange exchange(hosts[host].block, options);
      std::minstd_rand random(rank + 1);
      for (int step = 0; step < kSteps; ++step) {
        std::vector<uint64_t> numbers;
        for (int bucket = 0; bucket < num_buckets; ++bucket) {
          if (random() % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
          std::vector<float>& mine = values[rank][bucket];
          for (size_t i = 0; i < mine.size(); ++i) mine[i] = static_cast<float>((rank + 1) * (step + bucket + i % 7));
          ShmExchange::Operation operation = {{}, ElementType::kFloat32, static_cast<int64_t>(mine.size()), 1.0};
          const bool has_weights = is_weighted(bucket);
          if (has_weights) operation.weight = rank + 1 + step % 3;
          for (int other = 0; other < ranks_per_host; ++other) {
            operation.values.push_back(reinterpret_cast<char*>(values[host * ranks_per_host + other][bucket].data()));
          }
          numbers.push_back(exchange.start(std::move(operation)));
        }
        for (int bucket = 0; bucket < num_buckets; ++bucket) {
          exchange.wait(numbers[bucket]);
          bool equal = true;
          const double weights = world * (world + 1) / 2 + world * (step % 3);
          const float factor = is_weighted(bucket) ? static_cast<float>(1 / weights) : 1;
          const std::vector<float>& mine = values[rank][bucket];
          for (size_t i = 0; i < mine.size(); ++i) {
            equal &= mine[i] == static_cast<float>(world * (world + 1) / 2 * (step + bucket + i % 7)) * factor;
          }
          expect(equal, text(num_hosts, " hosts of ", ranks_per_host, " ranks: step ", step, ", bucket ", bucket));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::string error_of_wait(ShmExchange& exchange, uint64_t number) {
  try {
    exchange.wait(number);
  } catch (const EnvironmentError& error) {
    return error.what();
  }
  return "no error";
}

void test_exchange_errors() {
  float value = 1;
  const ShmExchange::Operation operation = {
      {reinterpret_cast<char*>(&value), reinterpret_cast<char*>(&value)}, ElementType::kFloat32, 1, 1.0};
  {
    Host host(2);
    ShmExchange::Options options = host.options(0);
    options.timeout = 100ms;
    ShmExchange exchange(host.block, options);
    const std::string error = error_of_wait(exchange, exchange.start(operation));
    expect(error == "not complete within the process group's timeout of 0.1 s; not started by rank 1", error);
    ShmExchange late(host.block, host.options(1));
    const std::string others = error_of_wait(late, late.start(operation));
    expect(others == "no error", "the late rank finds all values there: " + others);
    const std::string next = error_of_wait(late, late.start(operation));
    expect(next == "rank 0 has failed before; see its own error", next);
  }
  {
    Host host(2);
    ShmExchange::Options options = host.options(0);
    options.is_dead = [](int rank) { return rank == 1; };
    ShmExchange exchange(host.block, options);
    const std::string error = error_of_wait(exchange, exchange.start(operation));
    expect(error == "rank 1 has died", error);
    bool threw = false;
    try {
      exchange.start(operation);
    } catch (const EnvironmentError&) {
      threw = true;
    }
    expect(threw, "nothing can be started after a failure");
  }
  {
    Host host(2);
    auto left = std::make_unique<ShmExchange>(host.block, host.options(1));
    left->start(operation);
    left.reset();
    ShmExchange exchange(host.block, host.options(0));
    const std::string first = error_of_wait(exchange, exchange.start(operation));
    expect(first == "no error", "what a rank published before it left is added up: " + first);
    const std::string error = error_of_wait(exchange, exchange.start(operation));
    expect(error == "rank 1 has already deleted its DistributedDataParallel", error);
  }
  {
    Host host(2);
    ShmExchange exchange(host.block, host.options(0));
    ShmExchange other(host.block, host.options(1));
    const int failed = status_of_fork([&] {
      for (uint64_t number : {0, 1}) {
        try {
          number == 0 ? exchange.start(operation) : (exchange.wait(number), number);
          return 1;
        } catch (const EnvironmentError& thrown) {
          if (std::string(thrown.what()).find("was forked from rank 0") == std::string::npos) return 2;
        }
      }
      return exchange.is_done(1) ? 0 : 3;
    });
    expect(failed == 0, text("a forked child takes no part: failed check ", failed));
    const uint64_t number = exchange.start(operation);
    const std::string error = error_of_wait(other, other.start(operation));
    expect(error == "no error" && error_of_wait(exchange, number) == "no error", "the parent goes on: " + error);
  }
  {
    Host host(2);
    ShmExchange first(host.block, host.options(0));
    ShmExchange second(host.block, host.options(1));
    const float before = value;
    const uint64_t number = first.start(operation);
    ShmExchange::Operation other = operation;
    other.scale = 0.5;
    std::string error = "no error";
    try {
      second.start(other);
    } catch (const EnvironmentError& thrown) {
      error = thrown.what();
    }
    expect(error.find("rank 1 reduces the mean of 1 float32, but rank 0 reduces the sum of 1 float32") !=
               std::string::npos,
           error);
    const std::string others = error_of_wait(first, number);
    expect(others.find("rank 0 reduces the sum of 1 float32, but rank 1 reduces the mean of 1 float32") !=
               std::string::npos,
           others);
    expect(value == before, "nothing was added up");
  }
}

}  // namespace

void test_shared_memory() {
  test_sums();
  test_segments();
  test_seals();
  test_forked_segments();
  test_residency();
  test_peer_process();
  test_peer_process_in_a_sandbox();
  test_cores();
  test_exchange(1, 2);
  test_exchange(1, 3);
  test_exchange(2, 2);
  test_exchange(3, 1);
  test_exchange_errors();
}

}  // namespace drivetrain
