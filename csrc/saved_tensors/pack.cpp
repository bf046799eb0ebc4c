// Packs and unpacks tensors on all threads or on the current stream; see pack.h.
#include "saved_tensors/pack.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "base/current_stream.h"
#include "base/parallel.h"
#include "base/torch_text.h"
#include "formats/convert.h"
#include "formats/storage_torch.h"
#include "saved_tensors/bits.h"
#include "saved_tensors/pack_cuda.h"
#include "saved_tensors/saved_tensors.h"

namespace py = pybind11;

namespace drivetrain::saved_tensors {
namespace {

using formats::Format;
using formats::TypedArray;

constexpr int64_t kPiece = 1 << 14;  // elements; a multiple of both block sizes
constexpr int64_t kGrain = 4;        // pieces per task of a thread, at least
static_assert(kPiece % formats::kBlock == 0 && kPiece % kBitsBlock == 0);

int64_t num_pieces(int64_t numel) { return (numel + kPiece - 1) / kPiece; }
int64_t num_blocks(int64_t numel) { return (numel + formats::kBlock - 1) / formats::kBlock; }

at::Tensor empty_bytes(int64_t size, c10::Device device) {
  return at::empty({size}, at::TensorOptions(at::kByte).device(device));
}

// ---- Bits.

// Shares the two values among threads while they find them.
class SharedValues {
 public:
  explicit SharedValues(uint64_t first) : values_{{first, first}} {}

  TwoValues get() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return values_;
  }

  // Returns false if the second value differs from the one that another thread found.
  bool merge(const TwoValues& found) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!values_.has_second()) values_ = found;
    return !found.has_second() || found.bits[1] == values_.bits[1];
  }

 private:
  std::mutex mutex_;
  TwoValues values_;
};

// Returns the bytes of an element as an integer, padded with zeros.
uint64_t element_bits(const void* element, size_t size) {
  uint64_t bits = 0;
  std::memcpy(&bits, element, size);
  return bits;
}

// Returns two values of `size` bytes each as Packed::extra.
at::Tensor extra_of(const TwoValues& values, int size) {
  at::Tensor extra = empty_bytes(2 * size, at::kCPU);
  auto* bytes = static_cast<char*>(extra.data_ptr());
  for (int i = 0; i < 2; ++i) std::memcpy(bytes + i * size, &values.bits[i], size);
  return extra;
}

std::optional<Packed> pack_bits_cuda(const at::Tensor& flat) {
  if (flat.scalar_type() != at::kBool) return std::nullopt;
  const int64_t numel = flat.numel();
  Packed packed{Packing::kBits, at::kBool, numel, empty_bytes((numel + 7) / 8, flat.device()), extra_of({{0, 1}}, 1)};
  pack_bools_cuda(static_cast<const uint8_t*>(flat.const_data_ptr()), numel,
                  static_cast<uint8_t*>(packed.bytes.data_ptr()), current_stream(flat.device()));
  return packed;
}

std::optional<Packed> pack_bits(const at::Tensor& flat) {
  if (flat.is_cuda()) return pack_bits_cuda(flat);
  const int64_t numel = flat.numel();
  const auto size = static_cast<int>(flat.element_size());
  const void* from = flat.const_data_ptr();
  // A bit of 0 stands for false in bool tensors, whichever comes first, as on CUDA.
  const bool is_bool = flat.scalar_type() == at::kBool;
  SharedValues shared(numel == 0 || is_bool ? 0 : element_bits(from, size));
  Packed packed{Packing::kBits, flat.scalar_type(), numel, empty_bytes((numel + 7) / 8, flat.device()), {}};
  auto* to = static_cast<uint8_t*>(packed.bytes.data_ptr());
  const auto pack_bits_cpu = for_chosen_isa(DT_BY_ISA(saved_tensors, pack_bits_cpu));
  std::atomic<bool> has_third{false};
  const auto pack_pieces = [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end && !has_third; ++piece) {
      TwoValues values = shared.get();
      const int64_t last = std::min((piece + 1) * kPiece, numel);
      if (!pack_bits_cpu(from, size, piece * kPiece, last, values, to) || !shared.merge(values)) has_third = true;
    }
  };
  // The first piece is packed without threads: a tensor with many values mostly shows a third one there.
  pack_pieces(0, std::min<int64_t>(num_pieces(numel), 1));
  if (!has_third) parallel_for(1, num_pieces(numel), kGrain, pack_pieces);
  if (has_third) return std::nullopt;
  TwoValues values = shared.get();
  if (is_bool && !values.has_second()) values.bits[1] = 1;
  packed.extra = extra_of(values, size);
  return packed;
}

void unpack_bits(const Packed& packed, const at::Tensor& flat) {
  const auto* from = static_cast<const uint8_t*>(packed.bytes.const_data_ptr());
  if (flat.is_cuda()) {
    return unpack_bools_cuda(from, packed.numel, static_cast<uint8_t*>(flat.data_ptr()), current_stream(flat.device()));
  }
  const auto size = static_cast<int>(flat.element_size());
  const auto* extra = static_cast<const char*>(packed.extra.const_data_ptr());
  const TwoValues values = {{element_bits(extra, size), element_bits(extra + size, size)}};
  void* to = flat.data_ptr();
  const auto unpack_bits_cpu = for_chosen_isa(DT_BY_ISA(saved_tensors, unpack_bits_cpu));
  parallel_for(0, num_pieces(packed.numel), kGrain, [&](int64_t begin, int64_t end) {
    unpack_bits_cpu(from, values, size, begin * kPiece, std::min(end * kPiece, packed.numel), to);
  });
}

// ---- The formats of formats/storage.h.

Format packed_format(Packing packing) { return packing == Packing::kInt8 ? Format::kSigned8 : Format::kBFloat16; }

// Returns the array from a later element on, which must be a multiple of the block size.
TypedArray advanced(TypedArray array, int64_t elements) {
  array.data = static_cast<char*>(array.data) + elements * formats::bytes_of(array.format);
  if (array.extra != nullptr) array.extra = static_cast<float*>(array.extra) + elements / formats::kBlock;
  return array;
}

void convert(const TypedArray& from, const TypedArray& to, int64_t numel, c10::Device device) {
  if (device.is_cuda()) return convert_cuda(from, to, numel, current_stream(device));
  const auto convert_cpu = for_chosen_isa(DT_BY_ISA(formats, convert_cpu));
  parallel_for(0, num_pieces(numel), kGrain, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kPiece, last = std::min(end * kPiece, numel);
    convert_cpu(advanced(from, first), advanced(to, first), last - first, /*key=*/0);
  });
}

TypedArray packed_array(const Packed& packed) {
  return {const_cast<void*>(packed.bytes.const_data_ptr()), packed_format(packed.packing),
          packed.extra.defined() ? const_cast<void*>(packed.extra.const_data_ptr()) : nullptr};
}

TypedArray flat_array(const at::Tensor& flat) {
  return {const_cast<void*>(flat.const_data_ptr()), *formats::format_of(flat.scalar_type())};
}

Packed pack_format(const at::Tensor& flat, Packing packing) {
  const int64_t numel = formats::real_numel(flat);
  const int64_t bytes = numel * formats::bytes_of(packed_format(packing));
  Packed packed{packing, flat.scalar_type(), flat.numel(), empty_bytes(bytes, flat.device()), {}};
  if (packing == Packing::kInt8) packed.extra = at::empty({num_blocks(numel)}, flat.options().dtype(at::kFloat));
  convert(flat_array(flat), packed_array(packed), numel, flat.device());
  return packed;
}

void check_packable(at::ScalarType dtype, Packing packing) {
  if (is_packable(dtype, packing)) return;
  const char* takes = packing == Packing::kBits       ? "elements of 1, 2, 4 or 8 bytes"
                      : packing == Packing::kBFloat16 ? "float32 or float64"
                                                      : "float32, bfloat16 or float16";
  throw UserTypeError(text("tensor has dtype ", dtype, ", expected ", takes, " for packing '", name_of(packing), "'"));
}

}  // namespace

int64_t Packed::nbytes() const { return static_cast<int64_t>(bytes.nbytes() + (extra.defined() ? extra.nbytes() : 0)); }

bool is_packable(at::ScalarType dtype, Packing packing) {
  if (packing == Packing::kBits) return c10::elementSize(dtype) <= sizeof(uint64_t) && !c10::isQIntType(dtype);
  const std::optional<Format> format = formats::format_of(dtype);
  if (!format) return false;
  return packing == Packing::kBFloat16 ? format == Format::kFloat32 || format == Format::kFloat64
                                       : format != Format::kFloat64;
}

std::optional<Packed> pack(const at::Tensor& flat, Packing packing) {
  DT_INVARIANT(flat.dim() == 1 && flat.is_contiguous());
  check_packable(flat.scalar_type(), packing);
  if (!flat.is_cpu() && !flat.is_cuda()) {
    throw UnsupportedError(text("tensor is on ", flat.device().str(), ", expected cpu or cuda"));
  }
  const c10::DeviceGuard guard(flat.device());
  return packing == Packing::kBits ? pack_bits(flat) : pack_format(flat, packing);
}

at::Tensor unpack(const Packed& packed) {
  const c10::DeviceGuard guard(packed.bytes.device());
  const at::Tensor flat = at::empty({packed.numel}, packed.bytes.options().dtype(packed.dtype));
  if (packed.packing == Packing::kBits) {
    unpack_bits(packed, flat);
  } else {
    convert(packed_array(packed), flat_array(flat), formats::real_numel(flat), flat.device());
  }
  return flat;
}

Packing packing_of(const std::string& name) {
  for (const Packing packing : {Packing::kBits, Packing::kBFloat16, Packing::kInt8}) {
    if (name == name_of(packing)) return packing;
  }
  throw UserError(text("packing is '", name, "', expected 'bits', 'bfloat16' or 'int8'"));
}

const char* name_of(Packing packing) {
  switch (packing) {
    case Packing::kBits:
      return "bits";
    case Packing::kBFloat16:
      return "bfloat16";
    case Packing::kInt8:
      break;
  }
  return "int8";
}

void register_pack(py::module_& m) {
  using no_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<Packed>(m, "Packed")
      .def_property_readonly("nbytes", &Packed::nbytes)
      .def_property_readonly("bytes", [](const Packed& packed) { return packed.bytes; })
      .def_property_readonly("extra", [](const Packed& packed) { return packed.extra; });
  m.def(
      "pack",
      [](const at::Tensor& tensor, const std::string& packing) {
        if (!tensor.is_contiguous()) {
          throw UserError(text("tensor has strides ", tensor.strides(), ", expected a contiguous tensor"));
        }
        return pack(tensor.detach().view({-1}), packing_of(packing));
      },
      py::arg("tensor"), py::arg("packing"), no_gil());
  m.def("unpack", &unpack, py::arg("packed"), no_gil());
}

}  // namespace drivetrain::saved_tensors
