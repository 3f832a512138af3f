// The two names of the CUDA runtime that TensorRT's headers mention. The library needs no CUDA
// headers and links with no CUDA library.
#pragma once

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
