// Maps the file that ranks share, and finds ranks whose processes have ended.
#include "board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fstream>

namespace fake_nccl {

Board* open_board(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0) return nullptr;
  void* const data = ::ftruncate(file, sizeof(Board)) == 0
                         ? ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                         : MAP_FAILED;
  ::close(file);
  return data == MAP_FAILED ? nullptr : static_cast<Board*>(data);
}

void close_board(Board* board) { ::munmap(board, sizeof(Board)); }

int lost_rank(const Board& board, int size) {
  for (int rank = 0; rank < size; ++rank) {
    const int process = board.processes[rank];
    if (process == 0) continue;
    // The file reads "123 (name) S ...". A process that has ended is a zombie (Z) until its parent waits for it.
    std::ifstream file("/proc/" + std::to_string(process) + "/stat");
    std::string status;
    std::getline(file, status);
    const size_t end = status.rfind(')');
    if (end == std::string::npos || end + 2 >= status.size() || status[end + 2] == 'Z') return rank;
  }
  return -1;
}

}  // namespace fake_nccl
