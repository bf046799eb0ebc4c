// Implements a fake communicator's state, errors and waits; see communicator.h.
#include "communicator.h"

#include <cmath>
#include <cstdlib>
#include <fstream>

#include "launch.h"

namespace fake_nccl {

void note(const std::string& line) {
  static std::mutex mutex;
  const char* const path = std::getenv("FAKE_NCCL_LOG");
  if (path == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex);
  std::ofstream(path, std::ios::app) << line << std::endl;
}

bool fault(const std::string& what) {
  const char* const wanted = std::getenv("FAKE_NCCL_FAULT");
  return wanted != nullptr && what == wanted;
}

void rest() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

std::chrono::seconds longest_wait() {
  const char* const wanted = std::getenv("FAKE_NCCL_WAIT_S");
  return std::chrono::seconds(wanted == nullptr ? 120 : std::atoi(wanted));
}

std::chrono::microseconds time_on_link(size_t bytes) {
  const char* const link = std::getenv("FAKE_NCCL_LINK");
  if (link == nullptr) return std::chrono::microseconds(0);
  char* rest = nullptr;
  const double each = std::strtod(link, &rest), per_mib = std::strtod(rest, nullptr);
  return std::chrono::microseconds(std::llround(each + per_mib * static_cast<double>(bytes) / (1 << 20)));
}

}  // namespace fake_nccl

ncclComm::~ncclComm() {
  if (board == nullptr) return;
  board->processes[rank] = 0;
  fake_nccl::close_board(board);
}

void ncclComm::fail(ncclResult_t result, const std::string& text) {
  int none = ncclSuccess;
  const std::lock_guard<std::mutex> lock(text_mutex);
  if (error.compare_exchange_strong(none, result)) last_error = text;
}

bool ncclComm::are_peers_alive() {
  constexpr int64_t kSeldom = 20'000'000;  // ns
  const int64_t now = fake_nccl::Clock::now().time_since_epoch().count();
  if (now - looked_ < kSeldom) return error == ncclSuccess;
  looked_ = now;
  if (const int lost = fake_nccl::lost_rank(*board, size); lost >= 0) {
    fail(ncclRemoteError, "the process of rank " + std::to_string(lost) + " has ended");
  }
  return error == ncclSuccess;
}

void ncclComm::look_at_links() {
  if (std::getenv("FAKE_NCCL_SOCKETS") != nullptr) are_peers_alive();
}

bool ncclComm::have_launches_ended() {
  const std::lock_guard<std::mutex> lock(turn_mutex);
  return ended >= launched;
}

void ncclComm::add_memory(void* data, size_t bytes, bool is_window) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  registered[data] = {bytes, is_window};
}

void ncclComm::remove_memory(void* data) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  registered.erase(data);
}

bool ncclComm::is_in_window(const void* address) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  const auto next = registered.upper_bound(const_cast<void*>(address));
  if (next == registered.begin()) return false;
  const auto& [data, memory] = *std::prev(next);
  return memory.is_window && static_cast<const char*>(address) < static_cast<const char*>(data) + memory.bytes;
}

bool ncclComm::meet(const std::string& what) {
  const int64_t all = ++meetings * size;
  ++board->met;
  const fake_nccl::Clock::time_point deadline = fake_nccl::Clock::now() + fake_nccl::longest_wait();
  while (board->met < all) {
    if (aborted || !are_peers_alive()) return false;
    if (fake_nccl::Clock::now() > deadline) {
      fail(ncclInternalError, "fake NCCL waited too long for every rank's " + what);
      return false;
    }
    fake_nccl::rest();
  }
  return true;
}
