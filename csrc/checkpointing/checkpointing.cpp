// Binds the checkpoint writer and reader to Python, and passes tensors to them.
#include "checkpointing/checkpointing.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Storage.h>
#include <fcntl.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/torch_text.h"
#include "checkpointing/crc32c.h"
#include "checkpointing/file.h"
#include "checkpointing/reader.h"
#include "checkpointing/slab.h"
#include "checkpointing/snapshot.h"

namespace py = pybind11;

namespace drivetrain::checkpointing {
namespace {

constexpr double kSliceS = 0.1;  // between two looks for signals, such as Ctrl-C

void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const FileError& e) {
    errno = e.code();
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, e.path().c_str());
  }
}

// Calls `wait` with short timeouts, without the GIL, until it returns something true or the time is over.
template <class Wait>
auto wait_in_slices(double timeout_s, const Wait& wait) {
  for (;; timeout_s -= kSliceS) {
    const auto found = [&] {
      const py::gil_scoped_release no_gil;
      return wait(std::clamp(timeout_s, 0.0, kSliceS));
    }();
    if (found || timeout_s <= kSliceS) return found;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

// Binds a wait of a snapshot.
auto sliced(bool (Snapshot::*wait)(double) const) {
  return [wait](const Snapshot& snapshot, double timeout_s) {
    return wait_in_slices(timeout_s, [&](double slice_s) { return (snapshot.*wait)(slice_s); });
  };
}

void check_cpu(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided || tensor.is_conj() || tensor.is_neg()) {
    throw UserError(text("tensors contains one on ", tensor.device().str(),
                         ", expected strided CPU tensors that are no lazy conjugates or negatives"));
  }
}

// Keeps a tensor's memory, not the tensor: to drop a tensor that Python knows needs the GIL. The threads of checkpoints
// would wait for it, and a thread that asks for it while Python shuts down aborts the process.
std::shared_ptr<const void> memory_of(const at::Tensor& tensor) {
  return std::make_shared<const c10::Storage>(tensor.storage());
}

Source source_of(const at::Tensor& tensor) {
  check_cpu(tensor);
  const auto item = static_cast<int64_t>(tensor.element_size());
  std::vector<int64_t> strides = tensor.strides().vec();
  for (int64_t& stride : strides) stride *= item;
  return {StridedBytes(tensor.const_data_ptr(), item, tensor.sizes().vec(), strides), memory_of(tensor)};
}

std::shared_ptr<Snapshot> make_snapshot(SnapshotSlab& slab, const std::string& header,
                                        const std::vector<at::Tensor>& tensors, bool replaces_chunks) {
  std::vector<Source> sources;
  sources.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) sources.push_back(source_of(tensor));
  return std::make_shared<Snapshot>(slab, header, std::move(sources), replaces_chunks);
}

// Returns the bytes of a chunk, whose memory the tensor keeps; nothing if they are not copied in time.
std::optional<at::Tensor> chunk_of(const Snapshot& snapshot, int64_t index, double timeout_s) {
  const auto bytes = wait_in_slices(timeout_s, [&](double slice_s) { return snapshot.chunk(index, slice_s); });
  if (!bytes) return std::nullopt;
  return at::from_blob(
      const_cast<unsigned char*>(bytes.get()), {snapshot.chunk_bytes(index)}, [bytes](void*) {},
      at::TensorOptions().dtype(at::kByte));
}

void replace_chunk(Snapshot& snapshot, int64_t index, const at::Tensor& bytes) {
  check_cpu(bytes);
  const int64_t expected = snapshot.chunk_bytes(index);
  if (!bytes.is_contiguous() || static_cast<int64_t>(bytes.nbytes()) < expected) {
    throw UserError(text("bytes has ", bytes.nbytes(), " bytes, expected contiguous ", expected, " or more"));
  }
  const py::gil_scoped_release no_gil;
  snapshot.replace_chunk(index, bytes.const_data_ptr());
}

std::optional<std::vector<BadChunk>> read_chunks(std::string path, int64_t file_bytes, std::vector<int64_t> chunks,
                                                 std::vector<uint32_t> expected, const std::vector<int64_t>& begins,
                                                 const std::vector<at::Tensor>& tensors, int num_threads,
                                                 double timeout_s) {
  if (begins.size() != tensors.size() || expected.size() != chunks.size()) {
    throw UserError(text("begins has ", begins.size(), " members, expected ", tensors.size(),
                         ", one for each tensor; expected has ", expected.size(), ", expected ", chunks.size(),
                         ", one for each chunk."));
  }
  std::vector<Target> targets;
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_cpu(tensors[i]);
    if (!tensors[i].is_contiguous()) throw UserError("tensors contains a strided view, expected contiguous tensors");
    if (tensors[i].numel() == 0) continue;
    targets.push_back(
        {begins[i], tensors[i].mutable_data_ptr(), static_cast<int64_t>(tensors[i].nbytes()), memory_of(tensors[i])});
  }
  std::sort(targets.begin(), targets.end(), [](const Target& a, const Target& b) { return a.begin < b.begin; });
  const auto reader = [&] {
    const py::gil_scoped_release no_gil;
    return std::make_unique<CheckpointReader>(
        ReadJob{std::move(path), file_bytes, std::move(chunks), std::move(expected), std::move(targets)}, num_threads);
  }();
  return wait_in_slices(timeout_s, [&](double slice_s) { return reader->wait(slice_s); });
}

// Swaps two paths in one step. Returns false where the file system cannot.
bool exchange_paths(const std::string& first, const std::string& second) {
  if (::renameat2(AT_FDCWD, first.c_str(), AT_FDCWD, second.c_str(), RENAME_EXCHANGE) == 0) return true;
  if (errno == EINVAL || errno == ENOSYS) return false;
  throw FileError("renameat2", second, errno);
}

}  // namespace

void register_checkpointing(py::module_& m) {
  py::register_local_exception_translator(&translate);
  m.def(
      "crc32c",
      [](const py::bytes& data, uint32_t checksum) {
        const std::string_view bytes = data;
        const py::gil_scoped_release no_gil;
        return crc32c(checksum, bytes.data(), static_cast<int64_t>(bytes.size()));
      },
      py::arg("data"), py::arg("checksum") = 0);
  m.def("exchange_paths", &exchange_paths, py::arg("first"), py::arg("second"));
  m.def("read_chunks", &read_chunks, py::arg("path"), py::arg("file_bytes"), py::arg("chunks"), py::arg("expected"),
        py::arg("begins"), py::arg("tensors"), py::arg("num_threads"), py::arg("timeout_s"));
  py::class_<SnapshotSlab, std::shared_ptr<SnapshotSlab>>(m, "Slab")
      .def(py::init<>())
      .def_property_readonly("nbytes", &SnapshotSlab::nbytes);
  py::class_<Snapshot, std::shared_ptr<Snapshot>>(m, "Snapshot")
      .def(py::init(&make_snapshot), py::arg("slab"), py::arg("header"), py::arg("tensors"),
           py::arg("replaces_chunks") = false)
      .def_property_readonly("nbytes", &Snapshot::nbytes)
      .def_property_readonly("num_chunks", &Snapshot::num_chunks)
      .def("chunk", &chunk_of, py::arg("index"), py::arg("timeout_s"))
      .def("replace_chunk", &replace_chunk, py::arg("index"), py::arg("bytes"))
      .def_property_readonly("copy_seconds", &Snapshot::copy_seconds)
      .def("wait_copied", sliced(&Snapshot::wait_copied), py::arg("timeout_s"))
      .def(
          "write", [](Snapshot& snapshot, const std::string& path) { snapshot.write(path); }, py::arg("path"),
          py::call_guard<py::gil_scoped_release>())
      .def("wait_written", sliced(&Snapshot::wait_written), py::arg("timeout_s"))
      .def("abandon", &Snapshot::abandon)
      .def("wait_released", sliced(&Snapshot::wait_released), py::arg("timeout_s"))
      .def("checksums", &Snapshot::checksums);
}

}  // namespace drivetrain::checkpointing
