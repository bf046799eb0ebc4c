// Sums values over ranks: compiled once per instruction set (DRIVETRAIN_ISA names the namespace), includes no torch
// header.
#include <cstring>

#include "ddp/transport/rank_sum.h"
#include "formats/tile_cpu.h"

namespace drivetrain::ddp::DRIVETRAIN_ISA {
namespace {

using formats::Format;
using formats::kTile;

Format format_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat64:
      return Format::kFloat64;
    case ElementType::kBFloat16:
      return Format::kBFloat16;
    case ElementType::kFloat16:
      return Format::kFloat16;
    default:
      return Format::kFloat32;
  }
}

// Rounds values to a 16-bit type, as if they were stored.
template <class T>
void round_to(Format format, T* values, int64_t count) {
  alignas(64) uint16_t stored[kTile];
  const formats::TypedArray array = {stored, format};
  if (formats::is_native<T>(array)) return;
  formats::store_tile(array, 0, count, values);
  formats::load_tile<T>(array, 0, count, values);
}

// Adds a tile of every input in the order of a binary tree. load: returns a tile of an input.
template <class T, class Load>
void add_in_tree(const SumJob& job, int64_t count, T* sum, const Load& load) {
  constexpr int kLevels = 11;
  static_assert(1 << (kLevels - 1) == kMostInTree);
  alignas(64) T memory[kLevels][kTile];
  const T* partial[kLevels];  // sums of 2^n inputs each, of falling n
  int num_partial = 0;
  for (int input = 0; input < job.num_inputs; ++input) {
    partial[num_partial] = load(input, memory[num_partial]);
    ++num_partial;
    for (int count_so_far = input + 1; count_so_far % 2 == 0; count_so_far /= 2) {
      --num_partial;
      const T* const left = partial[num_partial - 1];
      const T* const right = partial[num_partial];
      T* const both = memory[num_partial - 1];
      for (int64_t i = 0; i < count; ++i) both[i] = left[i] + right[i];
      round_to(format_of(job.type), both, count);
      partial[num_partial - 1] = both;
    }
  }
  const T scale = static_cast<T>(job.scale);
  for (int64_t i = 0; i < count; ++i) sum[i] = partial[0][i] * scale;
}

// Adds a tile of every input in the L1 cache and copies it to the outputs. A loop for each number of ranks would only
// save trips to L1, while memory bandwidth decides.
template <class T>
void sum_floats(const SumJob& job) {
  const Format format = format_of(job.type);
  const T scale = static_cast<T>(job.scale);
  alignas(64) T sum[kTile];
  alignas(64) T scratch[kTile];
  for (int64_t at = job.begin; at < job.end; at += kTile) {
    const int64_t count = job.end - at < kTile ? job.end - at : kTile;
    const auto load = [&](int input, T* into) {
      return formats::load_tile<T>({const_cast<char*>(job.inputs[input]), format}, at, count, into);
    };
    const bool in_tree = job.in_tree && job.num_inputs > 1;
    const T* first = in_tree ? sum : load(0, sum);
    if (in_tree) add_in_tree(job, count, sum, load);
    if (job.num_inputs == 1) {
      for (int64_t i = 0; i < count; ++i) sum[i] = first[i] * scale;
    }
    for (int input = 1; input < job.num_inputs && !in_tree; ++input) {
      const T* next = load(input, scratch);
      if (input + 1 < job.num_inputs) {
        for (int64_t i = 0; i < count; ++i) sum[i] = first[i] + next[i];
      } else {
        for (int64_t i = 0; i < count; ++i) sum[i] = (first[i] + next[i]) * scale;
      }
      first = sum;
    }
    const formats::TypedArray own = {job.outputs[0], format_of(job.output_type)};
    if (formats::is_native<T>(own)) {
      for (int output = 0; output < job.num_outputs; ++output) {
        std::memcpy(job.outputs[output] + at * sizeof(T), sum, count * sizeof(T));
      }
    } else {
      formats::store_tile(own, at, count, sum);
      const int64_t begin = at * sizeof(uint16_t);
      for (int output = 1; output < job.num_outputs; ++output) {
        std::memcpy(job.outputs[output] + begin, job.outputs[0] + begin, count * sizeof(uint16_t));
      }
    }
  }
}

// Unsigned, so that an overflow wraps.
template <class T>
void sum_integers(const SumJob& job) {
  alignas(64) T sum[kTile];
  for (int64_t at = job.begin; at < job.end; at += kTile) {
    const int64_t count = job.end - at < kTile ? job.end - at : kTile;
    std::memcpy(sum, job.inputs[0] + at * sizeof(T), count * sizeof(T));
    for (int input = 1; input < job.num_inputs; ++input) {
      const T* next = reinterpret_cast<const T*>(job.inputs[input]) + at;
      for (int64_t i = 0; i < count; ++i) sum[i] += next[i];
    }
    for (int output = 0; output < job.num_outputs; ++output) {
      std::memcpy(job.outputs[output] + at * sizeof(T), sum, count * sizeof(T));
    }
  }
}

}  // namespace

void sum_range(const SumJob& job) {
  switch (job.type) {
    case ElementType::kFloat32:
    case ElementType::kBFloat16:
    case ElementType::kFloat16:
      return sum_floats<float>(job);
    case ElementType::kFloat64:
      return sum_floats<double>(job);
    case ElementType::kInt32:
      return sum_integers<uint32_t>(job);
    case ElementType::kInt64:
      return sum_integers<uint64_t>(job);
  }
}

}  // namespace drivetrain::ddp::DRIVETRAIN_ISA
