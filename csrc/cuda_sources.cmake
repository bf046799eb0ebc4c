# Lists the CUDA sources below csrc/, for the package and for the tests that compile them as C++. The first takes longest.
set(cuda_sources optim/step_cuda.cu base/write_cuda.cu formats/convert_cuda.cu grad/add_micro_grad_cuda.cu optim/adafactor_cuda.cu
    optim/grad_norm_cuda.cu optim/grad_scaling_cuda.cu optim/start_cuda.cu optim/step_kernel_cuda.cu
    optim/trust_ratio_cuda.cu saved_tensors/pack_cuda.cu)
