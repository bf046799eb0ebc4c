// Tests conversions between storage formats: the CUDA kernel (on cuda_on_cpu/) must write the same bytes as the CPU
// code.
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/check_cuda.h"
#include "formats/convert.h"
#include "native_tests.h"
#include "step_blocks.h"

namespace drivetrain {
namespace {

constexpr Format kSources[] = {Format::kFloat32,
                               Format::kBFloat16,
                               Format::kFloat16,
                               Format::kBFloat16Remainder16,
                               Format::kBFloat16Remainder8,
                               Format::kBFloat16Kahan,
                               Format::kFloat16Kahan,
                               Format::kFloat16Master,
                               Format::kSigned8,
                               Format::kSquared8,
                               Format::kSignedFloat8,
                               Format::kSquaredFloat8,
                               Format::kSigned4,
                               Format::kSquared4};
const std::vector<int64_t> kSizes = {
    0, 1, 255, 256, 257, 0, formats::kConversionChunk, formats::kConversionChunk + 1, 511, 1283, 9000, 0};

// Returns values of many magnitudes in that format, with some infinities and NaNs.
Block values_in(Format format, int64_t numel) {
  Block block(format, numel, 3);
  std::vector<float> values(numel);
  for (int64_t i = 0; i < numel; ++i) {
    const auto random = static_cast<uint32_t>(formats::mixed(i));
    values[i] = std::ldexp(static_cast<float>(random % 2001) - 1000, static_cast<int>(random >> 16) % 12 - 10);
    if (format == Format::kSquared8 || format == Format::kSquaredFloat8 || format == Format::kSquared4)
      values[i] = std::fabs(values[i]);
    if (i % 700 == 5) values[i] = INFINITY;
    if (i % 900 == 7) values[i] = NAN;
  }
  formats::baseline::convert_cpu({values.data(), Format::kFloat32}, block.stream(), numel, /*key=*/7);
  return block;
}

// Converts all sizes in one launch. With `fill`, there is no source and the target gets that value.
void test_pair(Format from, Format to, const double* fill) {
  std::vector<Block> sources, expected, found;
  std::vector<formats::Conversion> conversions;
  int64_t num_chunks = 0;
  for (int64_t numel : kSizes) {
    sources.push_back(fill ? Block(Format::kFloat32, numel, 3) : values_in(from, numel));
    expected.emplace_back(to, numel, 5);
    found.emplace_back(to, numel, 5);
    formats::TypedArray source = sources.back().stream();
    std::vector<float> filled(numel, fill ? static_cast<float>(*fill) : 0);
    if (fill) source = {filled.data(), Format::kFloat32};
    formats::baseline::convert_cpu(source, expected.back().stream(), numel, /*key=*/0);
    if (fill) source = {};
    conversions.push_back({source, found.back().stream(), numel, num_chunks, fill ? *fill : 0});
    num_chunks += formats::num_conversion_chunks(numel);
  }
  cuda_on_cpu::num_launches = 0;
  formats::convert_cuda(conversions.data(), static_cast<int32_t>(conversions.size()), num_chunks, nullptr);
  expect(cuda_on_cpu::num_launches == 1, "one launch converts all tensors");
  const std::string what = text("CUDA conversion from ", static_cast<int>(from), " to ", static_cast<int>(to));
  expect(bytes_of({found}) == bytes_of({expected}), text(what, ": other bytes than the CPU"));
}

// Creates the states of a whole model: zeroed codes with their scales, and counters.
void test_many() {
  constexpr int kTensors = 148;
  std::vector<Block> blocks;
  std::vector<float> counters(kTensors, 5);
  std::vector<formats::Conversion> conversions;
  int64_t num_chunks = 0;
  const auto add = [&](formats::TypedArray to, int64_t numel) {
    conversions.push_back({{}, to, numel, num_chunks, 0});
    num_chunks += formats::num_conversion_chunks(numel);
  };
  for (int i = 0; i < kTensors; ++i) blocks.emplace_back(Format::kSquared8, i * 37 % 700, i);
  for (int i = 0; i < kTensors; ++i) {
    add(blocks[i].stream(), static_cast<int64_t>(blocks[i].bytes.size()));
    add({&counters[i], Format::kFloat32}, 1);
  }
  cuda_on_cpu::num_launches = 0;
  formats::convert_cuda(conversions.data(), static_cast<int32_t>(conversions.size()), num_chunks, nullptr);
  expect(cuda_on_cpu::num_launches == 1, "one launch makes the states of 148 tensors");
  const std::vector<unsigned char> bytes = bytes_of({blocks});
  expect(bytes == std::vector<unsigned char>(bytes.size(), 0), "zeroed codes and scales are zero bytes");
  expect(counters == std::vector<float>(kTensors, 0), "counters begin at zero");
}

// Converts a parameter in place, with its extra bytes in a separate tensor.
void test_in_place(Format from, Format to) {
  const int64_t numel = 4500;
  Block expected = values_in(from, numel), found = values_in(from, numel);
  Block expected_extra(to, numel, 0), found_extra(to, numel, 0);
  const auto split = [](Block& param, Block& extra) {
    return formats::TypedArray{param.bytes.data(), extra.format, extra.extra.data()};
  };
  formats::baseline::convert_cpu(expected.stream(), split(expected, expected_extra), numel, /*key=*/0);
  const formats::Conversion conversion = {found.stream(), split(found, found_extra), numel, 0, 0};
  formats::convert_cuda(&conversion, 1, formats::num_conversion_chunks(numel), nullptr);
  expect(found.bytes == expected.bytes && found_extra.extra == expected_extra.extra,
         text("CUDA conversion in place, ", static_cast<int>(from), " to ", static_cast<int>(to), ": other bytes"));
}

}  // namespace

void test_conversions() {
  expect(describe_cuda(cudaErrorInsufficientDriver, "a launch").find("run `drivetrain doctor`") != std::string::npos,
         "the error of a driver that is too old says what to do");
  const double zero = 0, some = 0.1;
  for (const int seed : cuda_on_cpu::kSeeds) {
    cuda_on_cpu::set_seed(seed);
    for (Format to : kSources) {
      for (Format from : kSources) test_pair(from, to, nullptr);
      test_pair(Format::kFloat32, to, &zero);
      test_pair(Format::kFloat32, to, &some);
    }
    for (Format to : {Format::kBFloat16Remainder16, Format::kBFloat16Remainder8, Format::kBFloat16Kahan}) {
      for (Format from : {Format::kBFloat16, Format::kBFloat16Remainder16, Format::kBFloat16Kahan}) {
        test_in_place(from, to);
      }
    }
    test_in_place(Format::kFloat16, Format::kFloat16Master);
    test_many();
    std::vector<double> doubles(5000, -1);
    const formats::Conversion filled = {{}, {doubles.data(), Format::kFloat64}, 5000, 0, 0.1};
    formats::convert_cuda(&filled, 1, formats::num_conversion_chunks(5000), nullptr);
    expect(doubles == std::vector<double>(5000, 0.1), "a float64 state is filled in double precision");
  }
}

}  // namespace drivetrain
