// Reads parameters that are not plain with every check, on one thread; see step_reader.h.
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cctype>
#include <optional>

#include "base/check.h"
#include "base/torch_text.h"
#include "formats/storage_torch.h"
#include "optim/step_reader.h"
#include "optim/tensor_checks.h"

namespace py = pybind11;

namespace drivetrain::optim {
namespace {

bool has_place_of(const at::Tensor& tensor, const at::Tensor& param) {
  return tensor.sizes().equals(param.sizes()) && tensor.device() == param.device();
}

const at::Tensor& contiguous_copy(Batch& batch, const at::Tensor& tensor) {
  batch.copies.push_back({tensor, tensor.detach().clone(at::MemoryFormat::Contiguous)});
  return batch.copies.back().copy;
}

bool is_laid_out_as(const at::Tensor& like, const at::Tensor& value) {
  const bool same = (like.is_contiguous() && value.is_contiguous()) || like.strides().equals(value.strides());
  return same && !value.is_conj() && !value.is_neg();
}

// Returns `value` if it has the layout of `like`, else a copy with that layout, which is written back after the step if
// asked.
const at::Tensor& laid_out_as(Batch& batch, const at::Tensor& like, const at::Tensor& value, bool write_back) {
  if (is_laid_out_as(like, value)) return value;
  at::Tensor copy = at::empty_strided(like.sizes(), like.strides(), value.options());
  copy.copy_(value.detach());
  batch.copies.push_back({write_back ? value : at::Tensor(), copy});
  return batch.copies.back().copy;
}

}  // namespace

bool is_state_as(const at::Tensor& param, const at::Tensor& state, const at::Tensor* scales,
                 std::optional<at::ScalarType> dtype) {
  if (!dtype) return format_of(state.scalar_type()).has_value();
  if (marked_dtype(state, scales) != *dtype) return false;
  const std::optional<Format> in_blocks = block_format_of(*dtype);
  if (!in_blocks) return true;
  if (scales == nullptr || scales->scalar_type() != at::kFloat || scales->device() != param.device() ||
      !scales->is_contiguous() || scales->numel() != num_scales(*in_blocks, param.numel())) {
    return false;
  }
  // Blocks follow the memory order.
  if (is_packed(*in_blocks)) {
    return state.numel() == data_bytes(*in_blocks, param.numel()) && state.is_contiguous();
  }
  const bool in_order = is_walkable(param) ? state.strides().equals(param.strides()) : state.is_contiguous();
  return in_order || state.numel() < 2 || (param.is_contiguous() && state.is_contiguous());
}

// Returns whether states must be created or converted before the step: they are absent, or have another storage format
// than the group asks for.
bool StepReader::lacks_state(const Entry& entry, const StateValues& values) const {
  const Group& group = groups_[entry.group];
  if (!values.complete) return true;
  // A missing counter is an error if the rule counts steps: the number of the step is unknown.
  if (group.counts_steps && !group.rule->counts_steps && values.step == nullptr) return true;
  const at::Tensor& param = THPVariable_Unpack(entry.param);
  if (const std::optional<Extra> extra = extra_of(param_format(group.precision, param.scalar_type()))) {
    if (values.extra == nullptr) return true;
    const at::Tensor& found = THPVariable_Unpack(values.extra);
    if (found.scalar_type() != extra->dtype || !found.sizes().equals(param.sizes()) || found.device() != param.device())
      return true;
  } else if (values.extra != nullptr) {
    return true;  // A leftover of another format would be used again later.
  }
  for (size_t s = 0; s < group.rule->states.size(); ++s) {
    if (values.states[s] == nullptr || !THPVariable_Check(values.states[s])) continue;  // absent, or an error elsewhere
    const at::Tensor& state = THPVariable_Unpack(values.states[s]);
    const RuleInfo::State& info = group.rule->states[s];
    const at::Tensor* scales = values.scales[s] == nullptr ? nullptr : &THPVariable_Unpack(values.scales[s]);
    const at::ScalarType found = marked_dtype(state, scales);
    if ((!is_packed(found) && !is_shaped_as_state(*param.unsafeGetTensorImpl(), *state.unsafeGetTensorImpl(), info)) ||
        state.device() != param.device())
      continue;  // the same
    const auto wanted = state_dtype(group.precision, *param.unsafeGetTensorImpl(), info.kind);
    if ((wanted || is_block_dtype(state.scalar_type())) && !is_state_as(param, state, scales, wanted)) return true;
  }
  return false;
}

// Adds the jobs of all parameters, and reads those that are not plain.
void StepReader::add_jobs() {
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (readings_[i].kind == Kind::kPlain) add_job(entries_[i], readings_[i]);
    if (readings_[i].kind == Kind::kOther) read_other(entries_[i]);
  }
}

void StepReader::read_other(const Entry& entry) {
  own(entry);  // Python code may have changed it after own().
  const Group& group = groups_[entry.group];
  const RuleInfo& rule = *group.rule;
  const at::Tensor& param = THPVariable_Unpack(entry.param);
  const at::Tensor& grad = param.grad();
  if (!grad.defined()) return;
  if (param.key_set().has(c10::DispatchKey::Python)) {
    has_wrappers = true;
    return;
  }
  if (const size_t index = &entry - entries_.data(); was_cast(index)) {
    throw UserTypeError(text(label(entry), " is ", param.scalar_type(), " but was ", stepped_[index].dtype,
                             " in the step before: cast it back, or construct a new optimizer for it and load the "
                             "state with load_state_dict()."));
  }
  check_grad(entry, param, grad);
  check_memory(entry, param, "it");
  check_memory(entry, grad, "its gradient");
  if (!meets(rule.needs, *param.unsafeGetTensorImpl())) {
    std::string optimizer = rule.kind == RuleKind::kMuonMomentum ? "Muon" : rule.name;
    optimizer[0] = static_cast<char>(std::toupper(optimizer[0]));
    throw EnvironmentError(text(label(entry), " is ", param.scalar_type(), " of shape ", param.sizes(), ": ", optimizer,
                                param.is_complex() ? " does not support complex parameters"
                                                   : " only supports 2D parameters",  // torch's message
                                ". Use another optimizer for it, such as AdamW."));
  }
  if (const std::string reason = why_not(group.precision, param.scalar_type()); !reason.empty()) {
    throw UserError(text(label(entry), ": ", reason, "."));
  }
  const StateValues values = state_values(entry);
  if (lacks_state(entry, values)) {
    missing.append(py::make_tuple(py::handle(entry.param), group.index, label(entry)));
    return;
  }
  Batch& batch = batch_for(entry, param.device(), is_double(param));
  Reading reading;
  reading.in_double = is_double(param);
  reading.device = param.device();
  reading.param = param.unsafeGetTensorImpl();
  reading.grad = grad.unsafeGetTensorImpl();
  if (group.counts_steps) {
    reading.counter = counter_of(checked_number(entry, param, values.step, "step"));
    if (param.is_cpu()) reading.steps_done = steps_done(reading.counter);
  }
  for (size_t s = 0; s < rule.scalars.size(); ++s) {
    const std::string name = py::handle(rule.scalars[s]).cast<std::string>();
    reading.scalars[s] = counter_of(checked_number(entry, param, values.scalars[s], name.c_str()));
  }
  const bool as_it_lies =
      rule.needs == RuleInfo::Needs::kRealRowByRow ? param.is_contiguous() && is_walkable(param) : is_walkable(param);
  const at::Tensor& walked = as_it_lies ? param : contiguous_copy(batch, param);
  reading.job.numel = real_numel(param);
  if (rule.needs != RuleInfo::Needs::kNothing) read_shape(*walked.unsafeGetTensorImpl(), reading.job);
  reading.job.param = {walked.data_ptr(), param_format(group.precision, param.scalar_type())};
  if (extra_of(reading.job.param.format)) {
    const at::Tensor& extra = THPVariable_Unpack(values.extra);
    reading.job.param.extra = laid_out_as(batch, walked, extra, /*write_back=*/true).data_ptr();
  }
  reading.job.grad = array_of(laid_out_as(batch, walked, grad, /*write_back=*/writes_grads_));
  for (size_t s = 0; s < rule.states.size(); ++s) {
    if (!has_state(*param.unsafeGetTensorImpl(), rule.states[s])) continue;
    TypedArray& stream = reading.job.state[s];
    if (values.scales[s] != nullptr && THPVariable_Check(values.states[s])) {
      const at::Tensor &codes = THPVariable_Unpack(values.states[s]), &scales = THPVariable_Unpack(values.scales[s]);
      const std::optional<Format> in_blocks = block_format_of(marked_dtype(codes, &scales));
      if (in_blocks && (is_packed(*in_blocks) || has_place_of(codes, param))) {  // lacks_state() has checked the rest
        stream = {codes.data_ptr(), *in_blocks, scales.data_ptr()};
        continue;
      }
    }
    const at::Tensor& state = checked_state(entry, param, values.states[s], s);
    check_memory(entry, state, "its state");
    if (rule.states[s].of_all_shapes) {
      stream = array_of(laid_out_as(batch, walked, state, /*write_back=*/true));
    } else {
      stream = array_of(state.is_contiguous() ? state : contiguous_copy(batch, state));
    }
  }
  add_job(entry, reading);
}

void StepReader::check_memory(const Entry& entry, const at::Tensor& tensor, const char* what) const {
  if (tensor.device().is_meta()) return;
  if (has_own_memory(tensor) && tensor.numel() > 0 && tensor.layout() == at::kStrided &&
      tensor.storage().data() == nullptr) {
    throw UserError(text(label(entry), ": the memory of ", what,
                         " has been freed (its storage was resized to 0, as sharding wrappers do between steps): "
                         "restore it before optimizer.step()."));
  }
  if (has_own_memory(tensor)) return;
  throw UnsupportedError(text(label(entry), ": ", what,
                              " is a tensor subclass that wraps others, such as a DTensor of FSDP or tensor "
                              "parallelism. drivetrain's optimizers do not support it: use torch.optim."));
}

void StepReader::check_grad(const Entry& entry, const at::Tensor& param, const at::Tensor& grad) const {
  if (grad.layout() != at::kStrided) {
    throw EnvironmentError(text(
        label(entry),
        " has a sparse gradient, which this optimizer does not support: use SGD, Adagrad or torch.optim.SparseAdam "
        "for it, or sparse=False in its Embedding."));
  }
  if (grad.device() != param.device()) {
    throw UserError(text(label(entry), " is on ", param.device().str(), " but its gradient is on ", grad.device().str(),
                         ": move them together, with module.to(device)."));
  }
  if (writes_grads_ && at::has_internal_overlap(grad) == at::MemOverlap::Yes) {
    throw UserError(text(label(entry),
                         " has an expanded gradient, whose elements share memory, and this step writes gradients "
                         "(max_grad_norm, zero_grads_in_step or grad_scale). Give it one of its own with .clone()."));
  }
  if (!grad.sizes().equals(param.sizes())) {
    throw UserError(text(label(entry), " has a gradient of shape ", grad.sizes(), ", expected ", param.sizes(), "."));
  }
  if (!format_of(grad.scalar_type()) || grad.is_complex() != param.is_complex() ||
      is_double(grad) != is_double(param)) {
    throw UserTypeError(text(label(entry), " is ", param.scalar_type(), " but its gradient is ", grad.scalar_type(),
                             ": expected ", param.scalar_type(), " (or, for 16-bit parameters, Float)."));
  }
}

// Checks a step counter, or a scalar of the state.
const at::Tensor& StepReader::checked_number(const Entry& entry, const at::Tensor& param, PyObject* value,
                                             const char* name) const {
  const std::string device = counter_device(param.device()).str();
  if (value == nullptr || !THPVariable_Check(value)) {
    throw UserTypeError(text(label(entry), ": its state has no tensor '", name,
                             "'; expected a tensor with one float on ", device, "."));
  }
  const at::Tensor& number = THPVariable_Unpack(value);
  if (!is_step_counter(number, param.device())) {
    throw UserTypeError(text(label(entry), ": its state '", name, "' is ", number.scalar_type(), " of ", number.numel(),
                             " elements on ", number.device().str(), "; expected one float32 on ", device,
                             " (load_state_dict converts it)."));
  }
  return number;
}

const at::Tensor& StepReader::checked_state(const Entry& entry, const at::Tensor& param, PyObject* object,
                                            size_t which) const {
  const auto name = [&] { return py::handle(groups_[entry.group].rule->states[which].name).cast<std::string>(); };
  if (!THPVariable_Check(object)) {
    throw UserTypeError(text(label(entry), ": its state '", name(), "' is not a tensor."));
  }
  const at::Tensor& value = THPVariable_Unpack(object);
  const auto sizes = *state_sizes(*param.unsafeGetTensorImpl(), groups_[entry.group].rule->states[which].kind);
  if (!value.sizes().equals(sizes) || value.device() != param.device() || value.layout() != at::kStrided ||
      value.is_complex() != param.is_complex() || !format_of(value.scalar_type())) {
    throw UserTypeError(text(label(entry), ": its state '", name(), "' is ", value.scalar_type(), " of shape ",
                             value.sizes(), " on ", value.device().str(), "; expected a floating tensor of shape ",
                             at::IntArrayRef(sizes), " on ", param.device().str(), "."));
  }
  return value;
}

}  // namespace drivetrain::optim
