// Converts values between storage formats on CUDA; see convert.h. Includes no torch header.
#include "base/block_cuda.cuh"
#include "base/launch_cuda.h"
#include "formats/convert.h"
#include "formats/float8.h"
#include "formats/tile_cuda.cuh"

namespace drivetrain::formats {
namespace {

constexpr int kPerLane = kBlock / kWarp;  // A warp converts a block of 8-bit codes, or two of 4-bit codes.

// Calls visit(k, i) for this lane's elements of the warp's block; neighboring lanes have neighboring elements.
template <class Visit>
__device__ void for_each_element(int64_t begin, int64_t end, Visit visit) {
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int64_t i = begin + k * kWarp + threadIdx.x % kWarp;
    if (i < end) visit(k, i);
  }
}

// Loads elements; value_of(data, extra, i) returns element i.
template <class Value, class Extra = void, class ValueOf>
__device__ void load_as(const TypedArray& array, int64_t begin, int64_t end, float (&values)[kPerLane],
                        ValueOf value_of) {
  const auto* data = static_cast<const Value*>(array.data);
  const auto* extra = static_cast<const Extra*>(array.extra);
  for_each_element(begin, end, [&](int k, int64_t i) { values[k] = value_of(data, extra, i); });
}

template <class Kind>
__device__ void load_codes(const TypedArray& array, int64_t begin, int64_t end, float (&values)[kPerLane]) {
  load_as<void, float>(array, begin, end, values, [](auto* data, auto* extra, int64_t i) {
    return decode_any<Kind>(code_at<Kind>(data, i), extra[i / Kind::kPerScale]);
  });
}

__device__ void load(const TypedArray& array, int64_t begin, int64_t end, float (&values)[kPerLane]) {
  switch (array.format) {
    case Format::kBFloat16:
    case Format::kBFloat16Stochastic:
      return load_as<uint16_t>(array, begin, end, values,
                               [](auto* data, auto*, int64_t i) { return float_from_bfloat16(data[i]); });
    case Format::kFloat16:
    case Format::kFloat16Stochastic:
      return load_as<uint16_t>(array, begin, end, values,
                               [](auto* data, auto*, int64_t i) { return float_from_float16(data[i]); });
    case Format::kBFloat16Remainder16:
      return load_as<uint16_t, int16_t>(array, begin, end, values,
                                        [](auto* data, auto* extra, int64_t i) { return join(data[i], extra[i]); });
    case Format::kBFloat16Remainder8:
      return load_as<uint16_t, int8_t>(array, begin, end, values,
                                       [](auto* data, auto* extra, int64_t i) { return join8(data[i], extra[i]); });
    case Format::kBFloat16Kahan:
      return load_as<uint16_t, uint16_t>(array, begin, end, values, [](auto* data, auto* extra, int64_t i) {
        return compensated_bfloat16(data[i], extra[i]);
      });
    case Format::kFloat16Kahan:
      return load_as<uint16_t, uint16_t>(array, begin, end, values, [](auto* data, auto* extra, int64_t i) {
        return compensated_float16(data[i], extra[i]);
      });
    case Format::kFloat16Master:
      return load_as<uint16_t, float>(array, begin, end, values,
                                      [](auto* data, auto* extra, int64_t i) { return master_of(extra[i], data[i]); });
    case Format::kSigned8:
      return load_codes<SignedCode>(array, begin, end, values);
    case Format::kSquared8:
      return load_codes<SquaredCode>(array, begin, end, values);
    case Format::kSignedFloat8:
      return load_codes<SignedFloat8>(array, begin, end, values);
    case Format::kSquaredFloat8:
      return load_codes<SquaredFloat8>(array, begin, end, values);
    case Format::kSigned4:
      return load_codes<Signed4>(array, begin, end, values);
    case Format::kSquared4:
      return load_codes<Squared4>(array, begin, end, values);
    default:
      return load_as<float>(array, begin, end, values, [](auto* data, auto*, int64_t i) { return data[i]; });
  }
}

// Stores elements; write(data, extra, i, value) stores element i.
template <class Value, class Extra = void, class Write>
__device__ void store_as(const TypedArray& array, int64_t begin, int64_t end, const float (&values)[kPerLane],
                         Write write) {
  auto* data = static_cast<Value*>(array.data);
  auto* extra = static_cast<Extra*>(array.extra);
  for_each_element(begin, end, [&](int k, int64_t i) { write(data, extra, i, values[k]); });
}

// Stores a warp's values, a block or two. All lanes of the warp call it.
template <class Kind>
__device__ void store_block(const TypedArray& array, int64_t begin, int64_t end, const float (&values)[kPerLane]) {
  constexpr int kPerScale = Kind::kPerScale / kWarp;  // of a lane's values
#pragma unroll
  for (int first = 0; first < kPerLane; first += kPerScale) {
    const int64_t begin_of_block = begin + first * kWarp;
    if (begin_of_block >= end) break;
    float prepared[kPerScale] = {};
    uint32_t largest = 0, largest_finite = 0;
#pragma unroll
    for (int k = 0; k < kPerScale; ++k) {
      if (begin_of_block + k * kWarp + threadIdx.x % kWarp < end) prepared[k] = Kind::prepare(values[first + k]);
      const uint32_t magnitude = magnitude_bits(prepared[k]), finite = finite_magnitude(prepared[k]);
      largest = magnitude > largest ? magnitude : largest;
      largest_finite = finite > largest_finite ? finite : largest_finite;
    }
    const bool is_special = __reduce_max_sync(kAllLanes, largest) >= kInfinity;
    const float of_finite = Kind::scale_of(__reduce_max_sync(kAllLanes, largest_finite));
    const float scale = is_special ? with_special(scale_with_room<Kind>(of_finite)) : of_finite;
    const float factor = Kind::factor_of(fabsf(scale));
#pragma unroll
    for (int k = 0; k < kPerScale; ++k) {
      const int64_t i = begin_of_block + k * kWarp + threadIdx.x % kWarp;
      store_code<Kind>(array, i, end, encode_any<Kind>(prepared[k], factor));
    }
    if (threadIdx.x % kWarp == 0) static_cast<float*>(array.extra)[begin_of_block / Kind::kPerScale] = scale;
  }
}

__device__ void store(const TypedArray& array, int64_t begin, int64_t end, const float (&values)[kPerLane]) {
  switch (array.format) {
    case Format::kBFloat16:
      return store_as<uint16_t>(array, begin, end, values, [](auto* data, auto*, int64_t i, float value) {
        data[i] = bfloat16_from_float(value);
      });
    case Format::kFloat16:
      return store_as<uint16_t>(array, begin, end, values,
                                [](auto* data, auto*, int64_t i, float value) { data[i] = float16_from_float(value); });
    case Format::kBFloat16Remainder16:
      return store_as<uint16_t, int16_t>(
          array, begin, end, values,
          [](auto* data, auto* extra, int64_t i, float value) { split_into(value, data[i], extra[i]); });
    case Format::kBFloat16Remainder8:
      return store_as<uint16_t, int8_t>(array, begin, end, values, [](auto* data, auto* extra, int64_t i, float value) {
        split_into(value, data[i], extra[i]);
      });
    case Format::kBFloat16Kahan:
      return store_as<uint16_t, uint16_t>(array, begin, end, values,
                                          [](auto* data, auto* extra, int64_t i, float value) {
                                            data[i] = bfloat16_from_float(value);
                                            extra[i] = compensation_bfloat16(value, data[i]);
                                          });
    case Format::kFloat16Kahan:
      return store_as<uint16_t, uint16_t>(array, begin, end, values,
                                          [](auto* data, auto* extra, int64_t i, float value) {
                                            data[i] = float16_from_float(value);
                                            extra[i] = compensation_float16(value, data[i]);
                                          });
    case Format::kFloat16Master:
      return store_as<uint16_t, float>(array, begin, end, values, [](auto* data, auto* extra, int64_t i, float value) {
        data[i] = float16_from_float(value);
        extra[i] = value;
      });
    case Format::kSigned8:
      return store_block<SignedCode>(array, begin, end, values);
    case Format::kSquared8:
      return store_block<SquaredCode>(array, begin, end, values);
    case Format::kSignedFloat8:
      return store_block<SignedFloat8>(array, begin, end, values);
    case Format::kSquaredFloat8:
      return store_block<SquaredFloat8>(array, begin, end, values);
    case Format::kSigned4:
      return store_block<Signed4>(array, begin, end, values);
    case Format::kSquared4:
      return store_block<Squared4>(array, begin, end, values);
    default:
      return store_as<float>(array, begin, end, values,
                             [](auto* data, auto*, int64_t i, float value) { data[i] = value; });
  }
}

// Returns the conversion of a chunk: the last one that begins at or before it, because empty ones begin there too.
__device__ int32_t conversion_of(const Conversion* conversions, int32_t count, int64_t chunk) {
  int32_t low = 0, high = count;
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    (conversions[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return low;
}

// Converts one chunk per block of threads; each warp takes one block of values with a scale at a time.
__global__ void __launch_bounds__(kThreads) convert(const Conversion* conversions, int32_t count) {
  const int64_t chunk = blockIdx.x;
  const Conversion job = conversions[conversion_of(conversions, count, chunk)];
  const int64_t first = (chunk - job.first_chunk) * kConversionChunk;
  const int64_t last = job.numel < first + kConversionChunk ? job.numel : first + kConversionChunk;
  for (int64_t begin = first + threadIdx.x / kWarp * kBlock; begin < last; begin += kThreads / kWarp * kBlock) {
    const int64_t end = last < begin + kBlock ? last : begin + kBlock;
    float values[kPerLane] = {};
    if (job.from.data != nullptr) {
      load(job.from, begin, end, values);
    } else if (job.to.format == Format::kFloat64) {
      auto* data = static_cast<double*>(job.to.data);
      for_each_element(begin, end, [&](int, int64_t i) { data[i] = job.fill; });
      continue;
    } else {
      for (float& value : values) value = static_cast<float>(job.fill);
    }
    store(job.to, begin, end, values);
  }
}

}  // namespace

void convert_cuda(const Conversion* conversions, int32_t count, int64_t num_chunks, void* stream) {
  if (num_chunks == 0) return;
  launch_cuda("launching the conversion of the optimizer's states", convert, num_chunks, kThreads, stream, conversions,
              count);
}

}  // namespace drivetrain::formats
