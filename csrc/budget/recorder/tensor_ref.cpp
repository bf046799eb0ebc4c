// Describes, rebuilds, copies and hashes views of tensor storages; see tensor_ref.h.
#include "budget/recorder/tensor_ref.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>

#include "base/hash.h"
#include "budget/recorder/op_traits.h"

namespace drivetrain::budget {

namespace {

// Excluded while the recorder copies tensors: otherwise an active transform or mode would intercept these copies.
constexpr c10::DispatchKeySet kInterceptingKeys =
    kPythonKeys | c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                       c10::DispatchKey::FuncTorchDynamicLayerBackMode});

// Hashes bytes where they are, so that only a number is copied to the host. The hash is the sum of all words, each
// times an odd factor of its place, modulo 2^64.
uint64_t hash_on_device(const at::Tensor& bytes) {
  constexpr int64_t kWord = 8;
  constexpr int64_t kChunk = 1 << 17;  // words, of 1 MiB; bounds the memory of factors and products
  const c10::impl::ExcludeDispatchKeyGuard no_interception(kInterceptingKeys.add(kRecorderKey));
  const at::NoGradGuard no_grad;
  const auto odd = static_cast<int64_t>(kOddFactor);
  const int64_t num_words = bytes.numel() / kWord;
  // Under consecutive factors, equal differences of two words could cancel each other.
  const int64_t num_factors = std::max(std::min(num_words, kChunk), kWord);
  at::Tensor factors = at::arange(1, num_factors + 1, bytes.options().dtype(at::kLong)).mul_(odd);
  factors = factors.bitwise_xor(factors.bitwise_right_shift(29)).mul_(2).add_(1);
  at::Tensor hash = at::zeros({}, factors.options());
  const auto add = [&](const at::Tensor& words) {
    // The highest bit, such as the sign of a double, must reach lower ones. Two such differences would cancel
    // otherwise.
    const at::Tensor mixed = words.bitwise_xor(words.bitwise_right_shift(32));
    hash.mul_(odd).add_(mixed.mul(factors.narrow(0, 0, mixed.numel())).sum());
  };
  const at::Tensor words = bytes.narrow(0, 0, num_words * kWord).view(at::kLong);
  for (int64_t begin = 0; begin < num_words; begin += kChunk) {
    add(words.narrow(0, begin, std::min(kChunk, num_words - begin)));
  }
  add(bytes.narrow(0, num_words * kWord, bytes.numel() % kWord).to(at::kLong));
  return static_cast<uint64_t>(hash.item<int64_t>());
}

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  if (!tensor.defined()) return false;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return tensor.has_storage() && tensor.layout() == at::kStrided && !impl.is_python_dispatch() &&
         !impl.has_symbolic_sizes_strides() && !tensor.is_inference() && !tensor.is_quantized() &&
         !tensor.is_nested() && !tensor.is_meta() && !tensor._is_zerotensor();
}

at::Tensor alias_of(const at::Tensor& tensor) {
  // An active TorchDispatchMode would otherwise intercept the shallow copy.
  const c10::impl::ExcludeDispatchKeyGuard no_python(kPythonKeys);
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return at::Tensor(impl.shallow_copy_and_detach(impl.version_counter(), /*allow_tensor_metadata_change=*/true));
}

void describe(const at::Tensor& tensor, TensorRef& ref) {
  ref.version = tensor._version();
  ref.storage_bytes = tensor.storage().nbytes();
  ref.sizes = tensor.sizes();
  ref.strides = tensor.strides();
  ref.offset = tensor.storage_offset();
  ref.keys = tensor.key_set();
  ref.dtype = tensor.dtype();
}

at::Tensor view_of(const at::Tensor& held, const TensorRef& ref) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(held.storage()),
                                                             ref.keys, ref.dtype);
  c10::TensorImpl& impl = *view.unsafeGetTensorImpl();
  impl.set_storage_offset(ref.offset);
  impl.set_sizes_and_strides(ref.sizes, ref.strides);
  impl.set_version_counter(held.unsafeGetTensorImpl()->version_counter());
  return view;
}

at::Tensor flat_of(const at::Tensor& tensor, caffe2::TypeMeta dtype) {
  TensorRef ref;
  ref.sizes = {static_cast<int64_t>(tensor.storage().nbytes() / dtype.itemsize())};
  ref.strides = {1};
  ref.keys = tensor.key_set() - c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  ref.dtype = dtype;
  return view_of(tensor, ref);
}

at::Tensor bytes_of(const at::Tensor& tensor) { return flat_of(tensor, caffe2::TypeMeta::Make<uint8_t>()); }

uint64_t hash_of_storage(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  const auto num_bytes = static_cast<int64_t>(storage.nbytes());
  return tensor.is_cpu() ? hash_bytes(storage.data(), num_bytes) : hash_on_device(bytes_of(tensor));
}

std::optional<uint64_t> hash_of_elements(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return std::nullopt;
  if (tensor.numel() == 0) return 0;
  TensorRef ref;
  describe(tensor, ref);
  for (size_t dim = ref.sizes.size(); dim-- > 0;) {
    if (ref.strides[dim] != 0) continue;  // an expanded dimension repeats the same elements
    ref.sizes.erase(ref.sizes.begin() + static_cast<std::ptrdiff_t>(dim));
    ref.strides.erase(ref.strides.begin() + static_cast<std::ptrdiff_t>(dim));
  }
  at::Tensor elements = view_of(tensor, ref);
  if (!elements.is_non_overlapping_and_dense()) {
    const c10::impl::ExcludeDispatchKeyGuard no_interception(kInterceptingKeys);
    elements = elements.clone(at::MemoryFormat::Contiguous);
  }
  return hash_bytes(elements.const_data_ptr(), static_cast<int64_t>(elements.nbytes()));
}

at::Tensor copy_of(const at::Tensor& tensor) {
  at::Tensor bytes = bytes_of(tensor);
  at::Tensor copy = at::empty_strided(bytes.sizes(), bytes.strides(), bytes.options());
  copy.copy_(bytes);
  TensorRef ref;
  describe(tensor, ref);
  return view_of(copy, ref);
}

bool have_equal_storages(const at::Tensor& one, const at::Tensor& other) {
  const size_t num_bytes = one.storage().nbytes();
  if (num_bytes != other.storage().nbytes()) return false;
  if (!one.is_cpu() || !other.is_cpu()) return at::equal(bytes_of(one), bytes_of(other));
  return num_bytes == 0 || std::memcmp(one.storage().data(), other.storage().data(), num_bytes) == 0;
}

bool is_all_zero(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return !bytes_of(tensor).any().item<bool>();
  const auto* bytes = static_cast<const char*>(tensor.storage().data());
  const size_t num_bytes = tensor.storage().nbytes();
  // All bytes are zero if the first is zero and each equals the one before; most tensors fail the first test.
  return num_bytes == 0 || (bytes[0] == 0 && std::memcmp(bytes, bytes + 1, num_bytes - 1) == 0);
}

bool covers_its_storage(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && tensor.nbytes() == tensor.storage().nbytes();
}

bool is_freed(const TensorRef& ref) {
  return is_plain(ref.direct) && ref.direct.storage().nbytes() < ref.storage_bytes;
}
bool is_written(const TensorRef& ref) { return is_plain(ref.direct) && ref.direct._version() != ref.version; }

}  // namespace drivetrain::budget
