// Declares the interface of transports, which reduce buckets over ranks, and the functions that make them.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/transport/rank_ranges.h"
#include "ddp/transport/rank_sum.h"
#include "ddp/transport/tag_board.h"
#include "ddp/transport/torch/wire_format.h"

namespace drivetrain::ddp {

// A collective in progress.
class PendingReduce {
 public:
  virtual ~PendingReduce() = default;
  // Returns when the result may be used; on CUDA by later work of the current stream. Throws the transport's error
  // within its timeout.
  virtual void wait() = 0;
  // Waits for about that long at most. Returns true if wait() would return at once. A transport whose wait() does not
  // hold up the host need not implement it.
  virtual bool wait_for(std::chrono::milliseconds) {
    wait();
    return true;
  }
  // Returns true if wait() would return, or throw, at once.
  virtual bool is_done() = 0;
  // Returns true if the transport has held it back, so that no other rank has seen it; see Comm::flush().
  virtual bool is_held_back() const { return false; }
};

// The ranks of a process group as the whole job numbers them.
class Ranks {
 public:
  Ranks() = default;  // the group of the whole job
  explicit Ranks(std::vector<int64_t> global) : global_(std::move(global)) {}
  int64_t global(int rank) const { return global_.empty() ? rank : global_.at(rank); }
  // Returns "rank 5 (rank 1 of its group)", or "rank 5" where both numbers are equal.
  std::string name(int rank) const {
    const std::string number = std::to_string(global(rank));
    return "rank " + number + (global(rank) == rank ? "" : " (rank " + std::to_string(rank) + " of its group)");
  }

 private:
  std::vector<int64_t> global_;  // [ranks of the group]; empty: both numbers are equal
};

// A transport over a group of ranks. Its arguments and results number ranks as the group does.
class Comm {
 public:
  explicit Comm(Ranks ranks) : ranks_(std::move(ranks)) {}
  virtual ~Comm() = default;
  // Names the ranks in errors and records.
  const Ranks& ranks() const { return ranks_; }
  // Sets the tag of the collectives that start from now on.
  void set_tag(const Tag& tag) { tag_ = tag; }
  const Tag& tag() const { return tag_; }
  // Sets the board on which the ranks of this host show their collectives; null: they do not.
  void set_board(std::shared_ptr<TagBoard> board) { board_ = std::move(board); }
  TagBoard* board() const { return board_.get(); }
  virtual int size() const = 0;
  virtual int rank() const = 0;
  // Returns the name of the carrier of values and, if another one was requested, the reason.
  virtual std::string name() const = 0;
  virtual std::string why_not() const { return ""; }
  // Allocates zeroed bytes in which start() works best. Every rank must allocate the same sizes in the same order.
  virtual at::Tensor allocate(int64_t bytes, c10::Device device) = 0;
  // Returns true if a script's own process group carries the values. It gets the all-reduces that torch's reducer would
  // start, also a single rank's collectives, and no others.
  virtual bool is_foreign() const { return false; }
  // Returns true if this transport adds the rounding errors of a transfer to the next one of the same values.
  virtual bool carries_errors() const { return false; }
  // Lets it do so for tensors in that memory, as long as the result exists. Make a new one when other values take their
  // places. Every rank must call it between the same starts. Returns null if this transport carries none.
  virtual std::shared_ptr<void> carry_errors(const at::Tensor& /*memory*/) { return nullptr; }
  // Returns true if start_mean() gives means. Fixed once all memory is allocated.
  // NCCL could average too, but would then use neither NVLS nor its symmetric kernels (nccl#1455).
  virtual bool averages() const { return false; }
  // Returns true if a wait for other ranks begins by spinning. It then ends sooner, at the cost of a core.
  virtual bool spins() const { return false; }
  // Returns true if collectives proceed by themselves. Else the ranks' threads execute them in start() and wait().
  virtual bool in_background() const { return true; }
  // Starts an in-place all-reduce of a real tensor, flat or sparse, that leaves the sum. Every rank must start the same
  // tensors in the same order.
  virtual std::unique_ptr<PendingReduce> start_sum(const at::Tensor& flat) = 0;
  // Starts an all-reduce, or a reduce-scatter if there are ranges, that leaves the mean over ranks. With a weight,
  // which every rank must give, it leaves the sum divided by the sum of weights, or the sum if that is 0. A sum that is
  // divided later has the same bits. Returns null on all ranks if this transport does not divide that tensor.
  virtual std::unique_ptr<PendingReduce> start_mean(const at::Tensor& /*flat*/, std::optional<double> /*weight*/,
                                                    const std::shared_ptr<const RankRanges>& /*ranges*/) {
    return nullptr;
  }
  // Returns a number of float32 values at whose multiples a tensor may be divided. start_sum() of the parts, in their
  // order, then gives the bits of one start_sum(). This holds for a transport of this kind over that many ranks. 0:
  // there is no such number.
  virtual int64_t divides_at(int /*num_ranks*/) const { return 0; }
  // Starts an in-place reduce-scatter with the result of start_sum(). Each rank gets the result of its own ranges only;
  // other values are undefined. A transport reduces everything where it has none, or where no rank is busier then.
  virtual std::unique_ptr<PendingReduce> start_scatter(const at::Tensor& flat,
                                                       const std::shared_ptr<const RankRanges>& /*ranges*/) {
    return start_sum(flat);
  }
  // Names a process group of the same ranks in which only this transport sends sums to the further ranks of ranges.
  // Waits for reduce-scatters then communicate: every rank must wait for them in the same order.
  virtual void set_returning(const std::string& /*group_name*/) {}
  // Starts an in-place all-gather: every rank gets the values of each range from the rank that it belongs to. Returns
  // null if this transport has none for that tensor, on every rank alike.
  virtual std::unique_ptr<PendingReduce> start_gather(const at::Tensor& /*flat*/,
                                                      const std::shared_ptr<const RankRanges>& /*ranges*/) {
    return nullptr;
  }
  // Returns true if this rank has added up some of these values in their last sum. Several ranks may have, each a part.
  // False on all ranks where the transport does not know.
  virtual bool has_summed(const at::Tensor& /*values*/) const { return false; }
  // Begins collectives that the transport has held back to begin them together. A wait for one of them does the same.
  // Every rank must call it between the same starts.
  virtual void flush() {}
  // Aborts all collectives with that error, which later calls throw. Any thread may call it. Does nothing where the
  // process group carries the values.
  virtual void give_up(const std::string& /*why*/) {}

 private:
  const Ranks ranks_;
  Tag tag_;
  std::shared_ptr<TagBoard> board_;
};

// Returns the type of elements that transports add themselves; nothing: the process group must.
std::optional<ElementType> element_type(at::ScalarType dtype);

// Makes a transport over any torch process group, by the name under which it is registered now. backend: the name of
// its backend for the gradients' device, if torch brings it; else "". in_tree: NCCL sums floats in the order of a tree
// (rank_sum.h).
std::unique_ptr<Comm> make_torch_comm(const std::string& group_name, const std::string& backend, Ranks ranks = Ranks(),
                                      bool in_tree = false);

// Makes the exchange of tags between the ranks of a gloo process group.
std::unique_ptr<HostExchange> make_host_exchange(const std::string& group_name);

// Makes a transport over a gloo process group that sends float32 values in that format and sums them in float32. Each
// rank sums its own piece of a tensor in rank order, and all get the same bits. Other types travel unchanged. Every
// rank must send its tensors in the same order, so that a process group has only one such transport of each format.
//
// Each value is rounded once to nearest even, and each sum once more. The format's unit roundoff u is 2^-8 for bfloat16
// and 2^-3 for float8. Let S = |x_1| + ... + |x_n|. The result differs from the exact sum s by at most
//
//   u S  +  (n - 1) 2^-24 (1 + u) S  +  u (|s| + all terms before it)  +  (n + 1) m
//
// This holds for every n. The last term is for subnormal numbers: m is 2^-134 for bfloat16. For float8 it is 2^-31 of
// the largest magnitude of the value's block, or of the sum's, and at least 2^-143. An all-reduce in bfloat16 rounds up
// to n - 1 times more. A value or sum above 3.39e38 in bfloat16, or 3.19e38 in float8, becomes infinite.
//
// Carried rounding errors of float8 are added to the next values and sums in the same place (Seide et al. 2014;
// Karimireddy et al. 2019). For every K, the sum of K results then differs from the sum of the exact ones by the errors
// left at the end.
//
// The exact format rounds nothing. It carries floats of every type, and sums them in the order of a tree (rank_sum.h).
//
// returning: a process group of the same ranks in which only this transport sends its sums back.
std::unique_ptr<Comm> make_wire_comm(const std::string& group_name, const std::string& returning, WireFormat format,
                                     Ranks ranks);

// Options of the transport through shared memory within a host and through other transports between hosts.
struct ShmOptions {
  std::string group_name;
  std::vector<int64_t> hosts;     // by rank of the group: a number that is equal for ranks of one host
  std::shared_ptr<Comm> group;    // over all ranks, for tensors outside of shared memory
  std::shared_ptr<Comm> leaders;  // over every host's first rank; null with one host and for other ranks
  double timeout_s = 0;
  Ranks ranks;
  bool in_tree = false;  // sums in the order of a tree (rank_sum.h), on one host
};

// Makes that transport; every rank of the group must call it. If a rank cannot share memory, all use the transport over
// all ranks, and why_not() says why. allocate() may still find this.
std::unique_ptr<Comm> make_shm_comm(const ShmOptions& options);

// NCCL's functions (ddp/transport/nccl/nccl_api.h); empty in a build without NCCL.
struct NcclApi;

// Looks the functions up in the library that the process has loaded, else in the one at that path ("": the system's).
// Throws if there is none, or it is too old.
std::shared_ptr<const NcclApi> find_nccl(const std::string& fallback);
std::pair<std::string, std::string> path_and_version(const NcclApi& api);

// Options of the transport through our own NCCL communicator over the ranks of a process group.
struct NcclOptions {
  std::shared_ptr<const NcclApi> api;
  std::string group_name;
  c10::Device device;
  double timeout_s = 0;
  std::function<void()> release_cache;  // returns unused memory of torch's allocator to the device
  Ranks ranks = {};
  bool in_tree = false;  // sums floats in the order of a tree (rank_sum.h)
};

// Returns the bytes of device memory that NCCL transports of this process hold, and their peak. torch's allocator does
// not count them.
std::pair<int64_t, int64_t> nccl_memory_bytes();

// Makes that transport; every rank of the group must call it.
std::unique_ptr<Comm> make_nccl_comm(const NcclOptions& options);

}  // namespace drivetrain::ddp
