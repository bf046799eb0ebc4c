// Implements the rounds in which hosts agree on their next collectives.
#include "ddp/transport/host_agreement.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/hash.h"

namespace drivetrain::ddp {
namespace {

constexpr uint64_t kRemembered = 2048;  // numbers, for hosts that are behind

HostMessage message_for(const HostAgreement::Agreed& asked) {
  HostMessage message;
  message.kind = HostMessage::kAsks;
  message.number = asked.number;
  message.word = asked.words[0];
  message.count = asked.words.size();
  for (const uint64_t word : asked.words) message.digest = mix(message.digest, word);
  return message;
}

bool begins_with_the_same(const HostMessage& a, const HostMessage& b) {
  return a.number == b.number && a.word == b.word;
}

}  // namespace

HostAgreement::HostAgreement(std::unique_ptr<HostExchange> exchange, std::vector<uint64_t> ranks)
    : exchange_(std::move(exchange)), ranks_(std::move(ranks)) {}

void HostAgreement::ask(uint64_t number, std::vector<uint64_t> words) {
  DT_INVARIANT(!words.empty());
  asked_.push_back({number, std::move(words)});
  if (!round_ && asked_.size() == 1) start(message_for(asked_.front()));
}

void HostAgreement::start(const HostMessage& message) {
  has_asked_ = message.kind == HostMessage::kAsks;
  if (!error_.empty()) return;
  try {
    round_ = exchange_->start(message);
  } catch (const std::exception& error) {
    error_ = error.what();
  }
}

void HostAgreement::say_that_it_waits(uint64_t started) {
  if (round_ || std::chrono::steady_clock::now() - last_wait_ < kBetweenWaits) return;
  HostMessage message;
  message.kind = HostMessage::kWaits;
  message.number = started;
  start(message);
}

bool HostAgreement::has_ended(std::chrono::milliseconds limit) {
  if (!error_.empty()) return false;
  try {
    return round_->wait_for(limit);
  } catch (const std::exception& error) {
    error_ = error.what();
    return false;
  }
}

void HostAgreement::tell(const TagDifference& difference) {
  const auto until = std::chrono::steady_clock::now() + kLongestTale;
  const auto rest = [&] {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    return std::max(left, std::chrono::milliseconds(1));
  };
  asked_.clear();
  if (round_ && !has_ended(rest())) return;
  HostMessage message;
  message.kind = HostMessage::kDiffers;
  message.difference = difference;
  start(message);
  // The process may end behind the caller's error. The others are to hear of it before that.
  if (error_.empty()) has_ended(rest());
}

std::optional<TagDifference> HostAgreement::advance(std::vector<Agreed>& agreed) {
  while (round_ && has_ended(std::chrono::milliseconds(0))) {
    std::vector<HostMessage> messages;
    try {
      messages = round_->received();
    } catch (const std::exception& error) {
      error_ = error.what();
      break;
    }
    const bool asked = std::exchange(has_asked_, false);
    round_.reset();
    if (const auto difference = compare(messages)) return difference;
    const auto asks = [](const HostMessage& message) { return message.kind == HostMessage::kAsks; };
    if (!asked) last_wait_ = std::chrono::steady_clock::now();
    if (asked && std::all_of(messages.begin(), messages.end(), asks)) {
      const auto is_same = [&](const HostMessage& message) {
        return message.count == messages[0].count && message.digest == messages[0].digest;
      };
      if (!std::all_of(messages.begin(), messages.end(), is_same)) asked_.front().words.resize(1);
      remember(asked_.front());
      agreed.push_back(std::move(asked_.front()));
      asked_.pop_front();
    }
    if (!asked_.empty()) start(message_for(asked_.front()));
  }
  if (!error_.empty()) throw EnvironmentError("the hosts cannot compare what they start next: " + error_);
  return std::nullopt;
}

std::optional<TagDifference> HostAgreement::compare(const std::vector<HostMessage>& messages) const {
  const HostMessage* first = nullptr;  // that asks
  for (size_t host = 0; host < messages.size(); ++host) {
    const HostMessage& message = messages[host];
    if (message.kind == HostMessage::kDiffers) return message.difference;
    if (message.kind != HostMessage::kAsks) continue;
    if (first == nullptr) first = &message;
    if (begins_with_the_same(*first, message)) continue;
    return TagDifference{ranks_[first - messages.data()], first->word, ranks_[host], message.word};
  }
  for (size_t host = 0; first != nullptr && host < messages.size(); ++host) {
    const HostMessage& message = messages[host];
    if (message.kind != HostMessage::kWaits || message.number < first->number) continue;
    const auto started = agreed_words_.find(first->number);
    if (started == agreed_words_.end() || started->second == first->word) continue;
    return TagDifference{ranks_[first - messages.data()], first->word, ranks_[host], started->second};
  }
  return std::nullopt;
}

void HostAgreement::remember(const Agreed& agreed) {
  for (size_t i = 0; i < agreed.words.size(); ++i) {
    agreed_words_[agreed.number + i] = agreed.words[i];
    agreed_words_.erase(agreed.number + i - kRemembered);
  }
}

}  // namespace drivetrain::ddp
