// Loads and stores a tile of values with a block of threads, in a storage format chosen at run time; tile_cpu.h is the
// CPU's counterpart.
#pragma once

#include <cstdint>

#include "base/block_cuda.cuh"
#include "formats/float8.h"
#include "formats/storage.h"

namespace drivetrain::formats {

constexpr int kElementsPerThread = 4;  // loads per thread before the first value is used
constexpr int kTileCuda = kThreads * kElementsPerThread;

// Loads this thread's elements of a tile, kStride apart from `first` on. The format is checked once per tile.
template <int kStride, class Value, class T, int kCount, class FromValue>
__device__ void load_elements(const Value* from, int64_t first, int64_t end, T (&values)[kCount],
                              FromValue from_value) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int64_t i = first + k * kStride;
    if (i < end) values[k] = from_value(from[i]);
  }
}

template <int kStride, class Value, class T, int kCount, class ToValue>
__device__ void store_elements(Value* to, int64_t first, int64_t end, const T (&values)[kCount], ToValue to_value) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int64_t i = first + k * kStride;
    if (i < end) to[i] = to_value(values[k], i);
  }
}

// Loads a 16-bit parameter with `extra`: join_value(half, extra) returns the value. From here on `base` is the tile's
// first element, and all threads of the block share the tile.
template <class Extra, class Join>
__device__ void load_pairs(const TypedArray& array, int64_t base, int64_t end, float (&values)[kElementsPerThread],
                           Join join_value) {
  const auto* halves = static_cast<const uint16_t*>(array.data);
  const auto* extras = static_cast<const Extra*>(array.extra);
#pragma unroll
  for (int k = 0; k < kElementsPerThread; ++k) {
    const int64_t i = base + k * kThreads + threadIdx.x;
    if (i < end) values[k] = join_value(halves[i], extras[i]);
  }
}

// Stores a 16-bit parameter with `extra`: split_value(value, half, extra) fills both.
template <class Extra, class SplitValue>
__device__ void store_pairs(const TypedArray& array, int64_t base, int64_t end,
                            const float (&values)[kElementsPerThread], SplitValue split_value) {
  auto* halves = static_cast<uint16_t*>(array.data);
  auto* extras = static_cast<Extra*>(array.extra);
#pragma unroll
  for (int k = 0; k < kElementsPerThread; ++k) {
    const int64_t i = base + k * kThreads + threadIdx.x;
    if (i < end) split_value(values[k], halves[i], extras[i]);
  }
}

// ---- Blocks of codes: element k of all threads together is one block of 8-bit codes, or two of 4-bit codes.
static_assert(kThreads == kBlock);

// Returns the maximum over the kGroup neighboring threads that this one belongs to. All threads of the block call it.
template <int kGroup>
__device__ uint32_t largest_of_threads(uint32_t value) {
  __shared__ uint32_t of_warps[kThreads / 32];
  value = __reduce_max_sync(kAllLanes, value);
  __syncthreads();  // All threads have read the previous call's result.
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  uint32_t largest = 0;
#pragma unroll
  for (int warp = 0; warp < kGroup / 32; ++warp) {
    const uint32_t other = of_warps[threadIdx.x / kGroup * (kGroup / 32) + warp];
    largest = other > largest ? other : largest;
  }
  return largest;
}

template <class Kind>
__device__ void load_blocks(const TypedArray& array, int64_t base, int64_t end, float (&values)[kElementsPerThread]) {
  const auto* scales = static_cast<const float*>(array.extra);
#pragma unroll
  for (int k = 0; k < kElementsPerThread; ++k) {
    const int64_t i = base + k * kThreads + threadIdx.x;
    if (i < end) values[k] = decode_any<Kind>(code_at<Kind>(array.data, i), scales[i / Kind::kPerScale]);
  }
}

// Stores a lane's code i if there is one. Neighboring lanes have neighboring elements; all lanes of the warp call it.
template <class Kind>
__device__ __forceinline__ void store_code(const TypedArray& array, int64_t i, int64_t end, typename Kind::Code code) {
  if constexpr (Kind::kPerByte == 1) {
    if (i < end) static_cast<typename Kind::Code*>(array.data)[i] = code;
  } else {
    const auto next = __shfl_down_sync(kAllLanes, static_cast<uint32_t>(code), 1);
    if (i >= end || i % 2 != 0) return;
    static_cast<uint8_t*>(array.data)[i / 2] = packed(static_cast<uint32_t>(code), i + 1 < end ? next : 0);
  }
}

template <class Kind>
__device__ void store_blocks(const TypedArray& array, int64_t base, int64_t end,
                             const float (&values)[kElementsPerThread]) {
  auto* scales = static_cast<float*>(array.extra);
#pragma unroll
  for (int k = 0; k < kElementsPerThread; ++k) {
    const int64_t i = base + k * kThreads + threadIdx.x;
    const float prepared = i < end ? Kind::prepare(values[k]) : 0.0f;
    const uint32_t largest = largest_of_threads<Kind::kPerScale>(magnitude_bits(prepared));
    const bool special = largest >= kInfinity;  // the same for all threads of the block
    float scale = Kind::scale_of(largest);
    // All threads take the same way, also where they have blocks of their own.
    if (Kind::kPerScale == kThreads ? special : largest_of_threads<kThreads>(largest) >= kInfinity) {
      const float of_finite = Kind::scale_of(largest_of_threads<Kind::kPerScale>(finite_magnitude(prepared)));
      if (special) scale = scale_with_room<Kind>(of_finite);
    }
    store_code<Kind>(array, i, end, encode_any<Kind>(prepared, Kind::factor_of(scale)));
    if (i < end && i % Kind::kPerScale == 0) scales[i / Kind::kPerScale] = special ? with_special(scale) : scale;
  }
}

// ---- Tiles. Gradients have plain formats, parameters may have pairs and states blocks; other combinations are not
// compiled.

template <int kStride, class T, int kCount>
__device__ void load_plain_elements(const TypedArray& array, int64_t first, int64_t end, T (&values)[kCount]) {
  switch (array.format) {
    case Format::kFloat64:
      return load_elements<kStride>(static_cast<const double*>(array.data), first, end, values,
                                    [](double value) { return static_cast<T>(value); });
    case Format::kBFloat16:
    case Format::kBFloat16Stochastic:
      return load_elements<kStride>(static_cast<const uint16_t*>(array.data), first, end, values,
                                    [](uint16_t bits) { return static_cast<T>(float_from_bfloat16(bits)); });
    case Format::kFloat16:
    case Format::kFloat16Stochastic:
      return load_elements<kStride>(static_cast<const uint16_t*>(array.data), first, end, values,
                                    [](uint16_t bits) { return static_cast<T>(float_from_float16(bits)); });
    default:
      return load_elements<kStride>(static_cast<const float*>(array.data), first, end, values,
                                    [](float value) { return static_cast<T>(value); });
  }
}

template <class T>
__device__ void load_plain(const TypedArray& array, int64_t base, int64_t end, T (&values)[kElementsPerThread]) {
  load_plain_elements<kThreads>(array, base + threadIdx.x, end, values);
}

template <int kStride, class T, int kCount>
__device__ void store_plain_elements(const TypedArray& array, int64_t first, int64_t end, const T (&values)[kCount]) {
  switch (array.format) {
    case Format::kFloat64:
      return store_elements<kStride>(static_cast<double*>(array.data), first, end, values,
                                     [](T value, int64_t) { return static_cast<double>(value); });
    case Format::kBFloat16:
      return store_elements<kStride>(static_cast<uint16_t*>(array.data), first, end, values,
                                     [](T value, int64_t) { return bfloat16_from_float(static_cast<float>(value)); });
    case Format::kFloat16:
      return store_elements<kStride>(static_cast<uint16_t*>(array.data), first, end, values,
                                     [](T value, int64_t) { return float16_from_float(static_cast<float>(value)); });
    default:
      return store_elements<kStride>(static_cast<float*>(array.data), first, end, values,
                                     [](T value, int64_t) { return static_cast<float>(value); });
  }
}

template <class T>
__device__ void store_plain(const TypedArray& array, int64_t base, int64_t end, const T (&values)[kElementsPerThread]) {
  store_plain_elements<kThreads>(array, base + threadIdx.x, end, values);
}

template <class T>
__device__ void load_param(const TypedArray& array, int64_t base, int64_t end, T (&values)[kElementsPerThread]) {
  if constexpr (sizeof(T) == sizeof(float)) {
    switch (array.format) {
      case Format::kBFloat16Remainder16:
        return load_pairs<int16_t>(array, base, end, values,
                                   [](uint16_t half, int16_t remainder) { return join(half, remainder); });
      case Format::kBFloat16Remainder8:
        return load_pairs<int8_t>(array, base, end, values,
                                  [](uint16_t half, int8_t remainder) { return join8(half, remainder); });
      case Format::kBFloat16Kahan:
        return load_pairs<uint16_t>(array, base, end, values,
                                    [](uint16_t half, uint16_t rest) { return compensated_bfloat16(half, rest); });
      case Format::kFloat16Kahan:
        return load_pairs<uint16_t>(array, base, end, values,
                                    [](uint16_t half, uint16_t rest) { return compensated_float16(half, rest); });
      case Format::kFloat16Master:
        return load_pairs<float>(array, base, end, values,
                                 [](uint16_t half, float master) { return master_of(master, half); });
      default:
        break;
    }
  }
  load_plain(array, base, end, values);
}

template <class T>
__device__ void store_param(const TypedArray& array, uint64_t key, int64_t base, int64_t end,
                            const T (&values)[kElementsPerThread]) {
  if constexpr (sizeof(T) == sizeof(float)) {
    switch (array.format) {
      case Format::kBFloat16Stochastic:
        return store_elements<kThreads>(
            static_cast<uint16_t*>(array.data), base + threadIdx.x, end, values,
            [key](float value, int64_t i) { return stochastic_bfloat16(value, random_bits(key, i)); });
      case Format::kFloat16Stochastic:
        return store_elements<kThreads>(
            static_cast<uint16_t*>(array.data), base + threadIdx.x, end, values,
            [key](float value, int64_t i) { return stochastic_float16(value, random_bits(key, i)); });
      case Format::kBFloat16Remainder16:
        return store_pairs<int16_t>(array, base, end, values, [](float value, uint16_t& half, int16_t& remainder) {
          split_into(value, half, remainder);
        });
      case Format::kBFloat16Remainder8:
        return store_pairs<int8_t>(array, base, end, values, [](float value, uint16_t& half, int8_t& remainder) {
          split_into(value, half, remainder);
        });
      case Format::kBFloat16Kahan:
        return store_pairs<uint16_t>(array, base, end, values, [](float value, uint16_t& half, uint16_t& rest) {
          half = bfloat16_from_float(value);
          rest = compensation_bfloat16(value, half);
        });
      case Format::kFloat16Kahan:
        return store_pairs<uint16_t>(array, base, end, values, [](float value, uint16_t& half, uint16_t& rest) {
          half = float16_from_float(value);
          rest = compensation_float16(value, half);
        });
      case Format::kFloat16Master:
        return store_pairs<float>(array, base, end, values, [](float value, uint16_t& half, float& master) {
          half = float16_from_float(value);
          master = value;
        });
      default:
        break;
    }
  }
  store_plain(array, base, end, values);
}

// Loads a tile of a state. Its rule decides whether its codes are of squares or signed.
template <bool kIsSquared, class T>
__device__ void load_state(const TypedArray& array, int64_t base, int64_t end, T (&values)[kElementsPerThread]) {
  if constexpr (sizeof(T) == sizeof(float)) {
    switch (array.format) {
      case Format::kSigned8:
      case Format::kSquared8:
        return load_blocks<std::conditional_t<kIsSquared, SquaredCode, SignedCode>>(array, base, end, values);
      case Format::kSignedFloat8:
      case Format::kSquaredFloat8:
        return load_blocks<std::conditional_t<kIsSquared, SquaredFloat8, SignedFloat8>>(array, base, end, values);
      case Format::kSigned4:
      case Format::kSquared4:
        return load_blocks<std::conditional_t<kIsSquared, Squared4, Signed4>>(array, base, end, values);
      default:
        break;
    }
  }
  load_plain(array, base, end, values);
}

// Stores a tile of a state. All threads of the block call it for the same array.
template <bool kIsSquared, class T>
__device__ void store_state(const TypedArray& array, int64_t base, int64_t end, const T (&values)[kElementsPerThread]) {
  if constexpr (sizeof(T) == sizeof(float)) {
    switch (array.format) {
      case Format::kSigned8:
      case Format::kSquared8:
        return store_blocks<std::conditional_t<kIsSquared, SquaredCode, SignedCode>>(array, base, end, values);
      case Format::kSignedFloat8:
      case Format::kSquaredFloat8:
        return store_blocks<std::conditional_t<kIsSquared, SquaredFloat8, SignedFloat8>>(array, base, end, values);
      case Format::kSigned4:
      case Format::kSquared4:
        return store_blocks<std::conditional_t<kIsSquared, Squared4, Signed4>>(array, base, end, values);
      default:
        break;
    }
  }
  store_plain(array, base, end, values);
}

// Divides a position below size + kTileCuda by `size`, mostly without the long division.
__device__ inline int64_t whole_times(int64_t position, int64_t size) {
  return size >= kTileCuda ? position >= size : static_cast<uint32_t>(position) / static_cast<uint32_t>(size);
}

// Loads products of row and column factors for a parameter of matrices.
template <class T>
__device__ void load_factored(const TypedArray& state, int64_t matrix_rows, int64_t matrix_columns, int64_t base,
                              int64_t end, T (&values)[kElementsPerThread]) {
  const auto* rows = static_cast<const T*>(state.data);
  const auto* columns = static_cast<const T*>(state.extra);
  const int64_t row = base / matrix_columns, column = base - row * matrix_columns;
  const int64_t matrix = row / matrix_rows, row_of_matrix = row - matrix * matrix_rows;
#pragma unroll
  for (int k = 0; k < kElementsPerThread; ++k) {
    const int64_t in_tile = k * kThreads + threadIdx.x;
    if (base + in_tile >= end) continue;
    const int64_t more_rows = whole_times(column + in_tile, matrix_columns);
    const int64_t more_matrices = whole_times(row_of_matrix + more_rows, matrix_rows);
    values[k] =
        rows[row + more_rows] * columns[(matrix + more_matrices - more_rows) * matrix_columns + column + in_tile];
  }
}

}  // namespace drivetrain::formats
