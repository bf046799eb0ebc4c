// Declares the flat gradient buffer: its memory, its division into buckets, and the views that become `.grad`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/bucket_plan.h"
#include "ddp/parameter.h"
#include "ddp/step_streams.h"
#include "ddp/transport/transport.h"

namespace drivetrain::ddp {

// One bucket's memory.
struct Bucket {
  std::vector<size_t> params;                // in the expected order of their gradients
  std::shared_ptr<const std::string> label;  // "bucket 7 of 12 [layer3.weight, ...]"
  bool sparse = false;                       // has one parameter, whose gradient lies outside the buffer
  bool ends_group = true;                    // small buckets wait for the next one and start together
  int64_t offset = 0;                        // bytes from the buffer's start
  int64_t end = 0;                           // likewise
  // One-dimensional, padding included, in the parameters' dtype. For a sparse bucket this step's gradient.
  at::Tensor flat;
  at::Tensor seen;                           // its values as a communication hook gets them
  std::shared_ptr<const RankRanges> ranges;  // which part each rank keeps; null: each keeps everything
};

struct BucketInfo {
  std::vector<std::string> names;
  int64_t bytes = 0;  // of gradients, without padding
  std::string dtype;
};

// Owns one allocation per device. Each gradient has a fixed region in it from one build() to the next. After a
// synchronized backward, `.grad` is a view of that region. Sparse gradients have no region: each is a bucket of its
// own.
//
// Invariants: regions do not overlap, unless settings.reuses_memory is set. Every rank that builds the same plans has
// the same layout. A view shares the buffer's lifetime, but has its own storage and version counter. Saving or copying
// one gradient therefore never touches the others.
class GradBuffer {
 public:
  // The place of a parameter's gradient.
  struct Region {
    size_t bucket = 0;
    int64_t offset = 0;  // bytes from the bucket's start
    at::Tensor view;     // strided by torch's gradient layout contract; undefined where the gradient is sparse
    at::Storage memory;  // over the region; a script that replaces the view's may still show it in other tensors
  };
  // The layout settings take effect with the next build().
  struct Settings {
    bool stays_views = false;  // tensors that a script keeps over a `.grad` show the parameter's next gradient as well
    std::optional<at::ScalarType> low_precision;  // the gradients' dtype instead of their parameters'; layout
    bool reuses_memory = false;  // later buckets reuse the memory of earlier ones, for steps in backward; layout
    // A communication hook reads the buckets, in torch's layout, so that the transport does not touch them; layout.
    bool is_hooked = false;
    // Tells if Python refers to any of these tensors besides `.grad`.
    std::function<bool(const std::vector<at::Tensor>&)> are_held;
    // By parameter, the elements of its gradient that each rank keeps of the reduced one, in place of bytes; empty: all
    // ranks keep everything. Layout.
    std::vector<RankRanges> kept;
    // Gets views() after the gradients have moved.
    std::function<void(const std::vector<at::Tensor>&)> on_moved;
  };

  GradBuffer(const Parameters& params, StepStreams& streams, bool stays_views);

  // Lays out the buckets, on memory of the transport if the total size has changed.
  void build(const std::vector<BucketPlan>& plans, Comm& comm);
  // Frees the memory; build() follows.
  void free();

  const std::vector<Bucket>& buckets() const { return buckets_; }
  Bucket& bucket(size_t index) { return buckets_[index]; }
  const Region& region(size_t param) const { return regions_[param]; }
  const std::vector<BucketPlan>& plans() const { return plans_; }
  const std::map<std::string, at::Tensor>& memory() const { return memory_; }  // uint8, by device
  int64_t bytes() const { return bytes_; }
  std::vector<BucketInfo> infos() const;
  // Returns each parameter's view; undefined where the gradient is sparse.
  std::vector<at::Tensor> views() const;
  // Returns the dtype of the parameter's gradients in the buffer.
  at::ScalarType grad_dtype(size_t param) const;

  // ---- Gradients in and out.

  // Returns true if the tensor is the parameter's region, strided as its view.
  bool is_in_place(size_t param, const at::Tensor& grad) const;
  // Returns true if the buffer has these buckets already.
  bool is_in_place(const std::vector<BucketPlan>& plans) const;
  // Returns false if the script has replaced the view's memory, dtype or strides, as by assigning to .grad.data.
  bool has_intact_view(size_t param) const;
  // Lets the view show the region, if the script has replaced what it shows.
  void restore_view(size_t param);
  // Gives tensors that the script keeps over the region, such as p.grad.flatten(), memory of their own. Call it before
  // the region gets a gradient that is not accumulated into the last one. NumPy arrays keep pointing at the region.
  void leave_to_holders(size_t param);
  // Copies a gradient to its region in one pass, scaled.
  void fill(size_t param, const at::Tensor& values, double scale);
  void fill_zeros(size_t param);

  // Returns true if the script refers to a `.grad` that lies outside of the buffer, or to its memory. As under torch,
  // it then stays `.grad`, and gets the reduced values.
  bool is_scripts_own(const at::Tensor& grad) const;
  // Returns true if the script refers to a view, so that nothing may move.
  bool are_views_held() const;
  // Copies the gradients that are being accumulated in the buffer, by parameter. They move with their parameters.
  std::vector<at::Tensor> copy_kept_gradients() const;
  // Puts these copies into their regions after a build(), except gradients that became the script's own by it.
  void put_back(const std::vector<at::Tensor>& kept);
  void forget_sparse_gradients();
  // Calls settings.on_moved.
  void tell_moved() const;

  Settings settings;

 private:
  void lay_out(const BucketPlan& plan, int64_t device_bytes, int64_t& used, Comm& comm);
  void group_small_buckets();
  std::shared_ptr<const RankRanges> kept_ranges(const Bucket& bucket) const;
  std::string describe(size_t bucket) const;
  void make_view(size_t param);
  bool shows_region(size_t param) const;
  const void* address_of(size_t param) const;
  bool contains(const at::Tensor& tensor) const;

  const Parameters& params_;
  StepStreams& streams_;
  std::map<std::string, at::Tensor> memory_;
  std::vector<std::shared_ptr<void>> errors_;  // of the transport, in this layout
  std::vector<BucketPlan> plans_;
  std::vector<Bucket> buckets_;
  std::vector<Region> regions_;  // by parameter
  int64_t bytes_ = 0;
};

// Returns a tensor over part of the memory that shares its lifetime but has a storage of its own.
at::Tensor piece_of(const at::Tensor& memory, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides,
                    at::ScalarType dtype);

}  // namespace drivetrain::ddp
