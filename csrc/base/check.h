// The error vocabulary: three kinds of error, and how each is thrown. Needs no torch header.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

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

// Everything streamable, one after another: text("bucket ", 3) == "bucket 3".
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

[[noreturn]] void invariant_failed(const char* condition, const char* file, int line);

}  // namespace drivetrain

// Holds unless there is a bug in drivetrain itself.
#define DT_INVARIANT(condition) ((condition) ? void() : ::drivetrain::invariant_failed(#condition, __FILE__, __LINE__))
