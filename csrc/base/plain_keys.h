// Lists the dispatch keys of plain tensors.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>

namespace drivetrain {

// No wrapper, not sparse, no lazy conjugation or negation.
constexpr c10::DispatchKeySet kPlainKeys =
    c10::DispatchKeySet(c10::DispatchKey::Dense) | c10::autograd_dispatch_keyset_with_ADInplaceOrView |
    c10::autocast_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKeySet::RAW, c10::full_backend_mask);

inline bool has_plain_keys(const c10::TensorImpl& tensor) {
  return (tensor.key_set().raw_repr() & ~kPlainKeys.raw_repr()) == 0;
}

}  // namespace drivetrain
