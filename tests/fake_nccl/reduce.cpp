// Implements reductions on the host; see reduce.h.
#include "reduce.h"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace fake_nccl {
namespace {

// A bfloat16 value: the upper half of a float32, rounded to nearest even.
struct Bfloat16 {
  uint16_t bits = 0;
  Bfloat16() = default;
  Bfloat16(float value) {
    const auto whole = std::bit_cast<uint32_t>(value);
    const bool is_nan = value != value;
    bits = static_cast<uint16_t>(is_nan ? 0x7fc0 : (whole + 0x7fff + (whole >> 16 & 1)) >> 16);
  }
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

template <class T>
T combine(T a, T b, ncclRedOp_t op) {
  switch (op) {
    case ncclProd:
      return static_cast<T>(a * b);
    case ncclMax:
      return a < b ? b : a;
    case ncclMin:
      return b < a ? b : a;
    default:
      return static_cast<T>(a + b);
  }
}

template <class T>
void reduce_as(const std::vector<const char*>& parts, char* to, size_t count, ncclRedOp_t op) {
  for (size_t i = 0; i < count; ++i) {
    T value = reinterpret_cast<const T*>(parts[0])[i];
    for (size_t rank = 1; rank < parts.size(); ++rank) {
      value = combine(value, reinterpret_cast<const T*>(parts[rank])[i], op);
    }
    if (op == ncclAvg) value = static_cast<T>(value / static_cast<T>(static_cast<float>(parts.size())));
    reinterpret_cast<T*>(to)[i] = value;
  }
}

}  // namespace

size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

void reduce(const std::vector<const char*>& parts, char* to, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  switch (type) {
    case ncclInt8:
      return reduce_as<int8_t>(parts, to, count, op);
    case ncclUint8:
      return reduce_as<uint8_t>(parts, to, count, op);
    case ncclInt32:
      return reduce_as<int32_t>(parts, to, count, op);
    case ncclUint32:
      return reduce_as<uint32_t>(parts, to, count, op);
    case ncclInt64:
      return reduce_as<int64_t>(parts, to, count, op);
    case ncclUint64:
      return reduce_as<uint64_t>(parts, to, count, op);
    case ncclFloat16:
      return reduce_as<_Float16>(parts, to, count, op);
    case ncclBfloat16:
      return reduce_as<Bfloat16>(parts, to, count, op);
    case ncclFloat32:
      return reduce_as<float>(parts, to, count, op);
    default:
      return reduce_as<double>(parts, to, count, op);
  }
}

}  // namespace fake_nccl
