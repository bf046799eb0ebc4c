// Declares the test functions of the native tests, and the check that they share.
#pragma once

#include <string>

namespace drivetrain {

// Prints and counts a failure unless `holds`. Any thread may call it.
void expect(bool holds, const std::string& what);

void test_shared_memory();
void test_tag_board();
void test_cuda_kernels();
void test_step_kernels();
void test_conversions();
void test_solver();
void test_packing();
void test_checkpointing();
void test_trace();
void test_wire();

}  // namespace drivetrain
