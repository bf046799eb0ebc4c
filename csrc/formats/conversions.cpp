// Collects conversions and writes them; see conversions.h.
#include "formats/conversions.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "base/current_stream.h"
#include "base/device_table.h"
#include "base/parallel.h"
#include "base/torch_text.h"
#include "formats/convert.h"
#include "formats/storage_torch.h"

namespace drivetrain::formats {
namespace {

Format state_format(at::ScalarType dtype) {
  const std::optional<Format> in_blocks = block_format_of(dtype);
  return in_blocks ? *in_blocks : *format_of(dtype);
}

// Allocates a state with the strides of `param`, or a vector if two values share a byte.
at::Tensor empty_state(const at::Tensor& param, at::ScalarType dtype) {
  if (!is_packed(dtype)) return empty_as_walked(param, dtype);
  return at::empty({(param.numel() + 1) / 2}, param.options().dtype(stored_dtype(dtype)));
}

at::Tensor empty_scales(const at::Tensor& param, Format format) {
  return at::empty({num_scales(format, param.numel())}, param.options().dtype(at::kFloat).requires_grad(std::nullopt));
}

// Returns whether both tensors are dense and have their elements in the same memory order.
bool is_walked_alike(const at::Tensor& a, const at::Tensor& b) {
  if (!is_walkable(a) || !is_walkable(b) || !a.sizes().equals(b.sizes())) return false;
  return (a.is_contiguous() && b.is_contiguous()) || a.strides().equals(b.strides());
}

// Returns the format of a parameter dtype whose companion has this dtype.
Format param_format_with(at::ScalarType param, at::ScalarType extra) {
  for (const Format format : {Format::kBFloat16Remainder16, Format::kBFloat16Remainder8, Format::kBFloat16Kahan,
                              Format::kFloat16Kahan, Format::kFloat16Master}) {
    const bool is_float16 = format == Format::kFloat16Kahan || format == Format::kFloat16Master;
    if (extra_of(format)->dtype == extra && param == (is_float16 ? at::kHalf : at::kBFloat16)) return format;
  }
  throw UserTypeError(text("extra is ", extra, ", which no storage format of a ", param, " parameter uses."));
}

TypedArray array_of(const Stored& stored) {
  if (!stored.values.defined()) return {};
  if (stored.values.numel() > 0 && stored.values.data_ptr() == nullptr) {
    throw EnvironmentError(
        "the memory of a parameter or of its state has been freed (its storage was resized to 0): restore it before "
        "optimizer.step().");
  }
  return {stored.values.data_ptr(), stored.format, stored.extra.defined() ? stored.extra.data_ptr() : nullptr};
}

// Returns the rest of the array from element `i` on, which begins a block.
TypedArray from_element(const TypedArray& array, int64_t i) {
  TypedArray rest = array;
  if (array.data != nullptr) rest.data = static_cast<char*>(array.data) + data_bytes(array.format, i);
  if (array.extra == nullptr) return rest;
  auto* const extra = static_cast<char*>(array.extra);
  if (has_blocks(array.format)) {
    rest.extra = extra + num_scales(array.format, i) * static_cast<int64_t>(sizeof(float));
  } else {
    rest.extra = extra + i * static_cast<int64_t>(c10::elementSize(extra_of(array.format)->dtype));
  }
  return rest;
}

void fill_on_cpu(const TypedArray& to, int64_t numel, double fill) {
  if (fill == 0) {  // Zeros are bytes of zero in every format.
    std::memset(to.data, 0, data_bytes(to.format, numel));
    if (has_blocks(to.format)) std::memset(to.extra, 0, num_scales(to.format, numel) * sizeof(float));
  } else if (to.format == Format::kFloat64) {
    std::fill_n(static_cast<double*>(to.data), numel, fill);
  } else {
    std::vector<float> values(numel, static_cast<float>(fill));
    for_chosen_isa(DT_BY_ISA(formats, convert_cpu))({values.data(), Format::kFloat32}, to, numel, /*key=*/0);
  }
}

void convert_chunk_on_cpu(const Conversion& job, int64_t chunk) {
  const int64_t begin = (chunk - job.first_chunk) * kConversionChunk;
  const int64_t numel = std::min(job.numel - begin, kConversionChunk);
  const TypedArray to = from_element(job.to, begin);
  if (job.from.data == nullptr) return fill_on_cpu(to, numel, job.fill);
  for_chosen_isa(DT_BY_ISA(formats, convert_cpu))(from_element(job.from, begin), to, numel, /*key=*/0);
}

}  // namespace

std::tuple<at::Tensor, std::optional<at::Tensor>> Conversions::new_state(const at::Tensor& param,
                                                                         const std::vector<int64_t>& sizes,
                                                                         std::optional<at::ScalarType> dtype,
                                                                         double fill) {
  const bool has_its_shape = param.sizes().equals(sizes);
  at::Tensor state;
  if (!dtype && has_its_shape) {
    state = at::empty_like(param.detach(), at::MemoryFormat::Preserve);  // matches torch's allocation
  } else if (has_its_shape) {
    state = empty_state(param.detach(), *dtype);
  } else {
    state = at::empty(sizes, param.options().dtype(dtype.value_or(param.scalar_type())).requires_grad(std::nullopt));
  }
  const Format format = state_format(dtype.value_or(state.scalar_type()));
  at::Tensor scales;
  if (has_blocks(format)) scales = empty_scales(param, format);
  add({}, {state, format, scales}, fill, has_blocks(format) ? param.numel() : -1);
  return {state, scales.defined() ? std::optional(scales) : std::nullopt};
}

std::tuple<at::Tensor, std::optional<at::Tensor>> Conversions::converted_state(const at::Tensor& param,
                                                                               const at::Tensor& state,
                                                                               const std::optional<at::Tensor>& scales,
                                                                               at::ScalarType dtype) {
  const at::ScalarType found = marked_dtype(state, scales ? &*scales : nullptr);
  const bool has_its_shape = is_packed(found) || state.sizes().equals(param.sizes());
  const bool is_wide = c10::toRealValueType(dtype) == at::kDouble || c10::toRealValueType(found) == at::kDouble;
  const at::Tensor order = empty_as_walked(param.detach(), at::kFloat, at::kMeta);
  at::Tensor values = state.detach();
  const bool reads_codes =
      is_block_dtype(found) && has_its_shape && !is_wide && (is_packed(found) || is_walked_alike(values, order));
  if (is_block_dtype(found) && !reads_codes) values = load_state(values, scales, param);
  if (!has_its_shape) return {values.to(dtype).contiguous(), std::nullopt};
  const at::Tensor result = empty_state(param.detach(), dtype);
  if (!is_block_dtype(dtype) && is_wide) {
    result.copy_(values);
    return {result, std::nullopt};
  }
  Stored from = {values, state_format(is_wide ? at::kFloat : values.scalar_type())};
  if (reads_codes) {
    check_scales(values, scales, param);
    from.values = is_packed(found) ? values.contiguous() : values;
    from.format = state_format(found);
    from.extra = scales->detach().to(values.device()).contiguous();
  } else if (is_wide || !is_walked_alike(values, order)) {
    const at::TensorOptions staged = result.options().dtype(is_wide ? at::kFloat : values.scalar_type());
    from.values = at::empty_strided(order.sizes(), order.strides(), staged).copy_(values);
  }
  const Format format = state_format(dtype);
  at::Tensor new_scales;
  if (has_blocks(format)) new_scales = empty_scales(param, format);
  add(from, {result, format, new_scales}, 0, has_blocks(format) ? param.numel() : -1);
  return {result, has_blocks(format) ? std::optional(new_scales) : std::nullopt};
}

// Tensors with different layouts are converted through contiguous copies.
void Conversions::rewrite_param(const at::Tensor& param, Stored from, const at::Tensor& extra) {
  const Format format = param_format_with(param.scalar_type(), extra.scalar_type());
  const at::Tensor halves = param.detach();
  if (is_walked_alike(halves, extra) && is_walked_alike(halves, from.values) &&
      (!from.extra.defined() || is_walked_alike(halves, from.extra))) {
    halves.unsafeGetTensorImpl()->bump_version();
    return add(std::move(from), {halves, format, extra});
  }
  const at::Tensor new_halves = at::empty(halves.sizes(), halves.options());
  const at::Tensor new_extra = at::empty(extra.sizes(), extra.options());
  from.values = from.values.contiguous();
  if (from.extra.defined()) from.extra = from.extra.contiguous();
  add(std::move(from), {new_halves, format, new_extra});
  write_backs_.push_back({halves, new_halves});
  write_backs_.push_back({extra, new_extra});
}

at::Tensor Conversions::new_extra(const at::Tensor& param, const std::optional<at::Tensor>& before,
                                  at::ScalarType dtype) {
  const at::Tensor extra = empty_as_walked(param.detach(), dtype);
  Stored from = {param.detach(), *format_of(param.scalar_type())};
  if (before) {
    from.format = param_format_with(param.scalar_type(), before->scalar_type());
    from.extra = before->detach().to(param.device());
  }
  rewrite_param(param, from, extra);
  return extra;
}

at::Tensor Conversions::stored_param(const at::Tensor& param, const at::Tensor& values, at::ScalarType dtype) {
  const at::Tensor extra = empty_as_walked(param.detach(), dtype);
  rewrite_param(param, {values.detach().to(param.device(), at::kFloat), Format::kFloat32}, extra);
  return extra;
}

at::Tensor Conversions::new_counter(at::Device device, at::ScalarType dtype, double value) {
  const at::Tensor counter = at::empty({}, at::TensorOptions(dtype).device(device));
  add({}, {counter, *format_of(dtype)}, value);
  return counter;
}

void Conversions::add(Stored from, Stored to, double fill, int64_t numel) {
  if (numel < 0) numel = real_numel(to.values);
  pairs_.push_back({std::move(from), std::move(to), fill, numel});
}

void Conversions::run() {
  std::vector<c10::Device> devices;
  for (const Pair& pair : pairs_) {
    const c10::Device device = pair.to.values.device();
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
  }
  for (const c10::Device device : devices) {
    if (!device.is_cpu() && !device.is_cuda()) continue;  // A step rejects other devices before it reads states.
    std::vector<Conversion> jobs;
    int64_t num_chunks = 0;
    for (const Pair& pair : pairs_) {
      if (pair.to.values.device() != device) continue;
      jobs.push_back({array_of(pair.from), array_of(pair.to), pair.numel, num_chunks, pair.fill});
      num_chunks += num_conversion_chunks(pair.numel);
    }
    device.is_cpu() ? run_on_cpu(jobs, num_chunks) : run_on_cuda(jobs, num_chunks, device);
  }
  for (const WriteBack& each : write_backs_) each.original.copy_(each.copy);
  pairs_.clear();
  write_backs_.clear();
}

void Conversions::run_on_cpu(const std::vector<Conversion>& jobs, int64_t num_chunks) {
  constexpr int64_t kGrain = 8;  // chunks per thread at least
  parallel_for(0, num_chunks, kGrain, [&](int64_t begin, int64_t end) {
    const auto begins_after = [](int64_t chunk, const Conversion& job) { return chunk < job.first_chunk; };
    auto job = std::upper_bound(jobs.begin(), jobs.end(), begin, begins_after) - 1;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      while (job + 1 != jobs.end() && (job + 1)->first_chunk <= chunk) ++job;
      convert_chunk_on_cpu(*job, chunk);
    }
  });
}

void Conversions::run_on_cuda(const std::vector<Conversion>& jobs, int64_t num_chunks, c10::Device device) {
  const c10::DeviceGuard guard(device);
  void* const stream = current_stream(device);
  std::vector<char> bytes;
  append_bytes(bytes, jobs.data(), jobs.size());
  const at::Tensor table = table_of_launch(bytes, device, stream);  // freed in the stream's order, after the launch
  convert_cuda(static_cast<const Conversion*>(table.data_ptr()), static_cast<int32_t>(jobs.size()), num_chunks, stream);
}

void check_scales(const at::Tensor& state, const std::optional<at::Tensor>& scales,
                  const std::optional<at::Tensor>& param) {
  if (is_packed(marked_dtype(state, scales ? &*scales : nullptr))) {
    if (!param || state.numel() == (param->numel() + 1) / 2) return;
    throw UserError(text("a 4-bit state of ", state.numel(), " bytes is not for a parameter of shape ", param->sizes(),
                         ", which needs ", (param->numel() + 1) / 2, "."));
  }
  if (scales && scales->scalar_type() == at::kFloat && scales->numel() == num_blocks(state.numel())) return;
  throw UserError(text("an 8-bit state of shape ", state.sizes(), " needs ", num_blocks(state.numel()),
                       " float32 scales, one per block of ", kBlock, "; ",
                       scales ? text("got ", scales->scalar_type(), " of shape ", scales->sizes()) : "got none", "."));
}

at::Tensor load_state(const at::Tensor& state, const std::optional<at::Tensor>& scales,
                      const std::optional<at::Tensor>& param) {
  if (!is_block_dtype(state.scalar_type())) return state.detach().to(at::kFloat);
  const at::ScalarType found = marked_dtype(state, scales ? &*scales : nullptr);
  check_scales(state, scales, param);
  const at::Tensor codes = is_packed(found) || !is_walkable(state) ? state.detach().contiguous() : state.detach();
  const at::Tensor values = !is_packed(found) ? empty_as_walked(codes, at::kFloat)
                            : param           ? empty_as_walked(param->detach(), at::kFloat, codes.device())
                                              : at::empty({2 * codes.numel()}, codes.options().dtype(at::kFloat));
  Conversions one;
  one.add({codes, state_format(found), scales->detach().to(codes.device()).contiguous()}, {values, Format::kFloat32});
  one.run();
  return values;
}

at::Tensor load_param(const at::Tensor& param, const std::optional<at::Tensor>& extra) {
  if (!extra) return param.detach().to(at::kFloat);
  const Format format = param_format_with(param.scalar_type(), extra->scalar_type());
  const at::Tensor halves = param.detach().contiguous(), residual = extra->detach().to(param.device()).contiguous();
  const at::Tensor values = at::empty(halves.sizes(), halves.options().dtype(at::kFloat));
  Conversions one;
  one.add({halves, format, residual}, {values, Format::kFloat32});
  one.run();
  return values;
}

}  // namespace drivetrain::formats
