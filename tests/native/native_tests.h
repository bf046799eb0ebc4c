// What the files of the native tests share.
#pragma once

#include <string>

namespace drivetrain {

// Notes a failure, from any thread.
void expect(bool holds, const std::string& what);

void test_shared_memory();
void test_cuda_kernels();
void test_step_kernels();
void test_conversions();
void test_solver();
void test_packing();

}  // namespace drivetrain
