// Implements tags, their board on memory that ranks share, and the agreement of hosts on the tags that ranks show.
#include "ddp/transport/tag_board.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>
#include <thread>
#include <utility>

#include "base/check.h"
#include "ddp/transport/shm/shm_segment.h"

namespace drivetrain::ddp {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds, std::chrono::milliseconds;

// The time after which a waiting rank learns that others have parted from each other.
constexpr milliseconds kBetweenTagLooks(50);
// A wait in a collective that is longer than this may be in vain.
constexpr milliseconds kLongWait(1000);
// A rank waits that long for its host's first rank without giving its core away.
constexpr microseconds kShortWait(50);

constexpr int kPurposeBits = 5, kWrapperBits = 11, kBucketBits = 16;

constexpr char kUnprepared[] = " of a second backward, or one whose forward ran under no_sync(),";

constexpr uint64_t low_bits(uint64_t value, int bits) { return value & ((uint64_t{1} << bits) - 1); }

}  // namespace

uint64_t Tag::word() const {
  uint64_t word = static_cast<uint64_t>(step);
  word = word << kBucketBits | low_bits(bucket, kBucketBits);
  word = word << kWrapperBits | low_bits(wrapper, kWrapperBits);
  return word << kPurposeBits | low_bits(static_cast<uint64_t>(purpose), kPurposeBits);
}

Tag Tag::of(uint64_t word) {
  Tag tag;
  tag.purpose = static_cast<Purpose>(low_bits(word, kPurposeBits));
  tag.wrapper = low_bits(word >>= kPurposeBits, kWrapperBits);
  tag.bucket = low_bits(word >>= kWrapperBits, kBucketBits);
  tag.step = static_cast<int64_t>(word >> kBucketBits);
  return tag;
}

std::string describe(const Tag& tag) {
  const std::string step = text(" in synchronized step ", tag.step);
  switch (tag.purpose) {
    case Purpose::kBucket:
      return text("bucket ", tag.bucket, step);
    case Purpose::kWeightedBucket:
      return text("bucket ", tag.bucket, " of weighted gradients", step);
    case Purpose::kHook:
      return text("bucket ", tag.bucket, " for a communication hook", step);
    case Purpose::kUsedMap:
      return "the map of used parameters" + step;
    case Purpose::kWeights:
      return "the weights" + step;
    case Purpose::kReplicas:
      return "the comparison of replicas" + step;
    case Purpose::kPlan:
      return "the planning of buckets" + step;
    case Purpose::kFromRank0:
      return "rank 0's decision" + step;
    case Purpose::kBuffers:
      return "the broadcast of buffers" + step;
    case Purpose::kAgreement:
      return "the agreement on whether to synchronize, in join()," + step;
    case Purpose::kUnpreparedBucket:
      return text("bucket ", tag.bucket, kUnprepared, step);
    case Purpose::kUnpreparedHook:
      return text("bucket ", tag.bucket, " for a communication hook", kUnprepared, step);
    case Purpose::kGradientCheck:
      return "the check of gradients" + step;
    case Purpose::kGradientNoise:
      return "the norms of gradients for statistics()" + step;
    case Purpose::kChange:
      return text("the comparison of parameter ", tag.bucket,
                  ", which a hook changed during backward to values of checksum ", tag.step, ",");
    case Purpose::kConnection:
      return "the first backward of a copied wrapper, or of one with init_sync=False";
  }
  return "an unknown purpose";
}

std::string describe_difference(const std::string& rank, const std::string& what, const std::string& other_rank,
                                const std::string& other_what) {
  return text("the ranks start different collectives: ", rank, " starts ", what, ", but ", other_rank, " starts ",
              other_what,
              ". Every rank must run the same number of forward and backward passes through the same model. It must "
              "pass a weight or register a hook if another rank does");
}

// Zeroed bytes are a valid line, as tags are numbered from 1.
struct alignas(64) TagBoard::Line {
  std::atomic<uint64_t> shown;                      // the number of the rank's last tag
  std::atomic<uint64_t> has_difference;             // 1: the following is set
  std::array<std::atomic<uint64_t>, 4> difference;  // as in TagDifference
  std::atomic<uint64_t> words[kKept];
  // Only a host's first rank writes these: the number up to which hosts agree, the agreed words, and 1 after a host was
  // lost.
  std::atomic<uint64_t> agreed;
  std::atomic<uint64_t> agreed_words[kKept];
  std::atomic<uint64_t> has_lost_host;

  // Returns the tag of that number; none if it is not shown yet, or no longer kept.
  std::optional<uint64_t> find(uint64_t number) const {
    if (shown.load(std::memory_order_seq_cst) < number) return std::nullopt;
    const uint64_t word = words[number % kKept].load(std::memory_order_acquire);
    // The rank may be writing a later tag into the slot, which it shows afterwards. Whoever acquires that tag sees the
    // number before it, which the rank showed first.
    if (shown.load(std::memory_order_acquire) + 1 >= number + kKept) return std::nullopt;
    return word;
  }

  // Returns true if hosts agree on that tag.
  bool is_agreed(uint64_t number, uint64_t word) const {
    const uint64_t last = agreed.load(std::memory_order_acquire);
    if (last < number) return false;
    if (last + kLongestPromise >= number + kKept) return true;  // the word may no longer be kept
    return agreed_words[number % kKept].load(std::memory_order_acquire) == word;
  }
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

int64_t TagBoard::line_bytes() { return sizeof(Line); }

TagBoard::TagBoard(Options options) : options_(std::move(options)), creator_(fork_depth()) {
  DT_INVARIANT(options_.lines.size() == options_.ranks.size());
  DT_INVARIANT(!options_.agreement || (is_first() && !has_all_ranks()));
  DT_INVARIANT(!options_.do_hosts_agree || options_.agreement || options_.has_first_rank_ended);
}

TagBoard::Line& TagBoard::line(size_t rank) const { return *reinterpret_cast<Line*>(options_.lines[rank]); }

uint64_t TagBoard::add_wrapper(std::string name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  wrappers_.push_back(std::move(name));
  return wrappers_.size() - 1;
}

// ---- Differences.

std::string TagBoard::difference() {
  check_not_forked(creator_, options_.rank_names[options_.ranks[options_.rank]]);
  const std::lock_guard<std::mutex> lock(mutex_);
  look_for_difference();
  return difference_;
}

void TagBoard::check() {
  const std::string found = difference();
  if (!found.empty()) throw EnvironmentError(found);
}

void TagBoard::throw_difference() {
  look_for_difference();
  if (!difference_.empty()) throw EnvironmentError(difference_);
}

void TagBoard::set_difference(const TagDifference& difference) {
  Line& mine = line(options_.rank);
  if (mine.has_difference.load(std::memory_order_relaxed) != 0) return;
  const uint64_t values[] = {difference.rank, difference.word, difference.other_rank, difference.other_word};
  for (size_t i = 0; i < mine.difference.size(); ++i) mine.difference[i].store(values[i], std::memory_order_relaxed);
  mine.has_difference.store(1, std::memory_order_release);
}

void TagBoard::look_for_difference() {
  for (size_t rank = 0; rank < options_.lines.size() && difference_.empty(); ++rank) {
    const Line& found = line(rank);
    if (found.has_difference.load(std::memory_order_acquire) == 0) continue;
    const auto value = [&](size_t i) { return found.difference[i].load(std::memory_order_relaxed); };
    const TagDifference difference{value(0), value(1), value(2), value(3)};
    DT_INVARIANT(std::max(difference.rank, difference.other_rank) < options_.rank_names.size());
    const bool has_other_count = difference.word == difference.other_word;
    difference_ = describe_difference(options_.rank_names[difference.rank], describe_shown(difference.word),
                                      options_.rank_names[difference.other_rank],
                                      describe_shown(difference.other_word) +
                                          (has_other_count ? " after, or before, another number of collectives" : ""));
    if (!options_.agreement || do_hosts_know_) continue;
    do_hosts_know_ = true;
    options_.agreement->tell(difference);
  }
}

std::string TagBoard::describe_shown(uint64_t word) const {
  const Tag tag = Tag::of(word);
  if (wrappers_.size() < 2) return describe(tag);
  return text(describe(tag), " of ", tag.wrapper < wrappers_.size() ? wrappers_[tag.wrapper] : "another wrapper");
}

// ---- Tags.

void TagBoard::promise(const std::vector<Tag>& tags) {
  if (!options_.agreement || tags.empty()) return;
  check();
  const std::lock_guard<std::mutex> lock(mutex_);
  promised_.clear();
  for (size_t i = 0; i < std::min<size_t>(tags.size(), kLongestPromise); ++i) promised_.push_back(tags[i].word());
  options_.agreement->ask(shown_ + 1, {promised_.begin(), promised_.end()});
}

void TagBoard::show(const Tag& tag) {
  check();
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t word = tag.word(), number = ++shown_;
  Line& mine = line(options_.rank);
  mine.words[number % kKept].store(word, std::memory_order_release);
  // Sequentially consistent, as are the loads in find(): two ranks that show their tags at once cannot both miss the
  // other's.
  mine.shown.store(number, std::memory_order_seq_cst);
  compare_on_host(number, word);
  if (options_.agreement) {
    agree(number, word, lock);
  } else if (options_.do_hosts_agree) {
    wait_for_first_rank(number, word, lock);
  }
  started_ = number;
}

void TagBoard::compare_on_host(uint64_t number, uint64_t word) {
  for (size_t other = 0; other < options_.lines.size(); ++other) {
    const std::optional<uint64_t> theirs = line(other).find(number);
    if (!theirs || *theirs == word) continue;
    set_difference({options_.ranks[options_.rank], word, options_.ranks[other], *theirs});
    throw_difference();
  }
}

// ---- Agreement of hosts.

std::shared_ptr<HostExchange::Round> TagBoard::advance() {
  Line& mine = line(options_.rank);
  std::vector<HostAgreement::Agreed> agreed;
  std::optional<TagDifference> difference;
  try {
    difference = options_.agreement->advance(agreed);
  } catch (const EnvironmentError&) {
    mine.has_lost_host.store(1, std::memory_order_release);
    throw;
  }
  for (const auto& [first, words] : agreed) {
    for (size_t i = 0; i < words.size(); ++i) {
      mine.agreed_words[(first + i) % kKept].store(words[i], std::memory_order_release);
    }
    mine.agreed.store(first + words.size() - 1, std::memory_order_release);
    // The hosts may agree on less than this rank has promised, whose first collective it may have shown by now.
    if (shown_ + 1 == first && !promised_.empty() && promised_.front() == words[0]) {
      promised_.resize(std::min(promised_.size(), words.size()));
    } else if (shown_ == first && mine.words[first % kKept].load(std::memory_order_relaxed) == words[0]) {
      promised_.resize(std::min(promised_.size(), words.size() - 1));
    }
  }
  if (difference) {
    do_hosts_know_ = true;
    set_difference(*difference);
  }
  return options_.agreement->is_settled() ? nullptr : options_.agreement->round();
}

void TagBoard::agree(uint64_t number, uint64_t word, std::unique_lock<std::mutex>& lock) {
  if (!promised_.empty() && promised_.front() == word) {
    promised_.pop_front();
  } else {
    promised_.clear();
    options_.agreement->ask(number, {word});
  }
  while (const auto round = advance()) {
    throw_difference();
    lock.unlock();
    try {
      round->wait_for(kBetweenTagLooks);
    } catch (const std::exception&) {
      // advance() throws the connection's error.
    }
    lock.lock();
    compare_on_host(number, word);
  }
  throw_difference();
}

void TagBoard::wait_for_first_rank(uint64_t number, uint64_t word, std::unique_lock<std::mutex>& lock) {
  const auto start = Clock::now();
  const std::string& first = options_.rank_names[options_.ranks[0]];
  Clock::time_point next_look = start + kBetweenTagLooks;
  while (!line(0).is_agreed(number, word)) {
    throw_difference();
    const Clock::time_point now = Clock::now();
    const Clock::duration waited = now - start;
    if (line(0).has_lost_host.load(std::memory_order_acquire) != 0) {
      throw EnvironmentError(text(first,
                                  " has lost its connection to another host, whose ranks have probably died, "
                                  "before the hosts agreed on ",
                                  describe_shown(word)));
    }
    if (now >= next_look) {
      next_look = now + kBetweenTagLooks;
      if (options_.has_first_rank_ended() && !line(0).is_agreed(number, word)) {
        throw EnvironmentError(text(first, " has died before the hosts agreed on ", describe_shown(word)));
      }
    }
    if (waited > options_.limit) {
      throw EnvironmentError(text("waited ", std::chrono::duration_cast<std::chrono::seconds>(waited).count(),
                                  " s for ", first, " to start ", describe_shown(word)));
    }
    lock.unlock();
    if (waited < kShortWait) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::min<Clock::duration>(waited / 4, milliseconds(1)));
    }
    lock.lock();
    compare_on_host(number, word);
  }
}

void TagBoard::check(milliseconds waited) {
  check();
  if (!options_.agreement) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    advance();
  } catch (const EnvironmentError&) {
    return;  // the collective itself finds what has become of the connection, and says it better
  }
  throw_difference();
  if (waited >= kLongWait && options_.agreement->is_settled()) options_.agreement->say_that_it_waits(started_);
}

}  // namespace drivetrain::ddp
