// Uses a standard stream, so that the module needs libstdc++. tests/package/test_build.py links it in several ways.
#include <sstream>
#include <string>

extern "C" long length_of(long number) {
  std::ostringstream out;
  out << number << ' ' << 1.5;
  return static_cast<long>(out.str().size());
}
