// Declares the formats in which float32 values travel between hosts, and the rounding errors that wait for the next
// transfer. Needs no torch header.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace drivetrain::ddp {

enum class WireFormat : uint8_t {
  kBFloat16,
  kExact,   // as the tensor has them, summed in the order of a tree
  kFloat8,  // e5m2 in blocks with a scale (float8_wire.h); each value's rounding error is added to its next transfer
};

// Values of which whole blocks of every format consist.
constexpr int64_t kWireBlock = 256;

constexpr bool carries_errors(WireFormat format) { return format == WireFormat::kFloat8; }

// Returns the values that are rounded together.
constexpr int64_t block_values(WireFormat format) { return format == WireFormat::kFloat8 ? kWireBlock : 1; }

// Returns the bytes of that many float32 values on the wire: at most half of float32's bytes, unless they are exact.
int64_t wire_bytes(WireFormat format, int64_t numel);

// Returns the most values that one rank sends to another at once: whole blocks.
int64_t most_values(WireFormat format);

// Returns the first value of the piece that a rank sums of one transfer of an all-reduce. Its blocks begin there.
constexpr int64_t piece_begin(int64_t numel, int piece, int num_pieces) { return numel * piece / num_pieces; }

// The following three are for formats that round.

// Rounds values to nearest even. `to` may begin where `values` do, or before. errors: as float8_wire.h; null for
// formats that carry none.
void encode(WireFormat format, const char* values, float* errors, int64_t numel, char* to);

// Takes the sum of all pieces in float32 in their order, and writes the rounded sum over the first num_outputs of them.
void sum(WireFormat format, const std::vector<char*>& pieces, int num_outputs, float* errors, int64_t numel);

// Widens values to float32. `from` may begin where `to` does, or before.
void decode(WireFormat format, const char* from, int64_t numel, char* to);

// The rounding errors of one transfer's values and of the sums that this rank has sent back.
struct TransferErrors {
  std::vector<float> of_values;  // [values of the transfer]
  std::vector<float> of_sums;    // [values of this rank's piece]
};

// The rounding errors of transfers in one range of memory, by the transfers' place. Thread safe.
class CarriedErrors {
 public:
  CarriedErrors(const void* memory, int64_t bytes);

  // Returns true if all these values lie in the memory.
  bool covers(const float* values, int64_t numel) const;
  // Returns the errors of the last transfer of these values, or zeros. Forgets errors of transfers that overlapped and
  // began or ended elsewhere, because their errors belong to other values.
  std::shared_ptr<TransferErrors> of(const float* values, int64_t numel, int64_t numel_of_piece);

 private:
  const float* const begin_;
  const float* const end_;
  std::mutex mutex_;
  std::map<const float*, std::shared_ptr<TransferErrors>> by_begin_;  // without overlap
};

}  // namespace drivetrain::ddp
