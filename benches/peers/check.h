// Shared by the peers that call the CUDA driver themselves: a call that fails ends the program at once, with the call's text
// and the driver's error number. No destructors run, since other threads may be inside driver calls.
#pragma once

#include <cuda.h>

#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                           \
  do {                                                        \
    CUresult result_ = call;                                  \
    if (result_ != CUDA_SUCCESS) {                            \
      std::fprintf(stderr, "%s: error %d\n", #call, result_); \
      std::_Exit(1);                                          \
    }                                                         \
  } while (0)
