// Compiles the file named by PYPRUNE_BODY once per instruction set, each time in its own namespace
// (pyprune::scalar, pyprune::avx2, pyprune::avx512) and under its own function attributes.
//
// Rules for a body file: no include guard, no #include of a library header (those are included before this file, so
// that their inline functions are compiled for the baseline), every helper inside PYPRUNE_TARGET_NAMESPACE.
//
// PYPRUNE_TARGET_WIDTH is the number of float32 lanes in a register, for kernels/simd-inl.h.
//
// Before including: define PYPRUNE_BODY as a quoted path. Adding an instruction set means adding a block here and in
// simd-inl.h, an entry to Isa in dispatch.h, and nothing in the kernels.
#ifndef PYPRUNE_BODY
#error "define PYPRUNE_BODY before including foreach_target.h"
#endif

#define PYPRUNE_TARGET_NAMESPACE scalar
#define PYPRUNE_TARGET_WIDTH 4
#include PYPRUNE_BODY
#undef PYPRUNE_TARGET_NAMESPACE
#undef PYPRUNE_TARGET_WIDTH

#if PYPRUNE_X86

#define PYPRUNE_TARGET_NAMESPACE avx2
#define PYPRUNE_TARGET_WIDTH 8
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#include PYPRUNE_BODY
#pragma clang attribute pop
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include PYPRUNE_BODY
#pragma GCC pop_options
#endif
#undef PYPRUNE_TARGET_NAMESPACE
#undef PYPRUNE_TARGET_WIDTH

#define PYPRUNE_TARGET_NAMESPACE avx512
#define PYPRUNE_TARGET_WIDTH 16
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#include PYPRUNE_BODY
#pragma clang attribute pop
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#include PYPRUNE_BODY
#pragma GCC pop_options
#endif
#undef PYPRUNE_TARGET_NAMESPACE
#undef PYPRUNE_TARGET_WIDTH

#endif  // PYPRUNE_X86
#undef PYPRUNE_BODY
