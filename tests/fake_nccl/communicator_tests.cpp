// Tests NcclCommunicator over the fakes, with two ranks as two threads, mainly for the sanitizers. The tests cover
// groups, memory that outlives its communicator, and failures of collectives. A failed check makes the exit status 1.
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "ddp/transport/nccl/nccl_communicator.h"

namespace {

using namespace drivetrain;
using ddp::NcclCommunicator;
using Ranks = std::vector<std::unique_ptr<NcclCommunicator>>;

std::atomic<int> failures{0};

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  ++failures;
}

std::string error_of(const std::function<void()>& what) {
  try {
    what();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

void on_ranks(const std::function<void(int)>& body) {
  std::thread other([&] { body(1); });
  body(0);
  other.join();
}

Ranks make_ranks(double timeout_s) {
  const auto api = ddp::open_nccl(FAKE_NCCL);
  ncclUniqueId id = {};
  api->ncclGetUniqueId(&id);
  Ranks ranks(2);
  on_ranks([&](int rank) {
    ranks[rank] = std::make_unique<NcclCommunicator>(NcclCommunicator::Options{
        api, id, 2, rank, 0, std::chrono::nanoseconds(static_cast<int64_t>(timeout_s * 1e9))});
  });
  return ranks;
}

NcclCommunicator::Collective sum_of(const std::shared_ptr<std::vector<float>>& values) {
  return {values->data(), values->size(), ncclFloat32, values};
}

std::shared_ptr<void> registered(NcclCommunicator& communicator, size_t bytes) {
  std::string failure;
  return communicator.register_memory(communicator.allocate(bytes, [] {}, failure));
}

void test_groups() {
  Ranks ranks = make_ranks(30);
  on_ranks([&](int rank) {
    for (int round = 0; round < 50; ++round) {
      std::vector<std::shared_ptr<std::vector<float>>> tensors;
      std::vector<NcclCommunicator::Collective> collectives;
      for (int i = 1; i <= 3; ++i) {
        tensors.push_back(std::make_shared<std::vector<float>>(10 * i, static_cast<float>(i * (1 + 2 * rank))));
        collectives.push_back(sum_of(tensors.back()));
      }
      const auto group = ranks[rank]->start(collectives, nullptr);
      ranks[rank]->wait(*group, nullptr);
      expect(ranks[rank]->is_done(*group), "a group that was waited for is done");
      for (int i = 1; i <= 3; ++i) {
        expect((*tensors[i - 1])[0] == 4.0f * i && tensors[i - 1]->back() == 4.0f * i, "the sum of a group's tensors");
      }
    }
  });
  on_ranks([&](int rank) { ranks[rank].reset(); });
}

NcclCommunicator::Collective of_parts(const std::shared_ptr<std::vector<float>>& values, NcclCommunicator::Kind kind,
                                      int part) {
  NcclCommunicator::Collective collective = sum_of(values);
  collective.kind = kind;
  collective.count = values->size() / 2;
  collective.own = values->data() + part * collective.count;
  return collective;
}

// Scatters sums and gathers them again, and moves a part of one rank, in one group each.
void test_parts() {
  using Kind = NcclCommunicator::Kind;
  Ranks ranks = make_ranks(30);
  on_ranks([&](int rank) {
    for (int round = 0; round < 20; ++round) {
      const auto even = std::make_shared<std::vector<float>>(100, 1.0f + static_cast<float>(rank));
      const auto odd = std::make_shared<std::vector<float>>(7, 1.0f + static_cast<float>(rank));
      NcclCommunicator::Collective to_last = sum_of(odd);
      to_last.kind = Kind::kReduce;
      to_last.root = 1;
      const auto scattered = ranks[rank]->start({of_parts(even, Kind::kReduceScatter, rank), to_last}, nullptr);
      ranks[rank]->wait(*scattered, nullptr);
      expect((*even)[50 * rank] == 3.0f && (*even)[50 * rank + 49] == 3.0f, "a rank has the sums of its part");
      to_last.kind = Kind::kBroadcast;
      const auto gathered = ranks[rank]->start({of_parts(even, Kind::kAllGather, rank), to_last}, nullptr);
      ranks[rank]->wait(*gathered, nullptr);
      for (const float value : *even) expect(value == 3.0f, "a gather brings every part");
      for (const float value : *odd) expect(value == 3.0f, "a broadcast brings one rank's part");
    }
  });
  on_ranks([&](int rank) { ranks[rank].reset(); });
}

NcclCommunicator::Collective message_of(const std::shared_ptr<std::vector<float>>& values, NcclCommunicator::Kind kind,
                                        int peer) {
  NcclCommunicator::Collective message = sum_of(values);
  message.kind = kind;
  message.root = peer;
  return message;
}

// Every rank sends each one, itself included, another number of values, from few to several of the fake's chunks.
void test_messages() {
  using Kind = NcclCommunicator::Kind;
  Ranks ranks = make_ranks(30);
  on_ranks([&](int rank) {
    for (int round = 0; round < 20; ++round) {
      std::vector<NcclCommunicator::Collective> messages;
      std::vector<std::shared_ptr<std::vector<float>>> received;
      for (int peer = 0; peer < 2; ++peer) {
        const auto count = [&](int from, int to) { return 1 + 70'001 * (2 * from + to) * (round % 2); };
        const float value = static_cast<float>(10 * rank + peer);
        const auto sent = std::make_shared<std::vector<float>>(count(rank, peer), value);
        received.push_back(std::make_shared<std::vector<float>>(count(peer, rank)));
        messages.push_back(message_of(received.back(), Kind::kReceive, peer));
        messages.push_back(message_of(sent, Kind::kSend, peer));
      }
      ranks[rank]->wait(*ranks[rank]->start(messages, nullptr), nullptr);
      for (int peer = 0; peer < 2; ++peer) {
        const auto want = static_cast<float>(10 * peer + rank);
        expect(received[peer]->front() == want && received[peer]->back() == want, "a message arrives");
      }
    }
  });
  on_ranks([&](int rank) { ranks[rank].reset(); });
}

// Starts the messages of a rank, and returns the error of the wait for them.
std::string error_of_messages(NcclCommunicator& rank, const std::vector<NcclCommunicator::Collective>& messages) {
  return error_of([&] {
    const auto group = rank.start(messages, nullptr);
    while (!rank.is_done(*group)) std::this_thread::yield();
    rank.wait(*group, nullptr);
  });
}

// A side that is missing, or that differs, is an error within the timeout.
void test_messages_without_their_other_side() {
  using Kind = NcclCommunicator::Kind;
  const auto values = std::make_shared<std::vector<float>>(10, 1.0f);
  const auto send = message_of(values, Kind::kSend, 1), receive = message_of(values, Kind::kReceive, 1);
  for (const auto& message : {send, receive}) {
    const std::string error = error_of_messages(*make_ranks(0.3)[0], {message});
    expect(contains(error, "of 10 elements) did not end within the timeout of 0.3 s"), "messages end: " + error);
  }
  std::string error = error_of_messages(*make_ranks(30)[0], {message_of(values, Kind::kSend, 0)});
  expect(contains(error, "sends to itself without an equal receive"), "a message to itself has two sides: " + error);
  error = error_of_messages(*make_ranks(30)[0], {send, receive});
  expect(contains(error, "receive 10 overlaps with float send 10"), "messages do not overlap: " + error);
  Ranks ranks = make_ranks(3);
  on_ranks([&](int rank) {
    const auto of_rank = std::make_shared<std::vector<float>>(10 + rank, 1.0f);
    const Kind kind = rank == 0 ? Kind::kSend : Kind::kReceive;
    const std::string found = error_of_messages(*ranks[rank], {message_of(of_rank, kind, 1 - rank)});
    const char* const want = rank == 0 ? "did not end within the timeout" : "a message of another count or type";
    expect(contains(found, want), "both sides have one count: " + found);
  });
}

void test_parts_that_overlap() {
  using Kind = NcclCommunicator::Kind;
  for (const Kind kind : {Kind::kReduceScatter, Kind::kAllGather}) {
    Ranks ranks = make_ranks(30);
    const auto values = std::make_shared<std::vector<float>>(100, 1.0f);
    const std::string error = error_of([&] { ranks[0]->start({of_parts(values, kind, 1)}, nullptr); });
    expect(contains(error, "buffers that overlap, not in place"), "a part of another rank is refused: " + error);
  }
}

void test_memory_outlives_communicator() {
  Ranks ranks = make_ranks(30);
  std::vector<std::shared_ptr<void>> kept(2), dropped(2);
  on_ranks([&](int rank) {
    kept[rank] = registered(*ranks[rank], 5000);
    dropped[rank] = registered(*ranks[rank], 7000);
    expect(ranks[rank]->registration() == "registered window", "memory is registered");
    NcclCommunicator::Collective collective{kept[rank].get(), 1000, ncclFloat32, kept[rank]};
    std::fill_n(static_cast<float*>(kept[rank].get()), 1000, 1.0f);
    const auto group = ranks[rank]->start({collective}, nullptr);
    dropped[rank].reset();
    ranks[rank]->wait(*group, nullptr);
  });
  on_ranks([&](int rank) { ranks[rank].reset(); });
  for (const auto& memory : kept)
    expect(static_cast<float*>(memory.get())[999] == 2.0f, "memory stays after its communicator");
}

// One rank leaves while the other rank's collective is still running without a wait for it.
void test_teardown_with_a_collective_under_way() {
  Ranks ranks = make_ranks(1);
  on_ranks([&](int rank) {
    const auto memory = registered(*ranks[rank], 400);
    if (rank == 0) ranks[0]->start({{memory.get(), 100, ncclFloat32, memory}}, nullptr);
  });
  on_ranks([&](int rank) { ranks[rank].reset(); });
}

void test_a_rank_that_registers_no_memory() {
  Ranks ranks = make_ranks(0.3);
  const std::string error = error_of([&] { registered(*ranks[0], 5000); });
  expect(contains(error,
                  "rank 0 of 2: ncclCommWindowRegister of 5000 bytes (every rank must register as many) did not end "
                  "within the timeout of 0.3 s"),
         "a registration says what it waited for: " + error);
  expect(error_of([&] { registered(*ranks[0], 5000); }) == error, "the error stays");
}

void test_memory_is_counted() {
  Ranks ranks = make_ranks(30);
  const int64_t before = NcclCommunicator::memory_bytes();
  std::string failure;
  auto memory = ranks[0]->allocate(1 << 20, [] {}, failure);
  expect(NcclCommunicator::memory_bytes() == before + (1 << 20), "memory in use is counted");
  memory.reset();
  expect(NcclCommunicator::memory_bytes() == before, "memory that is freed no longer is");
  expect(NcclCommunicator::most_memory_bytes() >= before + (1 << 20), "the most that was in use is kept");
}

void test_timeout() {
  Ranks ranks = make_ranks(0.3);
  const auto values = std::make_shared<std::vector<float>>(10, 1.0f);
  const auto group = ranks[0]->start({sum_of(values)}, nullptr);  // the other rank never comes
  std::thread looking([&] {
    while (!ranks[0]->is_done(*group)) std::this_thread::yield();
  });
  const std::string error = error_of([&] { ranks[0]->wait(*group, nullptr); });
  looking.join();
  expect(contains(error,
                  "rank 0 of 2: group 1 of collectives (1 of them, the first of 10 elements) did not end within "
                  "the timeout of 0.3 s"),
         "a timeout says what it waited for: " + error);
  expect(error_of([&] { ranks[0]->start({sum_of(values)}, nullptr); }) == error, "the error stays");
}

// The peer's process has ended: nothing but the caller knows.
void test_giving_up() {
  Ranks ranks = make_ranks(30);
  const auto values = std::make_shared<std::vector<float>>(10, 1.0f);
  const auto group = ranks[0]->start({sum_of(values)}, nullptr);
  expect(!ranks[0]->is_done(*group), "a collective waits for its peer");
  expect(cudaGetLastError() == cudaSuccess, "a question leaves no error to the next launch's check");
  ranks[0]->give_up("rank 1 has ended");
  expect(error_of([&] { ranks[0]->wait(*group, nullptr); }) == "rank 1 has ended", "a wait throws why");
  expect(error_of([&] { ranks[0]->start({sum_of(values)}, nullptr); }) == "rank 1 has ended", "and so do later calls");
  expect(ranks[0]->end().empty(), "the abort ends");
}

// A kernel that does not look for an abort holds up ncclCommAbort, and none of our calls.
void test_an_abort_that_hangs() {
  ::setenv("FAKE_NCCL_FAULT", "abort hangs", 1);
  ::setenv("FAKE_NCCL_WAIT_S", "9", 1);
  const auto begin = std::chrono::steady_clock::now();
  const auto has_taken = [&](int seconds) {
    return std::chrono::steady_clock::now() - begin > std::chrono::seconds(seconds);
  };
  const int64_t before = NcclCommunicator::memory_bytes();
  Ranks ranks = make_ranks(0.3);
  std::vector<std::shared_ptr<void>> memory(2);
  on_ranks([&](int rank) { memory[rank] = registered(*ranks[rank], 4000); });
  auto group = ranks[0]->start({{memory[0].get(), 1000, ncclFloat32, memory[0]}}, nullptr);
  while (!ranks[0]->is_done(*group)) std::this_thread::yield();
  const std::string error = error_of([&] { ranks[0]->wait(*group, nullptr); });
  expect(contains(error, "did not end within the timeout") && !has_taken(3), "the error comes first: " + error);
  const std::string left = ranks[0]->end();
  expect(contains(left, "rank 0 of 2: ncclCommAbort has not ended within 5 s") && !has_taken(8),
         "and names it: " + left);
  ranks.clear();
  group.reset();
  memory[0].reset();
  expect(!has_taken(8), "nothing waits for the abort");
  expect(NcclCommunicator::memory_bytes() == before + 8000, "memory stays as long as the device may use it");
  while (NcclCommunicator::memory_bytes() > before + 4000 && !has_taken(30)) std::this_thread::yield();
  expect(NcclCommunicator::memory_bytes() == before + 4000, "it is freed once the abort has ended");
  ::unsetenv("FAKE_NCCL_WAIT_S");
  ::unsetenv("FAKE_NCCL_FAULT");
}

void test_reported_error() {
  ::setenv("FAKE_NCCL_FAULT", "float sum 77 errors", 1);
  Ranks ranks = make_ranks(30);
  on_ranks([&](int rank) {
    const auto values = std::make_shared<std::vector<float>>(77, 1.0f);
    const std::string error =
        error_of([&] { ranks[rank]->wait(*ranks[rank]->start({sum_of(values)}, nullptr), nullptr); });
    expect(contains(error, "failed with NCCL error 6 (remote process exited"), "NCCL's error is told: " + error);
  });
  ::unsetenv("FAKE_NCCL_FAULT");
}

// A wait must report the error, because the values are not the sum and no later call may follow.
void test_an_error_that_ends_a_collective() {
  ::setenv("FAKE_NCCL_WAIT_S", "1", 1);
  Ranks ranks = make_ranks(30);
  const auto values = std::make_shared<std::vector<float>>(10, 1.0f);
  const auto group = ranks[0]->start({sum_of(values)}, nullptr);  // the other rank never comes: the fake gives up
  std::string error;
  for (int i = 0; i < 3000 && error.empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    error = error_of([&] { ranks[0]->wait(*group, nullptr); });
  }
  expect(contains(error, "a collective failed with NCCL error 3"), "an error is told although all has ended: " + error);
  ::unsetenv("FAKE_NCCL_WAIT_S");
}

}  // namespace

int main() {
  test_groups();
  test_parts();
  test_messages();
  test_messages_without_their_other_side();
  test_parts_that_overlap();
  test_memory_outlives_communicator();
  test_teardown_with_a_collective_under_way();
  test_a_rank_that_registers_no_memory();
  test_memory_is_counted();
  test_timeout();
  test_giving_up();
  test_an_abort_that_hangs();
  test_reported_error();
  test_an_error_that_ends_a_collective();
  if (failures == 0) std::puts("communicator tests passed");
  return failures == 0 ? 0 : 1;
}
