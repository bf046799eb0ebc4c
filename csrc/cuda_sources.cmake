# Lists the CUDA sources below csrc/, for the package and for the tests that compile them as C++.
set(cuda_sources grad/accumulate_cuda.cu grad/norm_cuda.cu optim/adafactor_cuda.cu optim/convert_cuda.cu
    optim/layer_cuda.cu optim/start_cuda.cu optim/step_cuda.cu optim/step_kernel_cuda.cu optim/treat_cuda.cu
    activation/pack_cuda.cu)
