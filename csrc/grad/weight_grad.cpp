// Computes the products of weight gradients, by torch's own functions where it has them. On the CPU, bfloat16 products
// are summed in float32 over block products, which oneDNN compiles for the processor and libtorch exports.
#include "grad/weight_grad.h"

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "base/parallel.h"
#include "grad/add_micro_grad.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace drivetrain::grad {
namespace {

// Blocks of the product, and how many tokens are summed at a time: what fits the caches of every processor that has
// the instructions.
constexpr int64_t kRows = 64, kColumns = 64, kTokens = 512;
// Sums of fewer tokens are filled up with zeros: every length has code of its own.
constexpr int64_t kTokensStep = 32;
// Elements of a stripe of rows that is summed aside, for gradients with a remainder.
constexpr int64_t kAside = 1 << 17;

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Computes c[rows][columns] = a * b, or += if `adds`. a: [rows][tokens]; b: [tokens / 2][kColumns][2]; c's rows are
// ld_c apart.
void multiply_block(int64_t rows, int64_t columns, int64_t tokens, const at::BFloat16* a, const at::BFloat16* b,
                    float* c, int64_t ld_c, bool adds) {
  at::native::cpublas::brgemm(rows, columns, tokens, tokens, kColumns, ld_c, adds, a, b, c, /*is_vnni=*/true);
}

// Sets out[column][row] = in[row][column], 8 by 8.
void transpose_8x8(const at::BFloat16* in, int64_t ld_in, at::BFloat16* out, int64_t ld_out) {
#if defined(__SSE2__)
  __m128i pairs[8];  // of rows: of the first and second, the left and the right half of their columns; and so on
  for (int i = 0; i < 4; ++i) {
    const __m128i upper = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 2 * i * ld_in));
    const __m128i lower = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + (2 * i + 1) * ld_in));
    pairs[i] = _mm_unpacklo_epi16(upper, lower);
    pairs[4 + i] = _mm_unpackhi_epi16(upper, lower);
  }
  for (int half = 0; half < 2; ++half) {
    const __m128i* of = pairs + 4 * half;
    const __m128i first[] = {_mm_unpacklo_epi32(of[0], of[1]), _mm_unpackhi_epi32(of[0], of[1])};
    const __m128i last[] = {_mm_unpacklo_epi32(of[2], of[3]), _mm_unpackhi_epi32(of[2], of[3])};
    for (int i = 0; i < 2; ++i) {
      at::BFloat16* to = out + (4 * half + 2 * i) * ld_out;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi64(first[i], last[i]));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + ld_out), _mm_unpackhi_epi64(first[i], last[i]));
    }
  }
#else
  for (int row = 0; row < 8; ++row) {
    for (int column = 0; column < 8; ++column) out[column * ld_out + row] = in[row * ld_in + column];
  }
#endif
}

// Fills to[column][token], `padded` tokens long, from a [tokens][.] matrix whose rows are ld apart.
void pack_rows(const at::BFloat16* from, int64_t ld, int64_t tokens, int64_t columns, at::BFloat16* to,
               int64_t padded) {
  const int64_t whole_tokens = tokens / 8 * 8, whole_columns = columns / 8 * 8;
  for (int64_t m = 0; m < whole_columns; m += 8) {
    for (int64_t k = 0; k < whole_tokens; k += 8) transpose_8x8(from + k * ld + m, ld, to + m * padded + k, padded);
  }
  for (int64_t m = 0; m < columns; ++m) {
    at::BFloat16* row = to + m * padded;
    for (int64_t k = m < whole_columns ? whole_tokens : 0; k < tokens; ++k) row[k] = from[k * ld + m];
    std::fill(row + tokens, row + padded, at::BFloat16(0));
  }
}

// Fills to[token / 2][kColumns][token % 2], `padded` tokens long, as the processor's instructions want them.
void pack_columns(const at::BFloat16* from, int64_t ld, int64_t tokens, int64_t columns, at::BFloat16* to,
                  int64_t padded) {
  static constexpr std::array<at::BFloat16, kColumns> kZeros = {};
  for (int64_t k = 0; k < padded; k += 2) {
    const at::BFloat16* even = k < tokens ? from + k * ld : kZeros.data();
    const at::BFloat16* odd = k + 1 < tokens ? from + (k + 1) * ld : kZeros.data();
    at::BFloat16* pairs = to + k * kColumns;
    for (int64_t n = 0; n < columns; ++n) {
      pairs[2 * n] = even[n];
      pairs[2 * n + 1] = odd[n];
    }
  }
}

// Describes the addition of a product, summed in a buffer of its own, to the rows of `grad` from `row` on.
Addition addition_of(const at::Tensor& grad, const at::Tensor& residual, int64_t row, formats::TypedArray micro,
                     bool starts) {
  const int64_t offset = row * grad.size(1);
  return {{grad.data_ptr<at::BFloat16>() + offset, formats::Format::kBFloat16Remainder8,
           residual.data_ptr<int8_t>() + offset},
          micro,
          starts};
}

void add_in_blocks(const WeightGrad& weight_grad, const at::Tensor& grad, const at::Tensor& residual, bool starts) {
  const at::Tensor &left = weight_grad.left, &right = weight_grad.right;
  const int64_t tokens = left.size(0), rows = left.size(1), columns = right.size(1);
  const int64_t num_columns = (columns + kColumns - 1) / kColumns;
  // A stripe that is summed in a buffer of its own has fewer rows.
  const int64_t stripe = residual.defined() ? std::clamp<int64_t>(kAside / columns, 1, kRows) : kRows;
  const int64_t num_stripes = (rows + stripe - 1) / stripe;
  const int64_t most = round_up(std::min(tokens, kTokens), kTokensStep);
  const at::Tensor packed = at::empty({num_columns * kColumns * most}, right.options());
  auto* b = packed.data_ptr<at::BFloat16>();
  const auto accumulate_cpu = for_chosen_isa(DT_BY_ISA(grad, accumulate_cpu));
  for (int64_t token = 0; token < tokens; token += kTokens, starts = false) {
    const int64_t count = std::min(kTokens, tokens - token), padded = round_up(count, kTokensStep);
    const auto* from_left = left.const_data_ptr<at::BFloat16>() + token * rows;
    const auto* from_right = right.const_data_ptr<at::BFloat16>() + token * columns;
    parallel_for(0, num_columns, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin * kColumns; n < std::min(end * kColumns, columns); n += kColumns) {
        pack_columns(from_right + n, columns, count, std::min(kColumns, columns - n), b + n * padded, padded);
      }
    });
    parallel_for(0, num_stripes, 1, [&](int64_t begin, int64_t end) {
      std::vector<at::BFloat16> a(stripe * padded);
      std::vector<float> aside(residual.defined() ? stripe * columns : 0);
      for (int64_t m = begin * stripe; m < std::min(end * stripe, rows); m += stripe) {
        const int64_t height = std::min(stripe, rows - m);
        pack_rows(from_left + m, rows, count, height, a.data(), padded);
        float* to = residual.defined() ? aside.data() : grad.data_ptr<float>() + m * columns;
        for (int64_t n = 0; n < columns; n += kColumns) {
          multiply_block(height, std::min(kColumns, columns - n), padded, a.data(), b + n * padded, to + n, columns,
                         /*adds=*/!residual.defined() && !starts);
        }
        if (!residual.defined()) continue;
        const Addition addition = addition_of(grad, residual, m, {to, formats::Format::kFloat32}, starts);
        accumulate_cpu(addition, 0, height * columns);
      }
      at::native::cpublas::brgemm_release();
    });
  }
}

bool is_16_bit(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

}  // namespace

// Multiplies a small block, because libtorch throws on processors without such products.
bool has_block_products() {
  static const bool found = [] {
    std::array<at::BFloat16, kTokensStep> a = {};
    std::array<at::BFloat16, kTokensStep * kColumns> b = {};
    std::array<float, kColumns> c = {};
    try {
      multiply_block(1, kColumns, kTokensStep, a.data(), b.data(), c.data(), kColumns, false);
    } catch (const c10::Error&) {
      return false;
    }
    at::native::cpublas::brgemm_release();
    return true;
  }();
  return found && at::globalContext().userEnabledMkldnn();
}

bool can_add(const WeightGrad& weight_grad, at::ScalarType grad_dtype, bool has_residual) {
  const at::ScalarType dtype = weight_grad.left.scalar_type();
  if (!has_residual && grad_dtype == dtype) return true;
  if (!is_16_bit(dtype) || (!has_residual && grad_dtype != at::kFloat)) return false;
  if (weight_grad.is_on_cpu()) return dtype == at::kBFloat16 && has_block_products();
  // No product of CUDA's libraries adds to values with a remainder: it would have to go through memory in any case.
  // There it takes 4 + 4 bytes per element in float32, or 2 + 2 in 16 bits. Autograd's own product and accumulation
  // take the latter, in as many launches. Stripes of rows make neither less, and those that begin at an address aligned
  // to 2 bytes alone keep the libraries from their fast kernels.
  return !has_residual;
}

void add(const WeightGrad& weight_grad, const at::Tensor& grad, const at::Tensor& residual, bool starts) {
  DT_INVARIANT(can_add(weight_grad, grad.scalar_type(), residual.defined()) && grad.is_contiguous());
  if (grad.numel() == 0) return;
  at::Tensor to = grad;
  const at::Tensor left = weight_grad.left.t();
  const bool is_plain = !residual.defined() && grad.scalar_type() == left.scalar_type();
  if (weight_grad.left.size(0) == 0) {
    if (!starts) return;
    to.zero_();
    if (residual.defined()) residual.zero_();
  } else if (is_plain && starts) {
    at::mm_out(to, left, weight_grad.right);
  } else if (is_plain) {
    at::addmm_out(to, to, left, weight_grad.right);
  } else if (weight_grad.is_on_cpu()) {
    add_in_blocks(weight_grad, grad, residual, starts);
    grad.unsafeGetTensorImpl()->bump_version();  // as torch's own products do
  } else if (starts) {
    at::mm_out(to, left, weight_grad.right, at::kFloat);
  } else {
    at::addmm_out(to, to, left, weight_grad.right, at::kFloat);
  }
}

}  // namespace drivetrain::grad
