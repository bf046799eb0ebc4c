# Lists the CUDA sources below csrc/, for the package and for the tests that compile them as C++.
set(cuda_sources base/write_cuda.cu formats/convert_cuda.cu grad/add_micro_grad_cuda.cu optim/adafactor_cuda.cu
    optim/grad_norm_cuda.cu optim/grad_scaling_cuda.cu optim/start_cuda.cu optim/step_cuda.cu optim/step_kernel_cuda.cu
    optim/trust_ratio_cuda.cu saved_tensors/pack_cuda.cu)
