# Links targets with the shared libstdc++ and fails a build that contains a static copy.
#
# Compiler wrappers, -static-libstdc++ and some toolsets put a copy of libstdc++ into every module. torch uses the
# shared library. In one process with it, the copy crashes at its first stream: the facets of a locale belong to one
# copy and their ids to the other.

include_guard()
include(CheckCXXSourceCompiles)

# The shared library stands first on the link line, so it provides every symbol that it has. A static archive still
# provides newer functions that only the toolset's archive contains.
function(link_shared_libstdcxx target)
  set(CMAKE_REQUIRED_LIBRARIES "-l:libstdc++.so.6")
  check_cxx_source_compiles(
    "#include <sstream>\nint main() { std::ostringstream out; out << 1; return out.str().empty(); }" HAS_SHARED_LIBSTDCXX)
  if(HAS_SHARED_LIBSTDCXX)
    target_link_libraries(${target} PRIVATE "-l:libstdc++.so.6")
  else()
    message(WARNING "drivetrain: ${CMAKE_CXX_COMPILER} does not link with -l:libstdc++.so.6. If the build then fails for "
                    "a module with a libstdc++ of its own, point CXX at another g++ or LDFLAGS=-L... at the library's folder.")
  endif()
endfunction()

# Requires Python_EXECUTABLE.
function(fail_on_own_libstdcxx target)
  add_custom_command(
    TARGET ${target} POST_BUILD VERBATIM
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/libstdcxx.py"
            "$<TARGET_FILE:${target}>" "${CMAKE_CXX_COMPILER}")
endfunction()
