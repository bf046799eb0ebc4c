// Implements the Newton-Schulz iteration; see newton_schulz.h.
#include "optim/newton_schulz.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>

#include <array>
#include <cmath>
#include <iterator>
#include <utility>

#include "grad/norm.h"

namespace drivetrain::optim {
namespace {

// Returns each matrix's norm, in bfloat16 as in torch. On the CPU the order of the sum does not depend on the number of
// threads.
at::Tensor norms_of(const at::Tensor& matrices) {
  if (!matrices.is_cpu()) return at::linalg_vector_norm(matrices, 2, {1, 2}, /*keepdim=*/true);
  at::Tensor norms = at::empty({matrices.size(0), 1, 1}, at::kFloat);
  const int64_t numel = matrices.size(1) * matrices.size(2);
  for (int64_t i = 0; i < matrices.size(0); ++i) {
    const TypedArray values = {static_cast<uint16_t*>(matrices.data_ptr()) + i * numel, Format::kBFloat16};
    norms.data_ptr<float>()[i] = static_cast<float>(std::sqrt(grad::sum_of_squares({{values, numel}})));
  }
  return norms.to(at::kBFloat16);
}

// Returns the dtype of matrix products. Where oneDNN multiplies no bfloat16 matrices on the CPU, torch's own loop takes
// 30 times as long as a product in float32. Rounded to bfloat16, both are sums in float32 and differ in few last bits.
at::ScalarType product_dtype(const at::Tensor& matrices) {
  if (!matrices.is_cpu()) return at::kBFloat16;
  static const bool has_bfloat16 = [] {
    const auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_bf16_supported", ""});
    return found && found->typed<bool()>().call();
  }();
  return has_bfloat16 ? at::kBFloat16 : at::kFloat;
}

// Returns beta * added + alpha * left * right, where the product is symmetric. `added` may be undefined.
// On the CPU, large products of bfloat16 matrices are computed in blocks up to the diagonal, and mirrored. That takes
// 10/16 of the multiplications, and has the same bits. In float32 the bits of a block depend on its shape, on some
// CPUs.
at::Tensor symmetric_product(const at::Tensor& left, const at::Tensor& right, const at::Tensor& added = {},
                             double beta = 0, double alpha = 1) {
  constexpr int64_t kLeast = 512, kBlocks = 4;  // smaller products are faster as a whole
  const int64_t size = left.size(1);
  if (!left.is_cpu() || size < kLeast || left.scalar_type() != at::kBFloat16) {
    return added.defined() ? at::baddbmm(added, left, right, beta, alpha) : at::bmm(left, right);
  }
  const at::Tensor product = at::empty({left.size(0), size, size}, left.options());
  for (int64_t block = 0; block < kBlocks; ++block) {
    const int64_t begin = size * block / kBlocks, end = size * (block + 1) / kBlocks;
    const auto part = [&](const at::Tensor& of) { return of.narrow(1, begin, end - begin).narrow(2, 0, end); };
    const at::Tensor rows = left.narrow(1, begin, end - begin), columns = right.narrow(2, 0, end), to = part(product);
    for (int64_t i = 0; i < left.size(0); ++i) {
      at::Tensor one = to[i];
      added.defined() ? at::addmm_out(one, part(added)[i], rows[i], columns[i], beta, alpha)
                      : at::mm_out(one, rows[i], columns[i]);
    }
    product.narrow(1, 0, begin).narrow(2, begin, end - begin).copy_(to.narrow(2, 0, begin).transpose(1, 2));
  }
  return product;
}

// Returns the coefficients of iteration i. Polar Express has the best ones for each iteration in turn, for singular
// values from 0.001 to 1 (Amsel et al. 2025, algorithm 1). Like the norm, they leave room for rounding.
constexpr double kSafety = 1.01;
std::array<double, 3> coefficients_of(const MuonArgs& args, int i) {
  if (args.polar_express == 0) return {args.coefficients[0], args.coefficients[1], args.coefficients[2]};
  constexpr double kBest[][3] = {{8.28721201814563, -23.595886519098837, 17.300387312530933},
                                 {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
                                 {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
                                 {3.3184196573706015, -2.488488024314874, 0.51004894012372},
                                 {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
                                 {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
                                 {1.8750014808534479, -1.2500016453999487, 0.3750001645474248}};
  if (i >= static_cast<int>(std::size(kBest))) return {1.875, -1.25, 0.375};
  return {kBest[i][0] / kSafety, kBest[i][1] / std::pow(kSafety, 3), kBest[i][2] / std::pow(kSafety, 5)};
}

}  // namespace

void orthogonalize(at::Tensor matrices, at::Tensor other, const MuonArgs& args) {
  const bool is_tall = matrices.size(1) > matrices.size(2);
  const at::ScalarType dtype = product_dtype(matrices);
  at::Tensor norms = norms_of(matrices);
  if (args.polar_express != 0) norms.mul_(kSafety);
  matrices.div_(norms.clamp_min_(args.eps));
  for (int i = 0; i < static_cast<int>(args.iterations); ++i) {
    const auto [a, b, c] = coefficients_of(args, i);
    const at::Tensor factor = matrices.to(dtype), transposed = factor.transpose(1, 2);
    const at::Tensor product = is_tall ? symmetric_product(transposed, factor) : symmetric_product(factor, transposed);
    const at::Tensor gram = product.to(at::kBFloat16).to(dtype);
    // Skip the last product if c is 0. With alpha = 0 on the CPU, torch 2.13's baddbmm of bfloat16 matrices of some
    // sizes is wrong by a factor.
    const at::Tensor sum = c == 0 ? gram.mul(b) : symmetric_product(gram, gram, gram, /*beta=*/b, /*alpha=*/c);
    const at::Tensor polynomial = sum.to(at::kBFloat16).to(dtype);
    const at::Tensor &left = is_tall ? factor : polynomial, &right = is_tall ? polynomial : factor;
    if (dtype == at::kBFloat16) {
      at::baddbmm_out(other, factor, left, right, /*beta=*/a);
    } else {
      other.copy_(at::baddbmm(factor, left, right, /*beta=*/a));
    }
    std::swap(matrices, other);
  }
}

}  // namespace drivetrain::optim
