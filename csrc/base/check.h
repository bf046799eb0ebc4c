// Declares the exception types of the native module and `text`, which builds their messages. Needs no torch header.
#pragma once

#include <charconv>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace drivetrain {

// Reports a wrong value from the caller: ValueError in Python. The message names the argument, the value received and
// the value expected.
struct UserError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Reports a wrong kind of object from the caller: TypeError in Python.
struct UserTypeError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Reports a use that is not supported yet: NotImplementedError in Python.
struct UnsupportedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Reports a failure outside drivetrain (CUDA, a process group, IO): RuntimeError in Python. The message contains the
// call, the error code and its meaning.
struct EnvironmentError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Reports a bug in drivetrain: RuntimeError in Python, with the file and line.
struct InvariantError : std::logic_error {
  using std::logic_error::logic_error;
};

// Formats a value that is neither text nor a number. A specialization declares
// `static void append(std::string&, const T&)`. base/torch_text.h specializes it for torch's types.
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

// Joins the parts: text("bucket ", 3) == "bucket 3". It avoids iostreams because they cost compile time. They also
// crash if the module has its own copy of libstdc++ (see shared_libstdcxx.cmake).
template <class... Parts>
std::string text(const Parts&... parts) {
  std::string out;
  (append_part(out, parts), ...);
  return out;
}

[[noreturn]] void invariant_failed(const char* condition, const char* file, int line);

}  // namespace drivetrain

// Throws InvariantError if the condition is false, which only a bug in drivetrain can cause.
#define DT_INVARIANT(condition) ((condition) ? void() : ::drivetrain::invariant_failed(#condition, __FILE__, __LINE__))
