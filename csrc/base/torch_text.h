// Specializes Spelling of check.h for torch's types in error messages.
#pragma once

#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymInt.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/typeid.h>

#include <optional>
#include <string>

#include "base/check.h"

namespace drivetrain {

template <>
struct Spelling<c10::ScalarType> {
  static void append(std::string& out, c10::ScalarType dtype) { out += c10::toString(dtype); }
};

template <>
struct Spelling<caffe2::TypeMeta> {
  static void append(std::string& out, const caffe2::TypeMeta& dtype) { out += dtype.name(); }
};

template <>
struct Spelling<c10::SymInt> {
  static void append(std::string& out, const c10::SymInt& size) {
    if (const std::optional<int64_t> number = size.maybe_as_int()) {
      append_part(out, *number);
    } else {
      out += size.toSymNode()->str();
    }
  }
};

template <class T>
struct Spelling<c10::ArrayRef<T>> {
  static void append(std::string& out, c10::ArrayRef<T> values) {
    out += '[';
    for (size_t i = 0; i < values.size(); ++i) {
      if (i > 0) out += ", ";
      append_part(out, values[i]);
    }
    out += ']';
  }
};

template <>
struct Spelling<c10::Layout> {
  static void append(std::string& out, c10::Layout layout) {
    switch (layout) {
      case c10::Layout::Strided:
        out += "Strided";
        return;
      case c10::Layout::Sparse:
        out += "Sparse";
        return;
      case c10::Layout::SparseCsr:
        out += "SparseCsr";
        return;
      case c10::Layout::SparseCsc:
        out += "SparseCsc";
        return;
      case c10::Layout::SparseBsr:
        out += "SparseBsr";
        return;
      case c10::Layout::SparseBsc:
        out += "SparseBsc";
        return;
      case c10::Layout::Mkldnn:
        out += "Mkldnn";
        return;
      case c10::Layout::Jagged:
        out += "Jagged";
        return;
      default:
        out += "of an unknown layout";
        return;
    }
  }
};

}  // namespace drivetrain
