// Describes, rebuilds, copies and hashes views of tensor storages; see tensor_ref.h.
#include "budget/recorder/tensor_ref.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>

#include "base/hash.h"

namespace drivetrain::budget {

namespace {

// Excluded while the recorder copies tensors: otherwise an active transform or mode would intercept these copies.
constexpr c10::DispatchKeySet kInterceptingKeys =
    kPythonKeys | c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                       c10::DispatchKey::FuncTorchDynamicLayerBackMode});

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
  if (tensor.is_cpu()) return hash_bytes(storage.data(), num_bytes);
  const c10::impl::ExcludeDispatchKeyGuard no_interception(kInterceptingKeys);
  return hash_bytes(bytes_of(tensor).cpu().const_data_ptr(), num_bytes);
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
