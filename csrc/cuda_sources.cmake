# Lists the CUDA sources below csrc/, for the package and for the tests that compile them as C++.
set(cuda_sources grad/add_micro_grad_cuda.cu grad/norm_cuda.cu optim/adafactor_cuda.cu optim/convert_cuda.cu
    optim/trust_ratio_cuda.cu optim/start_cuda.cu optim/step_cuda.cu optim/step_kernel_cuda.cu optim/grad_scaling_cuda.cu
    saved_tensors/pack_cuda.cu)
