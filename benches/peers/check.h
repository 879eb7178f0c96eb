// What the peers that call the CUDA driver themselves share: a call that does not succeed ends the program at once, with its
// text and the driver's number. Without destructors, since other threads may be in calls of their own.
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
