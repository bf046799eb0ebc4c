# Links targets with the shared libstdc++ whatever the compiler's default, and fails a build that has a copy all the same.
#
# A wrapper in CXX, -static-libstdc++ and some toolsets put a copy of libstdc++ into every module. Beside torch, which uses
# the shared one, that copy crashes in its first stream: the facets of the locale belong to one copy, their ids to another.

include_guard()
include(CheckCXXSourceCompiles)

# Symbols that the shared library has are taken from it before a static archive is asked, as it stands first on the line.
# The archive may still give what the shared library lacks: toolsets have newer functions in theirs alone.
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

# Needs Python_EXECUTABLE. The script is the package's, so that `drivetrain doctor` asks the same of what is installed.
function(fail_on_own_libstdcxx target)
  add_custom_command(
    TARGET ${target} POST_BUILD VERBATIM
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../../python/drivetrain/libstdcxx.py"
            "$<TARGET_FILE:${target}>" "${CMAKE_CXX_COMPILER}")
endfunction()
