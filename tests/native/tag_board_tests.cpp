// Tests tags and their board without torch. Ranks are threads, so that the thread sanitizer sees every access.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "ddp/transport/tag_board.h"
#include "native_tests.h"

namespace drivetrain {
namespace {

using ddp::HostAgreement;
using ddp::HostExchange;
using ddp::HostMessage;
using ddp::Purpose;
using ddp::Tag;
using ddp::TagBoard;

// Carries messages between hosts that are threads.
class Network {
 public:
  explicit Network(int hosts) : hosts_(hosts) {}

  std::unique_ptr<HostExchange> exchange() { return std::make_unique<Exchange>(*this, next_host_++); }

 private:
  struct Sent {
    std::vector<HostMessage> messages;  // by host
    int came = 0;
  };

  class Arrival final : public HostExchange::Round {
   public:
    Arrival(Network& network, size_t number) : network_(network), number_(number) {}
    bool wait_for(std::chrono::milliseconds limit) override {
      std::unique_lock<std::mutex> lock(network_.mutex_);
      const auto is_there = [&] { return network_.rounds_[number_].came == network_.hosts_; };
      return network_.came_.wait_until(lock, std::chrono::system_clock::now() + limit, is_there);
    }
    std::vector<HostMessage> received() const override {
      const std::lock_guard<std::mutex> lock(network_.mutex_);
      return network_.rounds_[number_].messages;
    }

   private:
    Network& network_;
    const size_t number_;
  };

  class Exchange final : public HostExchange {
   public:
    Exchange(Network& network, int host) : network_(network), host_(host) {}
    std::shared_ptr<HostExchange::Round> start(const HostMessage& mine) override {
      const std::lock_guard<std::mutex> lock(network_.mutex_);
      if (network_.rounds_.size() <= next_) network_.rounds_.resize(next_ + 1);
      Sent& sent = network_.rounds_[next_];
      sent.messages.resize(network_.hosts_);
      sent.messages[host_] = mine;
      ++sent.came;
      network_.came_.notify_all();
      return std::make_shared<Arrival>(network_, next_++);
    }

   private:
    Network& network_;
    const int host_;
    size_t next_ = 0;
  };

  const int hosts_;
  int next_host_ = 0;
  std::mutex mutex_;  // guards the following
  std::condition_variable came_;
  std::vector<Sent> rounds_;
};

// The lines of the ranks of one host, or of hosts of `per_host` ranks each.
class Lines {
 public:
  explicit Lines(int size, int per_host = 0)
      : size_(size),
        per_host_(per_host > 0 ? per_host : size),
        network_(size / per_host_),
        memory_(::operator new(bytes(), std::align_val_t(64))) {
    std::memset(memory_, 0, bytes());
    for (int host = 0; host < size_ / per_host_; ++host) exchanges_.push_back(network_.exchange());
  }
  ~Lines() { ::operator delete(memory_, std::align_val_t(64)); }
  Lines(const Lines&) = delete;

  // exchange: replaces the one between the hosts.
  std::unique_ptr<TagBoard> board(
      int rank, std::function<bool()> has_first_rank_ended = [] { return false; },
      std::unique_ptr<HostExchange> exchange = nullptr) {
    TagBoard::Options options;
    options.has_first_rank_ended = std::move(has_first_rank_ended);
    options.rank = rank % per_host_;
    const int host = rank / per_host_;
    std::vector<uint64_t> first_ranks;
    for (int i = 0; i < size_; ++i) {
      options.rank_names.push_back(text("rank ", i));
      if (i % per_host_ == 0) first_ranks.push_back(i);
      if (i / per_host_ != host) continue;
      options.lines.push_back(static_cast<char*>(memory_) + i * TagBoard::line_bytes());
      options.ranks.push_back(i);
    }
    options.do_hosts_agree = size_ > per_host_;
    options.limit = std::chrono::minutes(1);
    if (options.do_hosts_agree && options.rank == 0) {
      options.agreement = std::make_unique<HostAgreement>(exchange ? std::move(exchange) : std::move(exchanges_[host]),
                                                          std::move(first_ranks));
    }
    return std::make_unique<TagBoard>(std::move(options));
  }

 private:
  size_t bytes() const { return size_ * TagBoard::line_bytes(); }

  const int size_, per_host_;
  Network network_;
  std::vector<std::unique_ptr<HostExchange>> exchanges_;  // by host
  void* const memory_;
};

Tag tag_at(int64_t step) { return {Purpose::kBucket, step, static_cast<uint64_t>(step % 7)}; }

template <class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const EnvironmentError& error) {
    return error.what();
  }
  return "";
}

void run_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.emplace_back(body, rank);
  for (std::thread& rank : ranks) rank.join();
}

void test_words() {
  std::mt19937_64 random(0);
  for (int i = 0; i < 1000; ++i) {
    const Tag tag{static_cast<Purpose>(1 + random() % 16), static_cast<int64_t>(random() >> 32), random() & 0xffff,
                  random() & 0x7ff};
    const Tag back = Tag::of(tag.word());
    expect(back.purpose == tag.purpose && back.step == tag.step && back.bucket == tag.bucket &&
               back.wrapper == tag.wrapper,
           "a word has all of its tag: " + describe(tag));
  }
}

// Ranks that agree never fail, however far one is ahead of another.
void test_agreement() {
  constexpr int kSize = 4, kSteps = 3 * TagBoard::kKept;
  Lines lines(kSize);
  std::atomic<int> arrived = 0;
  run_ranks(kSize, [&](int rank) {
    const auto board = lines.board(rank);
    if (rank == 3) {  // comes when the others have ended
      while (arrived < kSize - 1) std::this_thread::yield();
    }
    const std::string error = error_of([&] {
      for (int64_t step = 1; step <= kSteps; ++step) board->show(tag_at(step));
    });
    expect(error.empty(), "ranks that show the same tags go on: " + error);
    ++arrived;
  });
}

// Hosts that promise their collectives in steps of 7, or show them one by one.
void test_agreement_of_hosts() {
  constexpr int kSize = 6, kSteps = 700;
  Lines lines(kSize, 2);
  std::vector<std::atomic<int>> started(kSteps + 1);
  run_ranks(kSize, [&](int rank) {
    const auto board = lines.board(rank);
    const std::string error = error_of([&] {
      for (int64_t number = 1; number <= kSteps; ++number) {
        if (number % 7 == 1 && number % 2 == 0) {
          std::vector<Tag> tags;
          for (int64_t i = 0; i < 7; ++i) tags.push_back(tag_at(number + i));
          board->promise(tags);
        }
        board->show(tag_at(number));
        ++started[number];
        for (auto waited = std::chrono::milliseconds(0); started[number] < kSize; std::this_thread::yield()) {
          board->check(waited);
        }
      }
    });
    expect(error.empty(), "hosts that show the same tags go on: " + error);
  });
}

// One rank leaves out a step, repeats one or shows another purpose, at a drawn moment. No collective has all of its
// ranks from then on, and all of them fail.
void test_differences(int rounds, bool has_hosts) {
  std::mt19937 random(1);
  for (int round = 0; round < rounds; ++round) {
    const int size = has_hosts ? 4 : 2 + static_cast<int>(random() % 3), odd = static_cast<int>(random() % size);
    const int64_t from = 1 + random() % 40;
    const int kind = static_cast<int>(random() % 3);
    Lines lines(size, has_hosts ? 2 : 0);
    std::vector<std::atomic<int>> started(64);
    std::atomic<int> failed = 0;
    run_ranks(size, [&](int rank) {
      const auto board = lines.board(rank);
      const std::string error = error_of([&] {
        for (int64_t number = 1; number < 60; ++number) {
          Tag tag = tag_at(number);
          if (rank == odd && number >= from) {
            tag = kind == 0 ? tag_at(number + 1) : kind == 1 ? tag_at(number - 1) : Tag{Purpose::kWeights, number};
          }
          if (number % 10 == 1) {  // as the rank means to, before it goes astray
            std::vector<Tag> tags;
            for (int64_t i = 0; i < 10; ++i) tags.push_back(tag_at(number + i));
            board->promise(tags);
          }
          board->show(tag);
          ++started[number];  // the collective starts, and waits for the other ranks
          const auto start = std::chrono::steady_clock::now();
          for (; started[number] < size; std::this_thread::yield()) {
            const auto waited = std::chrono::steady_clock::now() - start;
            board->check(std::chrono::duration_cast<std::chrono::milliseconds>(waited));
          }
        }
      });
      failed += error.find("the ranks start different collectives") != std::string::npos ? 1 : 0;
      const std::string step = text("in synchronized step ", from);
      expect(error.find(text("rank ", odd)) != std::string::npos && error.find(step) != std::string::npos,
             text("the error names rank ", odd, " and ", step, ": ", error));
    });
    expect(failed == size, text(failed.load(), " of ", size, " ranks failed"));
    const bool is_whole = std::any_of(started.begin() + from, started.end(), [&](const auto& s) { return s == size; });
    expect(!is_whole, "no collective took place between ranks that differ");
  }
}

// Connections that break.
class BrokenExchange final : public HostExchange {
 public:
  std::shared_ptr<HostExchange::Round> start(const HostMessage&) override {
    throw EnvironmentError("the connection is closed");
  }
};

// The first rank of a host cannot reach the others, or dies. The host's other ranks learn it before their limit.
void test_lost_hosts() {
  for (const bool has_died : {false, true}) {
    Lines lines(4, 2);
    run_ranks(2, [&](int rank) {
      if (rank == 0 && has_died) return;
      const auto board =
          rank == 0 ? lines.board(0, {}, std::make_unique<BrokenExchange>()) : lines.board(1, [&] { return has_died; });
      const std::string error = error_of([&] { board->show(tag_at(1)); });
      const std::string expected = rank == 0  ? "the connection is closed"
                                   : has_died ? "rank 0 has died before the hosts agreed on bucket 1"
                                              : "rank 0 has lost its connection to another host";
      expect(error.find(expected) != std::string::npos, text("the error says '", expected, "': ", error));
    });
  }
}

void test_wrappers() {
  Lines lines(2);
  const auto first = lines.board(0), second = lines.board(1);
  for (const auto* board : {&first, &second}) {
    expect((*board)->add_wrapper("Generator") == 0 && (*board)->add_wrapper("Critic") == 1, "wrappers are numbered");
  }
  first->show({Purpose::kBucket, 3, 0, 0});
  const std::string error = error_of([&] { second->show({Purpose::kBucket, 3, 0, 1}); });
  expect(error.find("rank 1 starts bucket 0 in synchronized step 3 of Critic, but rank 0 starts bucket 0 in "
                    "synchronized step 3 of "
                    "Generator") != std::string::npos,
         "the error names the wrappers: " + error);
  expect(first->difference() == error && error_of([&] { first->show(tag_at(9)); }) == error, "both ranks fail");
}

}  // namespace

void test_tag_board() {
  test_words();
  test_agreement();
  test_agreement_of_hosts();
  test_differences(100, /*has_hosts=*/false);
  test_differences(6, /*has_hosts=*/true);
  test_lost_hosts();
  test_wrappers();
}

}  // namespace drivetrain
