// How buckets are reduced over ranks: the interface that every transport implements.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace drivetrain::ddp {

// One collective under way.
class PendingReduce {
 public:
  virtual ~PendingReduce() = default;
  // Returns when the result may be used (on CUDA: by work enqueued on the current stream after this). Throws what the
  // transport reports, within its timeout.
  virtual void wait() = 0;
  // Whether wait() would return, or throw, at once.
  virtual bool is_done() = 0;
  // Whether the transport has held it back, so that giving it up concerns nobody else; see Comm::flush().
  virtual bool is_held_back() const { return false; }
  // Once it is complete: the sum of squares of the result, if want_square_sums() has been asked for it.
  virtual std::optional<double> square_sum() { return std::nullopt; }
};

// What a collective is for, in one word; 0: not said. Collectives that belong together have the same on all ranks.
enum class Purpose : uint8_t { kBucket = 1, kUsedMap, kWeights, kReplicas, kPlan };
constexpr uint64_t tag_of(int64_t step, Purpose purpose, uint64_t bucket = 0) {
  return static_cast<uint64_t>(step) << 24 | (bucket & 0xffff) << 8 | static_cast<uint64_t>(purpose);
}
std::string describe_tag(uint64_t tag);  // "bucket 3 in synchronised step 7"

// The ranks of a process group as the whole job numbers them.
class Ranks {
 public:
  Ranks() = default;  // the job's own
  explicit Ranks(std::vector<int64_t> global) : global_(std::move(global)) {}
  int64_t global(int rank) const { return global_.empty() ? rank : global_.at(rank); }
  // "rank 5 (rank 1 of its group)"
  std::string name(int rank) const {
    const std::string number = std::to_string(global(rank));
    return "rank " + number + (global(rank) == rank ? "" : " (rank " + std::to_string(rank) + " of its group)");
  }

 private:
  std::vector<int64_t> global_;  // [ranks of the group]; empty: the same
};

class Comm {
 public:
  explicit Comm(Ranks ranks) : ranks_(std::move(ranks)) {}
  virtual ~Comm() = default;
  // For errors and records; all that is given to a transport, and comes from it, is numbered as in its group.
  const Ranks& ranks() const { return ranks_; }
  // Of the collectives that are started from now on.
  void set_tag(uint64_t tag) { tag_ = tag; }
  uint64_t tag() const { return tag_; }
  virtual int size() const = 0;
  virtual int rank() const = 0;
  // What carries the values, and, where that is not what was asked for, why.
  virtual std::string name() const = 0;
  virtual std::string why_not() const { return ""; }
  // Zeroed bytes in which start() works best. Every rank must allocate the same sizes in the same order.
  virtual at::Tensor allocate(int64_t bytes, c10::Device device) = 0;
  // Whether start() leaves the mean over ranks; else it leaves the sum. Fixed once all memory is allocated. NCCL could
  // average too, but takes slower ways then: without NVLS and its symmetric kernels (nccl#1455).
  virtual bool averages() const { return false; }
  // Whether the caller sends tags along with the values. Not over a transport that compares them before anything is
  // added up, nor over NCCL, where the host does not wait for what came.
  virtual bool wants_tags() const { return true; }
  // Whether a wait for other ranks begins by spinning; it then ends sooner, at the cost of a core.
  virtual bool spins() const { return false; }
  // Whether what start() began goes on by itself; else the ranks' threads carry it out within start() and wait().
  virtual bool in_background() const { return true; }
  // Begins an in-place all-reduce of a real tensor, flat or sparse. Every rank must start the same tensors in the same
  // order.
  virtual std::unique_ptr<PendingReduce> start(const at::Tensor& flat) { return start_sum(flat); }
  // The same as a sum, whatever averages() says (counts).
  virtual std::unique_ptr<PendingReduce> start_sum(const at::Tensor& flat) = 0;
  // Whether the means of floats that are started from now on also come with the sum of their squares. Another rank's
  // wish holds for all. False: this transport cannot.
  virtual bool want_square_sums(bool) { return false; }
  // Until this, or until any of them is waited for, a transport may hold back what was started, to begin all of it at
  // once. Every rank must call it between the same starts.
  virtual void flush() {}
  // Gives every rank rank 0's values, in place; waits for them.
  virtual void broadcast(const at::Tensor& values) = 0;

 private:
  const Ranks ranks_;
  uint64_t tag_ = 0;
};

// Over any torch process group, by the name that torch registered it under, for tensors on that kind of device.
std::unique_ptr<Comm> make_torch_comm(const std::string& group_name, c10::DeviceType device, Ranks ranks = Ranks());

// Over a gloo process group, float32 values as bfloat16 on the wire and added up in float32: each rank sums the piece
// of a tensor that is its own, in rank order, and all get the same bits. Other types go as they are. Its tensors must
// not go in another order on another rank, so that one process group has one such transport, whoever uses it.
//
// Each value is rounded once to nearest even, and each sum once more; with u = 2^-8, bfloat16's unit roundoff, and
// S = |x_1| + ... + |x_n|, what arrives is off the exact sum s by at most
//   u S  +  (n - 1) 2^-24 (1 + u) S  +  u (|s| + all before it)  +  (n + 1) 2^-134 where numbers are subnormal,
// whatever n; an all-reduce in bfloat16 rounds up to n - 1 times more. A value or sum above 3.39e38, bfloat16's
// largest, becomes infinite.
//
// returning: a process group of the same ranks for this transport alone, in which the sums go back.
std::unique_ptr<Comm> make_wire_comm(const std::string& group_name, const std::string& returning, Ranks ranks);

// Through shared memory between the ranks of one host, through other transports between hosts.
struct ShmOptions {
  std::string group_name;
  std::vector<int64_t> hosts;     // of every rank of the group: a number that is the same on the same host
  std::shared_ptr<Comm> group;    // over all ranks: for what cannot be shared
  std::shared_ptr<Comm> leaders;  // over every host's first rank; null with one host, and for other ranks
  double timeout_s = 0;
  Ranks ranks;
};

// Every rank of the group must call it. Where memory cannot be shared on any rank, all agree on the transport over all
// ranks, and why_not() says why; allocate() may still find that out.
std::unique_ptr<Comm> make_shm_comm(const ShmOptions& options);

// NCCL's functions (ddp/nccl_api.h), or in a build without them nothing at all.
struct NcclApi;

// In the library that the process has loaded, else in the one at that path ("": wherever the system has it). Throws
// where there is none, or none that will do.
std::shared_ptr<const NcclApi> find_nccl(const std::string& fallback);
std::pair<std::string, std::string> path_and_version(const NcclApi& api);

// Through an NCCL communicator of our own, over the ranks of a process group.
struct NcclOptions {
  std::shared_ptr<const NcclApi> api;
  std::string group_name;
  c10::Device device;
  double timeout_s = 0;
  std::function<void()> release_cache;  // gives what torch's allocator keeps unused back to the device
  Ranks ranks = {};
};

// The bytes of device memory that NCCL transports of this process hold now, and the most that they have held. No
// statistics of torch's allocator count them.
std::pair<int64_t, int64_t> nccl_memory_bytes();

// Every rank of the group must call it.
std::unique_ptr<Comm> make_nccl_comm(const NcclOptions& options);

}  // namespace drivetrain::ddp
