// The error vocabulary: three kinds of error, and how each is thrown. Needs no torch header.
#pragma once

#include <charconv>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace drivetrain {

// The caller's mistake, wrong value: ValueError in Python. The message names the argument, what came, what was
// expected.
struct UserError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The caller's mistake, wrong kind of object: TypeError in Python.
struct UserTypeError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A use that is not supported yet: NotImplementedError in Python.
struct UnsupportedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What surrounds us failed (CUDA, a process group, IO): RuntimeError in Python, with the call, the code and its
// meaning.
struct EnvironmentError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A bug of ours: RuntimeError in Python, with the place.
struct InvariantError : std::logic_error {
  using std::logic_error::logic_error;
};

// How messages spell a value that is neither text nor a number: a specialization has `static void append(std::string&,
// const T&)`. base/torch_text.h has those of torch's types.
template <class T>
struct Spelling;

void append_float(std::string& out, double value);

template <class T>
void append_part(std::string& out, const T& part) {
  if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    out += std::string_view(part);
  } else if constexpr (std::is_same_v<T, char>) {
    out += part;
  } else if constexpr (std::is_same_v<T, bool>) {
    out += part ? '1' : '0';
  } else if constexpr (std::is_integral_v<T>) {
    char digits[24];
    out.append(digits, std::to_chars(digits, digits + sizeof digits, part).ptr);
  } else if constexpr (std::is_floating_point_v<T>) {
    append_float(out, static_cast<double>(part));
  } else {
    Spelling<T>::append(out, part);
  }
}

// Joins the parts: text("bucket ", 3) == "bucket 3". Without iostreams, which cost compile time, and which crash where
// the module has a copy of libstdc++ beside torch's (see shared_libstdcxx.cmake).
template <class... Parts>
std::string text(const Parts&... parts) {
  std::string out;
  (append_part(out, parts), ...);
  return out;
}

[[noreturn]] void invariant_failed(const char* condition, const char* file, int line);

}  // namespace drivetrain

// Holds unless there is a bug in drivetrain itself.
#define DT_INVARIANT(condition) ((condition) ? void() : ::drivetrain::invariant_failed(#condition, __FILE__, __LINE__))
